//! Tensors over a unit's flat storage, and their tensor-parallel slices. Nothing here copies: writing to a view, or to a
//! slice of it, writes to the flat tensor. The same structs serve weights and gradients.

use tch::Tensor;

use super::lora::{BlockLora, Lora, Matrix};
use super::params::{ParamName, UnitLayout};
use super::spec::ModelSpec;
use crate::error::{Error, Result};

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
    /// Adapters beside the matrices.
    pub lora: BlockLora,
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
            lora: BlockLora::default(),
        }
    }

    /// What rank `tp_rank` of `tp_size` computes with, as views of `self` (a whole block). `tp_size` must have passed
    /// [`ModelSpec::validate_tp`].
    ///
    /// # Errors
    /// As [`BlockLora::tp_slice`].
    pub fn tp_slice(&self, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        Ok(Self {
            input_norm: self.input_norm.shallow_clone(),
            qkv: self.qkv.tp_slice(spec, tp_rank, tp_size),
            q_norm: self.q_norm.as_ref().map(Tensor::shallow_clone),
            k_norm: self.k_norm.as_ref().map(Tensor::shallow_clone),
            o: part(&self.o, 1, tp_rank, tp_size),
            post_norm: self.post_norm.shallow_clone(),
            gate_up: part(&self.gate_up, 0, tp_rank, tp_size),
            down: part(&self.down, 1, tp_rank, tp_size),
            lora: self.lora.tp_slice(spec, tp_rank, tp_size)?,
        })
    }

    /// The same parameters with every tensor but the adapters' replaced by `f` of it, in a fixed order.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_norm: f(&self.input_norm)?,
            qkv: match &self.qkv {
                Qkv::Grouped { weight, bias } => {
                    Qkv::Grouped { weight: f(weight)?, bias: bias.as_ref().map(&mut *f).transpose()? }
                }
                Qkv::Split { q, kv } => {
                    let mut pair = |(weight, bias): &(Tensor, Option<Tensor>)| {
                        Ok::<_, Error>((f(weight)?, bias.as_ref().map(&mut *f).transpose()?))
                    };
                    Qkv::Split { q: pair(q)?, kv: pair(kv)? }
                }
            },
            q_norm: self.q_norm.as_ref().map(&mut *f).transpose()?,
            k_norm: self.k_norm.as_ref().map(&mut *f).transpose()?,
            o: f(&self.o)?,
            post_norm: f(&self.post_norm)?,
            gate_up: f(&self.gate_up)?,
            down: f(&self.down)?,
            lora: self.lora.map(|_, lora| Ok(lora.shallow_clone()))?,
        })
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

impl BlockLora {
    /// What rank `tp_rank` of `tp_size` computes with beside its slice of the block.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], where ranks share a key/value head: rows of B are then copied.
    pub fn tp_slice(&self, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        self.map(|matrix, lora| lora.tp_slice(matrix, spec, tp_rank, tp_size))
    }
}

impl Lora {
    /// What a rank has of an adapter: B's rows as the matrix's, or A's columns.
    fn tp_slice(&self, matrix: Matrix, spec: &ModelSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let (a, b) = (&self.a, &self.b);
        Ok(match matrix {
            Matrix::Qkv => {
                let rows = Qkv::Grouped { weight: b.shallow_clone(), bias: None }.tp_slice(spec, tp_rank, tp_size);
                let b = match rows {
                    Qkv::Grouped { weight, .. } => weight,
                    Qkv::Split { q, kv } => Tensor::f_cat(&[q.0, kv.0], 0)?,
                };
                self.with(a.shallow_clone(), b)
            }
            Matrix::GateUp => self.with(a.shallow_clone(), part(b, 0, tp_rank, tp_size)),
            Matrix::O | Matrix::Down => self.with(part(a, 1, tp_rank, tp_size), b.shallow_clone()),
        })
    }

    fn shallow_clone(&self) -> Self {
        self.with(self.a.shallow_clone(), self.b.shallow_clone())
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
}

fn required(layout: &UnitLayout, name: ParamName, flat: &Tensor) -> Tensor {
    layout.view(name, flat).unwrap_or_else(|| panic!("the {} has no {name:?}", layout.unit))
}

/// The `tp_rank`-th of `tp_size` equal ranges of a dimension.
fn part(whole: &Tensor, dim: i64, tp_rank: usize, tp_size: usize) -> Tensor {
    let len = whole.size()[dim as usize] / tp_size as i64;
    whole.narrow(dim, tp_rank as i64 * len, len)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::{Device, Kind};

    use super::*;
    use crate::model::{ParamTable, Unit};

    fn spec(num_heads: usize, num_kv_heads: usize) -> Arc<ModelSpec> {
        Arc::new(ModelSpec { num_heads, num_kv_heads, ..ModelSpec::preset("micro").unwrap() })
    }

    /// Weight and bias rows [query heads, 2 + ..] of a slice: all q, then k and v of each group.
    fn rows(slice: &Qkv, spec: &ModelSpec, kv_heads: i64) -> [Tensor; 3] {
        let hd = spec.head_dim as i64;
        let joined = |weight: &Tensor, bias: &Option<Tensor>| {
            Tensor::cat(&[weight, &bias.as_ref().unwrap().unsqueeze(1)], 1).view([-1, hd, weight.size()[1] + 1])
        };
        match slice {
            Qkv::Grouped { weight, bias } => {
                let all = joined(weight, bias);
                let groups = all.view([kv_heads, -1, hd, all.size()[2]]);
                let heads = groups.size()[1] - 2;
                let q = groups.narrow(1, 0, heads).reshape([-1, hd, all.size()[2]]);
                [q, groups.select(1, heads), groups.select(1, heads + 1)]
            }
            Qkv::Split { q, kv } => {
                let both = joined(&kv.0, &kv.1);
                [joined(&q.0, &q.1), both.narrow(0, 0, 1), both.narrow(0, 1, 1)]
            }
        }
    }

    #[test]
    fn slices_of_all_ranks_make_the_whole_without_copies() {
        for (heads, kv_heads, sizes) in [(8, 4, vec![1, 2, 4, 8]), (12, 3, vec![1, 3, 6, 12]), (4, 1, vec![1, 2, 4])] {
            let spec = spec(heads, kv_heads);
            let table = ParamTable::new(spec.clone(), 1);
            let layout = table.unit(Unit::Block(1));
            let flat = Tensor::arange(layout.len as i64, (Kind::Double, Device::Cpu));
            let whole = BlockParams::view(layout, &flat);
            let [q, k, v] = rows(&whole.qkv, &spec, kv_heads as i64);
            for tp_size in sizes {
                spec.validate_tp(tp_size).unwrap();
                let (_, local) = spec.tp_heads(tp_size);
                let slices: Vec<_> = (0..tp_size).map(|rank| whole.tp_slice(&spec, rank, tp_size).unwrap()).collect();
                let parts: Vec<_> = slices.iter().map(|slice| rows(&slice.qkv, &spec, local as i64)).collect();
                let gather = |i: usize| Tensor::cat(&parts.iter().map(|part| &part[i]).collect::<Vec<_>>(), 0);
                let repeat = (tp_size / kv_heads).max(1) as i64;
                assert!(gather(0).equal(&q));
                assert!(gather(1).equal(&k.repeat_interleave_self_int(repeat, 0, None)));
                assert!(gather(2).equal(&v.repeat_interleave_self_int(repeat, 0, None)));
                let join =
                    |of: fn(&BlockParams) -> &Tensor, dim| Tensor::cat(&slices.iter().map(of).collect::<Vec<_>>(), dim);
                assert!(join(|slice| &slice.o, 1).equal(&whole.o));
                assert!(join(|slice| &slice.down, 1).equal(&whole.down));
                assert!(join(|slice| &slice.gate_up, 0).equal(&whole.gate_up));
                // A slice is a view: what is written through it is in the flat tensor.
                let last = &slices[tp_size - 1];
                let before = flat.sum(Kind::Double).double_value(&[]);
                let _ = last.o.shallow_clone().g_add_scalar_(1.0);
                let added = flat.sum(Kind::Double).double_value(&[]) - before;
                assert_eq!(added, last.o.numel() as f64);
            }
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_the_valid_ones() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        for valid in [1, 2, 4] {
            spec.validate_tp(valid).unwrap();
        }
        let error = spec.validate_tp(8).unwrap_err().to_string();
        assert!(error.starts_with("tensor_parallel_size = 8: expected one of 1, 2, 4 ("), "{error}");
        assert!(error.contains("28 query heads, 4 key/value heads"), "{error}");
        assert!(spec.validate_tp(0).is_err());
    }

    #[test]
    fn vocabulary_ranges_cover_every_row_once() {
        let spec = ModelSpec { vocab_size: 97, ..ModelSpec::preset("micro").unwrap() };
        for tp_size in 1..9 {
            let rows: Vec<usize> = (0..tp_size).flat_map(|rank| spec.vocab_range(rank, tp_size)).collect();
            assert_eq!(rows, (0..97).collect::<Vec<_>>());
        }
    }
}
