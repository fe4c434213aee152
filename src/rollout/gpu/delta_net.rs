//! A gated delta net in a step on a GPU: its projections side by side in one buffer, and the kernel that updates the states of the step's sequences.
//!
//! T tokens, C = 2 Hk dk + H dv channels, H value heads of width dv.

use tch::Tensor;

use super::delta_columns::{ALIGNED, DeltaColumns};
use super::network::{DecoderNetwork, StepTokens};
use super::op::DecoderOp;
use crate::cuda::kernels::{self, DeltaPages, DeltaRuns};
use crate::error::Result;
use crate::model::{BlockParams, DeltaNetSpec, Linear, Matrix};
use crate::ops::delta_net::{DeltaOptions, DeltaRows};

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
        let states = self.memory.states.expect("a model with states has pages").layer(layer);
        let pages = DeltaPages { rows: &states.conv, states: &states.rule };
        let runs = DeltaRuns { pages: tokens.state_pages, bounds: tokens.bounds, positions: tokens.positions };
        let options = DeltaOptions { heads, eps: self.spec.rms_norm_eps };
        let mut out = self.buffers.attended([rows, columns.values as i64]);
        let rows = DeltaRows { qkv, z, b, a };
        DecoderOp::DeltaNet.run(|| kernels::delta_step(&rows, &weights, options, pages, runs, &mut out))?;
        Ok(out)
    }
}
