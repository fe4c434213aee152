//! Sizes that fit: blocks of the KV cache, tokens of a micro-batch.

use super::advice::LEAST_PROMPT_LENGTH;
use super::choices::{Choices, MAX_KEPT_SHARE};
use super::classes::{ACTIVATIONS, of_engine};
use super::shortage::MemoryShortage;
use super::{MemoryPlan, PlanInput};
use crate::config::Config;
use crate::error::Error;
use crate::rollout::{cache_kind, kv_block_bytes};

/// Maximum share of a CPU's free memory for the KV cache if its size is left to the plan.
const MAX_KV_SHARE: f64 = 0.5;

impl MemoryPlan {
    /// Sizes the KV cache as configured or, by default, with as many blocks as all sequences at their maximum length can use, including those of an
    /// evaluation, within the memory that the other classes leave.
    pub(super) fn size_kv_cache(&mut self, input: &PlanInput<'_>) -> Result<(), MemoryShortage> {
        let PlanInput { config, kind, .. } = *input;
        let block_bytes = kv_block_bytes(
            input.engine_layers,
            config.tensor_parallel_size,
            config.kv_block_size,
            cache_kind(config.kv_cache_dtype, kind),
        );
        // A GPU belongs to the run alone, while training together with libtorch's cache. A CPU's memory does not, and its pages are never released.
        let (available, taken, share) = match self.room.swap_bytes {
            Some(_) if config.keeps_kv_cache() => (self.most_kept(), self.peak_bytes(), 1.0),
            Some(_) => (self.room.available_bytes, self.sum(|class| class.rollout_bytes), 1.0),
            None => (self.room.available_bytes, self.peak_bytes(), MAX_KV_SHARE),
        };
        let free = available.saturating_sub(taken) as f64;
        let longest_blocks = self.longest_blocks();
        let num_seqs = match config.has_held_out() {
            true if config.keeps_kv_cache() => self.num_seqs + config.max_num_seqs, // an evaluation in addition to kept sequences
            true => config.max_num_seqs,
            false => self.num_seqs,
        };
        let useful = num_seqs.saturating_mul(longest_blocks).saturating_mul(block_bytes);
        let affordable = (free * share * config.gpu_memory_utilization) as usize;
        // Request the minimum in any case, so that the error says how much is missing.
        let least = longest_blocks * block_bytes;
        let bytes = config.kv_cache_bytes.unwrap_or(useful.min(affordable).max(least));
        self.num_kv_blocks = bytes / block_bytes;
        self.kv_cache_bytes = self.num_kv_blocks * block_bytes;
        if self.num_kv_blocks < longest_blocks {
            let expected = format!(
                "at least {least} bytes: {longest_blocks} blocks of {} tokens for one sequence of {} tokens \
                 (max_model_length){}",
                config.kv_block_size,
                self.max_model_length,
                self.context_of_cache(config).map_or_else(String::new, |length| format!(", or a context of {length}"))
            );
            return Err(MemoryShortage::Value(Error::invalid_value("kv_cache_bytes", bytes, expected)));
        }
        self.classes.push(of_engine("KV cache", self.kv_cache_bytes, input));
        Ok(())
    }

    /// Number of KV blocks that a generation batch at its maximum length can fill.
    pub(super) fn num_useful_blocks(&self) -> usize {
        self.num_kv_blocks.min(self.num_seqs.saturating_mul(self.longest_blocks()))
    }

    /// The longest context for which the cache holds one sequence, if it has enough space for prompts.
    fn context_of_cache(&self, config: &Config) -> Option<usize> {
        let length = self.num_kv_blocks * self.kv_block_size;
        (length >= config.max_completion_length + LEAST_PROMPT_LENGTH).then_some(length)
    }

    fn longest_blocks(&self) -> usize {
        self.max_model_length.div_ceil(self.kv_block_size)
    }

    /// Maximum tokens of a micro-batch that leave the reserve for libtorch's cache beside the memory held between uses.
    pub(super) fn largest_micro_batch(&self, input: &PlanInput<'_>) -> usize {
        let between_uses = self.train_bytes() - self.fullest.total();
        let others_on_host = self.swapped_bytes() - self.offloaded_bytes();
        let offloaded = |tokens| input.model().offloaded_bytes(self.gradient_checkpointing, tokens);
        let fits = |tokens: usize| {
            between_uses + input.fullest(self.choices(), tokens).total() <= self.most_kept()
                && self.room.swap_bytes.is_none_or(|host| others_on_host + offloaded(tokens) <= host)
        };
        // If the whole update is one micro-batch, there are no gradients from an earlier one.
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

    /// The choices that this plan was made for.
    pub(super) fn choices(&self) -> Choices {
        let Self { optimizer, reference, gradient_checkpointing, .. } = *self;
        Choices { optimizer, reference, gradient_checkpointing }
    }

    /// Whether training leaves the reserve for libtorch's cache.
    pub fn leaves_share(&self) -> bool {
        self.train_bytes() <= self.most_kept()
    }

    fn most_kept(&self) -> usize {
        (self.room.available_bytes as f64 * MAX_KEPT_SHARE) as usize
    }

    /// Whether the available memory is enough for this plan.
    pub(super) fn is_enough(&self) -> bool {
        self.fits_device() && self.room.swap_bytes.is_none_or(|host| self.swapped_bytes() <= host)
    }

    pub(super) fn fits_device(&self) -> bool {
        self.peak_bytes() <= self.room.available_bytes
    }

    /// Bytes of kept activations of one micro-batch that are offloaded to the host.
    pub fn offloaded_bytes(&self) -> usize {
        self.classes.iter().filter(|class| class.class == ACTIVATIONS).map(|class| class.host_bytes).sum()
    }

    /// Bytes on the host.
    pub(super) fn swapped_bytes(&self) -> usize {
        self.sum(|class| class.host_bytes)
    }
}
