//! Experts in a step on a GPU: the router, GEMMs and weighted sum of one layer. The sequence of kernel launches does not depend on the routing, so a
//! decode step can be captured as a CUDA graph.
//!
//! R rows of a step, k experts of a token, D hidden, I an expert's width on this rank.

use tch::{Device, Kind, Tensor};

use super::network::{DecoderNetwork, StepTokens};
use super::op::DecoderOp;
use crate::cuda::kernels::{
    self, ExpertAdapter, ExpertTile, LowRows, RouteOptions, RouteScores, RoutedTokens, RouterNorm, SharedExpertRows,
};
use crate::error::Result;
use crate::model::{
    BlockParams, ExpertStep, ExpertsSpec, Linear, Lora, MIXER_NORMS, MLP_NORMS, Matrix, Mlp, ParamName, StepExperts,
};
use crate::ops::router::RouterScores;
use crate::ops::swiglu::Activation;

impl DecoderNetwork<'_> {
    /// Writes to `out` the weighted sum of the chosen experts' outputs, for this rank's part of the experts.
    ///
    /// With a `sum`, the residual stream and the output of the mixer, the router first computes their sum and its norm (see
    /// [`DecoderNetwork::norms_in_router`]).
    pub(super) fn experts(
        &self,
        (layer, spec): (usize, ExpertsSpec),
        w: &BlockParams,
        (sum, normed): (Option<(&mut Tensor, &Tensor)>, &mut Tensor), // [T, D]
        tokens: &StepTokens,
        out: &Tensor, // [T, D]
    ) -> Result<()> {
        let buffers = self.buffers.experts.as_ref().expect("a model with experts has their buffers");
        let (rows, k) = (normed.size()[0], spec.router.num_experts_per_tok);
        let Device::Cuda(gpu) = normed.device() else { unreachable!("an engine on a GPU") };
        let format = self.format();
        let [tile, down_tile] = format.step_tiles(ExpertStep {
            tokens: rows as usize,
            choices: k,
            experts: spec.num_experts,
            width: buffers.act.size()[1] as usize,
            kind: normed.kind(),
            gpu,
        })?;
        let own = spec.own_experts(w, self.tp.rank());
        let routed = buffers.routed(rows, spec, own, tile);
        let first = self.spec.places_among_expert_layers()[layer] * k as i64;
        let of_layer = |all: &Tensor| all.narrow(0, first, all.size()[0] - first);
        let (recorded, record) = (tokens.recorded.map(of_layer), of_layer(&buffers.record));
        let options = RouteOptions {
            scores: scores(spec, w),
            normalised: spec.router.norm_topk_prob,
            slots: Some(tokens.slots),
            recorded: recorded.as_ref(),
            record: self.records_experts.then_some(&record),
            stride: buffers.per_token,
        };
        let router = w.router().expect("experts have a router");
        match sum {
            Some((x, delta)) => {
                let weight = w.norm(MLP_NORMS.pre).expect("the norm that is computed here");
                let to = self.rows(normed)?.rounded.expect("FP8 quantizes rows");
                let y = (self.low.is_some() || spec.shared.is_some()).then_some(&mut *normed);
                let norm = RouterNorm { x, delta, weight, y, to, norm: self.spec.norm() };
                DecoderOp::Router.run(|| kernels::norm_route_fp8(norm, router, &routed, &options))?;
            }
            None => DecoderOp::Router.run(|| kernels::route(normed, router, &routed, &options))?,
        }
        let normed = &*normed;
        let of_rows = |all: &Tensor| all.narrow(0, 0, rows * k as i64);
        let (act, rows) = (of_rows(&buffers.act), of_rows(&buffers.out));
        let [gate_up, down] = [Matrix::GateUp, Matrix::Down].map(|matrix| w.linear(matrix));
        let adapter = self.low(gate_up, tile, LowRows::OfTokens(normed), &routed)?;
        let by = StepExperts { tile, adapter: adapter.of(), routed: &routed };
        let x = self.rows(normed)?;
        DecoderOp::GateUp.run(|| format.step_experts_gate_up(by, x, gate_up.piece(), &act))?;
        let adapter = self.low(down, tile, LowRows::Sorted(&act), &routed)?;
        let by = StepExperts { tile: down_tile, adapter: adapter.of(), routed: &routed };
        let x = self.rows(&act)?; // quantized rows are read later only by the shared expert, which quantizes again
        DecoderOp::Down.run(|| format.step_experts_down(by, x, down.piece(), &rows))?;
        let shared =
            spec.shared.map(|shared| self.shared_rows(shared.0.activation, w, normed, &buffers.shared)).transpose()?;
        let of_shared =
            shared.as_ref().map(|rows| SharedExpertRows { rows, x: normed, gate: w.norm(ParamName::SharedGate) });
        DecoderOp::Combine.run(|| kernels::experts_combine(&rows, &routed, of_shared, out))
    }

    /// Whether a layer's router computes the norm of its rows, too.
    pub(super) fn norms_in_router(&self, mlp: Mlp, w: &BlockParams) -> Result<bool> {
        let (Mlp::Experts(spec), Some(pre), None) = (mlp, w.norm(MLP_NORMS.pre), w.norm(MIXER_NORMS.post)) else {
            return Ok(false);
        };
        let is_alone = self.tp.size() == 1 && self.sums.is_none();
        let is_fp8 = self.format().rounds() && self.format().sections(&[1, 1])[0].1 == Kind::Float8e4m3fn;
        Ok(is_alone && is_fp8 && kernels::norm_route_serves(pre, scores(spec, w))?)
    }

    /// Computes x A^T of the LoRA adapters beside a matrix of experts.
    fn low<'w>(
        &self,
        linear: &'w Linear,
        tile: ExpertTile,
        rows: LowRows<'_>,
        routed: &RoutedTokens,
    ) -> Result<InnerProducts<'w>> {
        let (Some(Lora { a, b, owners, .. }), Some(low)) = (&linear.lora, self.low) else {
            return Ok(InnerProducts(None));
        };
        let shape = [routed.order.numel() as i64, a.size()[1]];
        let low = low.narrow(0, 0, shape[0] * shape[1]).view(shape); // [R k, r]
        let choice = owners.as_ref().zip(self.adapters).map(|(owners, adapters)| [owners, adapters]);
        DecoderOp::Adapters.run(|| kernels::experts_low(tile, rows, a, choice, routed, &low))?;
        Ok(InnerProducts(Some((low, b))))
    }

    /// Computes the shared expert's output, before its gate. [T, D]
    fn shared_rows(
        &self,
        activation: Activation,
        w: &BlockParams,
        normed: &Tensor, // [T, D]
        out: &Tensor,    // [R, D]
    ) -> Result<Tensor> {
        let (expand, contract) = (w.linear(Matrix::SharedGateUp), w.linear(Matrix::SharedDown));
        let first = |buffer: &Tensor, width: i64| {
            let rows = normed.size()[0];
            buffer.view(-1).narrow(0, 0, rows * width).view([rows, width])
        };
        let width = contract.weight().size()[1];
        self.round(normed, self.format())?;
        let (gate_up, mut act) = (first(&self.buffers.gate_up, 2 * width), first(&self.buffers.act, width));
        self.gate_up(activation, expand, normed, &gate_up, &mut act)?;
        let out = first(out, normed.size()[1]);
        self.linear(DecoderOp::Down, &act, contract, &out)?;
        Ok(out)
    }
}

/// How the router turns its logits into scores.
fn scores(spec: ExpertsSpec, w: &BlockParams) -> RouteScores<'_> {
    match (spec.router.scores, w.norm(ParamName::RouterBias)) {
        (RouterScores::Softmax, None) => RouteScores::Softmax,
        (RouterScores::Softmax, Some(bias)) => RouteScores::Biased(bias),
        (RouterScores::Sigmoid { num_groups, groups_per_tok, scale }, _) => {
            let parts = w.norm(ParamName::RouterCorrection).expect("sigmoid scores have a correction");
            RouteScores::Sigmoid { parts, num_groups, groups_per_tok, scale }
        }
    }
}

/// x A^T of the sorted rows and the adapters' B matrix; `None` without adapters.
#[derive(Debug)]
struct InnerProducts<'w>(Option<(Tensor, &'w Tensor)>);

impl InnerProducts<'_> {
    fn of(&self) -> Option<ExpertAdapter<'_>> {
        self.0.as_ref().map(|(low, b)| ExpertAdapter { low, b })
    }
}
