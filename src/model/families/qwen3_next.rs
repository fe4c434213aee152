//! Qwen3-Next: Qwen3.5 with experts, but that some layers may have none, and that the projections of a gated delta net lie together in two
//! tensors.
//!
//! LoRA on `in_proj_qkvz` and `in_proj_ba` is refused. PEFT gives each tensor one adapter, whose A its parts share. Here the parts
//! are separate matrices; adapters trained apart are no adapter of rank r of the file's tensor. Sharing A needs a parameter that two
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
