//! Llama 3.x: the baseline decoder from which other families are derived; its rope is scaled by wavelength.

use serde_json::json;

use super::{Traits, Window};
use crate::model::spec::NormPlaces;

pub(super) const TRAITS: Traits = Traits {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    qkv_bias: false,
    has_attention_bias: false,
    qk_norm: None,
    norms: NormPlaces::PRE,
    head_dim: None,
    window: Window::Never,
    has_experts: false,
    has_shared_expert: false,
    divides_by_choices: false,
    has_delta_nets: false,
    interleaves_delta_nets: false,
    zero_centred_norms: false,
    rotary_factor: None,
    turns_pairs: false,
    fused_tensors: &[],
    stacks_experts: false,
    reads_mxfp4: false,
    shared_expert: "shared_expert",
    keeps_further_layers: false,
    tensor_names: &[],
    defaults: || json!({}),
    read: |_, spec| Ok(spec),
    write: |_, _| {},
    whole: None,
};
