//! Rates of GPUs, and the shares of them that parts of a step reach. The numbers in [`DECODE`], [`TRAIN`] and [`TRANSITIONS`] were fitted by least
//! squares of logarithms to every other line of `tests/golden/recorded_steps.jsonl`, except those whose comment names a source.

use crate::config::RolloutQuantization;

/// A kind of GPU with measured steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Name on the command line.
    pub name: &'static str,
    /// Name that the driver reports.
    pub driver_name: &'static str,
    /// Free memory of an unused GPU, in GiB.
    pub free_gib: f64,
    /// Measured rate of large bfloat16 GEMMs, in FLOP/s.
    pub product_flop_per_s: f64,
    /// Measured rate of a large copy, in bytes read and written per second.
    pub memory_bytes_per_s: f64,
}

impl Gpu {
    /// All known kinds.
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

    /// The kind with this name or driver name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|gpu| gpu.name == name || gpu.driver_name == name)
    }
}

/// Rates of a decode step.
pub(super) struct DecodeRates {
    /// Rate of reading weights, relative to that of a copy; reading alone can be faster.
    pub weights: f64,
    /// Share of the GPU's GEMM rate.
    pub products: f64,
    /// Speed-up of FP8 GEMMs.
    pub fp8_gain: f64,
    /// Bytes of keys and values read per second. Parts of a prompt are read from the L2 cache, so both GPUs are equally fast.
    pub cache_bytes_per_s: f64,
    /// Time with an FP8 cache relative to a bfloat16 cache.
    pub fp8_cache: f64,
    /// Rate of reading and writing states of delta nets, relative to that of a copy.
    pub states: f64,
    /// Seconds per layer for launches, norms, rotation and small GEMMs.
    pub layer_s: f64,
    /// Seconds per layer for launches with FP8 GEMMs, whose kernels start earlier.
    pub fp8_layer_s: f64,
    /// Seconds per step outside the layers.
    pub step_s: f64,
    /// Bytes that sampling moves per logit.
    pub logit_bytes: f64,
    /// Seconds per layer with experts for router, sums and launches.
    pub experts_s: f64,
    /// Seconds per layer for adapters.
    pub adapters_s: f64,
    /// Seconds per layer and row for adapters.
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
    /// Share of the GEMM rate in prefill: 47,446 tokens/s for 7B in bfloat16, 81,576 in FP8 (generation.md#rates, fp8.md#generation); with experts,
    /// 16,384 tokens of 30B-A3B in 0.39 s (experts.md#generation-on-one-gpu).
    pub(super) fn prefill_share(&self, quantization: RolloutQuantization, has_experts: bool) -> f64 {
        match (has_experts, quantization) {
            (true, _) => 0.3,
            (false, RolloutQuantization::Fp8 | RolloutQuantization::Int8) => 1.33,
            (false, RolloutQuantization::None | RolloutQuantization::Mxfp4) => 0.775,
        }
    }
}

/// Seconds of an all-reduce over a tensor-parallel group.
pub(super) const ALL_REDUCE_S: f64 = 4.33e-6;
/// Additional seconds of the all-reduce per byte of the rows.
pub(super) const ALL_REDUCE_BYTE_S: f64 = 6.11e-12;

/// Rates of training.
pub(super) struct TrainRates {
    /// Share of the GEMM rate that blocks of a very wide model reach.
    pub products: f64,
    /// Width of the residual stream at which half of that share is reached.
    pub narrow: f64,
    /// Share of the GEMM rate that FP8 GEMMs reach.
    pub fp8: f64,
    /// Share of the GEMM rate that experts reach.
    pub experts: f64,
    /// Share of the GEMM rate that the head reaches.
    pub head: f64,
    /// Share of the GEMM rate in attention's forward (training.md#where-a-steps-time-goes).
    pub attention: f64,
    /// Time of attention's backward relative to its forward (same page).
    pub attention_backward: f64,
    /// Elements moved per element of the MLP's width and of the residual stream's width, in forward and backward (same page).
    pub forward_width: f64,
    pub forward_hidden: f64,
    pub backward_width: f64,
    pub backward_hidden: f64,
    /// Bytes moved by a delta net per FLOP of its recurrence, at half of a copy's rate, which its kernels reach (delta-nets.md#training-kernels).
    pub delta_forward_bytes: f64,
    pub delta_backward_bytes: f64,
    /// Share of the recomputable work that full recomputation repeats.
    pub full: f64,
    /// Share of the recomputable work that selective recomputation repeats.
    pub selective: f64,
    /// Time of a pass with adapters relative to one without.
    pub adapters: f64,
    /// Time of adding gradients between micro-batches, relative to the time to move their bytes.
    pub accumulate: f64,
    /// Time of AdamW relative to the time to move its bytes (13.1 and 1.5 ms for 12.3; training.md#where-a-steps-time-goes).
    pub optimizer: f64,
    /// Time of streamed optimizer state relative to its bytes over the host link.
    pub stream: f64,
    /// Seconds of collectives that are not overlapped.
    pub exchange_s: f64,
    /// Seconds per byte of gradients that a rank sends.
    pub exchange_byte_s: f64,
    /// Relative time of gathering weights for ZeRO-3 in a pass.
    pub zero_3: f64,
    /// Additional time of a GRPO step compared with training alone: incomplete micro-batches, losses, waiting for the slowest rank.
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

/// Rates of the transitions between training and generation.
pub(super) struct TransitionRates {
    /// Seconds for mapping the cache and waiting for all ranks.
    pub fixed_s: f64,
    /// Seconds per byte for gathering sharded weights from other ranks.
    pub gather_byte_s: f64,
    /// Bytes per second of pinned copies between host and device, on all GPUs at once (transitions.md#copies-to-and-from-the-host).
    pub host_bytes_per_s: f64,
    /// Seconds for rewards and packing.
    pub rewards_s: f64,
}

pub(super) const TRANSITIONS: TransitionRates =
    TransitionRates { fixed_s: 17.6e-3, gather_byte_s: 1.009e-11, host_bytes_per_s: 48e9, rewards_s: 45e-3 };
