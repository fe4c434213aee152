//! Where adapters lie in their unit's flat tensor, and their expansion to the rows of the fused matrices.

use tch::Tensor;

use super::spec::{AdaptedProjection, Fused, LoraSpec};
use crate::error::Result;
use crate::model::params::UnitLayout;
use crate::model::spec::{Matrix, ModelSpec, Unit};
use crate::ops::dropout::Dropout;
use crate::torch::scalar;

/// The adapter of one matrix [N, K] as it is computed with: y += (x A^T) B^T. Of gradients: those of A and of the expanded
/// B, before [`BlockLora::add_to`].
#[derive(Debug)]
pub struct Lora {
    /// Stacked A. [k, K], or [E, k, K] of experts; a column range in a row-parallel slice
    pub a: Tensor,
    /// Expanded B times alpha / r. [N, k], or [E, N, k] of experts
    pub b: Tensor,
    /// In training.
    pub(super) dropout: Option<Dropout>,
    /// Where adapters of several names are stacked: the number of the one that each row of A belongs to. [k] i32
    pub owners: Option<Tensor>,
    /// In a step over stacked adapters: whether an element of the inner product is another adapter's than its row's. [T, k] bool
    pub(super) others: Option<Tensor>,
}

/// The adapters of a block, each with the matrix that it is beside. Slices have their share of rows (B of Qkv and GateUp) or
/// columns (A of O and Down).
#[derive(Debug, Default)]
pub struct BlockLora(pub(super) Vec<(Matrix, Lora)>);

impl BlockLora {
    /// The adapters that a block computes with, from its flat tensor [layout.len]: A as views, B expanded and scaled.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn expand(
        spec: &ModelSpec,
        lora: &LoraSpec,
        layout: &UnitLayout,
        flat: &Tensor,
        dropout: Option<Dropout>,
    ) -> Result<Self> {
        let expanded = |fused: Fused| {
            let [a, b] = fused.views(layout, flat);
            let dropout = dropout.map(|dropout| dropout.fold(fused.linear.matrix as u64));
            Ok((fused.linear.matrix, Lora { dropout, ..Lora::new(a, fused.expand(&b)?) }))
        };
        Ok(Self(lora.fused(spec, layer_of(layout)).into_iter().map(expanded).collect::<Result<_>>()?))
    }

    /// For one backward's gradients: A as views of the gradients' flat tensor, zeros for the expanded B.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gradients(spec: &ModelSpec, lora: &LoraSpec, layout: &UnitLayout, flat: &Tensor) -> Result<Self> {
        let zeros = |fused: Fused| {
            let [a, b] = fused.views(layout, flat);
            let b = Tensor::f_zeros(fused.expanded_shape(), (b.kind(), b.device()))?;
            Ok((fused.linear.matrix, Lora::new(a, b)))
        };
        Ok(Self(lora.fused(spec, layer_of(layout)).into_iter().map(zeros).collect::<Result<_>>()?))
    }

    /// Adds the gradients of a block's expanded B, those that `own` has of a matrix, to those of B in the flat tensor.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn add_to<'a>(
        own: impl Fn(Matrix) -> Option<&'a Lora>,
        spec: &ModelSpec,
        lora: &LoraSpec,
        layout: &UnitLayout,
        flat: &Tensor,
    ) -> Result<()> {
        for fused in lora.fused(spec, layer_of(layout)) {
            if let Some(own) = own(fused.linear.matrix) {
                let [_, b] = fused.views(layout, flat);
                fused.fold(&own.b, &b)?;
            }
        }
        Ok(())
    }

    /// These adapters with B in `kept`'s memory, which is allocated where it is empty: a CUDA graph holds its address.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn kept_in(&self, kept: &mut BlockLora) -> Result<Self> {
        if kept.0.is_empty() {
            *kept = self.map(|_, lora| Ok(lora.with(lora.a.shallow_clone(), lora.b.f_empty_like()?)))?;
        }
        self.map(|matrix, lora| {
            let (_, Lora { b, .. }) =
                kept.0.iter().find(|(own, _)| *own == matrix).expect("adapters beside the same matrices");
            b.shallow_clone().f_copy_(&lora.b)?;
            Ok(lora.with(lora.a.shallow_clone(), b.shallow_clone()))
        })
    }

    /// All of them, each with its matrix.
    pub(in crate::model) fn into_pairs(self) -> Vec<(Matrix, Lora)> {
        self.0
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &(Matrix, Lora)> {
        self.0.iter()
    }

    /// The adapters with each replaced by `f` of it.
    pub(in crate::model) fn map(&self, f: impl Fn(Matrix, &Lora) -> Result<Lora>) -> Result<Self> {
        Ok(Self(self.iter().map(|(matrix, lora)| Ok((*matrix, f(*matrix, lora)?))).collect::<Result<_>>()?))
    }
}

impl Lora {
    /// One adapter for all rows of a batch.
    pub(super) fn new(a: Tensor, b: Tensor) -> Self {
        Self { a, b, dropout: None, owners: None, others: None }
    }

    /// With another A or B.
    pub(in crate::model) fn with(&self, a: Tensor, b: Tensor) -> Self {
        let same = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self { a, b, dropout: self.dropout, owners: same(&self.owners), others: same(&self.others) }
    }

    pub(in crate::model) fn shallow_clone(&self) -> Self {
        self.with(self.a.shallow_clone(), self.b.shallow_clone())
    }
}

impl Fused {
    /// A and B in a flat tensor of their unit.
    pub fn views(&self, layout: &UnitLayout, flat: &Tensor) -> [Tensor; 2] {
        let view = |name| layout.view(name, flat).expect("the layout is that of these adapters");
        [view(self.a), view(self.b)]
    }

    /// A projection's A [r, K], or [E, r, K] of experts.
    pub fn a_of(&self, piece: &AdaptedProjection, a: &Tensor) -> Tensor {
        a.narrow(-2, piece.index * self.r, self.r)
    }

    /// A projection's B [groups, heads, inner, r], after the experts' dimension if there is one.
    pub fn b_of(&self, piece: &AdaptedProjection, b: &Tensor) -> Tensor {
        self.in_groups(b, self.adapted_heads).narrow(-3, piece.adapted_first, piece.heads)
    }

    fn in_groups(&self, b: &Tensor, heads: i64) -> Tensor {
        let (size, rows) = (b.size(), [self.linear.groups as i64, heads, self.linear.inner as i64]);
        let (experts, columns) = (&size[..size.len() - 2], &size[size.len() - 1..]);
        b.view([experts, &rows, columns].concat().as_slice())
    }

    /// A projection's rows and columns of the expanded B [groups, heads, inner, r], after the experts' dimension if there is one.
    fn expanded_of(&self, piece: &AdaptedProjection, expanded: &Tensor) -> Tensor {
        let whole = self.in_groups(expanded, self.linear.heads() as i64);
        whole.narrow(-3, piece.first, piece.heads).narrow(-1, piece.index * self.r, self.r)
    }

    /// The B of all adapted projections, scaled, on all rows of the matrix [N, n r], or of each expert's.
    fn expand(&self, b: &Tensor) -> Result<Tensor> {
        let expanded = Tensor::f_zeros(self.expanded_shape(), (b.kind(), b.device()))?;
        for piece in &self.pieces {
            self.expanded_of(piece, &expanded).f_copy_(&self.b_of(piece, b).f_mul(&scalar(self.scale))?)?;
        }
        Ok(expanded)
    }

    /// Adds the gradient of the expanded B to that of B.
    fn fold(&self, expanded: &Tensor, b: &Tensor) -> Result<()> {
        for piece in &self.pieces {
            let _ = self.b_of(piece, b).f_add_(&self.expanded_of(piece, expanded).f_mul(&scalar(self.scale))?)?;
        }
        Ok(())
    }
}

/// The layer of a block's layout.
fn layer_of(layout: &UnitLayout) -> usize {
    let Unit::Block(layer) = layout.unit else { panic!("the {} has no LoRA adapters", layout.unit) };
    layer
}
