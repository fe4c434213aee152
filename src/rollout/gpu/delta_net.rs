//! A gated delta net in a step on a GPU: its projections side by side in one buffer, and the kernel that updates the states of the step's sequences.
//!
//! T tokens, C = 2 Hk dk + H dv channels, H value heads of width dv.

use tch::{Kind, Tensor};

use super::delta_columns::{ALIGNED, DeltaColumns};
use super::inputs::DraftedInputs;
use super::network::{DecoderNetwork, StepTokens};
use super::op::DecoderOp;
use super::runner::GpuRunner;
use crate::cuda::kernels::{self, DeltaDrafts, DeltaPages, DeltaRuns};
use crate::error::{Error, Result};
use crate::model::{BlockParams, DeltaNetSpec, Linear, Matrix, Mixer};
use crate::ops::delta_net::{DeltaOptions, DeltaRows};
use crate::rollout::speculation::StoredDrafts;
use crate::torch;

const PROJECTIONS: [Matrix; 4] = [Matrix::DeltaQkv, Matrix::DeltaZ, Matrix::DeltaB, Matrix::DeltaA];

/// Joins the projections from number `first` on into one matrix. `None` unless they and their output columns are contiguous, unquantized and without
/// adapters.
fn joined(w: &BlockParams, columns: DeltaColumns, first: usize) -> Option<Tensor> {
    let linears = PROJECTIONS[first..].iter().map(|matrix| w.linear(*matrix)).collect::<Vec<_>>();
    let is_plain = |linear: &&Linear| linear.lora.is_none() && linear.pieces.len() == 1 && !linear.format.rounds();
    let parts = &columns.parts()[first..];
    if !linears.iter().all(is_plain) || !parts.iter().all(|columns| columns.is_multiple_of(ALIGNED)) {
        return None;
    }
    let weights: Vec<&Tensor> = linears.into_iter().map(Linear::weight).collect();
    let end = |weight: &Tensor| weight.data_ptr() as usize + weight.numel() * weight.kind().elt_size_in_bytes();
    let are_neighbours = weights.windows(2).all(|pair| end(pair[0]) == pair[1].data_ptr() as usize);
    let shape = [parts.iter().sum::<usize>() as i64, weights[0].size()[1]];
    if are_neighbours { weights[0].f_as_strided(shape, [shape[1], 1], None::<i64>).ok() } else { None }
}

impl DecoderNetwork<'_> {
    /// Computes the input rows of the last projection. [T, H dv]
    pub(super) fn delta_net(
        &self,
        layer: usize,
        spec: DeltaNetSpec,
        w: &BlockParams,
        normed: &Tensor, // [T, D]
        tokens: &StepTokens,
    ) -> Result<Tensor> {
        let heads = spec.tp_slice(self.tp.size()).heads;
        let columns = DeltaColumns::new(heads);
        let rows = normed.size()[0];
        let projected = self.buffers.projected([rows, columns.all() as i64]);
        let mut at = 0;
        let starts = columns.parts().map(|own| {
            let start = at;
            at += own.next_multiple_of(ALIGNED) as i64;
            start
        });
        let part = |number: usize| projected.narrow(1, starts[number], columns.parts()[number] as i64);
        let [qkv, z, b, a] = [0, 1, 2, 3].map(part);
        for (number, part) in [&qkv, &z, &b, &a].into_iter().enumerate() {
            // One GEMM for all projections; in a quantized format only for the last two, which stay unquantized.
            if let Some(rest) = joined(w, columns, number) {
                let out = projected.narrow(1, starts[number], rest.size()[0]);
                self.product(DecoderOp::Qkv, normed, &rest, None, &out)?;
                break;
            }
            self.linear(DecoderOp::Qkv, normed, w.linear(PROJECTIONS[number]), part)?;
        }
        let weights = w.delta_weights();
        let states = self.memory.states.expect("a model with states has pages");
        let of_layer = states.layer(layer);
        let pages = DeltaPages { rows: &of_layer.conv, states: &of_layer.rule };
        let own_pages = tokens.state_pages;
        let options = DeltaOptions { heads, eps: self.spec.rms_norm_eps };
        let mut out = self.buffers.attended([rows, columns.values as i64]);
        let rows = DeltaRows { qkv, z, b, a };
        DecoderOp::DeltaNet.run(|| match tokens.drafts {
            Some(DraftedInputs { bounds, stored, starts, .. }) => {
                let drafts = DeltaDrafts { pages: own_pages, bounds, stored, starts, gates: states.gates(layer) };
                kernels::delta_drafts(&rows, &weights, options, pages, drafts, &mut out)
            }
            None => {
                let runs = DeltaRuns { pages: own_pages, bounds: tokens.bounds, positions: tokens.positions };
                kernels::delta_step(&rows, &weights, options, pages, runs, &mut out)
            }
        })?;
        Ok(out)
    }
}

impl GpuRunner<'_> {
    /// Has states take in stored drafts that were drawn, with no step.
    pub(super) fn take_in(&self, stored: &[StoredDrafts]) -> Result<()> {
        let Some(states) = self.memory.states.filter(|_| !stored.is_empty()) else { return Ok(()) };
        let (device, kind) = (self.weights.embedding.device(), self.weights.embedding.kind());
        let of_drafts =
            |number: &dyn Fn(&StoredDrafts) -> usize| stored.iter().map(number).map(|it| it as i64).collect();
        let [pages, counts, ends]: [Vec<i64>; 3] =
            [of_drafts(&|it| it.page as usize), of_drafts(&|it| it.count), of_drafts(&|it| it.end)];
        let ints = |values: &[i64]| Ok::<_, Error>(torch::tensor_on(values, device)?.f_to_kind(Kind::Int)?);
        let (own_pages, taken, starts) = (ints(&pages)?, ints(&counts)?, ints(&ends)?);
        let bounds = Tensor::f_zeros([stored.len() as i64 + 1], (Kind::Int, device))?;
        for (layer, block) in self.spec.layers.iter().enumerate() {
            let Mixer::DeltaNet(delta_net) = block.tp_slice(self.tp.size()).mixer else { continue };
            self.weights.prepare(layer)?;
            let (heads, of_layer) = (delta_net.heads, states.layer(layer));
            let none = |columns: usize| Tensor::f_empty([0, columns as i64], (kind, device));
            let (channels, values) = (heads.channels(), heads.num_value_heads * heads.value_dim);
            let [qkv, z] = [none(channels)?, none(values)?];
            let [b, a] = [none(heads.num_value_heads)?, none(heads.num_value_heads)?];
            let rows = DeltaRows { qkv, z, b, a };
            let options = DeltaOptions { heads, eps: self.spec.rms_norm_eps };
            let pages = DeltaPages { rows: &of_layer.conv, states: &of_layer.rule };
            let gates = states.gates(layer);
            let drafts = DeltaDrafts { pages: &own_pages, bounds: &bounds, stored: &taken, starts: &starts, gates };
            let weights = self.weights.blocks[layer].delta_weights();
            kernels::delta_drafts(&rows, &weights, options, pages, drafts, &mut none(values)?)?;
        }
        if self.head.is_some() {
            states.keep_newest(&torch::tensor_on(&pages, device)?, &counts)?;
        }
        Ok(())
    }
}
