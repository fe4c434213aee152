//! Views of the embedding's and the head's flat tensors. Nothing is copied: writing to a view writes to the flat tensor. Weights and gradients use
//! the same structs.

use tch::Tensor;

use super::params::{UnitLayout, required};
use super::spec::ParamName;

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
    /// Weight of the norm before the head.
    pub final_norm: Tensor, // [D]
    /// One row per token id; `None` if the head is tied to the embedding table.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::{Device, Kind};

    use super::*;
    use crate::model::tests::with_heads;
    use crate::model::{BlockParams, Linear, Matrix, ModelSpec, ParamTable, Piece, Unit};

    fn spec(num_heads: usize, num_kv_heads: usize) -> Arc<ModelSpec> {
        Arc::new(with_heads(ModelSpec::preset("micro").unwrap(), num_heads, num_kv_heads))
    }

    /// Reorders the rows [query heads, 2 + ..] of a slice's weight and bias: all queries, then the key and value of each group.
    fn rows(slice: &Linear, spec: &ModelSpec, kv_heads: i64) -> [Tensor; 3] {
        let hd = spec.attention().head_dim as i64;
        let joined = |Piece { weight, bias, .. }: &Piece| {
            Tensor::cat(&[weight, &bias.as_ref().unwrap().unsqueeze(1)], 1).view([-1, hd, weight.size()[1] + 1])
        };
        match &slice.pieces[..] {
            [all] => {
                let all = joined(all);
                let groups = all.view([kv_heads, -1, hd, all.size()[2]]);
                let heads = groups.size()[1] - 2;
                let q = groups.narrow(1, 0, heads).reshape([-1, hd, all.size()[2]]);
                [q, groups.select(1, heads), groups.select(1, heads + 1)]
            }
            [q, kv] => {
                let both = joined(kv);
                [joined(q), both.narrow(0, 0, 1), both.narrow(0, 1, 1)]
            }
            _ => unreachable!(),
        }
    }

    #[test]
    fn views_of_all_ranks_cover_the_weights_without_copies() {
        for (heads, kv_heads, sizes) in [(8, 4, vec![1, 2, 4, 8]), (12, 3, vec![1, 3, 6, 12]), (4, 1, vec![1, 2, 4])] {
            let spec = spec(heads, kv_heads);
            let table = ParamTable::new(spec.clone(), 1);
            let layout = table.unit(Unit::Block(1));
            let flat = Tensor::arange(layout.len as i64, (Kind::Double, Device::Cpu));
            let whole = BlockParams::view(&spec, layout, &flat);
            let [q, k, v] = rows(whole.linear(Matrix::Qkv), &spec, kv_heads as i64);
            for tp_size in sizes {
                spec.validate_tp(tp_size).unwrap();
                let local = spec.attention().tp_slice(tp_size).num_kv_heads;
                let slices: Vec<_> = (0..tp_size).map(|rank| whole.tp_slice(rank, tp_size).unwrap()).collect();
                let parts: Vec<_> =
                    slices.iter().map(|slice| rows(slice.linear(Matrix::Qkv), &spec, local as i64)).collect();
                let gather = |i: usize| Tensor::cat(&parts.iter().map(|part| &part[i]).collect::<Vec<_>>(), 0);
                let repeat = (tp_size / kv_heads).max(1) as i64;
                assert!(gather(0).equal(&q));
                assert!(gather(1).equal(&k.repeat_interleave_self_int(repeat, 0, None)));
                assert!(gather(2).equal(&v.repeat_interleave_self_int(repeat, 0, None)));
                let join =
                    |of: fn(&BlockParams) -> &Tensor, dim| Tensor::cat(&slices.iter().map(of).collect::<Vec<_>>(), dim);
                assert!(join(|slice| slice.linear(Matrix::O).weight(), 1).equal(whole.linear(Matrix::O).weight()));
                assert!(
                    join(|slice| slice.linear(Matrix::Down).weight(), 1).equal(whole.linear(Matrix::Down).weight())
                );
                assert!(
                    join(|slice| slice.linear(Matrix::GateUp).weight(), 0).equal(whole.linear(Matrix::GateUp).weight())
                );
                // A slice is a view: writing to it changes the flat tensor.
                let last = &slices[tp_size - 1];
                let before = flat.sum(Kind::Double).double_value(&[]);
                let _ = last.linear(Matrix::O).weight().shallow_clone().g_add_scalar_(1.0);
                let added = flat.sum(Kind::Double).double_value(&[]) - before;
                assert_eq!(added, last.linear(Matrix::O).weight().numel() as f64);
            }
        }
    }

    #[test]
    fn invalid_tensor_parallel_sizes_are_refused_with_the_valid_ones() {
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
    fn vocabulary_shards_cover_every_row_once() {
        let spec = ModelSpec { vocab_size: 97, ..ModelSpec::preset("micro").unwrap() };
        for tp_size in 1..9 {
            let rows: Vec<usize> = (0..tp_size).flat_map(|rank| spec.vocab_range(rank, tp_size)).collect();
            assert_eq!(rows, (0..97).collect::<Vec<_>>());
        }
    }
}
