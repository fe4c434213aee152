//! Tensors over a unit's flat storage, and their tensor-parallel slices. Nothing here copies: writing to a view, or to a
//! slice of it, writes to the flat tensor. The same structs serve weights and gradients.

use tch::Tensor;

use super::params::{ParamName, UnitLayout};
use super::spec::ModelSpec;

/// A block's parameters. Shapes are those of the whole block; a tensor-parallel slice has its share of H, Hkv and F.
#[derive(Debug)]
pub struct BlockParams {
    /// Norm before attention.
    pub input_norm: Tensor, // [D]
    /// Query, key and value projections.
    pub qkv: Qkv,
    /// Norm of every query head (Qwen3).
    pub q_norm: Option<Tensor>, // [hd]
    /// Norm of every key head (Qwen3).
    pub k_norm: Option<Tensor>, // [hd]
    /// Attention output projection.
    pub o: Tensor, // [D, H hd], column stride kept in a slice
    /// Norm before the MLP.
    pub post_norm: Tensor, // [D]
    /// Gate and up projections, rows g0 u0 g1 u1 ..
    pub gate_up: Tensor, // [2 F, D]
    /// MLP output projection.
    pub down: Tensor, // [D, F], column stride kept in a slice
}

/// Query, key and value projections.
#[derive(Debug)]
pub enum Qkv {
    /// Whole groups: rows `[query heads of group g, k_g, v_g]` for each group.
    Grouped {
        /// [(H + 2 Hkv) hd, D]
        weight: Tensor,
        /// [(H + 2 Hkv) hd]
        bias: Option<Tensor>,
    },
    /// Some query heads of one group and that group's k and v: the slice of a rank when there are more ranks than
    /// key/value heads.
    Split {
        /// Weight [H hd, D] and bias [H hd].
        q: (Tensor, Option<Tensor>),
        /// Weight [2 hd, D] and bias [2 hd], k before v.
        kv: (Tensor, Option<Tensor>),
    },
}

impl BlockParams {
    /// Views of a block's flat tensor [layout.len].
    ///
    /// # Panics
    /// If `layout` is not a block's.
    pub fn view(layout: &UnitLayout, flat: &Tensor) -> Self {
        let get = |name| required(layout, name, flat);
        Self {
            input_norm: get(ParamName::InputNorm),
            qkv: Qkv::Grouped { weight: get(ParamName::Qkv), bias: layout.view(ParamName::QkvBias, flat) },
            q_norm: layout.view(ParamName::QNorm, flat),
            k_norm: layout.view(ParamName::KNorm, flat),
            o: get(ParamName::O),
            post_norm: get(ParamName::PostNorm),
            gate_up: get(ParamName::GateUp),
            down: get(ParamName::Down),
        }
    }

    /// What rank `tp_rank` of `tp_size` computes with, as views of `self` (a whole block). `tp_size` must have passed
    /// [`ModelSpec::validate_tp`].
    pub fn tp_slice(&self, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Self {
        Self {
            input_norm: self.input_norm.shallow_clone(),
            qkv: self.qkv.tp_slice(spec, tp_rank, tp_size),
            q_norm: self.q_norm.as_ref().map(Tensor::shallow_clone),
            k_norm: self.k_norm.as_ref().map(Tensor::shallow_clone),
            o: part(&self.o, 1, tp_rank, tp_size),
            post_norm: self.post_norm.shallow_clone(),
            gate_up: part(&self.gate_up, 0, tp_rank, tp_size),
            down: part(&self.down, 1, tp_rank, tp_size),
        }
    }
}

impl Qkv {
    fn tp_slice(&self, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Self {
        let Qkv::Grouped { weight, bias } = self else { panic!("a slice cannot be sliced again") };
        if tp_size <= spec.num_kv_heads {
            let bias = bias.as_ref().map(|bias| part(bias, 0, tp_rank, tp_size));
            return Qkv::Grouped { weight: part(weight, 0, tp_rank, tp_size), bias };
        }
        let ranks_per_group = tp_size / spec.num_kv_heads;
        let (group, member) = (tp_rank / ranks_per_group, tp_rank % ranks_per_group);
        let (query_heads, _) = spec.tp_heads(tp_size);
        let group_start = group * (spec.heads_per_group() + 2);
        let rows = |first_head: usize, heads: usize| {
            let (start, len) = ((first_head * spec.head_dim) as i64, (heads * spec.head_dim) as i64);
            (weight.narrow(0, start, len), bias.as_ref().map(|bias| bias.narrow(0, start, len)))
        };
        Qkv::Split {
            q: rows(group_start + member * query_heads, query_heads),
            kv: rows(group_start + spec.heads_per_group(), 2),
        }
    }
}

/// The embedding's parameters.
#[derive(Debug)]
pub struct EmbeddingParams {
    /// One row per token id.
    pub table: Tensor, // [V, D]
}

impl EmbeddingParams {
    /// Views of the embedding's flat tensor [layout.len].
    ///
    /// # Panics
    /// If `layout` is not the embedding's.
    pub fn view(layout: &UnitLayout, flat: &Tensor) -> Self {
        Self { table: required(layout, ParamName::Embedding, flat) }
    }
}

/// The head's parameters.
#[derive(Debug)]
pub struct HeadParams {
    /// Norm before the head.
    pub final_norm: Tensor, // [D]
    /// One row per token id; `None` when the embedding table serves as the head.
    pub lm_head: Option<Tensor>, // [V, D]
}

impl HeadParams {
    /// Views of the head's flat tensor [layout.len].
    ///
    /// # Panics
    /// If `layout` is not the head's.
    pub fn view(layout: &UnitLayout, flat: &Tensor) -> Self {
        Self { final_norm: required(layout, ParamName::FinalNorm, flat), lm_head: layout.view(ParamName::LmHead, flat) }
    }

    /// The table that makes logits [V, D]: its own, or the embedding's when tied. A rank's share is
    /// `narrow(0, ..)` of it by [`ModelSpec::vocab_range`].
    pub fn output_table<'a>(&'a self, embedding: &'a EmbeddingParams) -> &'a Tensor {
        self.lm_head.as_ref().unwrap_or(&embedding.table)
    }
}

fn required(layout: &UnitLayout, name: ParamName, flat: &Tensor) -> Tensor {
    layout.view(name, flat).unwrap_or_else(|| panic!("the {} has no {name:?}", layout.unit))
}

/// The `tp_rank`-th of `tp_size` equal ranges of a dimension.
fn part(whole: &Tensor, dim: i64, tp_rank: usize, tp_size: usize) -> Tensor {
    let len = whole.size()[dim as usize] / tp_size as i64;
    whole.narrow(dim, tp_rank as i64 * len, len)
}
