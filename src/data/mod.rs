//! Prompts, tokenizer, chat template. Knows nothing of tensors.
