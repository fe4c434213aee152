//! Steps of a session on a GPU: uploaded, launched, and read one step behind. With pipeline stages they are read as many steps behind as there are
//! stages.

use std::collections::VecDeque;

use tch::{Kind, Tensor, no_grad};

use super::draft_head::DraftHead;
use super::inputs::{DraftPlaces, Packing, PrefillInputs, Words};
use super::network::{DecoderNetwork, StepTokens};
use super::prefill::PrefillAttention;
use super::processing::Processing;
use super::sampling::DrawOutputs;
use super::stages::StageLine;
use super::state::GpuState;
use super::wait::wait;
use crate::cuda::{CurrentStream, Tuning};
use crate::error::Result;
use crate::model::{BlockParams, Matrix, ModelSpec, OwnProducts, Stage};
use crate::ops::swiglu::Activation;
use crate::ranks::Collective;
use crate::rollout::routes::recorded_experts;
use crate::rollout::runner::Runner;
use crate::rollout::sampler::{Draw, Sampled, Sampler, non_finite};
use crate::rollout::scheduler::Step;
use crate::rollout::sequence::EngineSequence;
use crate::rollout::speculation::StoredDrafts;
use crate::rollout::stages::EngineRanks;
use crate::rollout::state_pages::{SequenceMemory, StatePages};
use crate::rollout::stats::StageTimes;
use crate::rollout::weights::EngineWeights;
use crate::torch;
use crate::types::TokenLogprob;

/// Runs the steps of one sampling session.
pub(in crate::rollout) struct GpuRunner<'a> {
    pub(super) state: &'a mut GpuState,
    pub(super) spec: &'a ModelSpec,
    pub(super) weights: &'a EngineWeights<'a>,
    pub(super) memory: SequenceMemory<'a>,
    pub(super) tp: &'a dyn Collective,
    pub(super) ranks: &'a EngineRanks,
    stage: Stage,
    line: Option<StageLine<'a>>,
    /// For each sequence, the index of its sample among the tokens on the device that the last launched step writes.
    pub(super) pending: Vec<u32>,
    under_way: VecDeque<StepDraws>,
    num_launched: usize,
    /// Experts of the step that was collected last.
    experts: Vec<u16>,
    pub(super) head: Option<DraftHead<'a>>,
    /// Where the drafts of the step are that is being launched, by the model's own head.
    pub(super) drafted: DraftPlaces,
    /// Drafts of the step that was collected last, if the host did not know them.
    drafts: Vec<u32>,
    _current: CurrentStream,
}

/// The draws of a launched step that is not collected yet.
struct StepDraws {
    drawn: Vec<DrawnRow>,
    /// The most probable ids of the draws that request them, with the draw's number.
    top: Vec<(usize, Vec<TokenLogprob>)>,
    /// Number of tokens that the step computed.
    num_tokens: usize,
    /// Where its drafts are among the words of the device, if the host does not know them.
    drafts: Vec<i32>,
    /// The number of the step's tick, in an engine with pipeline stages.
    tick: usize,
}

/// A row that a token was sampled from.
struct DrawnRow {
    prompt_id: u64,
    /// Position of the sampled token: the number of tokens before it.
    position: usize,
    /// Whether the row follows a draft token. Its sample is then discarded if the draft token is rejected.
    is_draft: bool,
}

impl<'a> GpuRunner<'a> {
    /// Starts a session. While the runner exists, libtorch operations of this thread run on the engine's stream.
    pub(in crate::rollout) fn new(
        state: &'a mut GpuState,
        (spec, weights): (&'a ModelSpec, &'a EngineWeights<'a>),
        memory: SequenceMemory<'a>,
        ranks: &'a EngineRanks,
    ) -> Result<Self> {
        let current = state.stream.make_current()?;
        let head = if state.shape.drafts > 0 { DraftHead::new(spec, weights)? } else { None };
        Ok(Self {
            state,
            spec,
            weights,
            memory,
            tp: &*ranks.tp,
            ranks,
            stage: ranks.stage(),
            line: StageLine::new(&*ranks.pipe),
            pending: Vec::new(),
            under_way: VecDeque::new(),
            num_launched: 0,
            experts: Vec::new(),
            head,
            drafted: DraftPlaces::default(),
            drafts: Vec::new(),
            _current: current,
        })
    }

    /// The network over this engine's memory. A strict engine has one fixed GEMM algorithm. Others choose by `tuning`; what is timed may be chosen
    /// differently in the next run.
    pub(super) fn network(&self, tuning: Tuning, processing: Processing) -> DecoderNetwork<'_> {
        let state = &*self.state;
        DecoderNetwork {
            spec: self.spec,
            stage: &self.stage,
            weights: self.weights,
            memory: self.memory,
            tp: self.tp,
            products: &state.products,
            buffers: state.buffers.as_ref().expect("the engine is awake"),
            ropes: &state.ropes,
            low: state.low.as_ref(),
            sums: None,
            tuning: match tuning {
                _ if state.exact => Tuning::Exact,
                _ if state.strict => Tuning::Fixed,
                Tuning::Timed if torch::is_deterministic() => Tuning::First,
                tuning => tuning,
            },
            own_products: own_products(self.spec, self.weights),
            processing,
            adapters: None,
            masks: state.masks.as_ref(),
            first_cache_layer: 0,
            records_experts: true,
        }
    }

    /// What inputs of a step are packed from.
    pub(super) fn packing<'p>(
        &self,
        (step, draws, sequences): (&'p Step, &'p [Draw<'p>], &'p [EngineSequence]),
        drafted: &'p DraftPlaces,
    ) -> Packing<'p> {
        Packing {
            step,
            draws,
            sequences,
            block_size: self.memory.kv_cache.block_size(),
            has_adapters: self.weights.num_adapters > 0,
            takes_drafts_in: self.memory.states.is_some_and(StatePages::have_drafts),
            num_kept: self.memory.states.map_or(0, StatePages::num_kept_rows),
            drafted,
        }
    }

    /// The most probable ids of the draws that request them, from the logits of the newest step; waits for that step. Collective if there are such
    /// draws.
    fn top_logprobs(&self, draws: &[Draw]) -> Result<Vec<(usize, Vec<TokenLogprob>)>> {
        let asks = |(_, draw): &(usize, &Draw)| draw.params.top_logprobs > 0;
        let (rows, asking): (Vec<usize>, Vec<&Draw>) = draws.iter().enumerate().filter(asks).unzip();
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let vocab = self.spec.vocab_range(self.tp.rank(), self.tp.size());
        let logits = &self.state.buffers.as_ref().expect("the engine is awake").logits;
        let own_rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
        let own_rows = torch::tensor_on(&own_rows, logits.device())?;
        let logits = logits.f_index_select(0, &own_rows)?.f_narrow(1, 0, vocab.len() as i64)?;
        let logits = torch::f32_vec(&logits)?;
        let sampler = Sampler { vocab, tp: self.tp };
        Ok(rows.into_iter().zip(sampler.top_logprobs(&logits, &asking)?).collect())
    }

    /// Queues the exchange between pipeline stages that precedes a step of `rows` rows, or no step. Does nothing with one stage.
    fn tick(&mut self, rows: Option<usize>) -> Result<()> {
        let GpuState { buffers, tokens, stream, .. } = &mut *self.state;
        let (Some(line), Some(tokens)) = (&mut self.line, tokens) else { return Ok(()) };
        let buffers = buffers.as_ref().expect("the engine is awake");
        line.tick(stream, (buffers, tokens), rows, !self.under_way.is_empty())
    }

    fn prefill(&mut self, packing: &Packing) -> Result<()> {
        let blocks = self.state.shape.blocks;
        let pack = |words: &mut Words, inputs: &Tensor| PrefillInputs::pack(packing, words, blocks, inputs);
        let inputs = self.state.upload(&*self.ranks.all, pack)?;
        let network = self.network(Tuning::First, Processing::of(packing));
        let network = DecoderNetwork { adapters: inputs.adapters.as_ref(), ..network };
        let strict = self.state.strict.then_some(&self.state.plans);
        let attention = PrefillAttention::new(packing, &inputs, self.spec, self.memory.kv_cache, strict)?;
        let recorded = match self.state.record_downloads {
            Some(_) => recorded_experts(self.spec, packing.step, packing.sequences),
            None => None,
        };
        let recorded = recorded.map(|experts| torch::tensor_on(&experts, inputs.slots.device())).transpose()?;
        let tokens = StepTokens {
            ids: &inputs.token_ids,
            positions: &inputs.positions,
            slots: &inputs.slots,
            recorded: recorded.as_ref(),
            state_pages: &inputs.state_pages,
            bounds: Some(&inputs.bounds),
            drafts: None,
        };
        let hidden = network.hidden(&tokens, &mut |layer, spec, heads| attention.attend(layer, spec, heads))?;
        let drawn = match packing.draws.is_empty() || !self.stage.is_last() {
            true => None,
            false => Some(hidden.f_index_select(0, &inputs.last_rows)?),
        };
        if let Some(head) = &self.head {
            head.follow_prompts(self.network(Tuning::First, Processing::default()), packing, &hidden)?;
        }
        if !packing.step.copies.is_empty() {
            let [from, to] = &inputs.copies;
            self.memory.kv_cache.copy_blocks(from, to)?;
            let history = &network.buffers.history;
            let _ = history.shallow_clone().f_index_copy_(
                0,
                &to.f_to_kind(Kind::Int64)?,
                &history.f_index_select(0, from)?,
            )?;
        }
        if let Some(states) = self.memory.states {
            states.copy(&packing.step.state_copies)?;
        }
        let Some(drawn_hidden) = drawn else { return Ok(()) };
        let block_tables = inputs.block_tables.f_index_select(0, &inputs.drawn_runs)?;
        let drawn = DrawOutputs { lens: &inputs.lens, block_tables: &block_tables, sampling: &inputs.sampling };
        network.sample(&drawn_hidden, &drawn)
    }
}

/// The crate's GEMM kernels that all steps use, if the format has no others. They fuse SwiGLU into the GEMM in all steps or in none, so that a row's bits
/// do not depend on the step.
fn own_products(spec: &ModelSpec, weights: &EngineWeights) -> OwnProducts {
    let is_fused = |w: &BlockParams| w.linear(Matrix::GateUp).lora.is_none();
    let has_silu = spec.layers.iter().all(|block| block.mlp.activation() == Activation::Silu);
    match weights.format().has_own_products() && has_silu && weights.blocks.iter().all(is_fused) {
        true => OwnProducts::WideAndGateUp,
        false => OwnProducts::None,
    }
}

impl Runner for GpuRunner<'_> {
    fn lag(&self) -> usize {
        self.line.as_ref().map_or(1, StageLine::lag)
    }

    fn launch(&mut self, step: &Step, draws: &[Draw], sequences: &[EngineSequence]) -> Result<()> {
        let drafted = std::mem::take(&mut self.drafted);
        let packing = self.packing((step, draws, sequences), &drafted);
        self.pending.resize(sequences.len(), 0);
        self.ranks.all.epoch()?; // a captured graph does not notice that a communicator has ended
        self.state.upload_masks(draws, self.spec.vocab_size, &*self.ranks.all)?;
        let num_tokens = step.num_tokens();
        self.tick(Some(if step.is_decode { self.bucket(&packing) } else { num_tokens }))?;
        no_grad(|| if step.is_decode { self.decode(&packing) } else { self.prefill(&packing) })?;
        let buffers = self.state.buffers.as_ref().expect("the engine is awake");
        let (tick, first) = match (&mut self.line, &self.state.tokens) {
            (Some(line), Some(tokens)) => line.computed(&self.state.stream, tokens)?,
            _ => {
                self.state.downloads[self.num_launched % 2].download(&buffers.sampled)?;
                (0, 0)
            }
        };
        let sampled = step.runs.iter().filter(|run| !run.samples.is_empty());
        // For a run with draft tokens, the next step uses what the host knows by then.
        let samples = sampled.flat_map(|run| {
            let first = run.tokens.end - run.drafts.token_ids.len();
            (first..=run.tokens.end).flat_map(|position| run.samples.clone().map(move |index| (index, position)))
        });
        if let (Some(downloads), Some(experts)) = (&mut self.state.record_downloads, &buffers.experts) {
            downloads[self.num_launched % 2].download(&experts.recorded(num_tokens))?;
        }
        let mut drawn = Vec::with_capacity(draws.len());
        for (row, ((index, position), draw)) in samples.zip(draws).enumerate() {
            self.pending[index] = (first + row) as u32;
            drawn.push(DrawnRow { prompt_id: draw.prompt_id, position, is_draft: !draw.drafts.is_empty() });
        }
        let top = self.top_logprobs(draws)?;
        let of_head = step.runs.iter().filter(|_| step.asks_head && self.head.is_some());
        let drafts = of_head.flat_map(|run| drafted.get(&run.sequence).into_iter().flatten().copied()).collect();
        self.under_way.push_back(StepDraws { drawn, top, num_tokens, drafts, tick });
        self.num_launched += 1;
        Ok(())
    }

    fn take_experts(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.experts)
    }

    fn draft(
        &mut self,
        step: &Step,
        depth: usize,
        draws: &[Draw],
        sequences: &[EngineSequence],
    ) -> Result<Vec<Sampled>> {
        let head = self.head.take().expect("a model with a draft head");
        let outcome = no_grad(|| self.draft_at(&head, (step, draws, sequences), depth));
        self.head = Some(head);
        outcome.map(|()| Vec::new())
    }

    fn take_drafts(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.drafts)
    }

    fn settle(&mut self, stored: &[StoredDrafts]) -> Result<()> {
        no_grad(|| self.take_in(stored))
    }

    fn take_times(&mut self) -> StageTimes {
        self.line.as_mut().map_or_else(StageTimes::default, StageLine::take_times)
    }

    fn collect(&mut self) -> Result<Vec<Sampled>> {
        let StepDraws { drawn, top, num_tokens, drafts, tick } =
            self.under_way.pop_front().expect("a step was launched");
        while self.line.as_ref().is_some_and(|line| !line.is_through(tick)) {
            self.ranks.all.epoch()?;
            self.tick(None)?;
        }
        let parity = (self.num_launched - self.under_way.len() - 1) % 2;
        let all = &*self.ranks.all;
        if let Some(downloads) = &mut self.state.record_downloads {
            let words = downloads[parity].words(&mut || wait(all))?;
            let num_experts = num_tokens * self.spec.routed_experts_per_token();
            self.experts = vec![0; num_experts.next_multiple_of(2)];
            for (pair, word) in self.experts.chunks_exact_mut(2).zip(words) {
                pair.copy_from_slice(&[*word as u16, (*word >> 16) as u16]);
            }
            self.experts.truncate(num_experts);
        }
        let words = match (&mut self.line, &mut self.state.tokens) {
            (Some(line), Some(tokens)) => line.collect(tokens, tick, all)?,
            _ => &*self.state.downloads[parity].words(&mut || wait(all))?,
        };
        let (ids, logprobs) = words.split_at(self.state.shape.seqs);
        self.drafts = drafts.into_iter().map(|place| words[place as usize] as u32).collect();
        let results = drawn.iter().zip(ids.iter().zip(logprobs));
        let sampled = results.map(|(drawn, (&id, &bits))| match u32::try_from(id) {
            Ok(token_id) => Ok(Sampled { token_id, logprob: f32::from_bits(bits as u32), top: Vec::new() }),
            Err(_) if drawn.is_draft => Ok(Sampled::not_finite()),
            Err(_) => Err(non_finite(drawn.prompt_id, drawn.position)),
        });
        let mut sampled = sampled.collect::<Result<Vec<_>>>()?;
        for (draw, top) in top {
            let Sampled { token_id, logprob, top: of_draw } = &mut sampled[draw];
            *of_draw = top;
            // The device and the host sum in different orders: report one log-probability for one token.
            let own = of_draw.iter_mut().filter(|other| other.token_id == *token_id);
            own.for_each(|own| own.logprob = *logprob);
        }
        Ok(sampled)
    }
}
