//! What fits: blocks of the KV cache, tokens of a micro-batch; and what to change where a run does not.

use super::choices::Choices;
use super::classes::of_engine;
use super::{MemoryPlan, PlanInput, human};
use crate::config::{CarriedKv, Config, GradientCheckpointing};
use crate::error::{Error, Result};
use crate::rollout::kv_block_bytes;

/// Share of a CPU's free memory that the KV cache takes at most where its size is left to the plan.
const MAX_KV_SHARE: f64 = 0.5;

impl MemoryPlan {
    /// As many blocks as all sequences at their longest can use, within the share of what the rest leaves; or what the
    /// configuration says.
    pub(super) fn size_kv_cache(&mut self, input: &PlanInput<'_>) -> Result<()> {
        let PlanInput { config, table, kind, .. } = *input;
        let block_bytes = kv_block_bytes(&table.spec, config.tensor_parallel_size, config.kv_block_size, kind);
        // A GPU is the run's alone; a CPU's memory is not, and its pages are taken for good.
        let (taken, share) = match self.room.swap_bytes {
            Some(_) if config.keeps_kv_cache() => (self.peak_bytes(), 1.0),
            Some(_) => (self.sum(|class| class.rollout_bytes), 1.0),
            None => (self.peak_bytes(), MAX_KV_SHARE),
        };
        let free = self.room.available_bytes.saturating_sub(taken) as f64;
        let longest_blocks = self.max_model_length.div_ceil(config.kv_block_size);
        let useful = config.max_num_seqs.saturating_mul(longest_blocks).saturating_mul(block_bytes);
        let affordable = (free * share * config.gpu_memory_utilization) as usize;
        // The least is asked for in any case: `check` says what it lacks.
        let least = longest_blocks * block_bytes;
        let bytes = config.kv_cache_bytes.unwrap_or(useful.min(affordable).max(least));
        self.num_kv_blocks = bytes / block_bytes;
        self.kv_cache_bytes = self.num_kv_blocks * block_bytes;
        if self.num_kv_blocks < longest_blocks {
            return Err(Error::invalid_value(
                "kv_cache_bytes",
                bytes,
                format!(
                    "at least {least} bytes: {longest_blocks} blocks of {} tokens for one sequence of max_model_length {}",
                    config.kv_block_size, self.max_model_length
                ),
            ));
        }
        self.classes.push(of_engine("KV cache", self.kv_cache_bytes, input));
        Ok(())
    }

    /// Most tokens of a micro-batch that fit beside what training holds between uses.
    pub(super) fn largest_micro_batch(&self, choices: Choices, input: &PlanInput<'_>) -> usize {
        let fits = |tokens: usize| self.fits(choices, tokens, input);
        // A whole update in one micro-batch finds no gradients of an earlier one.
        let whole = input.update_tokens().max(1);
        let (mut least, mut most) = if fits(whole) { (whole, 2 * whole) } else { (0, whole) };
        while fits(most) {
            (least, most) = (most, 2 * most);
        }
        while most - least > 1 {
            let middle = least.midpoint(most);
            *(if fits(middle) { &mut least } else { &mut most }) = middle;
        }
        least
    }

    fn fits(&self, choices: Choices, tokens: usize, input: &PlanInput<'_>) -> bool {
        let between_uses = self.train_bytes() - self.fullest.total();
        between_uses + input.fullest(choices, tokens).total() <= self.room.available_bytes
    }

    pub(super) fn check(&self, choices: Choices, input: &PlanInput<'_>) -> Result<()> {
        let swapped = self.sum(|class| class.host_bytes);
        if let Some(host) = self.room.swap_bytes.filter(|host| *host < swapped) {
            let message = format!(
                "residency.optimizer = {} and residency.reference = {} need {} of host memory per rank and {} are \
                 available; set resident",
                self.optimizer.name(),
                self.reference.name(),
                human(swapped),
                human(host)
            );
            return Err(Error::Environment { message });
        }
        let peak = self.peak_bytes();
        if peak <= self.room.available_bytes {
            return Ok(());
        }
        Err(Error::Environment {
            message: format!(
                "this run needs {} per rank and {} are available; {}, or use a smaller model\n{self}",
                human(peak),
                human(self.room.available_bytes),
                self.smallest_change(choices, input)
            ),
        })
    }

    /// The first change with which this run fits, from the one that costs least time; tried, where activations alone change.
    fn smallest_change(&self, choices: Choices, input: &PlanInput<'_>) -> String {
        let config = input.config;
        let change = match self.sum(|class| class.rollout_bytes) > self.room.available_bytes {
            true => self.change_of_rollout(choices, input),
            false => self.change_of_training(choices, input),
        };
        change.unwrap_or_else(|| {
            let stage = config.zero.stage;
            if input.table.shards > 1 && stage < 3 {
                return format!("raise zero.stage from {stage} to {}", stage + 1);
            }
            let lora = if config.lora.r.is_none() { "train adapters alone (lora.r = 16), " } else { "" };
            format!("{lora}use more GPUs or ones with more memory")
        })
    }

    /// The same, where generation does not fit: its cache is too large, or the weights beside it.
    fn change_of_rollout(&self, choices: Choices, input: &PlanInput<'_>) -> Option<String> {
        let (length, cache) = (self.max_model_length, self.kv_cache_bytes);
        if self.sum(|class| class.rollout_bytes) - cache < self.room.available_bytes {
            return Some(format!("lower max_model_length (is {length}) or kv_cache_bytes ({cache})"));
        }
        let tp = self.larger_engine(choices, input)?;
        Some(format!("set tensor_parallel_size = {tp}, which divides the engine's weights"))
    }

    /// The same, where generation fits.
    fn change_of_training(&self, choices: Choices, input: &PlanInput<'_>) -> Option<String> {
        use GradientCheckpointing::{Full, None as Nothing, Selective};
        let (config, keep) = (input.config, self.gradient_checkpointing);
        if config.keeps_kv_cache() {
            let recomputing = Config { carried_kv: CarriedKv::Recompute, ..config.clone() };
            if Self::with(choices, &PlanInput { config: &recomputing, ..*input }).is_ok() {
                return Some("set carried_kv = recompute, with which the KV cache leaves while training".to_owned());
            }
        }
        let more: &[GradientCheckpointing] = match keep {
            Nothing => &[Selective, Full],
            Selective => &[Full],
            Full => &[],
        };
        let kept = |&gradient_checkpointing: &GradientCheckpointing| Choices { gradient_checkpointing, ..choices };
        let tokens = input.micro_batch_tokens();
        if let Some(keep) = more.iter().find(|&keep| self.fits(kept(keep), tokens, input)) {
            return Some(format!("set gradient_checkpointing = {}", keep.name()));
        }
        let tokens = self.largest_micro_batch(kept(&Full), input);
        let recompute = if keep == Full { "" } else { "gradient_checkpointing = full and " };
        let is_enough = tokens > config.max_completion_length;
        is_enough.then(|| format!("set {recompute}max_tokens_per_micro_batch = {tokens}"))
    }

    /// The least number of ranks of one engine with which rollout fits, where it does not: they divide its weights and its cache.
    fn larger_engine(&self, choices: Choices, input: &PlanInput<'_>) -> Option<usize> {
        let PlanInput { config, table, engine_weight_bytes, room, .. } = *input;
        let own = config.tensor_parallel_size;
        let divides = |tp: &usize| table.shards.is_multiple_of(*tp) && table.spec.num_kv_heads.is_multiple_of(*tp);
        (2 * own..=table.shards).step_by(own).filter(divides).find(|&tp| {
            let config = Config { tensor_parallel_size: tp, ..config.clone() };
            let engine_weight_bytes = engine_weight_bytes * own / tp;
            let plan = Self::with(choices, &PlanInput { config: &config, engine_weight_bytes, ..*input });
            plan.is_ok_and(|plan| plan.sum(|class| class.rollout_bytes) <= room.available_bytes)
        })
    }
}
