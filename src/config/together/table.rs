//! The table of what does not go together.

use super::Circumstance::*;
use super::ConflictKind::*;
use super::{Conflict, KeyValues, Term};

macro_rules! term {
    ($key:literal is $($word:literal)|+) => { Term::Setting($key, KeyValues::Is(&[$($word),+])) };
    ($key:literal not $($word:literal)|+) => { Term::Setting($key, KeyValues::Not(&[$($word),+])) };
    ($key:literal above $number:literal) => { Term::Setting($key, KeyValues::Above($number)) };
    ($key:literal at_most $number:literal) => { Term::Setting($key, KeyValues::AtMost($number)) };
    ($key:literal begins $start:literal) => { Term::Setting($key, KeyValues::Begins($start)) };
    ($key:literal given) => { Term::Setting($key, KeyValues::Given) };
    ($circumstance:ident) => { Term::Circumstance($circumstance) };
}

/// `(feature) (feature) => "why";` A feature of several parts has them one after the other; the first key of a row is the one that errors name.
macro_rules! table {
    ($($refused:ident { $(($($feature:tt)+) $(($($with:tt)+))+ => $why:literal;)+ })+) => {
        &[$($(Conflict { refused: $refused, feature: term!($($feature)+), with: &[$(term!($($with)+)),+], why: $why },)+)+]
    };
}

pub(crate) const TABLE: &[Conflict] = table! {
    Unread {
        ("train_file" is "none") ("dataset_name" is "none") ("environment" is "none") => "a run reads files with training rows, or a data set of the Hugging Face Hub";
        ("train_file" given) ("dataset_name" given) => "either of them says where the rows are; a file of the Hub is hf://datasets/USER/NAME/FILE";
        ("train_file" given) ("environment" begins "verifiers:") => "its rows are its own";
        ("train_file" given) ("environment" begins "reasoning_gym:") => "its rows are its own";
        ("dataset_name" given) ("environment" begins "verifiers:") => "its rows are its own";
        ("dataset_name" given) ("environment" begins "reasoning_gym:") => "its rows are its own";
        ("dataset_config" given) ("dataset_name" is "none") => "it names a configuration of that data set";
        ("eval_file" is "none") ("eval_steps" given) ("dataset_name" is "none") ("environment" is "none") => "evaluations need held-out rows";
        ("eval_file" is "none") ("eval_steps" given) ("dataset_test_split" is "none") => "evaluations need held-out rows";
        ("eval_steps" is "none") ("load_best_model_at_end" is "true") => "without evaluations no model is the best";
        ("eval_steps" is "none") ("early_stopping_patience" given) => "it counts evaluations";
        ("eval_num_generations" above 1.0) ("eval_temperature" at_most 0.0) => "greedy samples of a problem are all equal";
        ("environment_args" given) ("environment" is "none") => "they are its arguments";
        ("generation_batch_size" given) ("steps_per_generation" given) => "either of them determines the other";
        ("split" given) ("mode" is "colocated") => "every rank does both halves of a step";
        ("split.rollout_gpus" is "none") ("mode" is "split") => "it is the number of GPUs that only generate";
        ("split.in_flight_updates" is "true") ("split.async_steps" at_most 1.0) => "one batch ahead is complete before its weights change";
        ("zero.shard_group_size" given) ("zero.stage" at_most 0.0) => "stage 0 shards nothing";
        ("lora" given) ("lora.r" is "none") => "adapters have a rank";
        ("quantization" not "none") ("lora.r" is "none") => "a quantised base is frozen, so that adapters train beside it";
        ("reference" is "base") ("lora.r" is "none") => "without adapters the base is the initial model";
        ("residency.reference" is "host") ("lora.r" given) => "the frozen base of the adapters is its own reference";
        ("sync_ref_model" is "true") ("lora.r" given) => "the frozen base of the adapters is the reference: there is none of its own to mix into";
        ("sync_ref_model" is "true") ("beta" at_most 0.0) => "without beta there is no reference model";
        ("use_kl_in_reward" is "true") ("beta" at_most 0.0) => "beta weighs the divergence";
        ("kl_estimator" not "k3") ("beta" at_most 0.0) => "without beta there is no KL term";
        ("ref_model_mixup_alpha" given) ("sync_ref_model" is "false") => "nothing else reads it";
        ("ref_model_sync_steps" given) ("sync_ref_model" is "false") => "nothing else reads it";
        ("curriculum.every" given) ("curriculum.solve_rate" is "none") => "it is about rows outside of these bounds";
        ("teacher_model_revision" given) ("teacher_model_name_or_path" is "none") => "there is no teacher";
        ("distillation_weight" given) ("teacher_model_name_or_path" is "none") ("self_distillation" is "none") => "there is no teacher";
        ("distillation_is_clip" given) ("teacher_model_name_or_path" is "none") ("self_distillation" is "none") => "there is no teacher";
        ("distillation_mode" is "topk_logits") ("teacher_model_name_or_path" is "none") ("self_distillation" is "none") => "there is no teacher";
        ("distillation_topk" is "none") ("distillation_mode" is "topk_logits") => "it is the number of tokens that the divergence is over";
        ("distillation_topk" given) ("distillation_mode" is "sampled_token") => "the divergence is over the sampled tokens";
        ("distillation_alpha" given) ("distillation_mode" is "sampled_token") => "the divergence is over the sampled tokens";
        ("distillation_add_tail" is "true") ("distillation_mode" is "sampled_token") => "the divergence is over the sampled tokens";
        ("self_distillation" not "none") ("teacher_model_name_or_path" given) => "either of them is the teacher";
        ("teacher_prompt_template" given) ("self_distillation" not "sdft") => "no other teacher has such a prompt";
        ("num_loss_tokens_to_skip" given) ("self_distillation" not "sdft") => "no other teacher leaves tokens out";
        ("reprompt_template" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("solution_template" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("feedback_template" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("use_successful_as_teacher" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("success_reward_threshold" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("dont_reprompt_on_self_success" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("include_environment_feedback" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("environment_feedback_only_without_solution" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("remove_thinking_from_demonstration" given) ("self_distillation" not "sdpo") => "no other teacher is shown completions or feedback";
        ("max_reprompt_len" given) ("self_distillation" is "none") => "there is no such prompt";
        ("delta" given) ("loss_type" is "cispo" | "sapo" | "vespo") => "these losses do not clip from two sides";
        ("sapo_temperature_neg" given) ("loss_type" not "sapo") => "no other loss has a temperature";
        ("sapo_temperature_pos" given) ("loss_type" not "sapo") => "no other loss has a temperature";
        ("vespo_k_pos" given) ("loss_type" not "vespo") => "no other loss has gamma weights";
        ("vespo_lambda_pos" given) ("loss_type" not "vespo") => "no other loss has gamma weights";
        ("vespo_k_neg" given) ("loss_type" not "vespo") => "no other loss has gamma weights";
        ("vespo_lambda_neg" given) ("loss_type" not "vespo") => "no other loss has gamma weights";
        ("entropy_coef_min" given) ("use_adaptive_entropy" is "false") => "the weight of the entropy bonus stays what it is";
        ("entropy_coef_max" given) ("use_adaptive_entropy" is "false") => "the weight of the entropy bonus stays what it is";
        ("entropy_coef_delta" given) ("use_adaptive_entropy" is "false") => "the weight of the entropy bonus stays what it is";
        ("entropy_target" given) ("use_adaptive_entropy" is "false") => "the weight of the entropy bonus stays what it is";
        ("importance_sampling_clip_min" given) ("importance_sampling_correction" is "false") => "there is no correction to bound";
        ("dynamic_sampling_range" given) ("dynamic_sampling" is "none") => "all groups are trained on";
        ("partial_rollout" is "true") ("oversample" at_most 0.0) => "every group is complete when a step ends";
        ("carried_kv" is "keep") ("partial_rollout" is "false") => "nothing is carried to the next step";
        ("warmup_ratio" above 0.0) ("warmup_steps" above 0.0) => "either of them says how long the rate rises";
        ("lr_scheduler_kwargs.min_lr_rate" is "none") ("lr_scheduler_type" is "cosine_with_min_lr") => "it is the share of learning_rate that this shape ends at";
        ("lr_scheduler_kwargs.min_lr_rate" given) ("lr_scheduler_type" not "cosine_with_min_lr") => "no other shape has a lowest rate";
        ("muon" given) ("optim" not "muon") => "no other optimizer reads it";
        ("router_aux_loss_coef" given) (NoExperts) => "config.json describes none";
        ("enable_expert_parallel" is "true") (NoExperts) => "config.json describes none";
        ("mamba_ssm_cache_dtype" is "bfloat16") (NoDeltaNets) => "keys and values have the type kv_cache_dtype";
        ("num_speculative_tokens" given) ("speculation" is "none") => "nothing is drafted";
        ("top_entropy_quantile" given) (OwnLoss) => "it is part of the configured loss";
        ("entropy_coef" given) (OwnLoss) => "it is part of the configured loss";
        ("use_adaptive_entropy" is "true") (OwnLoss) => "it is part of the configured loss";
    }
    Wrong {
        ("importance_sampling_correction" is "false") ("partial_rollout" is "true") => "older weights sampled some tokens";
        ("importance_sampling_correction" is "false") ("split.async_steps" above 0.0) => "an older policy samples";
        ("importance_sampling_correction" is "false") ("rollout_quantization" is "fp8") => "the sampler has other probabilities than the trainer";
        ("importance_sampling_correction" is "false") ("mixed_precision" not "none") => "the sampler has other probabilities than the trainer";
        ("importance_sampling_correction" is "false") ("kv_cache_dtype" is "fp8") => "the sampler has other probabilities than the trainer";
        ("importance_sampling_correction" is "false") ("mamba_ssm_cache_dtype" is "bfloat16") => "the sampler has other probabilities than the trainer";
        ("importance_sampling_level" not "sequence") ("loss_type" is "luspo") => "luspo sums the loss of whole sequences";
        ("importance_sampling_level" not "token") ("loss_type" is "vespo") => "vespo makes ratios of sequences by itself";
        ("importance_sampling_mode" not "token_truncate" | "token_mask") ("loss_type" is "vespo") ("importance_sampling_correction" is "true") => "vespo multiplies the ratios of a sequence's tokens by itself";
        ("use_bias_correction_kl" is "false") ("kl_estimator" is "k1") ("use_kl_in_reward" is "false") => "the gradient of k1 alone is 0 in the mean";
        ("use_kl_in_reward" is "true") ("multi_objective_aggregation" is "normalize_then_sum") => "each reward is scaled by itself, and none of them has the divergence";
        ("use_kl_in_reward" is "true") ("dynamic_sampling" not "none") => "with the divergence in the rewards groups of equal rewards teach, too";
        ("scale_rewards" is "group") ("advantage_estimator" is "rloo") => "none leaves the advantages as they are, batch brings those of the batch to mean 0 and standard deviation 1";
        ("scale_rewards" not "group") ("multi_objective_aggregation" is "normalize_then_sum") => "rewards are scaled by group and then by batch";
        ("advantage_estimator" is "rloo") ("multi_objective_aggregation" is "normalize_then_sum") => "each reward is scaled by its group's mean and standard deviation";
        ("dynamic_sampling" not "none") ("multi_objective_aggregation" is "normalize_then_sum") => "groups whose weighted sums are equal teach, too";
        ("dynamic_sampling" not "none") ("teacher_model_name_or_path" given) => "groups of equal rewards teach, too";
        ("dynamic_sampling" not "none") ("self_distillation" not "none") => "groups of equal rewards teach, too";
        ("dynamic_sampling" is "replace") ("oversample" above 0.0) => "the first complete groups are the batch, whatever their rewards";
        ("top_entropy_quantile" given) ("lora.dropout" above 0.0) => "the entropies of a pass with dropout are not known before it";
        ("split.in_flight_updates" is "true") ("strict" is "true") => "what is sampled by which weights depends on the clock";
        ("split.in_flight_updates" is "true") ("full_determinism" is "true") => "what is sampled by which weights depends on the clock";
        ("speculation" is "auto") ("full_determinism" is "true") => "how many tokens are drafted, and so what is computed together, depends on the clock";
        ("full_determinism" is "true") ("agent" given) => "what is computed together depends on when the agent's requests come";
        ("full_determinism" is "true") ("environment" begins "verifiers:") => "what is computed together depends on when the agent's requests come";
        ("strict" is "true") ("device" is "cpu") => "a CPU's sums change with the batch";
        ("strict" is "true") ("tensor_parallel_size" above 1.0) => "sums over the ranks of an engine change with the batch";
        ("carried_kv" is "keep") ("strict" is "true") => "a completion's bits would depend on when its keys and values were computed";
        ("rollout_quantization" is "fp8") ("strict" is "true") => "in FP8 the order in which a product adds up changes with the number of rows";
        ("mamba_ssm_cache_dtype" is "bfloat16") ("strict" is "true") => "states are rounded after each step, so that a completion's bits would depend on how it is cut into steps";
        ("mixed_precision" not "none") ("quantization" not "none") => "the weights are rounded already";
        ("carried_kv" is "keep") ("exact" is "true") => "keys and values of other weights give a token another probability";
        ("rollout_quantization" is "fp8") ("exact" is "true") => "the sampler has other probabilities than the trainer";
        ("mixed_precision" not "none") ("exact" is "true") => "in FP8 the order in which a product adds up changes with the number of rows";
        ("kv_cache_dtype" is "fp8") ("exact" is "true") => "the sampler has other probabilities than the trainer";
        ("lora.target_modules" is "all-linear" | "q_proj" | "k_proj" | "v_proj") ("lora.r" given) (FusedQkv) => "PEFT adapts qkv_proj, which is not served";
        ("lora.target_modules" is "all-linear" | "gate_proj" | "up_proj") ("lora.r" given) (FusedGateUp) => "PEFT adapts gate_up_proj, which is not served";
        ("lora.dropout" above 0.0) ("exact" is "true") => "training drops elements that the sampler keeps";
    }
    Unserved {
        ("strict" is "true") ("pipeline_parallel_size" above 1.0) => "the parts of a batch that stages compute change with it";
        ("speculation" is "mtp") (NoDraftHead) => "draft heads are not read yet, and ngram and auto need none";
        ("speculation" not "none") ("device" is "cuda") (DeltaNets) => "no kernel stores drafts beside states yet; on CPUs they are";
        ("speculation" not "none") ("pipeline_parallel_size" above 1.0) => "stages compute steps whose tokens nobody knows yet";
        ("exact" is "true") ("tensor_parallel_size" above 1.0) => "the trainer adds up whole products, ranks of an engine add up their parts";
        ("exact" is "true") ("pipeline_parallel_size" above 1.0) => "the parts of a batch that stages compute change with it";
        ("exact" is "true") ("split.async_steps" above 0.0) => "older weights sample, so that there is nothing that could be equal";
        ("exact" is "true") ("quantization" not "none") => "only weights that are stored as they are multiplied are held to the same bits so far";
        ("exact" is "true") ("agent" given) => "an agent asks for temperatures of its own";
        ("exact" is "true") (Experts) => "experts are not held to the same bits so far";
        ("exact" is "true") (DeltaNets) => "gated delta nets are not held to the same bits so far";
        ("pipeline_parallel_size" above 1.0) ("mode" is "colocated") ("zero.stage" at_most 2.0) => "where every rank holds all weights, replicas of an engine generate more than stages of one";
        ("pipeline_parallel_size" above 1.0) ("quantization" not "none") => "every rank holds its blocks whole";
        ("pipeline_parallel_size" above 1.0) ("agent" given) => "an agent's requests come when it sends them";
        ("pipeline_parallel_size" above 1.0) ("environment" begins "verifiers:") => "an agent's requests come when it sends them";
        ("pipeline_parallel_size" above 1.0) ("device" is "cuda") (Experts) => "such a model runs in stages on CPUs alone so far; on GPUs tensor_parallel_size divides it";
        ("pipeline_parallel_size" above 1.0) ("device" is "cuda") (DeltaNets) => "such a model runs in stages on CPUs alone so far; on GPUs tensor_parallel_size divides it";
        ("oversample" above 0.0) ("mode" is "split") => "a step takes every group that it begins";
        ("quantization" not "none") ("mode" is "split") => "weights are sent as they are computed with";
        ("residency.optimizer" is "swap") ("mode" is "split") => "no engine needs the memory of the optimizer's state";
        ("split.in_flight_updates" is "true") ("dynamic_sampling" is "replace") => "rows in the place of others are drawn batch by batch";
        ("save_on_each_node" is "true") ("mode" is "split") (SeveralNodes) => "nodes with engines alone have no state to save";
        ("tools" given) ("agent" given) => "an agent plays whole episodes in the place of tools";
        ("environment_factory" given) ("agent" given) => "an agent plays whole episodes in the place of tools";
        ("agent" given) ("environment" given) => "either of them plays the episodes";
        ("environment_factory" given) ("environment" given) => "either of them is a completion's environment";
        ("tools" given) ("environment" begins "verifiers:") => "an agent plays whole episodes in the place of tools";
        ("exact" is "true") ("environment" begins "verifiers:") => "an agent asks for temperatures of its own";
        ("rollout_quantization" not "none") ("quantization" not "none") => "the base is dequantised one block after the other";
        ("rollout_quantization" is "fp8") (Experts) => "experts are not multiplied in FP8 yet";
        ("rollout_quantization" is "fp8") (DeltaNets) => "gated delta nets are not multiplied in FP8 yet";
        ("rollout_quantization" is "fp8") ("device" is "cuda") ("dtype" is "float32") => "on a GPU FP8 is rounded from bfloat16";
        ("kv_cache_dtype" is "fp8") ("device" is "cuda") ("dtype" is "float32") => "on a GPU FP8 is rounded from bfloat16";
        ("mixed_precision" not "none") (Experts) => "experts do not train in FP8 yet";
        ("mixed_precision" not "none") ("device" is "cuda") ("dtype" is "float32") => "on a GPU FP8 is rounded from bfloat16";
        ("optim" is "muon") ("lora.r" given) => "muon orthogonalises whole matrices of the model, and adapters train beside them";
        ("optim" is "muon") (Experts) => "matrices of experts are not orthogonalised yet";
        ("optim" is "muon") (FusedDeltaNets) => "in_proj_qkvz and in_proj_ba are not orthogonalised yet";
        ("quantization" is "nf4") (SomeExperts) => "NF4 is for experts in all layers or in none";
        ("lora.target_modules" is "all-linear" | "gate_proj" | "up_proj" | "down_proj") ("lora.r" given) (SomeExperts) => "PEFT reads no adapters of such a model's MLPs";
        ("lora.target_modules" is "all-linear" | "in_proj_qkv" | "in_proj_z" | "in_proj_b" | "in_proj_a") ("lora.r" given) (FusedDeltaNets) => "PEFT adapts in_proj_qkvz and in_proj_ba, which are not served";
        ("lora.dropout" above 0.0) ("lora.target_modules" is "all-linear" | "gate_proj" | "up_proj" | "down_proj") (Experts) => "PEFT has no dropout beside experts";
        ("oversample" above 0.0) (OwnLoop) => "a step takes every group that it begins";
        ("dynamic_sampling" is "replace") (OwnLoop) => "a step takes every group that it begins";
        ("self_distillation" not "none") ("tools" given) => "prompts of a teacher show completions of one turn";
        ("self_distillation" not "none") ("environment_factory" given) => "prompts of a teacher show completions of one turn";
        ("self_distillation" not "none") ("agent" given) => "prompts of a teacher show completions of one turn";
        ("self_distillation" not "none") ("environment" begins "verifiers:") => "prompts of a teacher show completions of one turn";
        ("self_distillation" not "none") ("environment" begins "openenv:") => "prompts of a teacher show completions of one turn";
        ("tools" given) (OwnLoop) => "completions have one turn";
        ("environment_factory" given) (OwnLoop) => "completions have one turn";
        ("environment" given) (OwnLoop) => "its rows and its scores belong to the configured run";
        ("agent" given) (OwnLoop) => "completions have one turn";
        ("split.async_steps" above 0.0) (OwnLoop) => "batches are sampled one after the other";
    }
};
