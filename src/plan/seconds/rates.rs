//! Rates of chips, and what parts of a step reach of them. The numbers of [`DECODE`], [`TRAIN`] and [`TRANSITIONS`] were fitted by least
//! squares of logarithms to every other line of `tests/golden/recorded_steps.jsonl`, but for those whose comment has a source.

use crate::config::RolloutQuantization;

/// A kind of GPU whose steps are recorded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Name on the command line.
    pub name: &'static str,
    /// Name that the driver gives.
    pub driver_name: &'static str,
    /// Memory that is free on an unused one, in GiB.
    pub free_gib: f64,
    /// Large bfloat16 products, in floating-point operations a second, as measured.
    pub product_flop_per_s: f64,
    /// A large copy, bytes read and written a second, as measured.
    pub memory_bytes_per_s: f64,
}

impl Gpu {
    /// All that are known.
    pub const ALL: [Self; 2] = [
        Self {
            name: "h100",
            driver_name: "NVIDIA H100 80GB HBM3",
            free_gib: 79.0,
            product_flop_per_s: 798e12,
            memory_bytes_per_s: 2.96e12,
        },
        Self {
            name: "h200",
            driver_name: "NVIDIA H200",
            free_gib: 139.0,
            product_flop_per_s: 798e12,
            memory_bytes_per_s: 4.25e12,
        },
    ];

    /// The one with this name, or with this name of the driver.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|gpu| gpu.name == name || gpu.driver_name == name)
    }
}

/// Rates of a decode step.
pub(super) struct DecodeRates {
    /// Share of a copy's rate at which weights are read: reading alone can be faster.
    pub weights: f64,
    /// Share of the chip's product rate.
    pub products: f64,
    /// How much faster products in FP8 are.
    pub fp8_gain: f64,
    /// Keys and values read a second: parts of a prompt come from the L2, so both chips read as fast.
    pub cache_bytes_per_s: f64,
    /// Time of a cache in FP8 beside one of bfloat16.
    pub fp8_cache: f64,
    /// Share of a copy's rate at which states of delta nets are read and written.
    pub states: f64,
    /// Launches of a layer, and of its norms, rotation and small products.
    pub layer_s: f64,
    /// Launches of a layer whose products are in FP8; those kernels begin earlier.
    pub fp8_layer_s: f64,
    /// Time of a step beside its layers.
    pub step_s: f64,
    /// Bytes that sampling moves for a logit.
    pub logit_bytes: f64,
    /// Router, sums and launches of a layer with experts.
    pub experts_s: f64,
    /// Adapters of a layer.
    pub adapters_s: f64,
    /// Adapters of a layer, for each row.
    pub adapters_row_s: f64,
}

pub(super) const DECODE: DecodeRates = DecodeRates {
    weights: 1.046,
    products: 0.876,
    fp8_gain: 1.434,
    cache_bytes_per_s: 3.603e12,
    fp8_cache: 0.774,
    states: 0.85,
    layer_s: 33.9e-6,
    fp8_layer_s: 21.5e-6,
    step_s: 148.5e-6,
    logit_bytes: 18.46,
    experts_s: 22.4e-6,
    adapters_s: 32.1e-6,
    adapters_row_s: 59.4e-9,
};

impl DecodeRates {
    /// Share of the product rate that prompts run at: 47,446 tokens/s of 7B in bfloat16, 81,576 in FP8 (generation.md#rates, fp8.md#generation);
    /// of experts 16,384 tokens of 30B-A3B in 0.39 s (experts.md#generation-on-one-gpu).
    pub(super) fn prefill_share(&self, quantization: RolloutQuantization, has_experts: bool) -> f64 {
        match (has_experts, quantization) {
            (true, _) => 0.3,
            (false, RolloutQuantization::Fp8) => 1.33,
            (false, RolloutQuantization::None) => 0.775,
        }
    }
}

/// A sum over a tensor-parallel group.
pub(super) const ALL_REDUCE_S: f64 = 4.33e-6;
/// Time of an exchange for each byte of the rows.
pub(super) const ALL_REDUCE_BYTE_S: f64 = 6.11e-12;

/// Rates of training.
pub(super) struct TrainRates {
    /// Share of the product rate that blocks of a very wide model reach.
    pub products: f64,
    /// Width of the residual stream at which half of it is lost.
    pub narrow: f64,
    /// Share of the product rate that products in FP8 reach.
    pub fp8: f64,
    /// Share that experts reach.
    pub experts: f64,
    /// Share that the head reaches.
    pub head: f64,
    /// Share of the product rate of attention's forward (training.md#where-a-steps-time-goes).
    pub attention: f64,
    /// Backward of attention, in multiples of its forward (same page).
    pub attention_backward: f64,
    /// Elements moved for each of the MLP's width, and for each of the residual stream's, forward and backward (the same).
    pub forward_width: f64,
    pub forward_hidden: f64,
    pub backward_width: f64,
    pub backward_hidden: f64,
    /// Bytes of a delta net for each operation of its rule, at the half of a copy's rate that its kernels reach
    /// (delta-nets.md#training-kernels).
    pub delta_forward_bytes: f64,
    pub delta_backward_bytes: f64,
    /// Share of what could be computed again that full and selective recomputation do.
    pub full: f64,
    pub selective: f64,
    /// Time of a pass with adapters beside one without.
    pub adapters: f64,
    /// Gradients added up between micro-batches: share of their bytes' time.
    pub accumulate: f64,
    /// AdamW's time over that of its bytes (13.1 and 1.5 ms of 12.3; training.md#where-a-steps-time-goes).
    pub optimizer: f64,
    /// Streamed state: share of its bytes' time over the host's link.
    pub stream: f64,
    /// Collectives that nothing hides.
    pub exchange_s: f64,
    /// Seconds for each byte of gradients that leaves a rank.
    pub exchange_byte_s: f64,
    /// Gathering weights for ZeRO-3, of a pass.
    pub zero_3: f64,
    /// Time of a GRPO step beyond training alone: micro-batches that are not full, losses, waiting for the slowest rank.
    pub whole_step: f64,
}

pub(super) const TRAIN: TrainRates = TrainRates {
    products: 0.958,
    narrow: 302.4,
    fp8: 1.697,
    experts: 0.545,
    head: 0.706,
    attention: 0.613,
    attention_backward: 2.5 * 0.613 / 0.487,
    forward_width: 3.15,
    forward_hidden: 15.4,
    backward_width: 6.25,
    backward_hidden: 19.6,
    delta_forward_bytes: 0.07,
    delta_backward_bytes: 0.203,
    full: 0.734,
    selective: 1.102,
    adapters: 1.153,
    accumulate: 0.366,
    optimizer: 1.2,
    stream: 0.83,
    exchange_s: 7.83e-3,
    exchange_byte_s: 5.12e-12,
    zero_3: 0.014,
    whole_step: 0.1133,
};

/// Rates of the transitions between the halves.
pub(super) struct TransitionRates {
    /// Mapping the cache and waiting for all ranks.
    pub fixed_s: f64,
    /// Gathering sharded weights, for each byte that comes from other ranks.
    pub gather_byte_s: f64,
    /// A pinned copy between host and device, all GPUs at once (transitions.md#copies-to-and-from-the-host).
    pub host_bytes_per_s: f64,
    /// Rewards and packing.
    pub rewards_s: f64,
}

pub(super) const TRANSITIONS: TransitionRates =
    TransitionRates { fixed_s: 17.6e-3, gather_byte_s: 1.009e-11, host_bytes_per_s: 48e9, rewards_s: 45e-3 };
