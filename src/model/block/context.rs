//! What all blocks of a pass share, and how a sublayer enters and leaves the residual stream: by a norm, a factor and a sum, each with
//! its backward.

use tch::Tensor;

use super::linear::Linear;
use super::params::BlockParams;
use crate::error::Result;
use crate::model::distinct::ByRope;
use crate::model::format::Rows;
use crate::model::spec::{AttentionSpec, BlockSpec, Matrix, ModelSpec, NormNames, ParamName};
use crate::ops::exact;
use crate::ops::rope::RopeRows;
use crate::ops::router::Routing;
use crate::ranks::{Collective, ReduceOp};

/// Sees and decides which experts tokens go to, in all layers of a pass.
pub trait Routes: std::fmt::Debug {
    /// The experts that tokens go to [T, K], where the router by itself chooses `own`. A backward that computes again asks again.
    ///
    /// # Errors
    /// Returns the errors of the implementation.
    fn choose(&self, layer: usize, own: Tensor) -> Result<Tensor>;

    /// Tells of a forward's routing, and which experts the router by itself chose [T, K].
    ///
    /// # Errors
    /// Returns the errors of the implementation.
    fn observe(&self, layer: usize, routing: &Routing, own: &Tensor) -> Result<()>;

    /// The gradient of what the loss reads of a layer's probabilities [T, E], or what broadcasts to it.
    ///
    /// # Errors
    /// Returns the errors of the implementation.
    fn d_probs(&self, layer: usize) -> Result<Option<Tensor>>;
}

/// Inputs that all blocks share in one pass over a batch of tokens.
#[derive(Debug, Clone, Copy)]
pub struct BlockContext<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Rotations of the tokens' positions.
    pub ropes: &'a ByRope<RopeRows>,
    /// The ranks whose slices together make the block; forward only.
    pub tp: Option<&'a dyn Collective>,
    /// Who sees which experts tokens go to, and what the loss makes of it.
    pub routes: Option<&'a dyn Routes>,
    /// Whether the forward computes by [`crate::ops::exact`].
    pub(super) exact: bool,
    /// Factor of what a sublayer of the block at hand adds to the residual stream.
    residual_scale: f64,
}

impl<'a> BlockContext<'a> {
    /// Makes the context of whole blocks, or with `tp` of their slices.
    pub fn new(
        spec: &'a ModelSpec,
        ropes: &'a ByRope<RopeRows>,
        tp: Option<&'a dyn Collective>,
        routes: Option<&'a dyn Routes>,
    ) -> Self {
        Self { spec, ropes, tp, routes, exact: false, residual_scale: 1.0 }
    }

    /// With a forward of which a token has the same bits in the engine and in training. Rotations are those of
    /// [`Ropes::exact_rows`](crate::model::Ropes::exact_rows), and blocks are in the format [`Exact`](crate::model::Exact).
    pub fn exactly(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    pub(super) fn of_block(self, block: &BlockSpec) -> Self {
        Self { residual_scale: block.residual_scale, ..self }
    }

    /// Adds up what ranks have of all heads' queries and keys; a key that ranks share counts once.
    pub(super) fn sum_over_heads(
        &self,
        attention: AttentionSpec,
        squares: &mut Tensor, /* [T, 2] */
    ) -> Result<()> {
        let Some(tp) = self.tp else { return Ok(()) };
        if !attention.has_first_of_key(tp.rank(), tp.size()) {
            let _ = squares.narrow(1, 1, 1).f_zero_()?;
        }
        tp.all_reduce(squares, ReduceOp::Sum)
    }

    /// The input of a sublayer [T, D], of the weights' type, and the norm's rstd.
    pub(super) fn enter(&self, w: &BlockParams, norms: NormNames, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Some(weight) = w.norm(norms.pre) else { return Ok((x.f_to_kind(w.kind())?, None)) };
        let (normed, rstd) = self.spec.norm().forward(x, weight)?;
        Ok((if self.exact { exact::rms_norm(x, weight, self.spec.norm())? } else { normed }, Some(rstd)))
    }

    /// Normalised rows [T, D], without what a backward needs.
    pub(super) fn norm(&self, w: &BlockParams, name: ParamName, x: &Tensor) -> Result<Tensor> {
        let weight = w.norm(name).expect("a norm of the block");
        if self.exact {
            exact::rms_norm(x, weight, self.spec.norm())
        } else {
            Ok(self.spec.norm().forward(x, weight)?.0)
        }
    }

    /// The input of a sublayer for the products of some matrices, rounded by the norm where a format has a kernel for that. [T, D]
    pub(super) fn enter_rows(
        &self,
        w: &BlockParams,
        norms: NormNames,
        x: &Tensor,
        matrices: &[Matrix],
    ) -> Result<Rows> {
        let mut linears = matrices.iter().map(|&matrix| w.linear(matrix));
        let rounding = linears.clone().find(|linear| linear.format.rounds());
        match w.norm(norms.pre).zip(rounding) {
            Some((weight, linear)) => linear.format.norm(self.spec.norm(), x, weight, linears.any(Linear::reads_plain)),
            None if self.exact && w.norm(norms.pre).is_some() => Ok(self.norm(w, norms.pre, x)?.into()),
            None => Ok(self.enter(w, norms, x)?.0.into()),
        }
    }

    /// dx, from the gradient of what the sublayer reads and that of the residual stream behind it.
    pub(super) fn enter_backward(
        &self,
        w: &BlockParams,
        norms: NormNames,
        d_normed: &Tensor,           // [T, D]
        (x, dy): (&Tensor, &Tensor), // [T, D]
        rstd: Option<&Tensor>,       // [T, 1]
        grads: &BlockParams,
    ) -> Result<Tensor> {
        let (Some(weight), Some(rstd)) = (w.norm(norms.pre), rstd) else { return Ok(d_normed.f_add(dy)?) };
        self.spec.norm().backward(d_normed, x, weight, rstd, Some(dy), &mut grads.gradient_of(w, norms.pre)?)
    }

    /// residual + the sublayer's output [T, D], whose last product is that of `linear` and x; and the output before its norm.
    pub(super) fn leave(
        &self,
        w: &BlockParams,
        norms: NormNames,
        linear: &Linear,
        x: &Rows,          // [T, K]
        residual: &Tensor, // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        if w.norm(norms.post).is_none() && self.residual_scale == 1.0 {
            return Ok((linear.forward_summed(x, Some(residual), self.tp)?, None));
        }
        self.add(w, norms, linear.forward_summed(x, None, self.tp)?, residual)
    }

    /// residual + the sublayer's output [T, D], of which every rank has a part; and the output before its norm, of the weights' kind.
    pub(super) fn leave_with(
        &self,
        w: &BlockParams,
        norms: NormNames,
        mut output: Tensor, // [T, D]
        residual: &Tensor,  // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        if let Some(tp) = self.tp.filter(|tp| tp.size() > 1) {
            tp.all_reduce(&mut output, ReduceOp::Sum)?;
        }
        if w.norm(norms.post).is_some() {
            output = output.f_to_kind(w.kind())?;
        }
        self.add(w, norms, output, residual)
    }

    /// residual + scale * norm(output) [T, D], where there is a norm; and the output, which its backward reads.
    fn add(
        &self,
        w: &BlockParams,
        norms: NormNames,
        output: Tensor,    // [T, D]
        residual: &Tensor, // [T, D]
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (mut added, output) = match w.norm(norms.post) {
            Some(_) => (self.norm(w, norms.post, &output)?, Some(output)),
            None => (output, None),
        };
        if self.residual_scale != 1.0 {
            let _ = added.f_mul_scalar_(self.residual_scale)?;
        }
        Ok((residual.f_add(&added)?.f_to_kind(residual.kind())?, output))
    }

    /// The gradient of the output before its norm.
    pub(super) fn leave_backward(
        &self,
        w: &BlockParams,
        norms: NormNames,
        dy: &Tensor,             // [T, D]
        output: Option<&Tensor>, // [T, D]
        grads: &BlockParams,
    ) -> Result<Tensor> {
        let dy = match self.residual_scale {
            1.0 => dy.shallow_clone(),
            scale => dy.f_mul_scalar(scale)?,
        };
        let (Some(weight), Some(output)) = (w.norm(norms.post), output) else { return Ok(dy) };
        let norm = self.spec.norm();
        let (_, rstd) = norm.forward(output, weight)?;
        norm.backward(&dy, output, weight, &rstd, None, &mut grads.gradient_of(w, norms.post)?)
    }
}
