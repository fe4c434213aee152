//! Predicted seconds of training: scores, forward, backward and the optimizer step.

use super::rates::{Gpu, TRAIN, TRANSITIONS};
use super::{ELEMENT_BYTES, PlannedStep};
use crate::config::{GradientCheckpointing, MixedPrecision, OptimizerResidency};
use crate::model::Mlp;

/// Seconds of a forward pass over one rank's share, by the limiting resource.
#[derive(Debug, Clone, Copy)]
struct ForwardSeconds {
    products: f64,
    attention: f64,
    elementwise: f64,
}

impl ForwardSeconds {
    fn total(self) -> f64 {
        self.products + self.attention + self.elementwise
    }
}

/// Tokens of one rank's share of a batch.
#[derive(Debug, Clone, Copy)]
struct TokenShare {
    tokens: f64,
    scored: f64,
    /// Number of (query, key) token pairs in attention.
    pairs: f64,
    micro_batches: f64,
}

impl PlannedStep<'_> {
    /// Seconds of all passes over the batch: one for reference scores, one for old log-probabilities if several updates follow, and the updates.
    pub(super) fn update_s(&self, gpu: Gpu) -> f64 {
        let config = self.config;
        let (share, params) = (self.share(), self.spec.num_params() as f64);
        let trains_adapters = config.lora.r.is_some();
        let (forward, product_rate) = self.forward(gpu, share);
        let block_flop = 2.0 * self.block_params() * share.tokens;
        let of_inputs = forward.products;
        let of_weights = match (trains_adapters, config.model.mixed_precision) {
            (true, _) => 0.0,
            (false, MixedPrecision::Fp8All) => forward.products,
            (false, _) => block_flop / product_rate,
        };
        let backward = of_inputs
            + of_weights
            + forward.attention * TRAIN.attention_backward
            + forward.elementwise * self.elementwise_backward();
        let mlp_share = self.mlp_params() / self.block_params();
        let again = match self.keep {
            GradientCheckpointing::Full => TRAIN.full * forward.total(),
            GradientCheckpointing::KeepAttention => TRAIN.full * (forward.total() - forward.attention),
            GradientCheckpointing::Selective => {
                TRAIN.selective * (forward.products * 2.0 / 3.0 * mlp_share + forward.elementwise)
            }
            _ => 0.0,
        };
        let adapters = if trains_adapters { TRAIN.adapters } else { 1.0 };
        let body = adapters * (forward.total() + backward + again);
        let head_rate = gpu.product_flop_per_s * TRAIN.head;
        let head_pass = 2.0 * self.head_params() * share.scored / head_rate;
        let head = head_pass * if trains_adapters { 3.0 } else { 4.0 };
        let accumulated = if trains_adapters { 0.0 } else { (share.micro_batches - 1.0) * 8.0 * params };
        let gathers = if config.zero.stage == 3 && self.roles.num_trainers > 1 { TRAIN.zero_3 * body } else { 0.0 };
        let pass = body + head + gathers + accumulated * TRAIN.accumulate / gpu.memory_bytes_per_s;
        let score = forward.total() + head_pass;
        let passes = config.num_iterations as f64;
        let scores = [config.beta > 0.0, self.updates as f64 * passes > 1.0];
        let num_scores = scores.into_iter().filter(|is_scored| *is_scored).count() as f64;
        let updates = passes * self.updates as f64;
        passes * pass + num_scores * score + updates * self.optimizer_s(gpu)
    }

    /// Tokens that a rank trains on in one pass; a shared prompt counts once per group.
    fn share(&self) -> TokenShare {
        let (trainers, group) = (self.roles.num_trainers as f64, self.group as f64);
        let lengths = self.lengths.completion.quantiles();
        let mean = |of: fn(f64) -> f64| lengths.iter().map(|&length| of(length)).sum::<f64>() / lengths.len() as f64;
        let (completion, squared, prompt) =
            (mean(|length| length), mean(|length| length * length), self.lengths.prompt);
        let groups = self.num_prompts as f64 / trainers;
        let sequences = groups * group;
        let (prompts, unit_tokens, units) = match self.config.share_prompts && self.spec.can_share_prompts() {
            true => (groups, prompt + group * completion, groups),
            false => (sequences, prompt + completion, sequences),
        };
        let a_micro_batch = (self.config.max_tokens_per_micro_batch as f64 / unit_tokens).floor().max(1.0);
        TokenShare {
            tokens: prompts * prompt + sequences * completion,
            scored: sequences * completion,
            pairs: prompts * prompt * prompt / 2.0 + sequences * (completion * prompt + squared / 2.0),
            micro_batches: (units * self.config.num_sharers() as f64 / a_micro_batch).ceil().max(1.0),
        }
    }

    /// Seconds of a forward pass through the blocks, and the bfloat16 GEMM rate there, which is higher for wide models.
    fn forward(&self, gpu: Gpu, share: TokenShare) -> (ForwardSeconds, f64) {
        let rate = match self.has_experts() {
            true => gpu.product_flop_per_s * TRAIN.experts,
            false => gpu.product_flop_per_s * TRAIN.products / (1.0 + TRAIN.narrow / self.spec.hidden_size as f64),
        };
        let own_rate = match self.config.model.mixed_precision {
            MixedPrecision::None => rate,
            _ => gpu.product_flop_per_s * TRAIN.fp8,
        };
        let attention_flop = self.spec.training_flop_per_pair() as f64 / 3.0 * share.pairs;
        let (hidden, width) = (self.spec.hidden_size as f64 * self.spec.num_layers() as f64, self.mlp_width());
        let elements = TRAIN.forward_width * width + TRAIN.forward_hidden * hidden;
        let delta_bytes = self.spec.training_flop_per_token() as f64 / 3.0 * TRAIN.delta_forward_bytes;
        let bytes = share.tokens * (ELEMENT_BYTES * elements + delta_bytes);
        let forward = ForwardSeconds {
            products: 2.0 * self.block_params() * share.tokens / own_rate,
            attention: attention_flop / (gpu.product_flop_per_s * TRAIN.attention),
            elementwise: bytes / gpu.memory_bytes_per_s,
        };
        (forward, rate)
    }

    /// Time of the backward of norms, rotations, activations and delta nets, relative to their forward.
    fn elementwise_backward(&self) -> f64 {
        let (hidden, width) = (self.spec.hidden_size as f64 * self.spec.num_layers() as f64, self.mlp_width());
        let delta = self.spec.training_flop_per_token() as f64 / 3.0;
        let forward = ELEMENT_BYTES * (TRAIN.forward_width * width + TRAIN.forward_hidden * hidden)
            + delta * TRAIN.delta_forward_bytes;
        let backward = ELEMENT_BYTES * (TRAIN.backward_width * width + TRAIN.backward_hidden * hidden)
            + delta * TRAIN.delta_backward_bytes;
        backward / forward
    }

    /// Seconds of the optimizer step: moving its bytes, and the part of exchanging gradients and new weights that is not overlapped.
    fn optimizer_s(&self, gpu: Gpu) -> f64 {
        let trainers = self.roles.num_trainers as f64;
        let own_s = match self.residency {
            OptimizerResidency::Stream => self.state_bytes as f64 * TRAIN.stream / TRANSITIONS.host_bytes_per_s,
            _ => TRAIN.optimizer * self.optimizer_step_bytes as f64 / gpu.memory_bytes_per_s,
        };
        if self.roles.num_trainers == 1 {
            return own_s;
        }
        let trained = if self.config.lora.r.is_some() { 0.0 } else { self.spec.num_params() as f64 };
        own_s + TRAIN.exchange_s + 4.0 * trained * (trainers - 1.0) / trainers * TRAIN.exchange_byte_s
    }

    /// Sum of the MLP widths of all layers; for experts, the width of one expert.
    fn mlp_width(&self) -> f64 {
        let width = |mlp: &Mlp| match mlp {
            Mlp::Dense(dense) => dense.intermediate,
            Mlp::Experts(experts) => experts.router.num_experts_per_tok * experts.expert.intermediate,
        };
        self.spec.layers.iter().map(|block| width(&block.mlp)).sum::<usize>() as f64
    }

    fn mlp_params(&self) -> f64 {
        3.0 * self.spec.hidden_size as f64 * self.mlp_width()
    }
}
