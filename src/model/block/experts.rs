//! Mixture of experts: a router picks K MLPs for every token, w_1 E_1(x) + .. + w_K E_K(x).
//!
//! T tokens, D hidden, E experts, K of them per token, R = T K rows, I an expert's width; in a tensor-parallel slice this rank's share of it. Every
//! rank has the whole router and computes it in the accumulation type.

use std::ops::Range;

use tch::Tensor;

use super::context::BlockContext;
use super::expanded::Expanded;
use super::params::BlockParams;
use super::shared::SharedRows;
use crate::error::Result;
use crate::model::correction;
use crate::model::lora::Lora;
use crate::model::spec::{ExpertsSpec, MLP_NORMS as NORMS, Matrix, ParamName};
use crate::ops::expert_bias;
use crate::ops::grouped::Dispatch;
use crate::ops::linear;
use crate::ops::router::{self, Routing};
use crate::ops::swiglu::{Activation, GateUp, WeightedGradient};
use crate::ranks::Collective;

/// Tokens with their chosen experts, and the experts' gate and up outputs.
#[derive(Debug)]
pub(super) struct Routed {
    routing: Routing,
    /// The experts that the router itself chose.
    own: Tensor, // [T, K]
    dispatch: Dispatch,
    /// Index of this rank's first expert.
    first_own: usize,
    gate_up: GateUp, // R rows
    activation: Activation,
    shared: Option<SharedRows>,
}

impl ExpertsSpec {
    /// Indices of the experts whose weights `w`, a rank's slice, contains.
    pub fn own_experts(self, w: &BlockParams, tp_rank: usize) -> Range<usize> {
        let own = w.linear(Matrix::GateUp).weight().size()[0] as usize;
        let first = if own < self.num_experts { tp_rank * own } else { 0 };
        first..first + own
    }

    /// Returns the block's output [T, D], and the activations that a backward may keep.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        h: &Tensor, // [T, D]
    ) -> Result<(Tensor, Expanded<Routed>)> {
        let routed = self.expand(ctx, layer, w, &ctx.enter(w, NORMS, h)?.0)?;
        if let Some(routes) = ctx.routes {
            routes.observe(layer, &routed.routing, &routed.own)?;
        }
        let output = routed.contract(w)?;
        let (y, output) = ctx.leave_with(w, NORMS, output, h)?;
        Ok((y, Expanded { wide: Some(routed), output }))
    }

    /// Returns dh, the gradient of the residual stream before the experts, given that of the block's output. Activations that were not kept are
    /// recomputed.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        (h, dy): (&Tensor, &Tensor), // [T, D]
        kept: Expanded<Routed>,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        let (normed, rstd) = ctx.enter(w, NORMS, h)?;
        let routed = kept.wide.map_or_else(|| self.expand(ctx, layer, w, &normed), Ok)?;
        let output = match kept.output {
            None if w.norm(NORMS.post).is_some() => Some(routed.contract(w)?),
            kept => kept,
        };
        let d_output = ctx.leave_backward(w, NORMS, dy, output.as_ref(), grads)?;
        drop(output);
        let Routed { routing, dispatch, first_own, gate_up, activation, shared, .. } = routed;
        let (d_gate_up, mut d_weights) =
            contract_backward(w, (&routing, &dispatch), (activation, gate_up), &d_output, grads)?;
        if let Some(bias) = &w.linear(Matrix::Down).piece().bias {
            let d_bias = grads.linear_mut(Matrix::Down).bias_mut();
            expert_bias::contract_backward(&routing, bias, &d_output, &mut d_weights, d_bias)?;
        }
        let d_bias = grads.linear_mut(Matrix::GateUp).bias_mut();
        if let Some((bias, d_bias)) = w.linear(Matrix::GateUp).piece().bias.as_ref().zip(d_bias) {
            let hot = expert_bias::one_hot(&dispatch, &routing.experts, first_own, bias)?;
            expert_bias::expand_backward(&hot, &d_gate_up, d_bias)?;
        }
        let d_rows = expand_backward(w, &dispatch, &d_gate_up, &normed, grads)?;
        drop(d_gate_up);
        let mut d_normed = dispatch.gather(&d_rows, None)?;
        drop(d_rows);
        if let Some(shared) = shared {
            shared.backward(w, &normed, &d_output, &mut d_normed, grads)?;
        }
        let d_probs = ctx.routes.map_or(Ok(None), |routes| routes.d_probs(layer))?;
        let d_logits = routing.backward(&d_weights, d_probs.as_ref(), self.router)?;
        let d_normed = self.router_backward(w, &d_logits, &normed, d_normed, grads)?;
        ctx.enter_backward(w, NORMS, &d_normed, (h, dy), rstd.as_ref(), grads)
    }

    /// Routes the tokens and computes gate and up.
    fn expand(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        normed: &Tensor, // [T, D]
    ) -> Result<Routed> {
        let (router, bias) = (w.router().expect("experts have a router"), w.norm(ParamName::RouterBias));
        let probs = router::probabilities(normed, router, bias, self.router)?;
        let parts = w.norm(ParamName::RouterCorrection);
        let correction = parts.map(|parts| correction::sum(parts, probs.kind())).transpose()?;
        let own = router::choose(&probs, correction.as_ref(), self.router)?;
        let experts = match ctx.routes {
            Some(routes) => routes.choose(layer, own.shallow_clone())?,
            None => own.shallow_clone(),
        };
        let routing = Routing::new(probs, experts, self.router)?;
        let present = self.own_experts(w, ctx.tp.map_or(0, Collective::rank));
        let first_own = present.start;
        let dispatch = Dispatch::new(&routing.experts, self.num_experts, present, normed.kind())?;
        let linear = w.linear(Matrix::GateUp);
        let rows = linear.format.experts_rows(&dispatch, normed, linear.lora.is_some())?;
        let gate_up = linear.format.experts_gate_up(&dispatch, &rows, linear.piece())?;
        let gate_up = match &linear.lora {
            Some(lora) => lora.add_gate_up(&dispatch, rows.plain(), gate_up)?,
            None => gate_up,
        };
        let gate_up = match &linear.piece().bias {
            Some(bias) => {
                let hot = expert_bias::one_hot(&dispatch, &routing.experts, first_own, bias)?;
                expert_bias::expand(gate_up, &hot, bias)?
            }
            None => gate_up,
        };
        let shared = self.shared.map(|shared| SharedRows::expand(shared, w, normed)).transpose()?;
        Ok(Routed { routing, own, dispatch, first_own, gate_up, activation: self.expert.activation, shared })
    }

    /// Returns the gradient of the rows that the router and the experts read, in the weights' type: the sum of the router's gradient and that of the
    /// experts, added in the accumulation type.
    fn router_backward(
        self,
        w: &BlockParams,
        d_logits: &Tensor,    // [T, E]
        normed: &Tensor,      // [T, D]
        mut d_normed: Tensor, // [T, D]
        grads: &BlockParams,
    ) -> Result<Tensor> {
        let wide = d_logits.kind();
        let router = w.router().expect("experts have a router");
        linear::accumulate_input(d_logits, &router.f_to_kind(wide)?, &mut d_normed)?;
        if let Some(gradient) = grads.norm(ParamName::RouterBias) {
            linear::accumulate_bias(d_logits, &mut gradient.shallow_clone())?;
        }
        if let Some(gradient) = grads.router() {
            linear::accumulate_weight(d_logits, &normed.f_to_kind(wide)?, &mut gradient.shallow_clone())?;
        }
        Ok(d_normed.f_to_kind(normed.kind())?)
    }
}

impl Routed {
    /// Returns the weighted sum of the chosen experts' outputs, plus the shared expert's, in the accumulation type. [T, D]
    fn contract(&self, w: &BlockParams) -> Result<Tensor> {
        let down = w.linear(Matrix::Down);
        let act = down.format.activate(self.activation, &self.gate_up, down.reads_plain())?; // [R, I]
        let rows = down.format.experts_forward(&self.dispatch, &act, down.piece())?;
        let rows = match &down.lora {
            Some(lora) => lora.add_rows(&self.dispatch, act.plain(), rows)?,
            None => rows,
        };
        let mut sum = self.dispatch.gather(&rows, Some(&self.routing.weights))?;
        if let Some(bias) = &down.piece().bias {
            expert_bias::contract(&self.routing, self.first_own, bias, &mut sum)?;
        }
        match &self.shared {
            Some(shared) => Ok(shared.contract(w)?.f_add_(&sum)?),
            None => Ok(sum),
        }
    }
}

/// Returns the gradient of the rows that gate and up read [R, D].
fn expand_backward(
    w: &BlockParams,
    dispatch: &Dispatch,
    d_gate_up: &GateUp,
    normed: &Tensor, // [T, D]
    grads: &mut BlockParams,
) -> Result<Tensor> {
    let (linear, gradients) = (w.linear(Matrix::GateUp), grads.linear_mut(Matrix::GateUp));
    let mut d_rows = dispatch.gate_up_backward_input(d_gate_up, linear.weight())?;
    if let Some((dw, onto)) = gradients.sum() {
        dispatch.gate_up_weight_gradient(d_gate_up, &dispatch.scatter(normed)?, dw, onto)?;
    }
    if let (Some(lora), Some(gradient)) = (&linear.lora, &mut gradients.lora) {
        lora.gate_up_backward(dispatch, d_gate_up, &dispatch.scatter(normed)?, &mut d_rows, gradient)?;
    }
    Ok(d_rows)
}

/// Returns the gradients of gate and up, and of the experts' routing weights [T, K].
///
/// The routing weight multiplies the activation instead of the output, which is wider and may not be in memory.
fn contract_backward(
    w: &BlockParams,
    (routing, dispatch): (&Routing, &Dispatch),
    (activation, gate_up): (Activation, GateUp),
    d_output: &Tensor, // [T, D]
    grads: &mut BlockParams,
) -> Result<(GateUp, Tensor)> {
    let down = w.linear(Matrix::Down);
    let rows = dispatch.scatter(d_output)?; // [R, D]
    let weights = dispatch.of_rows(&routing.weights)?; // [R, 1]
    let mut d_act = dispatch.backward_input(&rows, down.weight())?; // [R, I], of weights of 1
    let d_low = |lora: &Lora| dispatch.backward_input(&rows, &lora.b); // [R, k]
    let d_low = down.lora.as_ref().map(d_low).transpose()?;
    let adapter = down.lora.as_ref().zip(d_low.as_ref());
    if let Some((lora, d_low)) = adapter {
        dispatch.accumulate_input(d_low, &lora.a, &mut d_act)?;
    }
    let WeightedGradient { d_gate_up, act, d_weights } = gate_up.weighted_backward(activation, &d_act, &weights)?;
    drop(d_act);
    let gradients = grads.linear_mut(Matrix::Down);
    if let Some((dw, onto)) = gradients.sum() {
        dispatch.weight_gradient(&rows, &act, dw, onto)?;
    }
    if let (Some((lora, d_low)), Some(gradient)) = (adapter, &mut gradients.lora) {
        lora.accumulate_rows(dispatch, (&rows, d_low), &act, gradient)?;
    }
    Ok((d_gate_up, dispatch.of_choices(&d_weights)?))
}
