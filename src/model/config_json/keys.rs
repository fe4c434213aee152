//! The meaning of the keys of `config.json` and `generation_config.json`. docs/files.md shows the tables.

use crate::untrusted::KeyTable;

/// `config.json`. Whatever the configuration class of a served family has in transformers is in one of the lists.
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
        ("add_cross_attention", &["false"], "the decoder has no cross-attention"),
        (
            "attention_bias",
            &["false"],
            "biases of all four projections are computed for gpt-oss alone (Qwen2's own need no key, and GLM-4's are of three)",
        ),
        ("attention_dropout", &["0"], "training computes no dropout of attention"),
        ("attn_logit_softcapping", &[], "scores of attention have no cap"),
        ("chunk_size_feed_forward", &["0"], "MLPs are computed whole"),
        ("compression_config", &[], "only unquantised weights are read"),
        ("embd_pdrop", &["0"], "training computes no dropout of the embedding"),
        ("final_logit_softcapping", &[], "logits have no cap"),
        ("is_causal", &["true"], "tokens attend to those before them alone"),
        ("is_encoder_decoder", &["false"], "only decoders are computed"),
        ("mlp_bias", &["false"], "biases of an MLP are not computed"),
        ("pruned_heads", &["{}"], "heads are computed as num_attention_heads says"),
        ("resid_pdrop", &["0"], "training computes no dropout of sublayers"),
        ("use_bidirectional_attention", &["false"], "tokens attend to those before them alone"),
    ],
    ignores_unknown: true,
};

const LONG_ROPE: &str = "LongRoPE's frequencies, which depend on the longest sequence, are not computed";

/// `rope_parameters` and `rope_scaling` within `config.json`.
pub(crate) const ROPE_KEYS: KeyTable = KeyTable {
    name: "rope_parameters",
    served: "attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mscale mscale_all_dim \
        original_max_position_embeddings partial_rotary_factor rope_theta rope_type truncate type",
    harmless: "finetuned mrope_interleaved mrope_section",
    refused: &[
        ("long_factor", &[], LONG_ROPE),
        ("long_mscale", &[], LONG_ROPE),
        ("short_factor", &[], LONG_ROPE),
        ("short_mscale", &[], LONG_ROPE),
    ],
    ignores_unknown: false,
};

/// `generation_config.json`. Temperature and its kin are a run's own keys; what else changes the distribution that tokens are drawn from, and
/// cannot be asked for here, is refused.
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
        ("bad_words_ids", &["[]"], "tokens cannot be forbidden"),
        ("begin_suppress_tokens", &["[]"], "tokens cannot be forbidden"),
        ("constraints", &["[]"], "texts cannot be forced"),
        ("diversity_penalty", &["0"], "there is no search over beams"),
        ("dola_layers", &[], "one layer's logits are drawn from"),
        ("encoder_no_repeat_ngram_size", &["0"], "repeated tokens cannot be forbidden"),
        ("encoder_repetition_penalty", &["1"], "only repetition_penalty is computed"),
        ("epsilon_cutoff", &["0"], "only top_k, top_p and min_p cut the distribution"),
        ("eta_cutoff", &["0"], "only top_k, top_p and min_p cut the distribution"),
        ("exponential_decay_length_penalty", &[], "the end's probability does not depend on the length"),
        ("force_words_ids", &["[]"], "texts cannot be forced"),
        ("forced_bos_token_id", &[], "tokens cannot be forced"),
        ("forced_eos_token_id", &[], "tokens cannot be forced"),
        ("guidance_scale", &["1"], "one prompt's logits are drawn from"),
        ("min_length", &["0"], "the end cannot be forbidden"),
        ("min_new_tokens", &["0"], "the end cannot be forbidden"),
        ("no_repeat_ngram_size", &["0"], "repeated tokens cannot be forbidden"),
        ("num_beam_groups", &["1"], "there is no search over beams"),
        ("num_beams", &["1"], "there is no search over beams"),
        ("penalty_alpha", &["0"], "there is no contrastive search"),
        ("sequence_bias", &["[]", "{}"], "logits have no biases"),
        ("stop_strings", &["[]"], "a completion ends at eos_token_id; serve takes `stop` with a request"),
        ("suppress_tokens", &["[]"], "tokens cannot be forbidden"),
        ("token_healing", &["false"], "prompts are taken as they are"),
        ("top_h", &[], "only top_k, top_p and min_p cut the distribution"),
        ("typical_p", &["1"], "only top_k, top_p and min_p cut the distribution"),
        ("watermarking_config", &[], "there are no watermarks"),
    ],
    ignores_unknown: true,
};
