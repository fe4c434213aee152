//! Families of decoders, a file each: what their `config.json` calls them, and what it leaves unsaid.

mod llama;
mod mistral;
mod olmo2;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;

use super::block::{NormPlaces, QkNorm};

/// Architectures served by the one decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen2 with experts.
    Qwen2Moe,
    /// Qwen3.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Qwen3.5 and 3.6, text.
    Qwen3_5,
    /// Qwen3.5 and 3.6 with experts, text.
    Qwen3_5Moe,
    /// Qwen3-Next.
    Qwen3Next,
    /// Llama 3.x.
    Llama,
    /// Mistral.
    Mistral,
    /// OLMo 2.
    Olmo2,
}

/// Traits of a family that `config.json` leaves unsaid.
pub(super) struct Traits {
    /// `architectures`
    pub architecture: &'static str,
    /// `model_type`
    pub model_type: &'static str,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
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
    /// `config.json` describes gated delta nets; attention has an output gate and turns heads in part, and norms scale by 1 + weight.
    pub has_delta_nets: bool,
    /// A checkpoint has the projections of a gated delta net in two tensors, by key heads.
    pub interleaves_delta_nets: bool,
    /// Files whose `text_config` describes a model of this family, beside a vision tower.
    pub whole: Option<Names>,
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
    /// All layers, with `use_sliding_window` only.
    SwitchedForAll,
    /// With `use_sliding_window` some layers have one, which is not served.
    Refused,
}

impl Family {
    pub(super) const ALL: [Family; 10] = [
        Family::Qwen2,
        Family::Qwen2Moe,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::Qwen3_5,
        Family::Qwen3_5Moe,
        Family::Qwen3Next,
        Family::Llama,
        Family::Mistral,
        Family::Olmo2,
    ];

    pub(super) fn traits(self) -> Traits {
        match self {
            Family::Qwen2 => qwen2::TRAITS,
            Family::Qwen2Moe => qwen2_moe::TRAITS,
            Family::Qwen3 => qwen3::TRAITS,
            Family::Qwen3Moe => qwen3_moe::TRAITS,
            Family::Qwen3_5 => qwen3_5::TRAITS,
            Family::Qwen3_5Moe => qwen3_5_moe::TRAITS,
            Family::Qwen3Next => qwen3_next::TRAITS,
            Family::Llama => llama::TRAITS,
            Family::Mistral => mistral::TRAITS,
            Family::Olmo2 => olmo2::TRAITS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of scripts/golden.py, which the integration tests compare.
    #[test]
    fn every_family_has_golden_numbers() {
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
