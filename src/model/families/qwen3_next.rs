//! Qwen3-Next: like Qwen3.5 MoE, but some layers may have no experts, and a checkpoint stores a gated delta net's projections in two tensors.
//!
//! LoRA on `in_proj_qkvz` and `in_proj_ba` is refused. PEFT gives each tensor one adapter, whose A is shared by its parts. Here the parts are
//! separate matrices, and adapters trained separately are not a rank-r adapter of the file's tensor. Sharing A would need a parameter that two
//! matrices have in common, in the optimizer, ZeRO's shards, dropout and checkpoints.

use super::{Traits, qwen3_5_moe};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    divides_by_choices: false,
    interleaves_delta_nets: true,
    whole: None,
    ..qwen3_5_moe::TRAITS
};
