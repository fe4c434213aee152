//! The generation engine: persistent, asleep between rollouts. Every rank of an engine runs the same scheduler on the same requests,
//! so nobody drives.

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
use crate::data::{GrammarCompiler, Tokenizer};
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{Format, ModelSpec, Ropes, Stages};
use crate::phase::{self, Phase};
use crate::ranks::Collective;
use crate::types::Place;

/// The layers of the stage whose ranks take most memory for a KV block.
pub fn fullest_stage(spec: &ModelSpec, stages: &Stages) -> ModelSpec {
    let of_stages = stages.iter().map(|stage| spec.of_layers(&stage.layers));
    of_stages.max_by_key(|own| own.cached_elements(1)).unwrap_or_else(|| spec.clone())
}

/// Bytes of a rank's KV cache, of several stages so many that all have as many blocks as the one with the largest.
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

/// One rank of an engine. Asleep it holds addresses, and no memory unless it keeps it.
#[derive(Debug)]
pub struct Engine {
    pub(super) spec: Arc<ModelSpec>,
    /// The model with the layers of this rank's stage alone.
    pub(super) own: Arc<ModelSpec>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) grammars: Arc<GrammarCompiler>,
    pub(super) options: EngineOptions,
    pub(super) ranks: EngineRanks,
    pub(super) ropes: Ropes,
    pub(super) eos_token_ids: Vec<u32>,
    pub(super) completion_limit: Option<CompletionLimit>,
    pub(super) gpu: Option<GpuState>,
    /// The matrices in a format that rounds.
    pub(super) copy: Option<WeightCopy>,
    pub(super) kv_cache: KvCache,
    /// Pages of states, where the model has gated delta nets.
    pub(super) states: Option<StatePages>,
    pub(super) keeps_memory: bool, // asleep, too
    pub(super) keeps_sequences: bool,
    /// KV blocks since the last wake.
    pub(super) num_blocks: Option<usize>,
    /// In them, sequences to go on with.
    pub(super) kept: KeptSequences,
    /// What earlier sessions have learned of drafts.
    pub(super) speculator: Option<Speculator>,
    /// Times of this rank's stage in the steps since they were taken last.
    stage_times: Cell<StageTimes>,
    /// Draft tokens of sessions since they were taken last.
    draft_counts: Cell<DraftCounts>,
}

impl Engine {
    /// An engine whose tensor-parallel group has all layers, as [`Engine::in_stages`] makes it.
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

    /// Reserves addresses, and on a GPU allocates what stays. Not collective.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a size that leaves no room for a block, a sequence or a token, a tensor-parallel
    /// degree that the model cannot be split by, and options that do not go together.
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
        // Reserved in whole pages, of which every block is used.
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

    /// The ranks that it is shared by, and their layers.
    pub fn ranks(&self) -> &EngineRanks {
        &self.ranks
    }

    /// The format in which blocks' matrices are multiplied.
    pub fn format(&self) -> &'static dyn Format {
        self.options.quantization.format()
    }

    /// Type of weights and activations.
    pub fn kind(&self) -> Kind {
        self.options.kind
    }

    /// How long this rank computed and waited for other stages since the last call; nothing without several stages.
    pub(crate) fn take_stage_times(&self) -> StageTimes {
        self.stage_times.take()
    }

    /// What became of draft tokens since the last call.
    pub(crate) fn take_draft_counts(&self) -> DraftCounts {
        self.draft_counts.take()
    }

    /// Keeps the engine's memory mapped while it sleeps.
    pub fn keeping_memory(self) -> Self {
        Self { keeps_memory: true, ..self }
    }

    /// Keeps the memory mapped, and in it keys, values and states of sequences that a rollout leaves unfinished: a later one
    /// goes on from them, as the weights computed them that sampled the tokens.
    pub fn keeping_sequences(self) -> Self {
        Self { keeps_sequences: true, ..self.keeping_memory() }
    }

    /// Bounds the completions of all requests from now on, beside the limits of the requests. Every rank of the engine makes the call.
    pub fn limit_completions(&mut self, limit: CompletionLimit) {
        self.completion_limit = Some(limit);
    }

    /// Takes drafts from `injection` from now on, where the engine drafts. Every rank of the engine makes the call.
    pub fn inject_drafts(&mut self, injection: DraftInjection) {
        if let Some(speculator) = &mut self.speculator {
            speculator.inject(injection);
        }
    }

    /// Drops all sequences that are kept in the cache: the weights changed by more than training.
    pub fn drop_kept(&mut self) {
        self.kept = KeptSequences::default();
    }

    /// Maps the KV cache and takes this rank's weights for as long as the result lives; dropping that puts the engine to
    /// sleep. Collective over the engine's ranks, which agree on the smallest number of blocks.
    ///
    /// # Errors
    /// [`Error::StaleWeights`] unless the weights have `policy_version`; [`Error::OutOfMemory`] if not even a
    /// cache for the longest sequence can be mapped; an error that the last sleep kept.
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

    /// Wakes with weights of `version`, runs `work` and sleeps again, each booked to its phase. Collective over the engine's
    /// ranks. Sleeping waits for the device, which a collective may hold that peers have not come to: `work` posts its failure first.
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

    /// Memory that the KV cache, states, the buffers and the copy of weights take when the engine wakes; none for the cache while it holds sequences,
    /// whose blocks would lie elsewhere in a larger one.
    pub fn absent_bytes(&self) -> usize {
        let kv_cache = if self.kept.is_empty() { self.kv_cache.absent_bytes() } else { 0 };
        let copy = self.copy.as_ref().map_or(0, WeightCopy::absent_bytes);
        let states = self.states.as_ref().map_or(0, StatePages::absent_bytes);
        kv_cache + copy + states + self.gpu.as_ref().map_or(0, GpuState::absent_bytes)
    }

    /// Physical memory behind the KV cache now; next to nothing while the engine sleeps, unless it keeps sequences.
    ///
    /// # Errors
    /// The errors of [`Arena::resident_bytes`](crate::memory::Arena::resident_bytes).
    pub fn resident_bytes(&self) -> Result<usize> {
        self.kv_cache.resident_bytes()
    }
}

pub(super) type ProgressCallback<'a> = Box<dyn FnMut(&EngineStats) + 'a>;

/// An engine that is awake. It lives inside `with_rollout` and ends with it.
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
    /// Compiles what [`SamplingParams::structure`](crate::types::SamplingParams) asks for, as the engine does.
    pub(crate) fn grammars(&self) -> Arc<GrammarCompiler> {
        Arc::clone(&self.engine.grammars)
    }

    /// Ids that end a completion.
    pub(crate) fn eos_token_ids(&self) -> &[u32] {
        &self.engine.eos_token_ids
    }

    /// Counts since waking.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Calls `progress` after every step.
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
            Some(num_blocks) if !kept.is_empty() => num_blocks, // blocks of another number lie elsewhere
            _ => kv_cache.map(options.max_model_length, gpu.as_ref().map_or(0, GpuState::absent_bytes))?,
        };
        let num_blocks = kept.agree(num_own, all)?;
        let before = held.replace(num_blocks);
        kv_cache.open(num_blocks)?;
        if let Some(gpu) = gpu {
            gpu.wake(&self.weights, SequenceMemory { kv_cache, states: states.as_ref() }, tp)?;
        }
        memory::release_idle(options.device)?; // what the trainer gave up and the engine does not need
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
