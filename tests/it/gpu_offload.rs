//! Offloading of blocks' kept tensors to pinned host memory between forward and backward on a GPU: bits, memory and time. Ignored without a GPU.

use std::sync::Arc;
use std::time::Instant;

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::memory::HostPool;
use colo_grpo::internal::model::{ModelSpec, ParamTable, Plain, Unit, init_unit_on};
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::torch;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, MicroBatchShape, NetworkOptions, Optim, PackOptions, Policy, PolicyOptions, Sequence,
    TokenGradients, TrainedModel, UpdateCourse, WORKSPACE_BYTES, pack,
};
use tch::{Device, Kind, Tensor};

use crate::on_gpu::GPU;

const TOKENS: usize = 16_384;
const KIND: Kind = Kind::BFloat16;

/// Weights after two steps, and the time and memory that they took.
struct Trained {
    weights: Vec<Tensor>,
    peak_bytes: usize,
    planned_bytes: usize,
    seconds: f64,
    moved_bytes: usize,
    hidden: f64,
}

fn train(table: &Arc<ParamTable>, keep: GradientCheckpointing, offloads: bool) -> Trained {
    let mesh = World::single_on(Backend::Nccl).unwrap().mesh(1, 1).unwrap();
    let options = PolicyOptions {
        stage: 0,
        network: NetworkOptions { kind: KIND, residual: KIND, device: GPU, format: &Plain },
        gradient_checkpointing: keep,
        optim: Optim::AdamW,
        adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
        gradients: GradientOptions::default(),
    };
    let model = TrainedModel { offloads, ..TrainedModel::whole(table, 0, KIND, options.gradients) };
    let mut policy = Policy::new(table.clone(), &mesh, options, &|layout| init_unit_on(layout, 1, KIND, GPU)).unwrap();
    if offloads {
        let bytes = model.offloaded_bytes(keep, TOKENS);
        policy = policy.with_activation_offload(HostPool::new("offload_test", bytes, GPU, &mut |_, _| ()).unwrap());
    }
    let token_ids = (0..TOKENS).map(|at| (at * 7919 % 151_000) as u32).collect();
    let sequences = [Sequence::of_tokens(token_ids, TOKENS / 2)];
    let options = PackOptions { max_tokens: TOKENS, share_prompts: false, device: GPU };
    let micro_batches = pack(&sequences, &options).unwrap();
    let (mut peak_bytes, mut seconds) = (0, 0.0);
    for _ in 0..2 {
        torch::reset_peak_memory(GPU).unwrap();
        let start = Instant::now();
        policy
            .forward_backward(&micro_batches[0], 1.0, &mut |scores| {
                let dlogprobs = Tensor::full_like(&scores.logprobs, -1.0 / scores.logprobs.numel() as f64);
                Ok(TokenGradients { dlogprobs, dentropy: None, dtop: None, daux_loss: 0.0 })
            })
            .unwrap();
        tch::Cuda::synchronize(0);
        seconds = start.elapsed().as_secs_f64();
        peak_bytes = torch::device_memory(GPU).unwrap().unwrap().peak_allocated;
        let _ = policy.optimizer_step(1e-3, 1.0).unwrap();
    }
    let moved = policy.take_offloaded().unwrap();
    let shape = MicroBatchShape {
        tokens: TOKENS,
        scored_tokens: TOKENS / 2,
        num_sequences: 1,
        shares_prompts: false,
        num_top: 0,
    };
    let course = UpdateCourse { keep, micro_batches: &[shape], is_warm: true, streams: false };
    let units: Vec<Unit> = table.units.iter().map(|layout| layout.unit).collect();
    Trained {
        weights: units.iter().map(|&unit| policy.unit_weights(unit).unwrap().to_device(Device::Cpu)).collect(),
        peak_bytes,
        planned_bytes: model.bytes().weights + model.fullest(&course).total() + WORKSPACE_BYTES,
        seconds,
        moved_bytes: moved.bytes,
        hidden: 1.0 - moved.exposed.as_secs_f64() / moved.copying.as_secs_f64().max(1e-9),
    }
}

/// Weights have the same bits if sums are deterministic. Otherwise, with memory as in a run, the peak is the planned one and most
/// copies are hidden.
#[test]
#[ignore = "needs a GPU"]
fn gpu_offloaded_tensors_come_back_bit_for_bit() {
    let spec = ModelSpec::preset("qwen2.5-1.5b").unwrap().with_num_layers(8);
    let table = Arc::new(ParamTable::new(Arc::new(spec), 1));
    for keep in [GradientCheckpointing::Full, GradientCheckpointing::KeepAttention] {
        torch::set_deterministic(true).unwrap();
        let (own, offloaded) = (train(&table, keep, false), train(&table, keep, true));
        torch::set_deterministic(false).unwrap();
        for (own, offloaded) in own.weights.iter().zip(&offloaded.weights) {
            assert!(own.equal(offloaded), "{keep:?}");
        }
        let (own, offloaded) = (train(&table, keep, false), train(&table, keep, true));
        let saved = own.peak_bytes as i64 - offloaded.peak_bytes as i64;
        let (off, moved) = (offloaded.peak_bytes as f64 / offloaded.planned_bytes as f64 - 1.0, offloaded.moved_bytes);
        println!(
            "{}: peak {} bytes, {saved} less than without, {:.2} % off the plan; {moved} bytes moved, {:.3} of their time hidden; \
             {:.1} ms, {:.1} without",
            keep.name(),
            offloaded.peak_bytes,
            100.0 * off,
            offloaded.hidden,
            1e3 * offloaded.seconds,
            1e3 * own.seconds,
        );
        assert!(off.abs() < 0.01, "{off}");
        assert!(saved > 0 && offloaded.hidden > 0.5, "{saved} {}", offloaded.hidden);
    }
}
