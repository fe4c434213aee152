//! Positions of adapters in their unit's flat tensor, and the expansion of B to the rows of the fused matrices.

use tch::Tensor;

use super::spec::{AdaptedProjection, Fused, LoraSpec};
use crate::error::Result;
use crate::model::params::UnitLayout;
use crate::model::spec::{Matrix, ModelSpec, Unit};
use crate::ops::dropout::Dropout;
use crate::torch::scalar;

/// The adapter of one matrix [N, K] as used in computation: y += (x A^T) B^T. Or its gradients: those of A and of the expanded B, before
/// [`BlockLora::add_to`].
#[derive(Debug)]
pub struct Lora {
    /// Stacked A. [k, K], or [E, k, K] of experts; a column range in a row-parallel slice
    pub a: Tensor,
    /// Expanded B times alpha / r. [N, k], or [E, N, k] of experts
    pub b: Tensor,
    /// Dropout of the adapter's input, in training only.
    pub(super) dropout: Option<Dropout>,
    /// If several named adapters are stacked: the number of the adapter that each row of A belongs to. [k] i32
    pub owners: Option<Tensor>,
    /// In a step with stacked adapters: true for each element of x A^T that belongs to another adapter than its row's. [T, k] bool
    pub(super) others: Option<Tensor>,
}

/// The adapters of a block, each with its matrix. Tensor-parallel slices have some of the rows (B of Qkv and GateUp) or columns (A of O and Down).
#[derive(Debug, Default)]
pub struct BlockLora(pub(super) Vec<(Matrix, Lora)>);

impl BlockLora {
    /// The adapters in the form used in computation, from a block's flat tensor [layout.len]: A as views, B expanded and scaled.
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

    /// Gradients for one backward: A as views of the gradients' flat tensor, and zeros for the expanded B.
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

    /// Adds the gradients of the expanded B, which `own` returns for each matrix, to the gradients of B in the flat tensor.
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

    /// Copies these adapters' B into `kept`, whose addresses a CUDA graph has captured; allocates it if empty. Returns adapters that use this memory.
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

    /// All adapters, each with its matrix.
    pub(in crate::model) fn into_pairs(self) -> Vec<(Matrix, Lora)> {
        self.0
    }

    /// All adapters, each with its matrix.
    pub fn iter(&self) -> impl Iterator<Item = &(Matrix, Lora)> {
        self.0.iter()
    }

    /// Replaces each adapter by `f(matrix, adapter)`.
    pub(in crate::model) fn map(&self, f: impl Fn(Matrix, &Lora) -> Result<Lora>) -> Result<Self> {
        Ok(Self(self.iter().map(|(matrix, lora)| Ok((*matrix, f(*matrix, lora)?))).collect::<Result<_>>()?))
    }
}

impl Lora {
    /// An adapter that applies to all rows of a batch.
    pub(super) fn new(a: Tensor, b: Tensor) -> Self {
        Self { a, b, dropout: None, owners: None, others: None }
    }

    /// A copy with another A and B.
    pub(in crate::model) fn with(&self, a: Tensor, b: Tensor) -> Self {
        let same = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self { a, b, dropout: self.dropout, owners: same(&self.owners), others: same(&self.others) }
    }

    pub(in crate::model) fn shallow_clone(&self) -> Self {
        self.with(self.a.shallow_clone(), self.b.shallow_clone())
    }
}

impl Fused {
    /// Views of A and B in the flat tensor of their unit.
    pub fn views(&self, layout: &UnitLayout, flat: &Tensor) -> [Tensor; 2] {
        let view = |name| layout.view(name, flat).expect("the layout is that of these adapters");
        [view(self.a), view(self.b)]
    }

    /// The A of one projection: [r, K], or [E, r, K] for experts.
    pub fn a_of(&self, piece: &AdaptedProjection, a: &Tensor) -> Tensor {
        a.narrow(-2, piece.index * self.r, self.r)
    }

    /// The B of one projection: [groups, heads, inner, r], after the experts' dimension if there is one.
    pub fn b_of(&self, piece: &AdaptedProjection, b: &Tensor) -> Tensor {
        self.in_groups(b, self.adapted_heads).narrow(-3, piece.adapted_first, piece.heads)
    }

    fn in_groups(&self, b: &Tensor, heads: i64) -> Tensor {
        let (size, rows) = (b.size(), [self.linear.groups as i64, heads, self.linear.inner as i64]);
        let (experts, columns) = (&size[..size.len() - 2], &size[size.len() - 1..]);
        b.view([experts, &rows, columns].concat().as_slice())
    }

    /// The rows and columns of the expanded B that belong to one projection: [groups, heads, inner, r], after the experts' dimension if there is one.
    fn expanded_of(&self, piece: &AdaptedProjection, expanded: &Tensor) -> Tensor {
        let whole = self.in_groups(expanded, self.linear.heads() as i64);
        whole.narrow(-3, piece.first, piece.heads).narrow(-1, piece.index * self.r, self.r)
    }

    /// Expands the B of all adapted projections to all rows of the matrix, and scales it: [N, n r], with the experts' dimension in front if there is
    /// one.
    fn expand(&self, b: &Tensor) -> Result<Tensor> {
        let expanded = Tensor::f_zeros(self.expanded_shape(), (b.kind(), b.device()))?;
        for piece in &self.pieces {
            self.expanded_of(piece, &expanded).f_copy_(&self.b_of(piece, b).f_mul(&scalar(self.scale))?)?;
        }
        Ok(expanded)
    }

    /// Adds the gradient of the expanded B to the gradient of B.
    fn fold(&self, expanded: &Tensor, b: &Tensor) -> Result<()> {
        for piece in &self.pieces {
            let _ = self.b_of(piece, b).f_add_(&self.expanded_of(piece, expanded).f_mul(&scalar(self.scale))?)?;
        }
        Ok(())
    }
}

/// The layer that a block's layout belongs to.
fn layer_of(layout: &UnitLayout) -> usize {
    let Unit::Block(layer) = layout.unit else { panic!("the {} has no LoRA adapters", layout.unit) };
    layer
}
