//! Hugging Face's tensors and where each lies within our parameters.

use tch::Tensor;

use crate::model::params::{ParamName, Unit, UnitLayout, shapes};
use crate::model::spec::ModelSpec;

const NO_ADAPTERS: &str = "adapters are no parameters of the model";

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::model) struct HfTensor {
    /// `model.layers.0.self_attn.q_proj.weight`
    pub name: String,
    /// Its shape on disk.
    pub shape: Vec<i64>,
    param: ParamName,
    part: Part,
}

/// Which rows of our parameter a tensor is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    Whole,
    Query,
    Key,
    Value,
    Gate,
    Up,
}

impl HfTensor {
    /// The tensor as a view of its unit's flat tensor. Its elements are in the order of `shape`, its sizes may be split
    /// further: a tensor of `shape` fits after `view_as`.
    pub fn view(&self, spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Tensor {
        let whole = layout.view(self.param, flat).expect("tensors() lists parameters of the layout");
        let columns = &whole.size()[1..];
        let rows = |split: &[i64]| whole.view([split, columns].concat().as_slice());
        let (groups, heads, head_dim) = (spec.num_kv_heads as i64, spec.heads_per_group() as i64, spec.head_dim as i64);
        match self.part {
            Part::Whole => whole,
            Part::Query => rows(&[groups, heads + 2, head_dim]).narrow(1, 0, heads),
            Part::Key => rows(&[groups, heads + 2, head_dim]).select(1, heads),
            Part::Value => rows(&[groups, heads + 2, head_dim]).select(1, heads + 1),
            Part::Gate => rows(&[-1, 2]).select(1, 0),
            Part::Up => rows(&[-1, 2]).select(1, 1),
        }
    }
}

/// The tensors that a checkpoint has for one unit, in Hugging Face's order.
pub(in crate::model) fn tensors(spec: &ModelSpec, unit: Unit) -> Vec<HfTensor> {
    let head_rows = |heads: usize| (heads * spec.head_dim) as i64;
    let mut tensors = Vec::new();
    for (param, shape) in shapes(spec, unit) {
        let mut add = |part, rows: i64, name: &str| {
            let name = match unit {
                Unit::Block(layer) => format!("model.layers.{layer}.{name}"),
                Unit::Embedding | Unit::Head => name.to_owned(),
            };
            let shape = [&[rows], &shape[1..]].concat();
            tensors.push(HfTensor { name, shape, param, part });
        };
        match param {
            ParamName::Qkv | ParamName::QkvBias => {
                let suffix = if param == ParamName::Qkv { "weight" } else { "bias" };
                add(Part::Query, head_rows(spec.num_heads), &format!("self_attn.q_proj.{suffix}"));
                add(Part::Key, head_rows(spec.num_kv_heads), &format!("self_attn.k_proj.{suffix}"));
                add(Part::Value, head_rows(spec.num_kv_heads), &format!("self_attn.v_proj.{suffix}"));
            }
            ParamName::GateUp => {
                add(Part::Gate, spec.intermediate_size as i64, "mlp.gate_proj.weight");
                add(Part::Up, spec.intermediate_size as i64, "mlp.up_proj.weight");
            }
            ParamName::Embedding => add(Part::Whole, shape[0], "model.embed_tokens.weight"),
            ParamName::InputNorm => add(Part::Whole, shape[0], "input_layernorm.weight"),
            ParamName::QNorm => add(Part::Whole, shape[0], "self_attn.q_norm.weight"),
            ParamName::KNorm => add(Part::Whole, shape[0], "self_attn.k_norm.weight"),
            ParamName::O => add(Part::Whole, shape[0], "self_attn.o_proj.weight"),
            ParamName::PostNorm => add(Part::Whole, shape[0], "post_attention_layernorm.weight"),
            ParamName::Down => add(Part::Whole, shape[0], "mlp.down_proj.weight"),
            ParamName::FinalNorm => add(Part::Whole, shape[0], "model.norm.weight"),
            ParamName::LmHead => add(Part::Whole, shape[0], "lm_head.weight"),
            ParamName::QkvA | ParamName::QkvB | ParamName::OA | ParamName::OB => unreachable!("{NO_ADAPTERS}"),
            ParamName::GateUpA | ParamName::GateUpB | ParamName::DownA | ParamName::DownB => {
                unreachable!("{NO_ADAPTERS}")
            }
        }
    }
    tensors
}

/// Whether a tensor that we do not read may stand in a checkpoint, as in transformers: the head of a tied model, and the
/// rotary frequencies that old checkpoints carry.
pub(super) fn is_ignored(spec: &ModelSpec, name: &str) -> bool {
    (spec.tie_word_embeddings && name == "lm_head.weight") || name.ends_with(".self_attn.rotary_emb.inv_freq")
}
