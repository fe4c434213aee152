//! A product of a block: the weight of its matrix with bias and adapter, and the share that a rank has of them.

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
    /// The dimension of the rows, of a matrix, its bias or those of all experts.
    fn row_dim(&self) -> i64 {
        i64::from(self.experts.is_some())
    }

    /// Whole groups of rows for each rank; or, with more ranks than groups, some heads of the first projection, and those of the others
    /// that its group has.
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

/// A matrix with its bias and its adapter; or the gradients of all of them, without those of frozen ones.
#[derive(Debug, Default)]
pub struct Linear {
    /// One piece, but for a rank that shares a key/value head: its query heads, then that head's key and value; and for a rank's share of
    /// a gated delta net: queries, keys, values.
    pub pieces: Vec<Piece>,
    /// Beside the matrix.
    pub lora: Option<Lora>,
    /// The format that its products are made in.
    pub format: &'static dyn Format,
    /// In a `Linear` that holds gradients: the next product overwrites the weight's gradient. False: it is added.
    pub begins: bool,
}

impl Linear {
    /// Views of a block's flat tensor.
    pub(super) fn view(spec: &LinearSpec, layout: &UnitLayout, flat: &Tensor) -> Self {
        let bias = spec.bias.and_then(|bias| layout.view(bias, flat));
        let weight = required(layout, spec.matrix.weight(), flat);
        Self { pieces: vec![Piece::plain(weight, bias)], ..Self::default() }
    }

    /// All rows of a matrix in one piece.
    ///
    /// # Panics
    /// If it is in two.
    pub fn piece(&self) -> &Piece {
        let [piece] = &self.pieces[..] else {
            panic!("this matrix is stored in {} pieces, not in one", self.pieces.len())
        };
        piece
    }

    /// The weight of a matrix in one piece.
    ///
    /// # Panics
    /// If it is in two.
    pub fn weight(&self) -> &Tensor {
        &self.piece().weight
    }

    /// Type of the weights.
    pub fn kind(&self) -> Kind {
        self.pieces[0].weight.kind()
    }

    /// A rank's slice, as views of `self`, a whole matrix.
    pub(super) fn tp_slice(&self, spec: &LinearSpec, tp_rank: usize, tp_size: usize) -> Result<Self> {
        let Piece { weight, bias, .. } = self.piece();
        let pieces = match spec.split {
            TpSplit::Columns => {
                let weight = part(weight, spec.row_dim() + 1, tp_rank, tp_size);
                let is_first = tp_rank == 0; // the ranks' products are added up
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

    /// With every tensor but the adapter's replaced by `f` of it, and nothing rounded.
    pub(super) fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let piece =
            |Piece { weight, bias, .. }: &Piece| Ok(Piece::plain(f(weight)?, bias.as_ref().map(&mut *f).transpose()?));
        let pieces = self.pieces.iter().map(piece).collect::<Result<_>>()?;
        Ok(Self { pieces, lora: self.lora.as_ref().map(Lora::shallow_clone), ..Self::default() })
    }

    /// Whether the weight is one matrix, not those of experts.
    pub(super) fn is_one_matrix(&self) -> bool {
        self.weight().dim() == 2
    }

    /// Whether its rows are read as they are, not rounded alone.
    pub(super) fn reads_plain(&self) -> bool {
        !self.format.rounds() || self.lora.is_some()
    }

    /// x w^T + bias, with the adapter's part. [T, N]
    pub(super) fn forward(&self, x: &Rows /* [T, K] */) -> Result<Tensor> {
        self.adapt(x, self.product(x)?)
    }

    /// x w^T + bias. [T, N]
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

    /// residual + x w^T, where each rank of the tensor-parallel group has some columns of w, and of x. Without a residual the product
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

    /// In a `Linear` that holds gradients: that of the bias, where there is one that trains.
    pub(super) fn bias_mut(&mut self) -> Option<&mut Tensor> {
        self.pieces.first_mut().and_then(|piece| piece.bias.as_mut())
    }

    /// Whether the product is rounded, and its adapter's part added, before it is added to the residual stream.
    fn adds_rounded(&self) -> bool {
        self.format.is_exact() || self.format.rounds() && self.lora.is_some()
    }

    /// y + (x A^T) B^T, in y's memory, where there is an adapter.
    fn adapt(&self, x: &Rows, y: Tensor) -> Result<Tensor> {
        match &self.lora {
            None => Ok(y),
            Some(lora) => self.format.adapt(x, lora, y),
        }
    }

    /// dx; the gradients of the weight or of A and B are added to `grads`.
    pub(super) fn backward(
        &self,
        dy: &Tensor, // [T, N]
        x: &Tensor,  // [T, K]
        grads: &mut Linear,
    ) -> Result<Tensor> {
        self.backward_onto(None, dy, x, grads)
    }

    /// [`Linear::backward`], whose dx is added to a sum that is there.
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

    /// In a `Linear` that holds gradients: the weight's memory, and whether the next product overwrites or adds to it; `None` where the weight is frozen.
    fn sum(&mut self) -> Option<(&mut Tensor, Onto)> {
        let onto = if mem::take(&mut self.begins) { Onto::Nothing } else { Onto::Sum };
        self.pieces.first_mut().map(|piece| (&mut piece.weight, onto))
    }

    /// dy^T x, which goes to `grads` unless the weight is frozen.
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

    /// [`Linear::weight_gradient`] of a matrix that has gate and up.
    pub(super) fn gate_up_weight_gradient(&self, d: &GateUp, x: &Tensor, grads: &mut Linear) -> Result<()> {
        match grads.sum() {
            None => Ok(()),
            Some((dw, onto)) => self.format.gate_up_weight_gradient(d, x, dw, onto),
        }
    }

    /// dx = dy w.
    pub(super) fn backward_input(&self, dy: &Tensor /* [T, N] */) -> Result<Tensor> {
        self.format.backward_input(dy, self.piece())
    }
}

impl BlockLora {
    /// The adapters that rank `tp_rank` of `tp_size` computes with beside its slice of the block.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], where ranks share a key/value head: rows of B are then copied.
    pub fn tp_slice(&self, linears: &[LinearSpec], tp_rank: usize, tp_size: usize) -> Result<Self> {
        self.map(|matrix, lora| {
            let spec = linears.iter().find(|linear| linear.matrix == matrix).expect("a matrix of the block");
            lora.tp_slice(spec, tp_rank, tp_size)
        })
    }
}

impl Lora {
    /// A rank's slice of an adapter: B's rows as the matrix's, A's columns, or some experts' A and B.
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

/// Rows of queries, keys and values, of which the first two have `keys` each.
pub(super) fn sections(keys: usize, whole: &Tensor) -> [Tensor; 3] {
    let (keys, all) = (keys as i64, whole.size()[0]);
    [whole.narrow(0, 0, keys), whole.narrow(0, keys, keys), whole.narrow(0, 2 * keys, all - 2 * keys)]
}

/// The `tp_rank`-th of `tp_size` equal ranges of a dimension.
pub(super) fn part(whole: &Tensor, dim: i64, tp_rank: usize, tp_size: usize) -> Tensor {
    let len = whole.size()[dim as usize] / tp_size as i64;
    whole.narrow(dim, tp_rank as i64 * len, len)
}
