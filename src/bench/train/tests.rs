use super::*;
use crate::error::ExitCode;
use crate::ranks::Backend;

fn bench(preset: &str, num_layers: usize, gradient_checkpointing: GradientCheckpointing) -> TrainBench {
    let spec = ModelSpec::preset(preset).unwrap().with_num_layers(num_layers);
    TrainBench {
        model: preset.to_owned(),
        spec: Arc::new(spec),
        kind: Kind::BFloat16,
        residual: Kind::BFloat16,
        sequences: 4,
        prompt_len: 2048,
        completion_len: 2048,
        completion_spread: None,
        redraw: false,
        group: 1,
        share_prompts: true,
        max_tokens_per_micro_batch: 16_384,
        zero_stage: 2,
        shard_group_size: None,
        sequence_parallel_size: 1,
        gradients: GradientOptions::default(),
        optim: OptimizerName::AdamW,
        lora_r: None,
        quantization: Quantization::None,
        mixed_precision: MixedPrecision::None,
        routing: BenchRouting::Own,
        gradient_checkpointing,
        activation_offload: false,
        score: false,
        profile: false,
        steps: 1,
    }
}

/// Eight layers of Qwen3.5-9B on a GPU with 80 GB. Without kept chunks they fit, as was measured; with them they need 4.9 GB more and do not fit.
#[test]
fn memory_of_a_benchmark_includes_optimizer_state() {
    let available = 79 << 30; // of an H100 with a context
    let needs = |keep| {
        let bench = bench("qwen3.5-9b", 8, keep);
        let table = ParamTable::new(bench.spec.clone(), 1);
        bench.needs(&table, &bench.pack(&bench.all_sequences(0), Device::Cpu).unwrap())
    };
    let [none, keeping] = [GradientCheckpointing::None, GradientCheckpointing::KeepChunks].map(needs);
    assert_eq!(none.tensor_bytes, 37_002_732_544);
    assert!((45_169_583_616..45_200_000_000).contains(&none.optimizer_bytes), "{none:?}"); // 12 bytes per parameter
    assert_eq!(keeping.optimizer_bytes, none.optimizer_bytes);
    none.check_within(available).unwrap();
    let message = keeping.check_within(available).unwrap_err().to_string();
    for part in ["needs 81.", "for tensors, 42.1 GiB for optimizer state), but only 79.0 GiB are available"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn models_with_windows_do_not_share_prompts() {
    let tokens = |preset: &str| {
        let bench = TrainBench { group: 4, ..bench(preset, 6, GradientCheckpointing::None) };
        let micro_batches = bench.pack(&bench.all_sequences(0), Device::Cpu).unwrap();
        micro_batches.iter().map(|micro_batch| micro_batch.shape().tokens).sum::<usize>()
    };
    assert_eq!([tokens("qwen2.5-1.5b"), tokens("gemma-3-4b")], [5 * 2048, 8 * 2048]);
}

/// The benchmark needs more memory than any machine has: if it started to allocate, the kernel would kill it.
#[test]
fn a_benchmark_that_exceeds_memory_is_refused_before_it_starts() {
    let world = World::single_on(Backend::Shm).unwrap();
    let error = bench_train(&bench("qwen2.5-32b", 6400, GradientCheckpointing::Full), &world).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::Environment);
    assert!(error.to_string().contains("this benchmark needs "), "{error}");
}
