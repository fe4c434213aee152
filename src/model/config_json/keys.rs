//! The known keys of `config.json` and `generation_config.json`, by how they are handled. docs/files.md shows the tables.

use crate::untrusted::KeyTable;

/// Keys of `config.json`. Every key of a supported family's configuration class in transformers is in one of the lists.
pub(crate) const CONFIG_KEYS: KeyTable = KeyTable {
    name: "config.json",
    served: "architectures attn_output_gate bos_token_id decoder_sparse_step dtype eos_token_id first_k_dense_replace full_attention_interval head_dim \
        hidden_act hidden_activation hidden_size intermediate_size layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads \
        linear_num_value_heads linear_value_head_dim max_position_embeddings max_window_layers mlp_only_layers model_type \
        moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers \
        num_key_value_heads num_local_experts original_max_position_embeddings output_router_logits partial_rotary_factor qkv_bias quantization_config query_pre_attn_scalar rms_norm_eps \
        rope_local_base_freq rope_parameters rope_scaling rope_theta routed_scaling_factor router_aux_loss_coef shared_expert_intermediate_size sliding_window sliding_window_pattern swiglu_alpha swiglu_limit text_config \
        tie_word_embeddings topk_group torch_dtype use_qk_norm use_sliding_window vocab_size",
    harmless: "_sliding_window_pattern auto_map boi_token_index eoi_token_index experts_per_token id2label image_token_id image_token_index initial_context_length initializer_range label2id mm_tokens_per_image multimodal_projector_bias num_mtp_layers num_nextn_predict_layers output_attentions output_hidden_states \
        pad_token_id pretraining_tp problem_type projector_hidden_act return_dict spatial_merge_size transformers_version use_cache video_token_id vision_config vision_feature_layer \
        vision_end_token_id vision_start_token_id",
    refused: &[
        ("add_cross_attention", &["false"], "cross-attention is not supported"),
        (
            "attention_bias",
            &["false"],
            "biases of all four projections are supported for gpt-oss only (Qwen2 and GLM-4 have biases of three, \
             without this key)",
        ),
        ("attention_dropout", &["0"], "dropout in attention is not supported"),
        ("attn_logit_softcapping", &[], "soft-capping of attention scores is not supported"),
        ("chunk_size_feed_forward", &["0"], "chunked MLPs are not supported"),
        ("compression_config", &[], "compressed weights are not supported"),
        ("embd_pdrop", &["0"], "dropout after the embedding is not supported"),
        ("final_logit_softcapping", &[], "soft-capping of logits is not supported"),
        ("is_causal", &["true"], "only causal attention is supported"),
        ("is_encoder_decoder", &["false"], "only decoder models are supported"),
        ("mlp_bias", &["false"], "biases in MLPs are not supported"),
        ("pruned_heads", &["{}"], "pruned heads are not supported"),
        ("resid_pdrop", &["0"], "dropout of sublayer outputs is not supported"),
        ("use_bidirectional_attention", &["false"], "only causal attention is supported"),
    ],
    ignores_unknown: true,
};

const LONG_ROPE: &str = "LongRoPE is not supported (its frequencies depend on the longest sequence)";

/// Keys of `rope_parameters` and `rope_scaling` within `config.json`.
pub(crate) const ROPE_KEYS: KeyTable = KeyTable {
    name: "rope_parameters",
    served: "attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mscale mscale_all_dim \
        original_max_position_embeddings partial_rotary_factor rope_theta rope_type truncate type",
    harmless: "finetuned mrope_interleaved mrope_section",
    refused: &[
        ("llama_4_scaling_beta", &[], "queries scaled by their position (Ministral 3) are not supported"),
        ("long_factor", &[], LONG_ROPE),
        ("long_mscale", &[], LONG_ROPE),
        ("short_factor", &[], LONG_ROPE),
        ("short_mscale", &[], LONG_ROPE),
    ],
    ignores_unknown: false,
};

/// Keys of `generation_config.json`. Temperature and similar settings come from the run's configuration; other keys that change the sampling
/// distribution, and have no equivalent here, are refused.
pub(crate) const GENERATION_KEYS: KeyTable = KeyTable {
    name: "generation_config.json",
    served: "bos_token_id eos_token_id",
    harmless: "_from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind \
        cache_config cache_implementation compile_config continuous_batching_config decoder_start_token_id disable_compile \
        do_sample early_stopping is_assistant length_penalty low_memory max_cache_len max_length max_matching_ngram_size \
        max_new_tokens max_time min_p num_assistant_tokens num_assistant_tokens_schedule num_return_sequences output_attentions \
        output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens \
        remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate speculation_type target_lookbehind \
        temperature top_k top_p transformers_version use_cache use_mtp",
    refused: &[
        ("bad_words_ids", &["[]"], "forbidding tokens is not supported"),
        ("begin_suppress_tokens", &["[]"], "forbidding tokens is not supported"),
        ("constraints", &["[]"], "forcing texts is not supported"),
        ("diversity_penalty", &["0"], "beam search is not supported"),
        ("dola_layers", &[], "DoLa decoding is not supported"),
        ("encoder_no_repeat_ngram_size", &["0"], "forbidding repeated n-grams is not supported"),
        ("encoder_repetition_penalty", &["1"], "only repetition_penalty is supported"),
        ("epsilon_cutoff", &["0"], "only the filters top_k, top_p and min_p are supported"),
        ("eta_cutoff", &["0"], "only the filters top_k, top_p and min_p are supported"),
        ("exponential_decay_length_penalty", &[], "a length-dependent probability of the end is not supported"),
        ("force_words_ids", &["[]"], "forcing texts is not supported"),
        ("forced_bos_token_id", &[], "forcing tokens is not supported"),
        ("forced_eos_token_id", &[], "forcing tokens is not supported"),
        ("guidance_scale", &["1"], "classifier-free guidance is not supported"),
        ("min_length", &["0"], "a minimum length is not supported"),
        ("min_new_tokens", &["0"], "a minimum length is not supported"),
        ("no_repeat_ngram_size", &["0"], "forbidding repeated n-grams is not supported"),
        ("num_beam_groups", &["1"], "beam search is not supported"),
        ("num_beams", &["1"], "beam search is not supported"),
        ("penalty_alpha", &["0"], "contrastive search is not supported"),
        ("sequence_bias", &["[]", "{}"], "biases on logits are not supported"),
        ("stop_strings", &["[]"], "completions end at eos_token_id only; with serve use `stop` in a request"),
        ("suppress_tokens", &["[]"], "forbidding tokens is not supported"),
        ("token_healing", &["false"], "token healing is not supported"),
        ("top_h", &[], "only the filters top_k, top_p and min_p are supported"),
        ("typical_p", &["1"], "only the filters top_k, top_p and min_p are supported"),
        ("watermarking_config", &[], "watermarks are not supported"),
    ],
    ignores_unknown: true,
};
