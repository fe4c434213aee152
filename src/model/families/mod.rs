//! Families of decoders, a file each: what their `config.json` calls them, and what it leaves unsaid.

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

/// What each family has, from its own file.
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

/// Traits of a family that `config.json` leaves unsaid.
pub(super) struct Traits {
    /// `architectures`
    pub architecture: &'static str,
    /// `model_type`
    pub model_type: &'static str,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// `attention_bias` says whether they do; the projection behind attention has none.
    pub has_attention_bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Norms of the sublayers.
    pub norms: NormPlaces,
    /// Width of a head where `head_dim` is absent; `None`: `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Which layers `sliding_window` is for.
    pub window: Window,
    /// `config.json` describes experts.
    pub has_experts: bool,
    /// Beside its experts, `config.json` describes one that every token goes to.
    pub has_shared_expert: bool,
    /// The weights of a token's experts are divided by their sum, which `norm_topk_prob` need not say.
    pub divides_by_choices: bool,
    /// `config.json` describes gated delta nets; attention has an output gate.
    pub has_delta_nets: bool,
    /// A checkpoint has the projections of a gated delta net in two tensors, by key heads.
    pub interleaves_delta_nets: bool,
    /// Norms scale by 1 + weight, but for those within gated delta nets.
    pub zero_centred_norms: bool,
    /// Heads may be turned in part: the share that is turned where `partial_rotary_factor` is absent.
    pub rotary_factor: Option<f64>,
    /// A checkpoint has the columns of a head that are turned together next to each other; ours are half of what is turned apart.
    pub turns_pairs: bool,
    /// Tensors in which a checkpoint has several projections.
    pub fused_tensors: &'static [FusedTensor],
    /// A checkpoint has one tensor for a matrix of all experts, of each [in, out], gates and ups in turn, and one for its biases.
    pub stacks_experts: bool,
    /// These tensors may be in MXFP4.
    pub reads_mxfp4: bool,
    /// The module of the expert that every token goes to.
    pub shared_expert: &'static str,
    /// A checkpoint may have layers behind the last one, which predict further tokens.
    pub keeps_further_layers: bool,
    /// Tensors of a block that a checkpoint names otherwise than those of other families.
    pub tensor_names: &'static [(ParamName, &'static str)],
    /// The values of keys that a `config.json` may leave out, as in transformers.
    pub defaults: fn() -> Value,
    /// Reads the keys that are the family's own: the model as it is by those that families share, changed.
    pub read: fn(&JsonObject, ModelSpec) -> Result<ModelSpec>,
    /// Adds those keys to a `config.json`.
    pub write: fn(&ModelSpec, &mut Value),
    /// Files whose `text_config` describes a model of this family, beside a vision tower.
    pub whole: Option<Whole>,
}

/// A tensor of a checkpoint that has the rows of several projections, one after the other.
#[derive(Clone, Copy)]
pub(super) struct FusedTensor {
    /// The module within its block.
    pub name: &'static str,
    /// The projections, all of one matrix.
    pub modules: &'static [TargetModule],
}

/// Files of a model that sees, of which a text model is a part.
#[derive(Clone, Copy)]
pub(super) struct Whole {
    /// Names of the whole.
    pub names: Names,
    /// The decoder in names of tensors.
    pub decoder: &'static str,
    /// The head.
    pub head: &'static str,
    /// Beginnings of the names of tensors that are kept as they are.
    pub kept: &'static [&'static str],
}

/// Names of an architecture in `config.json`.
#[derive(Clone, Copy)]
pub(super) struct Names {
    /// `architectures`
    pub architecture: &'static str,
    /// `model_type`
    pub model_type: &'static str,
}

/// Which layers `sliding_window` is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Window {
    /// No layer has a window: the key has no meaning.
    Never,
    /// All, and this is the window where the key is missing.
    Always(usize),
    /// Layers from `max_window_layers` on have one, with `use_sliding_window` only.
    Switched,
    /// With `use_sliding_window` the layers that `layer_types` lists have one, or all where there is no list.
    Listed,
    /// All layers, with `use_sliding_window` only.
    SwitchedForAll,
    /// With `use_sliding_window` some layers have one, which is not served.
    Refused,
    /// The layers that `layer_types` lists, or all but every so many-th one where there is no list.
    Patterned(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of scripts/golden.py, which the integration tests compare.
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
