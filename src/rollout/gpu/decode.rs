//! Runs the decode steps of a session: this module uploads the inputs, runs the network and samples. The work on the GPU is captured in CUDA graphs.

use tch::Tensor;

use super::graphs::{GraphKey, GraphedStep};
use super::inputs::{DecodeInputs, Packing};
use super::network::{DecoderNetwork, StepHeads, StepTokens};
use super::op::DecoderOp;
use super::plans::AttentionPlans;
use super::processing::Processing;
use super::runner::GpuRunner;
use super::sampling::DrawOutputs;
use super::stages::StageTokens;
use crate::cuda::kernels::{self, SharedPrefixes};
use crate::cuda::{TorchStream, Tuning};
use crate::error::Result;
use crate::rollout::limits::step_rows;

impl GpuRunner<'_> {
    pub(super) fn decode(&mut self, packing: &Packing) -> Result<()> {
        let of = GraphedStep::Decode { is_drafted: packing.takes_drafts_in && packing.step.is_drafted() };
        let key = GraphKey { rows: self.bucket(packing), processing: Processing::of(packing), of };
        let mut graphs = std::mem::take(&mut self.state.graphs);
        let outcome = self.prepare_decode(packing, |stream, step| graphs.run(key, stream, step));
        self.state.graphs = graphs;
        outcome
    }

    /// Number of rows of the captured CUDA graph that runs a step: the step's number of rows, rounded up to a bucket.
    pub(super) fn bucket(&self, packing: &Packing) -> usize {
        step_rows(packing.step.num_tokens(), self.state.shape.seqs)
    }

    /// Uploads the inputs of a decode step and calls `run` with the step.
    pub(super) fn prepare_decode<T>(
        &mut self,
        packing: &Packing,
        run: impl FnOnce(&TorchStream, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let widths = (self.bucket(packing), self.state.shape.blocks);
        let (pending, least_shared) = (&self.pending, self.state.plans.least_shared_tokens(widths.0));
        let inputs = self.state.upload(&*self.ranks.all, |words, inputs| {
            DecodeInputs::pack(packing, words, widths, pending, least_shared, inputs)
        })?;
        let state = &*self.state;
        let sums = state.sums.as_ref().filter(|sums| widths.0 <= sums.rows());
        let network = self.network(Tuning::Timed, Processing::of(packing));
        let network = DecoderNetwork { sums, adapters: inputs.adapters.as_ref(), ..network };
        let last = state.tokens.as_ref().map_or_else(|| network.buffers.sampled.shallow_clone(), StageTokens::ids);
        let own_pages = inputs.drafted.as_ref().map_or(&inputs.state_pages, |drafted| &drafted.pages);
        let hidden =
            |network: &DecoderNetwork, pages: &Tensor| decode_hidden(network, (&inputs, &last, pages), &state.plans);
        run(&state.stream, &mut || {
            let own_products = state.own_products(&network, widths.0, &hidden)?;
            let hidden = hidden(&DecoderNetwork { own_products, ..network }, own_pages)?;
            network.keep_hidden(&hidden, inputs.kept.as_ref())?;
            if !network.stage.is_last() {
                return Ok(());
            }
            let drawn = DrawOutputs {
                lens: &inputs.context_lens,
                block_tables: &inputs.block_tables,
                sampling: &inputs.sampling,
            };
            network.sample(&hidden, &drawn)
        })
    }
}

/// Hidden states of a bucket's rows for their last tokens. For a model without state pages it can run several times with equal results, until the
/// next tokens are sampled.
fn decode_hidden(
    network: &DecoderNetwork,
    (inputs, last, state_pages): (
        &DecodeInputs,
        &Tensor, /* tokens that inputs may refer to */
        &Tensor, /* page of each row's sequence */
    ),
    plans: &AttentionPlans,
) -> Result<Tensor> {
    let buffers = network.buffers;
    let rows = inputs.from.size()[0];
    let mut ids = buffers.token_ids.narrow(0, 0, rows);
    kernels::next_tokens(&inputs.from, last, &mut ids)?;
    let prefixes = SharedPrefixes { groups: &inputs.groups, num_shared_blocks: &inputs.num_shared };
    DecoderOp::AttentionPlan.run(|| plans.update(&inputs.context_lens, prefixes))?;
    // A decode step's tokens are computed for the first time.
    let tokens = StepTokens {
        ids: &ids,
        positions: &inputs.positions,
        slots: &inputs.slots,
        recorded: None,
        state_pages,
        bounds: None,
        drafts: inputs.drafted.as_ref(),
    };
    network.hidden(&tokens, &mut |layer, attention, StepHeads { q, sinks, .. }| {
        let cache = network.memory.kv_cache.layer(layer);
        let attended = buffers.attended([rows, q.size()[1] * q.size()[2]]); // [S, H hd]
        let mut o = attended.view_as(q);
        DecoderOp::Attention
            .run(|| cache.attend(plans.of(attention), q, &inputs.block_tables, &inputs.context_lens, sinks, &mut o))?;
        Ok(attended)
    })
}
