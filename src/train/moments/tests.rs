//! Compares predicted peaks with peaks measured on GPUs.

use std::sync::Arc;

use tch::Kind;

use super::*;
use crate::config::{RouterReplay, TargetModule};
use crate::model::{Fp8, LoraSpec, ModelSpec, Plain};
use crate::train::WORKSPACE_BYTES;
use GradientCheckpointing::{Full, KeepAttention, None as Nothing, Selective};

const KIND: Kind = Kind::BFloat16;

/// Runs of `bench train`, and the peak memory of libtorch in GB (docs/benchmarks/training-memory.md, docs/benchmarks/delta-nets.md,
/// docs/long-contexts.md).
struct Measured {
    model: &'static str,
    ranks: usize,
    stage: u8,
    adapters: Option<Quantization>,
    keep: Option<GradientCheckpointing>, // None: only scores
    tokens: &'static [(usize, usize)],   // of each micro-batch: all and scored tokens
    shares_prompts: bool,
    residual: Kind,
    format: &'static dyn Format,
    layers: Option<usize>, // None: all layers
    sharers: usize,        // ranks that share micro-batches
    gb: f64,
}

impl Measured {
    fn predicted_gb(&self) -> f64 {
        let spec = ModelSpec::preset(self.model).unwrap();
        let num_layers = self.layers.unwrap_or(spec.num_layers());
        let spec = Arc::new(spec.with_num_layers(num_layers));
        let table = ParamTable::new(spec, self.ranks);
        let targets = TargetModule::ALL.to_vec();
        let model = TrainedModel {
            lora: self.adapters.map(|_| LoraSpec { r: 64, alpha: 32.0, dropout: 0.0, targets }),
            quantization: self.adapters.unwrap_or(Quantization::None),
            residual: self.residual,
            format: self.format,
            sharers: self.sharers,
            ..TrainedModel::whole(&table, self.stage, KIND, GradientOptions::default())
        };
        let shape = |&(tokens, scored_tokens): &(usize, usize)| MicroBatchShape {
            tokens,
            scored_tokens,
            num_sequences: tokens.div_ceil(4096),
            shares_prompts: self.shares_prompts,
            num_top: 0,
        };
        let shapes: Vec<_> = self.tokens.iter().map(shape).collect();
        let fullest = match self.keep {
            None => model.fullest_of_scores(shapes[0]),
            Some(keep) => model.fullest(&UpdateCourse { keep, micro_batches: &shapes, is_warm: true, streams: false }),
        };
        (model.bytes().weights + fullest.total() + WORKSPACE_BYTES) as f64 / 1e9
    }
}

#[test]
fn predicted_memory_peaks_match_gpu_measurements() {
    const ONE: &[(usize, usize)] = &[(16_384, 8_192)];
    const LONG: &[(usize, usize)] = &[(131_072, 65_536)];
    const GROUPS: &[(usize, usize)] = &[(17_408, 16_384); 2];
    const SEPARATE: &[(usize, usize)] = &[(16_896, 11_264), (16_896, 11_264), (15_360, 10_240)];
    let row = |model, ranks, stage, keep, tokens, gb| Measured {
        model,
        ranks,
        stage,
        adapters: None,
        keep,
        tokens,
        shares_prompts: false,
        residual: KIND,
        format: &Plain,
        layers: None,
        sharers: 1,
        gb,
    };
    let adapted = |model, quantization, keep, gb| Measured {
        adapters: Some(quantization),
        ..row(model, 1, 2, Some(keep), ONE, gb)
    };
    let shared = |row| Measured { shares_prompts: true, ..row };
    let of_float32 = |row| Measured { residual: Kind::Float, ..row };
    let rows = [
        row("qwen2.5-1.5b", 1, 2, Some(Nothing), ONE, 32.65),
        row("qwen2.5-1.5b", 1, 2, Some(Selective), ONE, 16.79),
        row("qwen2.5-1.5b", 1, 2, Some(Full), ONE, 12.24),
        row("qwen2.5-0.5b", 1, 2, Some(Nothing), ONE, 14.24),
        row("qwen2.5-0.5b", 1, 2, Some(Full), &[(8_192, 4_096); 2], 3.86),
        shared(row("qwen2.5-1.5b", 1, 2, Some(Nothing), GROUPS, 34.15)),
        row("qwen2.5-1.5b", 1, 2, Some(Nothing), SEPARATE, 33.39),
        shared(row("qwen2.5-7b", 2, 2, Some(Selective), GROUPS, 51.70)),
        row("qwen2.5-7b", 2, 2, Some(Selective), SEPARATE, 51.15),
        row("qwen2.5-7b", 2, 3, Some(Full), ONE, 27.13),
        row("qwen2.5-7b", 1, 2, None, ONE, 17.77),
        adapted("qwen2.5-1.5b", Quantization::None, Selective, 11.08),
        adapted("qwen2.5-7b", Quantization::None, Full, 22.81),
        adapted("qwen2.5-7b", Quantization::None, Nothing, 66.80),
        adapted("qwen2.5-7b", Quantization::Nf4, Full, 13.62),
        adapted("qwen2.5-14b", Quantization::None, Full, 42.27),
        of_float32(row("qwen2.5-1.5b", 1, 2, Some(Nothing), ONE, 35.51)),
        of_float32(row("qwen2.5-1.5b", 1, 2, Some(Full), ONE, 13.75)),
        of_float32(adapted("qwen2.5-1.5b", Quantization::None, Selective, 13.95)),
        Measured { layers: Some(8), ..row("qwen2.5-7b", 1, 2, Some(Nothing), ONE, 33.35) },
        Measured { layers: Some(8), format: &Fp8::ROWS, ..row("qwen2.5-7b", 1, 2, Some(Nothing), ONE, 33.97) },
        Measured { layers: Some(4), ..row("qwen3-30b-a3b", 1, 2, Some(Nothing), &[(16_384, 16_384)], 24.91) },
        Measured { layers: Some(8), ..row("qwen3.5-9b", 1, 2, Some(Nothing), ONE, 37.01) },
        Measured { layers: Some(4), ..row("qwen3.5-9b", 1, 2, Some(Nothing), ONE, 25.23) },
        // The peak is at the last block, which has attention, while the head's gradients are reduced.
        Measured { sharers: 2, ..row("qwen3.5-9b", 2, 3, Some(KeepAttention), LONG, 49.07) },
        Measured { sharers: 2, ..row("qwen2.5-7b", 2, 3, Some(KeepAttention), LONG, 51.786) },
        Measured { sharers: 2, layers: Some(14), ..row("qwen2.5-7b", 2, 3, Some(Full), LONG, 29.063) },
    ];
    for row in rows {
        let (predicted, Measured { model, ranks, stage, adapters, keep, gb, .. }) = (row.predicted_gb(), &row);
        let off = predicted / gb - 1.0;
        println!("{model}, {ranks} ranks, stage {stage}, {adapters:?}, {keep:?}: {predicted:.2}, measured {gb:.2}");
        assert!(off.abs() < 0.01, "{model}, {ranks} ranks, {stage}, {adapters:?}, {keep:?}: {predicted}, not {gb}");
    }
}

/// Four layers of Qwen3.5-9B with gated delta nets last, whose backward is the peak, over 65,536 tokens in sequences of one length; GB as measured
/// (docs/benchmarks/delta-nets.md). Sequences of whole chunks have no padding, where half a chunk is planned for each.
#[test]
fn predicted_peaks_of_delta_nets_follow_the_number_of_sequences() {
    let mut spec = ModelSpec::preset("qwen3.5-9b").unwrap().with_num_layers(4);
    spec.layers.rotate_right(1);
    let table = ParamTable::new(Arc::new(spec), 1);
    let model = TrainedModel::whole(&table, 2, KIND, GradientOptions::default());
    for (num_sequences, gb, most_off) in [(1, 31.486, 0.001), (16, 31.519, 0.002), (256, 32.021, 0.018)] {
        let (tokens, scored_tokens) = (65_536, 32_768);
        let shape = MicroBatchShape { tokens, scored_tokens, num_sequences, shares_prompts: false, num_top: 0 };
        let course = UpdateCourse { keep: Full, micro_batches: &[shape], is_warm: true, streams: false };
        let bytes = model.bytes().weights + model.fullest(&course).total() + WORKSPACE_BYTES;
        let (predicted, off) = (bytes as f64 / 1e9, bytes as f64 / 1e9 / gb - 1.0);
        println!("{num_sequences} sequences: {predicted:.3}, measured {gb:.3}");
        assert!((-0.001..most_off).contains(&off), "{num_sequences} sequences: {predicted}, not {gb}");
    }
}

/// The block of an update equals the peak of its largest micro-batch less the memory of collectives. It has one size for all micro-batches that round
/// up to the same number of tokens.
#[test]
fn the_reserved_block_holds_the_largest_micro_batch() {
    let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 4);
    let of_stage = |stage| TrainedModel::whole(&table, stage, KIND, GradientOptions::default());
    let shape = |tokens| MicroBatchShape {
        tokens,
        scored_tokens: tokens / 2,
        num_sequences: 4,
        shares_prompts: false,
        num_top: 0,
    };
    let block = |stage, tokens: &[usize]| {
        let micro_batches: Vec<_> = tokens.iter().map(|&tokens| shape(tokens)).collect();
        let course = UpdateCourse { keep: Nothing, micro_batches: &micro_batches, is_warm: true, streams: false };
        of_stage(stage).block_bytes(&course, 16_384)
    };
    let sizes = [[16_384, 16_384], [15_500, 700], [3_000, 16_000]].map(|tokens| block(2, &tokens));
    assert!(sizes.iter().all(|&size| size == sizes[0]), "{sizes:?}");
    assert!(block(2, &[15_000, 700]) < sizes[0] && block(2, &[20_000]) > sizes[0]);

    let full = [MicroBatchShape { scored_tokens: 16_384, ..shape(16_384) }; 2];
    let course = UpdateCourse { keep: Nothing, micro_batches: &full, is_warm: false, streams: false };
    let model = of_stage(2);
    let (fullest, slices) = (model.fullest(&course).total(), model.bytes().gradients);
    let ratio = sizes[0] as f64 / (fullest - slices) as f64;
    assert!((ratio - 1.0 - BLOCK_MARGIN).abs() < 1e-6, "{ratio}: slices lie in memory of the collectives' stream");
    assert!(block(1, &[16_384, 16_384]) > sizes[0] + slices, "kept whole, gradients lie in the block");
}

/// A streamed step of 24 layers of Qwen3-30B-A3B, with 32 groups of 8, on one GPU. 110.9 GB were measured while the block counted as a tensor when it
/// was taken.
#[test]
fn the_reserved_block_with_weights_matches_measurements() {
    let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap().with_num_layers(24);
    let table = ParamTable::new(Arc::new(spec), 1);
    let model = TrainedModel::whole(&table, 2, KIND, GradientOptions::default());
    let shape =
        MicroBatchShape { tokens: 8_704, scored_tokens: 8_192, num_sequences: 9, shares_prompts: true, num_top: 0 };
    let course = UpdateCourse { keep: Nothing, micro_batches: &[shape; 32], is_warm: false, streams: true };
    let held = |beside: usize| (model.bytes().weights + beside + WORKSPACE_BYTES) as f64 / 1e9;
    let (tensors, block) = (model.fullest(&course).total(), model.block_bytes(&course, 16_384));
    let recorded = model.recorded_bytes(RouterReplay::R3, 32 * 8_704);
    let (planned, measured) = (held(tensors), held(block + recorded));
    assert!((planned - 107.6).abs() < 0.05 && (measured - 110.9).abs() < 0.1, "{planned}, {measured}");
}

/// Gradients grow while activations shrink. With one micro-batch the peak is below the sum of both maxima; with two it is not.
#[test]
fn memory_classes_may_peak_at_different_moments() {
    let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 2);
    let model = TrainedModel::whole(&table, 3, KIND, GradientOptions::default());
    let shape =
        MicroBatchShape { tokens: 16_384, scored_tokens: 8_192, num_sequences: 4, shares_prompts: false, num_top: 0 };
    let fullest = |keep, count| {
        let micro_batches = &[shape; 2][..count];
        model.fullest(&UpdateCourse { keep, micro_batches, is_warm: false, streams: false })
    };
    for keep in [Nothing, Selective, Full] {
        let (one, two) = (fullest(keep, 1), fullest(keep, 2));
        assert!(one.total() < two.total() && two.gradients > model.bytes().gradients, "{one:?} {two:?}");
    }
    let (early, late) = (fullest(Nothing, 1), fullest(Full, 1));
    assert!(early.activations > late.activations && early.gradients < late.gradients, "{early:?} {late:?}");
    let step = UpdateCourse { keep: Full, micro_batches: &[], is_warm: false, streams: true };
    assert_eq!(model.fullest(&step).buckets, model.bytes().optimizer_buckets);
}
