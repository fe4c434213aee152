//! A linear layer of a block: weight, bias and adapter, and the slice of them that a rank has.

use std::mem;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::format::{Format, Piece, Rows};
use crate::model::lora::{BlockLora, Lora};
use crate::model::params::{UnitLayout, required};
use crate::model::spec::{LinearSpec, TpSplit};
use crate::ops::linear::Onto;
use crate::ops::swiglu::GateUp;
use crate::ranks::{Collective, ReduceOp};

impl LinearSpec {
    /// The dimension that indexes rows, in a matrix, its bias, or the stacked ones of all experts.
    fn row_dim(&self) -> i64 {
        i64::from(self.experts.is_some())
    }

    /// A rank's rows: some whole groups or, with more ranks than groups, some heads of the first projection plus its group's heads of the other
    /// projections.
    fn own_rows(&self, whole: &Tensor, tp_rank: usize, tp_size: usize) -> Vec<Tensor> {
        if tp_size == 1 {
            return vec![whole.shallow_clone()];
        }
        if let TpSplit::RowSections { keys } = self.split {
            return sections(keys, whole).map(|section| part(&section, 0, tp_rank, tp_size)).into();
        }
        if tp_size <= self.groups {
            return vec![part(whole, self.row_dim(), tp_rank, tp_size)];
        }
        let ranks_per_group = tp_size / self.groups;
        let (group, member, shared) = (tp_rank / ranks_per_group, tp_rank % ranks_per_group, self.projections[0].1);
        let (first, own) = (group * self.heads(), shared / ranks_per_group);
        let rows = |head: usize, heads: usize| whole.narrow(0, (head * self.inner) as i64, (heads * self.inner) as i64);
        vec![rows(first + member * own, own), rows(first + shared, self.heads() - shared)]
    }
}

/// A matrix with its bias and its adapter, or the gradients of these, without those of frozen parameters.
#[derive(Debug, Default)]
pub struct Linear {
    /// One piece in most cases. A rank that shares a key/value head has its query heads, then the head's key, then its value. A rank's slice of a
    /// gated delta net has queries, keys and values.
    pub pieces: Vec<Piece>,
    /// The adapter (LoRA) that is added to the matrix.
    pub lora: Option<Lora>,
    /// The number format in which GEMMs with the matrix are computed.
    pub format: &'static dyn Format,
    /// For a `Linear` that holds gradients: whether the next GEMM overwrites the weight's gradient instead of adding to it.
    pub begins: bool,
}

impl Linear {
    /// Views of this matrix, bias and weight in a block's flat tensor.
    pub(super) fn view(spec: &LinearSpec, layout: &UnitLayout, flat: &Tensor) -> Self {
        let bias = spec.bias.and_then(|bias| layout.view(bias, flat));
        let weight = required(layout, spec.matrix.weight(), flat);
        Self { pieces: vec![Piece::plain(weight, bias)], ..Self::default() }
    }

    /// The only piece of the matrix.
    ///
    /// # Panics
    /// If the matrix has several pieces.
    pub fn piece(&self) -> &Piece {
        let [piece] = &self.pieces[..] else {
            panic!("this matrix is stored in {} pieces, not in one", self.pieces.len())
        };
        piece
    }

    /// The weight of the only piece.
    ///
    /// # Panics
    /// If the matrix has several pieces.
    pub fn weight(&self) -> &Tensor {
        &self.piece().weight
    }

    /// The type of the weights.
    pub fn kind(&self) -> Kind {
        self.pieces[0].weight.kind()
    }

    /// A tensor-parallel rank's slice, as views of `self`, a whole matrix.
    pub(super) fn tp_slice(&self, spec: &LinearSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let Piece { weight, bias, .. } = self.piece();
        let pieces = match spec.split {
            TpSplit::Columns => {
                let weight = part(weight, spec.row_dim() + 1, tp_rank, tp_size);
                let is_first = tp_rank == 0; // the ranks' outputs are summed
                vec![Piece::plain(weight, bias.as_ref().filter(|_| is_first).map(Tensor::shallow_clone))]
            }
            TpSplit::Experts => {
                let own = |whole: &Tensor| part(whole, 0, tp_rank, tp_size);
                vec![Piece::plain(own(weight), bias.as_ref().map(own))]
            }
            TpSplit::Rows | TpSplit::RowSections { .. } => {
                let own = |whole: &Tensor| spec.own_rows(whole, tp_rank, tp_size).into_iter();
                let mut biases = bias.as_ref().map(own);
                own(weight).map(|weight| Piece::plain(weight, biases.as_mut().and_then(Iterator::next))).collect()
            }
        };
        let lora = self.lora.as_ref().map(|lora| lora.tp_slice(spec, tp_rank, tp_size)).transpose()?;
        Ok(Self { pieces, lora, ..Self::default() })
    }

    /// Replaces every tensor except the adapter's by `f(tensor)`, and discards quantized copies.
    pub(super) fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let piece =
            |Piece { weight, bias, .. }: &Piece| Ok(Piece::plain(f(weight)?, bias.as_ref().map(&mut *f).transpose()?));
        let pieces = self.pieces.iter().map(piece).collect::<Result<_>>()?;
        Ok(Self { pieces, lora: self.lora.as_ref().map(Lora::shallow_clone), ..Self::default() })
    }

    /// Whether the weight is a stack of experts' matrices.
    pub(crate) fn is_of_experts(&self) -> bool {
        self.pieces[0].weight.dim() == 3
    }

    /// Whether the forward reads its input rows unquantized, perhaps in addition to their quantized copy.
    pub(super) fn reads_plain(&self) -> bool {
        !self.format.rounds() || self.lora.is_some()
    }

    /// Returns x w^T + bias, plus the adapter's part. [T, N]
    pub(super) fn forward(&self, x: &Rows /* [T, K] */) -> Result<Tensor> {
        self.adapt(x, self.product(x)?)
    }

    /// Returns x w^T + bias. [T, N]
    fn product(&self, x: &Rows /* [T, K] */) -> Result<Tensor> {
        match &self.pieces[..] {
            [piece] => self.format.forward(x, piece),
            pieces => {
                let x = self.format.rows(x)?;
                let parts: Vec<_> = pieces.iter().map(|piece| self.format.forward(&x, piece)).collect::<Result<_>>()?;
                Ok(Tensor::f_cat(&parts, 1)?)
            }
        }
    }

    /// Returns residual + x w^T, summed over the tensor-parallel ranks, each of which has some columns of w and x. Without a residual returns x w^T
    /// alone. [T, N]
    pub(super) fn forward_summed(
        &self,
        x: &Rows,                  // [T, K]
        residual: Option<&Tensor>, // [T, N]
        tp: Option<&dyn Collective>,
    ) -> Result<Tensor> {
        match (tp.filter(|tp| tp.size() > 1), residual) {
            (None, Some(residual)) if self.adds_rounded() || self.piece().bias.is_some() => {
                Ok(residual.f_add(&self.forward(x)?)?.f_to_kind(residual.kind())?)
            }
            (None, Some(residual)) => self.adapt(x, self.format.forward_onto(residual, x, self.piece())?),
            (None, None) => self.forward(x),
            (Some(tp), residual) => {
                let mut partial = self.forward(x)?;
                tp.all_reduce(&mut partial, ReduceOp::Sum)?;
                match residual {
                    Some(residual) => Ok(partial.f_add(residual)?),
                    None => Ok(partial),
                }
            }
        }
    }

    /// For a `Linear` that holds gradients: the bias's gradient, if there is a bias that trains.
    pub(super) fn bias_mut(&mut self) -> Option<&mut Tensor> {
        self.pieces.first_mut().and_then(|piece| piece.bias.as_mut())
    }

    /// Whether the GEMM's output is rounded, and the adapter's part added, before the sum with the residual stream.
    fn adds_rounded(&self) -> bool {
        self.format.is_exact() || self.format.rounds() && self.lora.is_some()
    }

    /// Adds the adapter's part to y in place, if there is an adapter: y + (x A^T) B^T.
    fn adapt(&self, x: &Rows, y: Tensor) -> Result<Tensor> {
        match &self.lora {
            None => Ok(y),
            Some(lora) => self.format.adapt(x, lora, y),
        }
    }

    /// Returns dx, and adds the gradients of the weight, or of A and B, to `grads`.
    pub(super) fn backward(
        &self,
        dy: &Tensor, // [T, N]
        x: &Tensor,  // [T, K]
        grads: &mut Linear,
    ) -> Result<Tensor> {
        self.backward_onto(None, dy, x, grads)
    }

    /// Computes [`Linear::backward`] and adds dx to `sum`, if there is one.
    pub(super) fn backward_onto(
        &self,
        sum: Option<Tensor>, // [T, K]
        dy: &Tensor,         // [T, N]
        x: &Tensor,          // [T, K]
        grads: &mut Linear,
    ) -> Result<Tensor> {
        let mut dx = match sum {
            None => self.backward_input(dy)?,
            Some(mut sum) => {
                self.format.accumulate_input(dy, self.piece(), &mut sum)?;
                sum
            }
        };
        self.weight_gradient(dy, x, grads)?;
        if let (Some(lora), Some(gradient)) = (&self.lora, &mut grads.lora) {
            lora.backward(dy, x, &mut dx, gradient)?;
        }
        Ok(dx) // [T, K]
    }

    /// For a `Linear` that holds gradients: the weight's gradient, and whether the next GEMM overwrites it or adds to it. `None` if the weight is
    /// frozen.
    pub(super) fn sum(&mut self) -> Option<(&mut Tensor, Onto)> {
        let onto = if mem::take(&mut self.begins) { Onto::Nothing } else { Onto::Sum };
        self.pieces.first_mut().map(|piece| (&mut piece.weight, onto))
    }

    /// Computes the weight's gradient dy^T x in `grads`, unless the weight is frozen.
    pub(super) fn weight_gradient(
        &self,
        dy: &Tensor, // [T, N]
        x: &Tensor,  // [T, K]
        grads: &mut Linear,
    ) -> Result<()> {
        match grads.sum() {
            None => Ok(()),
            Some((dw, onto)) => self.format.weight_gradient(dy, x, dw, onto),
        }
    }

    /// Computes the weight's gradient ([`Linear::weight_gradient`]) of the fused gate and up matrix.
    pub(super) fn gate_up_weight_gradient(&self, d: &GateUp, x: &Tensor, grads: &mut Linear) -> Result<()> {
        match grads.sum() {
            None => Ok(()),
            Some((dw, onto)) => self.format.gate_up_weight_gradient(d, x, dw, onto),
        }
    }

    /// Returns dx = dy w.
    pub(super) fn backward_input(&self, dy: &Tensor /* [T, N] */) -> Result<Tensor> {
        self.format.backward_input(dy, self.piece())
    }
}

impl BlockLora {
    /// The adapters for the slice of the block on rank `tp_rank` of `tp_size`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], if ranks share a key/value head: rows of B are then copied.
    pub fn tp_slice(&self, linears: &[LinearSpec], tp_rank: usize, tp_size: usize) -> Result<Self> {
        self.map(|matrix, lora| {
            let spec = linears.iter().find(|linear| linear.matrix == matrix).expect("a matrix of the block");
            lora.tp_slice(spec, tp_rank, tp_size)
        })
    }
}

impl Lora {
    /// A rank's slice of an adapter: the rows of B that match the matrix's rows, the matching columns of A, or the A and B of some experts.
    fn tp_slice(&self, spec: &LinearSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let (a, b) = (self.a.shallow_clone(), self.b.shallow_clone());
        Ok(match spec.split {
            TpSplit::Columns => self.with(part(&a, spec.row_dim() + 1, tp_rank, tp_size), b),
            TpSplit::Experts => self.with(part(&a, 0, tp_rank, tp_size), part(&b, 0, tp_rank, tp_size)),
            TpSplit::Rows | TpSplit::RowSections { .. } => match &spec.own_rows(&b, tp_rank, tp_size)[..] {
                [rows] => self.with(a, rows.shallow_clone()),
                pieces => self.with(a, Tensor::f_cat(pieces, 0)?),
            },
        })
    }
}

/// Splits rows into queries, keys and values. Queries and keys have `keys` rows each.
pub(super) fn sections(keys: usize, whole: &Tensor) -> [Tensor; 3] {
    let (keys, all) = (keys as i64, whole.size()[0]);
    [whole.narrow(0, 0, keys), whole.narrow(0, keys, keys), whole.narrow(0, 2 * keys, all - 2 * keys)]
}

/// The `tp_rank`-th of `tp_size` equal ranges of a dimension.
pub(super) fn part(whole: &Tensor, dim: i64, tp_rank: usize, tp_size: usize) -> Tensor {
    let len = whole.size()[dim as usize] / tp_size as i64;
    whole.narrow(dim, tp_rank as i64 * len, len)
}
