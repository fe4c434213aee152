//! Model families, one file each: their names in `config.json`, and the properties it leaves unsaid.

mod gemma3;
mod glm;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod llama;
mod ministral;
mod mistral;
mod olmo2;
mod phi3;
#[cfg(test)]
mod published;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod smollm3;

use serde_json::Value;

use super::json::JsonObject;
use super::spec::{Family, ModelSpec, NormPlaces, ParamName, QkNorm, families};
use crate::config::TargetModule;
use crate::error::Result;

/// Generates `Family::traits`, which returns each family's `TRAITS`.
macro_rules! traits_of {
    ($($(#[$doc:meta])* $name:ident: $file:ident,)*) => {
        impl Family {
            pub(super) fn traits(self) -> Traits {
                match self {
                    $(Family::$name => $file::TRAITS,)*
                }
            }
        }
    };
}

families!(traits_of);

/// Properties of a family that `config.json` leaves unsaid.
pub(super) struct Traits {
    /// Value of `architectures` in `config.json`.
    pub architecture: &'static str,
    /// Value of `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The key `attention_bias` states whether query, key and value have biases; attention's output projection has none.
    pub has_attention_bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Places of the sublayers' norms.
    pub norms: NormPlaces,
    /// Default of `head_dim`; `None` means `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Which layers `sliding_window` applies to.
    pub window: Window,
    /// `config.json` describes experts.
    pub has_experts: bool,
    /// `config.json` also describes a shared expert, which processes every token.
    pub has_shared_expert: bool,
    /// The routing weights of a token's experts are divided by their sum, even if `norm_topk_prob` is absent.
    pub divides_by_choices: bool,
    /// `config.json` describes gated delta nets; attention has an output gate.
    pub has_delta_nets: bool,
    /// A checkpoint stores a gated delta net's projections in two tensors, grouped by key heads.
    pub interleaves_delta_nets: bool,
    /// Norms multiply by 1 + weight, except those within gated delta nets.
    pub zero_centred_norms: bool,
    /// Default of `partial_rotary_factor`, for families that may rotate only part of each head.
    pub rotary_factor: Option<f64>,
    /// A checkpoint stores the columns of a head that rotate together next to each other. In our layout they are half of the rotated columns apart.
    pub turns_pairs: bool,
    /// Tensors in which a checkpoint fuses several projections.
    pub fused_tensors: &'static [FusedTensor],
    /// A checkpoint has one tensor for the matrices of all experts, each [in, out] with gate and up alternating, and one for their biases.
    pub stacks_experts: bool,
    /// The stacked expert tensors may be in MXFP4.
    pub reads_mxfp4: bool,
    /// Name of the shared expert's module.
    pub shared_expert: &'static str,
    /// A checkpoint may have layers after the last one (multi-token prediction), which are copied unchanged.
    pub keeps_further_layers: bool,
    /// Tensors of a block whose checkpoint names differ from the usual ones.
    pub tensor_names: &'static [(ParamName, &'static str)],
    /// Default values of `config.json`'s keys, as in transformers.
    pub defaults: fn() -> Value,
    /// Reads the family's own keys and changes the spec that was read from the shared keys.
    pub read: fn(&JsonObject, ModelSpec) -> Result<ModelSpec>,
    /// Adds the family's own keys to a `config.json`.
    pub write: fn(&ModelSpec, &mut Value),
    /// Names of vision-language models whose `text_config` describes a model of this family.
    pub whole: Option<Whole>,
}

/// A checkpoint's tensor that contains the rows of several projections, one after the other.
#[derive(Clone, Copy)]
pub(super) struct FusedTensor {
    /// Name of the module within its block.
    pub name: &'static str,
    /// The projections, all of one fused matrix.
    pub modules: &'static [TargetModule],
}

/// Names in files of a vision-language model that has a text model as a part.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    /// Names of the whole model's architecture.
    pub names: Names,
    /// Prefix of the decoder's tensors.
    pub decoder: &'static str,
    /// Name of the output head's tensor.
    pub head: &'static str,
    /// Prefixes of the names of tensors that are copied unchanged.
    pub kept: &'static [&'static str],
}

/// The names of an architecture in `config.json`.
#[derive(Clone, Copy)]
pub(super) struct Names {
    /// Value of `architectures`.
    pub architecture: &'static str,
    /// Value of `model_type`.
    pub model_type: &'static str,
}

/// Which layers `sliding_window` applies to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Window {
    /// No layer: the key is ignored.
    Never,
    /// All layers. The value is the default window if the key is absent.
    Always(usize),
    /// Layers from `max_window_layers` on, if `use_sliding_window` is set.
    Switched,
    /// The layers that `layer_types` lists, or all without such a list, if `use_sliding_window` is set.
    Listed,
    /// All layers, if `use_sliding_window` is set.
    SwitchedForAll,
    /// Some layers if `use_sliding_window` is set, which is unsupported and refused.
    Refused,
    /// The layers that `layer_types` lists or, without such a list, all layers except every n-th.
    Patterned(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every family has a folder of golden numbers (scripts/golden.py), which the integration tests use.
    #[test]
    fn every_model_family_has_golden_test_data() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let folders = golden.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let folders: Vec<_> = folders.filter(|folder| folder.join("config.json").exists()).collect();
        let tests = [include_str!("../../../tests/it/model.rs"), include_str!("../../../tests/it/rollout.rs")];
        for family in Family::ALL {
            let architecture = family.traits().architecture;
            let is_of_family = |folder: &&std::path::PathBuf| {
                std::fs::read_to_string(folder.join("config.json")).unwrap().contains(&format!("\"{architecture}\""))
            };
            let folder =
                folders.iter().find(is_of_family).unwrap_or_else(|| panic!("{architecture}: no golden folder"));
            let name = folder.file_name().unwrap().to_string_lossy();
            assert!(folder.join("golden.json").exists(), "{name}: no logits and tokens");
            let is_compared = tests.iter().all(|test| test.contains(&format!("\"{name}\"")));
            assert!(is_compared, "{name} is not in tests/it/model.rs or not in tests/it/rollout.rs");
        }
    }
}
