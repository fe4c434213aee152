//! The generation engine. It persists over the run and sleeps between rollouts. Every rank of an engine runs the same scheduler on the same requests,
//! so no rank leads.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use tch::{Device, Kind};

use super::copy::WeightCopy;
use super::gpu::GpuState;
use super::kept::KeptSequences;
use super::kv_cache::{KvCache, check_kv_cache, kv_block_bytes};
use super::options::EngineOptions;
use super::speculation::{DraftInjection, Speculator};
use super::stages::EngineRanks;
use super::state_pages::{SequenceMemory, StatePages};
use super::stats::{DraftCounts, EngineStats, StageTimes};
use super::stop::CompletionLimit;
use super::weights::EngineWeights;
use crate::config::Speculation;
use crate::data::{GrammarCompiler, Tokenizer};
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{Format, ModelSpec, Ropes, Stages};
use crate::phase::{self, Phase};
use crate::ranks::Collective;
use crate::types::Place;

/// The part of the model on the pipeline stage whose ranks need the most memory per KV block.
pub fn fullest_stage(spec: &ModelSpec, stages: &Stages) -> ModelSpec {
    let of_stages = stages.iter().map(|stage| spec.of_layers(&stage.layers));
    of_stages.max_by_key(|own| own.cached_elements(1)).unwrap_or_else(|| spec.clone())
}

/// Bytes of this rank's KV cache. With several stages, all get as many blocks as the stage with the largest blocks can hold.
fn own_cache_bytes(spec: &ModelSpec, ranks: &EngineRanks, options: &EngineOptions) -> Result<usize> {
    if ranks.stages.count() == 1 {
        return Ok(options.kv_cache_bytes);
    }
    let (tp_size, block_size, kind) = (ranks.tp.size(), options.block_size, options.cache_kind());
    let [own, most] = [spec.of_layers(&ranks.stage().layers), fullest_stage(spec, &ranks.stages)]
        .map(|spec| kv_block_bytes(&spec, tp_size, block_size, kind));
    if options.kv_cache_bytes < most {
        let expected =
            format!("at least {most}, the size of one block of {block_size} tokens on the stage with the most layers");
        return Err(Error::invalid_value("kv_cache_bytes", options.kv_cache_bytes, expected));
    }
    Ok(options.kv_cache_bytes / most * own)
}

/// One rank of an engine. While asleep it holds addresses but no memory, unless it is configured to keep memory.
#[derive(Debug)]
pub struct Engine {
    pub(super) spec: Arc<ModelSpec>,
    /// The model restricted to the layers of this rank's stage.
    pub(super) own: Arc<ModelSpec>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) grammars: Arc<GrammarCompiler>,
    pub(super) options: EngineOptions,
    pub(super) ranks: EngineRanks,
    pub(super) ropes: Ropes,
    pub(super) eos_token_ids: Vec<u32>,
    pub(super) completion_limit: Option<CompletionLimit>,
    pub(super) gpu: Option<GpuState>,
    /// The quantized copy of the matrices, for a quantized format.
    pub(super) copy: Option<WeightCopy>,
    pub(super) kv_cache: KvCache,
    /// State pages, if the model has gated delta nets.
    pub(super) states: Option<StatePages>,
    pub(super) keeps_memory: bool, // also while asleep
    pub(super) keeps_sequences: bool,
    /// Number of KV blocks since the last wake.
    pub(super) num_blocks: Option<usize>,
    /// Unfinished sequences whose keys and values are still in the cache.
    pub(super) kept: KeptSequences,
    /// Acceptance statistics of draft tokens from earlier sessions.
    pub(super) speculator: Option<Speculator>,
    /// Computing and waiting times of this rank's stage since they were last read.
    stage_times: Cell<StageTimes>,
    /// Draft token counts of all sessions since they were last read.
    draft_counts: Cell<DraftCounts>,
}

impl Engine {
    /// Creates an engine whose tensor-parallel group holds all layers; otherwise like [`Engine::in_stages`].
    ///
    /// # Errors
    /// The errors of [`Engine::in_stages`].
    pub fn new(
        spec: Arc<ModelSpec>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
        tp: Arc<dyn Collective>,
    ) -> Result<Self> {
        let ranks = EngineRanks::of_one_stage(&spec, tp);
        Self::in_stages(spec, tokenizer, options, ranks)
    }

    /// Creates an engine with pipeline stages. Reserves addresses and, on a GPU, allocates the permanent buffers. Not collective.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for sizes too small for one block, sequence or token, for a tensor-parallel degree that does not divide the model, and
    /// for options that exclude each other.
    pub fn in_stages(
        spec: Arc<ModelSpec>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
        ranks: EngineRanks,
    ) -> Result<Self> {
        let tp = &ranks.tp;
        options.check(&spec, &ranks)?;
        spec.validate_tp(tp.size())?;
        if options.device.is_cuda() {
            spec.validate_gpu(options.kind, Some(tp.size()), Path::new(""))?;
        }
        let least = [
            ("kv_block_size", options.block_size, 1),
            ("max_num_seqs", options.max_num_seqs, 1),
            ("max_num_batched_tokens", options.max_num_batched_tokens, 1),
            ("max_model_length", options.max_model_length, 2),
        ];
        if let Some((key, got, least)) = least.into_iter().find(|(_, got, least)| got < least) {
            return Err(Error::invalid_value(key, got, format!("at least {least}")));
        }
        check_kv_cache(options.kv_cache_dtype, options.device)?;
        let own = match ranks.stages.count() {
            1 => spec.clone(),
            _ => Arc::new(spec.of_layers(&ranks.stage().layers)),
        };
        let copy = WeightCopy::reserve(&own, &options, tp.size())?;
        let place = (options.cache_kind(), options.device);
        let bytes = own_cache_bytes(&spec, &ranks, &options)?;
        let kv_cache = KvCache::reserve(&own, tp.size(), options.block_size, bytes, place)?;
        // Reserve whole pages, and use every block that fits in them.
        let options = EngineOptions { kv_cache_bytes: kv_cache.reserved_bytes(), ..options };
        let states = StatePages::reserve(&own, tp.size(), options.max_num_seqs, &options)?;
        let speculator = Speculator::new(options.speculation);
        let ropes = spec.ropes();
        let eos_token_ids = tokenizer.eos_token_ids(&spec.eos_token_ids);
        let grammars = Arc::new(GrammarCompiler::new(tokenizer.clone(), eos_token_ids.clone()));
        let gpu = match options.device {
            Device::Cuda(ordinal) => {
                Some(GpuState::new(&own, &options, &ropes, (tp.as_ref(), ranks.stages.count()), ordinal)?)
            }
            _ => None,
        };
        Ok(Self {
            spec,
            own,
            tokenizer,
            grammars,
            options,
            ranks,
            ropes,
            eos_token_ids,
            completion_limit: None,
            gpu,
            copy,
            kv_cache,
            states,
            keeps_memory: false,
            keeps_sequences: false,
            num_blocks: None,
            kept: KeptSequences::default(),
            speculator,
            stage_times: Cell::default(),
            draft_counts: Cell::default(),
        })
    }

    /// The ranks that share this engine, and their layers.
    pub fn ranks(&self) -> &EngineRanks {
        &self.ranks
    }

    /// The format of the blocks' GEMMs.
    pub fn format(&self) -> &'static dyn Format {
        self.options.quantization.format()
    }

    /// Dtype of weights and activations.
    pub fn kind(&self) -> Kind {
        self.options.kind
    }

    /// Returns how long this rank computed and waited for other stages since the last call. Zero with a single stage.
    pub(crate) fn take_stage_times(&self) -> StageTimes {
        self.stage_times.take()
    }

    /// Returns the draft token counts since the last call.
    pub(crate) fn take_draft_counts(&self) -> DraftCounts {
        self.draft_counts.take()
    }

    /// Keeps the engine's memory mapped during sleep.
    pub fn keeping_memory(self) -> Self {
        Self { keeps_memory: true, ..self }
    }

    /// Keeps the memory mapped during sleep, with the keys, values and states of unfinished sequences. A later rollout continues from them, although
    /// older weights computed them.
    pub fn keeping_sequences(self) -> Self {
        Self { keeps_sequences: true, ..self.keeping_memory() }
    }

    /// Sets a further limit on completions of all requests from now on, in addition to the limits of each request. All ranks of the engine must call
    /// this.
    pub fn limit_completions(&mut self, limit: CompletionLimit) {
        self.completion_limit = Some(limit);
    }

    /// Takes draft tokens from `injection` from now on, if speculative decoding is on. All ranks of the engine must call this.
    pub fn inject_drafts(&mut self, injection: DraftInjection) {
        if let Some(speculator) = &mut self.speculator {
            speculator.inject(injection);
        }
    }

    /// Changes where draft tokens come from, and forgets what was measured of the source before. The engine must have been created for the draft head
    /// if `method` uses it, and for draft tokens if it makes any. All ranks of the engine must call this.
    pub(crate) fn set_speculation(&mut self, method: Speculation) {
        self.options.speculation.method = method;
        self.speculator = Speculator::new(self.options.speculation);
    }

    /// Drops all sequences that are kept in the cache. Call this when the weights changed by more than training.
    pub fn drop_kept(&mut self) {
        self.kept = KeptSequences::default();
    }

    /// Maps the KV cache and holds this rank's weights for the lifetime of the result; dropping the result puts the engine to sleep. Collective over
    /// the engine's ranks, which use the smallest number of blocks that any rank could map.
    ///
    /// # Errors
    /// [`Error::StaleWeights`] unless the weights have `policy_version`; [`Error::OutOfMemory`] if not even a cache for the longest sequence can be
    /// mapped; an error kept from the last sleep.
    pub fn wake<'a>(&'a mut self, mut weights: EngineWeights<'a>, policy_version: u64) -> Result<RolloutEngine<'a>> {
        let EngineRanks { tp, .. } = &self.ranks;
        if self.options.exact {
            weights.multiply_exactly()?;
        }
        weights.check(&self.spec, &self.ranks.stage(), Place { rank: tp.rank(), size: tp.size() }, policy_version)?;
        // From here on an error drops `rollout`, which sleeps.
        let mut rollout = RolloutEngine { engine: self, weights, stats: EngineStats::default(), progress: None };
        if let Some(copy) = &mut rollout.engine.copy {
            copy.fill(&mut rollout.weights)?;
        }
        rollout.open_kv_cache()?;
        Ok(rollout)
    }

    /// Wakes with weights of `version`, runs `work` and sleeps again; the time of each is recorded under its phase. Collective over the engine's
    /// ranks. On failure `work` must broadcast its error before it returns: sleeping synchronises the device and could deadlock on a collective that
    /// peers never joined.
    ///
    /// # Errors
    /// The errors of [`Engine::wake`] and of `work`.
    pub fn awake<'a, R>(
        &'a mut self,
        weights: EngineWeights<'a>,
        version: u64,
        work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut rollout = phase::scope(Phase::Wake, || self.wake(weights, version))?;
        let outcome = phase::scope(Phase::Generate, || work(&mut rollout));
        phase::scope(Phase::Sleep, || {
            drop(rollout);
            outcome
        })
    }

    /// Bytes that waking has to map for the KV cache, the states, the buffers and the weight copy. The cache counts as 0 while it holds sequences,
    /// because in a larger cache their blocks would be at other addresses.
    pub fn absent_bytes(&self) -> usize {
        let kv_cache = if self.kept.is_empty() { self.kv_cache.absent_bytes() } else { 0 };
        let copy = self.copy.as_ref().map_or(0, WeightCopy::absent_bytes);
        let states = self.states.as_ref().map_or(0, StatePages::absent_bytes);
        kv_cache + copy + states + self.gpu.as_ref().map_or(0, GpuState::absent_bytes)
    }

    /// Physical memory of the KV cache now, in bytes. Nearly 0 while the engine sleeps, unless it keeps sequences.
    ///
    /// # Errors
    /// The errors of [`Arena::resident_bytes`](crate::memory::Arena::resident_bytes).
    pub fn resident_bytes(&self) -> Result<usize> {
        self.kv_cache.resident_bytes()
    }
}

pub(super) type ProgressCallback<'a> = Box<dyn FnMut(&EngineStats) + 'a>;

/// An engine that is awake. It exists only inside `with_rollout`.
///
/// ```no_run
/// use colo_grpo::{Result, Trainer};
///
/// /// Samples a batch of prompts, which nothing is learned from.
/// fn sample(trainer: &mut Trainer) -> Result<()> {
///     let (prompts, params) = (trainer.next_prompts()?, trainer.sampling_params());
///     let groups = trainer.with_rollout(|engine| engine.generate(&prompts, &params, |_| ()))?;
///     groups.iter().flat_map(|group| &group.completions).for_each(|completion| println!("{}", completion.text));
///     Ok(())
/// }
/// ```
pub struct RolloutEngine<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) weights: EngineWeights<'a>,
    pub(super) stats: EngineStats,
    pub(super) progress: Option<ProgressCallback<'a>>,
}

impl std::fmt::Debug for RolloutEngine<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RolloutEngine").field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl<'a> RolloutEngine<'a> {
    /// The compiler for [`SamplingParams::structure`](crate::types::SamplingParams), as this engine uses it.
    pub(crate) fn grammars(&self) -> Arc<GrammarCompiler> {
        Arc::clone(&self.engine.grammars)
    }

    /// Token ids that end a completion.
    pub(crate) fn eos_token_ids(&self) -> &[u32] {
        &self.engine.eos_token_ids
    }

    /// Counters since the engine woke.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Calls `progress` after every engine step.
    pub fn on_progress(&mut self, progress: impl FnMut(&EngineStats) + 'a) {
        self.progress = Some(Box::new(progress));
    }

    fn open_kv_cache(&mut self) -> Result<()> {
        let Engine { gpu, kv_cache, kept, ranks, options, num_blocks: held, states, .. } = &mut *self.engine;
        let (all, tp) = (&*ranks.all, &*ranks.tp);
        if let Some(states) = states.as_mut() {
            states.wake()?;
        }
        let num_own = match *held {
            Some(num_blocks) if !kept.is_empty() => num_blocks, // with another number of blocks they would be at other addresses
            _ => kv_cache.map(options.max_model_length, gpu.as_ref().map_or(0, GpuState::absent_bytes))?,
        };
        let num_blocks = kept.agree(num_own, all)?;
        let before = held.replace(num_blocks);
        kv_cache.open(num_blocks)?;
        if let Some(gpu) = gpu {
            gpu.wake(&self.weights, SequenceMemory { kv_cache, states: states.as_ref() }, tp)?;
        }
        memory::release_idle(options.device)?; // memory that the trainer freed, for the engine
        if before.is_none() && all.rank() == 0 {
            tracing::info!("the KV cache has {num_blocks} blocks of {} tokens", options.block_size);
        }
        self.stats.num_blocks = num_blocks;
        Ok(())
    }
}

impl Drop for RolloutEngine<'_> {
    fn drop(&mut self) {
        *self.engine.stage_times.get_mut() += self.stats.stage;
        *self.engine.draft_counts.get_mut() += DraftCounts::of(&self.stats);
        let Engine { gpu, copy, kv_cache, states, keeps_memory: false, .. } = &mut *self.engine else { return };
        if let Some(gpu) = gpu {
            gpu.sleep();
        }
        if let Some(copy) = copy {
            copy.sleep();
        }
        if let Some(states) = states {
            states.sleep();
        }
        kv_cache.sleep();
    }
}
