//! The inputs that all blocks of a pass share, and the steps by which a sublayer reads the residual stream and adds to it (norm, scale and sum), each
//! with its backward.

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

/// Observes and can override which experts tokens are routed to, in all layers of a pass.
pub trait Routes: std::fmt::Debug {
    /// Returns the experts to route tokens to [T, K], given the router's own choice `own`. A backward that recomputes the forward calls this again.
    ///
    /// # Errors
    /// Returns the errors of the implementation.
    fn choose(&self, layer: usize, own: Tensor) -> Result<Tensor>;

    /// Receives a forward's routing, and the experts that the router itself chose [T, K].
    ///
    /// # Errors
    /// Returns the errors of the implementation.
    fn observe(&self, layer: usize, routing: &Routing, own: &Tensor) -> Result<()>;

    /// Returns the loss's gradient for a layer's routing probabilities [T, E], or a tensor that broadcasts to that shape.
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
    /// Rotary embeddings at the tokens' positions.
    pub ropes: &'a ByRope<RopeRows>,
    /// The tensor-parallel ranks whose slices make up the block; forward only.
    pub tp: Option<&'a dyn Collective>,
    /// Observer of expert routing, which also supplies the gradient of the loss for it.
    pub routes: Option<&'a dyn Routes>,
    /// Whether the forward uses the bit-exact operations of [`crate::ops::exact`].
    pub(super) exact: bool,
    /// Multiplier of each sublayer's output in the current block.
    residual_scale: f64,
}

impl<'a> BlockContext<'a> {
    /// Creates the context for whole blocks or, with `tp`, for tensor-parallel slices of them.
    pub fn new(
        spec: &'a ModelSpec,
        ropes: &'a ByRope<RopeRows>,
        tp: Option<&'a dyn Collective>,
        routes: Option<&'a dyn Routes>,
    ) -> Self {
        Self { spec, ropes, tp, routes, exact: false, residual_scale: 1.0 }
    }

    /// Selects a forward that computes the same bits for a token in the engine and in training. Rotary embeddings must come from
    /// [`Ropes::exact_rows`](crate::model::Ropes::exact_rows), and blocks must be in the format [`Exact`](crate::model::Exact).
    pub fn exactly(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    pub(super) fn of_block(self, block: &BlockSpec) -> Self {
        Self { residual_scale: block.residual_scale, ..self }
    }

    /// Sums over tensor-parallel ranks a value of all query and key heads; a key head that several ranks hold counts once.
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

    /// Returns a sublayer's normalized input [T, D] in the weights' type, and the norm's rstd.
    pub(super) fn enter(&self, w: &BlockParams, norms: NormNames, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let Some(weight) = w.norm(norms.pre) else { return Ok((x.f_to_kind(w.kind())?, None)) };
        let (normed, rstd) = self.spec.norm().forward(x, weight)?;
        Ok((if self.exact { exact::rms_norm(x, weight, self.spec.norm())? } else { normed }, Some(rstd)))
    }

    /// Normalizes rows [T, D] without keeping anything for backward.
    pub(super) fn norm(&self, w: &BlockParams, name: ParamName, x: &Tensor) -> Result<Tensor> {
        let weight = w.norm(name).expect("a norm of the block");
        if self.exact {
            exact::rms_norm(x, weight, self.spec.norm())
        } else {
            Ok(self.spec.norm().forward(x, weight)?.0)
        }
    }

    /// Returns a sublayer's normalized input for the GEMMs of some matrices; the norm also quantizes it if the format has a kernel for that. [T, D]
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

    /// Returns dx, given the gradients of the sublayer's normalized input and of the residual stream after the sublayer.
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

    /// Applies the sublayer's last matrix, `linear`, to `x` and adds the result to `residual` [T, D]. Also returns the sublayer's output before its
    /// norm.
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

    /// Sums the ranks' partial outputs and adds them to `residual` [T, D]. Also returns the output before its norm, in the weights' type.
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

    /// Returns residual + scale * norm(output) [T, D], where the norm may be absent; and the output if the norm's backward needs it.
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

    /// Returns the gradient of the sublayer's output before its norm.
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
