//! The theoretical minimum time of a step's phases: computation at the rate of large GEMMs, memory traffic at the memory's rate. Collectives, and
//! time between operations, are not included.

use std::collections::BTreeMap;

use tch::{Device, Kind};

use crate::config::{Roles, StateDtype};
use crate::cuda::Rates;
use crate::model::ModelSpec;
use crate::phase::Phase;
use crate::rollout::state_page_bytes;

/// Bytes of an element of weights and cache.
const ELEMENT_BYTES: f64 = 2.0;

/// The work of one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct TheoreticalStep<'a> {
    pub spec: &'a ModelSpec,
    pub prompts: usize,
    pub group: usize,
    pub prompt_len: usize,
    /// Completion length, or its mean if lengths differ.
    pub completion_len: f64,
    pub roles: Roles,
    pub tensor_parallel_size: usize,
    /// Dtype of the states of gated delta nets.
    pub state_dtype: StateDtype,
    /// Number of passes over the batch.
    pub num_iterations: usize,
    /// Tokens run forward and backward on all ranks, in all passes.
    pub trained_tokens: f64,
    /// Number of adapter parameters, if only adapters train.
    pub adapter_params: Option<usize>,
    /// Bytes of device memory that the optimizer step moves per rank.
    pub optimizer_bytes: Option<usize>,
    /// Rates that the GPUs reach.
    pub rates: Rates,
}

impl TheoreticalStep<'_> {
    /// Minimum seconds by phase, without recomputation. Generation is left out if completions differ in length.
    pub fn floors(&self, lengths_differ: bool) -> BTreeMap<Phase, f64> {
        let generate = (!lengths_differ).then(|| self.generate_s());
        let optimizer = self.optimizer_bytes.map(|bytes| bytes as f64 / self.rates.memory_bytes_per_s);
        let floors = [
            (Phase::Generate, generate),
            (Phase::ForwardBackward, Some(self.forward_backward_s())),
            (Phase::Optimizer, optimizer),
        ];
        floors.into_iter().filter_map(|(phase, seconds)| Some((phase, seconds?))).collect()
    }

    /// Minimum seconds of generation: prefill of each prompt once per group, then decode steps. A step reads all weights (for experts, those that are
    /// hit if routers choose uniformly), or computes with them if that takes longer, and reads the cache, with a prompt's part once per group.
    fn generate_s(&self) -> f64 {
        let Self { spec, tensor_parallel_size: tp, rates, .. } = *self;
        let num_engines = self.roles.num_generators / tp;
        let groups = (self.prompts as f64 / num_engines as f64).ceil();
        let (rows, prompt_tokens) = (groups * self.group as f64, groups * self.prompt_len as f64);
        let product_s = |params: f64, rows: f64| 2.0 * params * rows / rates.product_flop_per_s / tp as f64;
        let (blocks, head) = products(spec);
        let read = blocks + head + spec.num_params_hit(rows) - spec.num_active_params() as f64;
        let weights_s = ELEMENT_BYTES * read / tp as f64 / rates.memory_bytes_per_s;
        let steps = self.completion_len - 1.0; // prefill samples the first token
        let cached_tokens = prompt_tokens + rows * self.completion_len / 2.0; // mean over the steps
        let token_bytes = ELEMENT_BYTES * spec.cached_elements(tp) as f64;
        let cache_s = token_bytes * cached_tokens / rates.memory_bytes_per_s;
        // The state of every sequence in gated delta nets is read and written.
        let state_s = 2.0 * rows * state_page_bytes(spec, tp, Kind::BFloat16, self.state_dtype, Device::Cpu) as f64
            / rates.memory_bytes_per_s;
        let step_s = weights_s.max(product_s(blocks + head, rows)) + cache_s + state_s;
        let rule_s = spec.training_flop_per_token() as f64 / 3.0 * prompt_tokens / rates.product_flop_per_s / tp as f64;
        product_s(blocks, prompt_tokens) + rule_s + steps * step_s
    }

    /// Minimum seconds of forward and backward: GEMMs, the head only for scored tokens, and causal attention. The backward takes twice the forward,
    /// or once with frozen weights.
    fn forward_backward_s(&self) -> f64 {
        let Self { spec, trained_tokens, .. } = *self;
        let (prompt_len, passes) = (self.prompt_len as f64, self.num_iterations as f64);
        let completions = passes * (self.prompts * self.group) as f64;
        let (blocks, head) = products(spec);
        let in_base = blocks * trained_tokens + head * completions * self.completion_len;
        let of_prompts = passes * self.prompts as f64 * prompt_len * prompt_len / 2.0;
        let of_completions = completions * self.completion_len * (prompt_len + self.completion_len / 2.0);
        let attention = spec.training_flop_per_pair() as f64 * (of_prompts + of_completions);
        let flop = match self.adapter_params {
            None => 6.0 * in_base,
            Some(params) => 4.0 * in_base + 6.0 * params as f64 * trained_tokens,
        };
        let rule = spec.training_flop_per_token() as f64 * trained_tokens;
        (flop + attention + rule) / self.rates.product_flop_per_s / self.roles.num_trainers as f64
    }
}

/// Number of weights that a token is multiplied with in the blocks, and in the head.
fn products(spec: &ModelSpec) -> (f64, f64) {
    let head = spec.vocab_size * spec.hidden_size;
    let embedded = if spec.tie_word_embeddings { head } else { 2 * head };
    ((spec.num_active_params() - embedded) as f64, head as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::limits::of_h200;

    /// A step of 32 prompts x 8 completions, with 512 + 1,024 tokens, on H200 GPUs that share an engine; without the optimizer.
    fn of_32_prompts(spec: &ModelSpec, num_gpus: usize) -> TheoreticalStep<'_> {
        TheoreticalStep {
            spec,
            prompts: 32,
            group: 8,
            prompt_len: 512,
            completion_len: 1024.0,
            roles: Roles { num_trainers: num_gpus, num_generators: num_gpus },
            tensor_parallel_size: num_gpus,
            state_dtype: StateDtype::Float32,
            num_iterations: 1,
            trained_tokens: 32.0 * (512.0 + 8.0 * 1024.0),
            adapter_params: None,
            optimizer_bytes: None,
            rates: of_h200().rates,
        }
    }

    /// Computed by hand for 32 prompts x 8 completions, with 512 + 1,024 tokens, on four GPUs: 6.53e9 weights in the blocks, 0.545e9 in the head.
    #[test]
    fn lower_bounds_of_step_time_for_a_7b_model_match_hand_counts() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let work = TheoreticalStep { optimizer_bytes: Some(42_500_000_000), ..of_32_prompts(&spec, 4) };
        let floors = work.floors(false);
        let is_about = |phase, seconds: f64| (floors[&phase] / seconds - 1.0_f64).abs() < 0.02;
        // Prompts 0.067 s; 1,023 steps of 1.135 ms for GEMMs and 0.497 ms for 147,456 tokens of 14,336 bytes in the cache.
        assert!(is_about(Phase::Generate, 1.737), "{floors:?}");
        // Blocks 1.0906e16, head 0.0858e16 and attention 0.0328e16 operations.
        assert!(is_about(Phase::ForwardBackward, 3.786), "{floors:?}");
        assert!(is_about(Phase::Optimizer, 0.010), "{floors:?}");
        assert!(!work.floors(true).contains_key(&Phase::Generate));
        let slower = Rates { product_flop_per_s: 399e12, ..work.rates };
        let on_slower = TheoreticalStep { rates: slower, ..work }.floors(false);
        assert!((on_slower[&Phase::ForwardBackward] / floors[&Phase::ForwardBackward] - 2.0).abs() < 1e-9);
        assert_eq!(on_slower[&Phase::Optimizer], floors[&Phase::Optimizer]);
        let adapters = TheoreticalStep { adapter_params: Some(0), ..work };
        assert!(adapters.floors(false)[&Phase::ForwardBackward] < floors[&Phase::ForwardBackward] * 0.7);
    }

    /// A token of Qwen3-30B-A3B uses 3.35e9 weights; 256 tokens use nearly all of the 61 GB, except the embedding's 0.6 GB.
    #[test]
    fn lower_bound_counts_only_experts_that_some_token_uses() {
        let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap();
        assert_eq!(spec.num_params_hit(1.0), spec.num_active_params() as f64);
        let all = spec.num_params() as f64;
        assert!((spec.num_params_hit(8.0) / all - 0.45).abs() < 0.03, "{} of {all}", spec.num_params_hit(8.0));
        assert!(spec.num_params_hit(256.0) > 0.999_99 * all && spec.num_params_hit(256.0) < all);
        let floor_s = of_32_prompts(&spec, 1).floors(false)[&Phase::Generate] / 1023.0;
        let weights_s = ELEMENT_BYTES * (all - 151_936.0 * 2048.0) / of_h200().rates.memory_bytes_per_s;
        let cache_s = 147_456.0 * 98_304.0 / of_h200().rates.memory_bytes_per_s;
        assert!(
            ((floor_s - cache_s) / weights_s - 1.0).abs() < 0.03,
            "{floor_s}, weights {weights_s}, cache {cache_s}"
        );
    }

    /// Qwen3.5-9B decodes 256 sequences on one GPU. Every step reads and writes, in 24 layers, states of 32 heads of 128 x 128 float32 and three rows
    /// of 8,192 channels, besides reading 16.0 GB of weights.
    #[test]
    fn lower_bound_counts_reads_and_writes_of_delta_net_states() {
        let hybrid = ModelSpec::preset("qwen3.5-9b").unwrap();
        let mixer = crate::model::Mixer::Attention(hybrid.attention());
        let attention_alone = hybrid.clone().map_blocks(|_, block| block.mixer = mixer);
        let floors = |spec| of_32_prompts(spec, 1).floors(false);
        let state_bytes = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2);
        assert_eq!(state_page_bytes(&hybrid, 1, Kind::BFloat16, StateDtype::Float32, Device::Cpu), state_bytes);
        let step_s = floors(&hybrid)[&Phase::Generate] / 1023.0;
        let moved_s = 2.0 * 256.0 * state_bytes as f64 / of_h200().rates.memory_bytes_per_s;
        assert!(moved_s > 5e-3 && step_s > moved_s + 3e-3 && step_s < moved_s + 8e-3, "{step_s} for {moved_s}");
        let rounded = TheoreticalStep { state_dtype: StateDtype::Bfloat16, ..of_32_prompts(&hybrid, 1) }.floors(false);
        let saved_s = step_s - rounded[&Phase::Generate] / 1023.0;
        assert!((saved_s / moved_s - 0.5).abs() < 0.03, "{saved_s} of {moved_s}");
        // 3 x 7 FLOPs for each of 24 x 32 x 128 x 128 elements.
        assert_eq!(hybrid.training_flop_per_token(), 21 * 24 * 32 * 128 * 128);
        assert_eq!(attention_alone.training_flop_per_token(), 0);
    }
}
