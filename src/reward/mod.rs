//! Verifiers that score completions. Know nothing of tensors.
