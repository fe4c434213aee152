//! Compares adapters and 4-bit weights on a GPU with the CPU. Ignored without a GPU; times are printed as one JSON line each.

use std::path::Path;
use std::sync::Arc;

use colo_grpo::internal::config::{GradientCheckpointing, Quantization, TargetModule};
use colo_grpo::internal::cuda::kernels;
use colo_grpo::internal::model::{
    LoraSpec, ModelSpec, Nf4, ParamTable, Plain, StoredBlock, StoredFormat, Unit, UnitLayout, init_unit, init_unit_on,
};
use colo_grpo::internal::ops::dropout::Dropout;
use colo_grpo::internal::ops::random::RandomKey;
use colo_grpo::internal::ops::swiglu::Activation;
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, OptimizerHome, PackOptions, Policy, PolicyOptions,
    PolicyStart, Sequence, TokenGradients, pack,
};
use colo_grpo::internal::types::RoutedExperts;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::on_gpu::{GPU, is_small, seconds};

#[test]
#[ignore = "needs a GPU"]
fn gpu_dropout_masks_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let dropout = Dropout { rate: 0.3, key: RandomKey::new(5, 6) };
    for (rows, columns) in [(1, 1), (7, 30), (513, 1024)] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let x = Tensor::randn([rows, columns], (Kind::Float, Device::Cpu)).to_kind(kind);
            let (got, host) =
                (dropout.apply(&x.to_device(GPU)).unwrap(), dropout.apply(&x.to_kind(Kind::Float)).unwrap());
            assert!(got.to_device(Device::Cpu).equal(&host.to_kind(kind)), "{rows} x {columns}, {kind:?}");
        }
    }
}

/// A row has the same bits regardless of the other rows, and no other memory is written.
#[test]
#[ignore = "needs a GPU"]
fn gpu_lora_kernels_equal_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let rand = |shape: [i64; 2], scale: f64| Tensor::randn(shape, (Kind::BFloat16, GPU)) * scale;
    let double = |tensor: &Tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double);
    let near = |got: &Tensor, expected: &Tensor| {
        // bf16 rounds once; float32 sums of some thousand products are this far off.
        let off = (double(got) - expected).abs() - expected.abs() * 2f64.powi(-8);
        assert!(off.max().double_value(&[]) < 1e-3, "{off}");
    };
    // Blocks without a chunk, chunks that are not full, more of them than stages.
    for (columns, inner, outer) in [(5120, 192, 1792), (3456, 64, 5120), (72, 24, 200), (64, 8, 8), (520, 776, 72)] {
        if is_small() && columns > 1000 {
            continue;
        }
        let (all_x, base) = (rand([512, columns], 1.0), rand([512, outer], 1.0));
        let a = rand([inner, columns + 64], (columns as f64).powf(-0.5)).narrow(1, 64, columns);
        let b = rand([outer, inner], (inner as f64).powf(-0.5));
        let mut first: Option<[Tensor; 2]> = None;
        for rows in [1, 3, 16, 33, 100, 128, 512] {
            let x = all_x.narrow(0, 0, rows);
            let [low, out] =
                [inner, outer].map(|width| Tensor::full([rows + 1, width], f64::NAN, (Kind::BFloat16, GPU)));
            out.narrow(0, 0, rows).copy_(&base.narrow(0, 0, rows));
            let [own_low, own_out] = [&low, &out].map(|tensor| tensor.narrow(0, 0, rows));
            assert!(kernels::adapt_serves(&x, &a, &b, &own_out));
            kernels::adapt(&x, &a, &b, &own_low, &own_out).unwrap();
            near(&own_low, &double(&x).matmul(&double(&a).tr()));
            near(&own_out, &(double(&base.narrow(0, 0, rows)) + double(&own_low).matmul(&double(&b).tr())));
            for tensor in [&low, &out] {
                assert_eq!(tensor.isnan().sum(Kind::Int64).int64_value(&[]), tensor.size()[1], "{rows} rows");
            }
            let bits = [&low, &out].map(|tensor| tensor.narrow(0, 0, 1).copy());
            let first = first.get_or_insert_with(|| bits.each_ref().map(Tensor::shallow_clone));
            assert!(first.iter().zip(&bits).all(|(first, bits)| first.equal(bits)), "{rows} rows");
        }
    }
}

/// Operands whose sums cancel and span 40 binary orders of magnitude: the result depends on the rounding of single sums.
fn hostile([rows, columns]: [i64; 2], sign: f64) -> Tensor {
    let normal = || Tensor::randn([rows, columns / 2], (Kind::Float, GPU));
    let exponents = (normal() * 10.0).clamp(-20.0, 20.0).round();
    let first = (normal() * exponents.exp2()).to_kind(Kind::BFloat16);
    let other = exponents.abs().lt(1.0).to_kind(Kind::Float) / 128.0 + 1.0;
    let second = (first.to_kind(Kind::Float) * other * sign).to_kind(Kind::BFloat16);
    Tensor::cat(&[first, second], 1)
}

/// A row's bits are the same in the kernels for few rows (decode steps) and for many rows (training), also with a fused SiLU.
#[test]
#[ignore = "needs a GPU"]
fn gpu_lora_sums_have_one_order_for_all_batches() {
    kernels::prepare(0, 1).unwrap();
    const ROWS: i64 = 5000;
    for (columns, inner, outer) in
        [(3584, 48, 4608), (3584, 32, 9472), (18_944, 16, 3584), (896, 24, 1152), (1536, 192, 2048)]
    {
        let (columns, outer) = if is_small() { (columns / 16, outer / 16) } else { (columns, outer) };
        let (x, base) = (hostile([ROWS, columns], 1.0), hostile([ROWS, outer], 1.0));
        let (a, b) = (hostile([inner, columns], -1.0), hostile([outer, inner], 1.0));
        let of = |rows: i64| {
            let (x, base) = (x.narrow(0, 0, rows), base.narrow(0, 0, rows));
            let (low, out) = (Tensor::full([rows, inner], f64::NAN, (Kind::BFloat16, GPU)), base.copy());
            let mut acts = [(); 2].map(|()| Tensor::full([rows, outer / 2], f64::NAN, (Kind::BFloat16, GPU)));
            kernels::adapt(&x, &a, &b, &low, &out).unwrap();
            kernels::silu_mul(Activation::Silu, &out, &mut acts[0]).unwrap();
            kernels::adapt_silu_mul(&x, &a, &b, &low, &base, &acts[1]).unwrap();
            assert!(acts[0].view_dtype(Kind::Int16).equal(&acts[1].view_dtype(Kind::Int16)), "{rows} rows of {inner}");
            [low, out].map(|tensor| tensor.view_dtype(Kind::Int16)) // NaN is not NaN
        };
        let all = of(ROWS);
        for rows in [1, 8, 17, 64, 100, 256, 512, 1000, 2048] {
            for (own, all) in of(rows).iter().zip(&all) {
                assert!(own.equal(&all.narrow(0, 0, rows)), "{rows} rows, {columns} x {inner} x {outer}");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_nf4_dequantization_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    let [on_host, on_device] = [Device::Cpu, GPU].map(|device| Nf4.encoder(device).unwrap());
    for (groups, rows, columns) in [(1, 3, 64), (5, 2, 192), (40, 1, 4096), (1, 1000, 3584)] {
        if is_small() && columns > 1000 {
            continue;
        }
        let matrix = Tensor::randn([groups * rows, columns], (Kind::Float, Device::Cpu)) * 0.02;
        let host = on_host.encode(&matrix).unwrap();
        let device = on_device.encode(&matrix.to_device(GPU)).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            // Rows go between others, as those of fused matrices do.
            let mut expected = Tensor::full([groups, rows, columns], f64::NAN, (kind, Device::Cpu));
            host.decode(&mut expected).unwrap();
            let wide = Tensor::full([groups, rows + 3, columns], f64::NAN, (kind, GPU));
            device.decode(&mut wide.narrow(1, 1, rows)).unwrap();
            let wide = wide.to_device(Device::Cpu);
            let got = wide.narrow(1, 1, rows).contiguous();
            // The mean and the largest of the scales may differ in the last bit. A scale then takes the next of its 255 values, or
            // bfloat16 rounds the other way.
            let rounding = if kind == Kind::BFloat16 { 2f64.powi(-7) } else { 0.0 };
            let error = (&got - &expected).abs().to_kind(Kind::Float) - expected.abs().to_kind(Kind::Float) * rounding;
            let (error, largest) = (error.max().double_value(&[]), expected.abs().max().double_value(&[]));
            assert!(error <= largest / 127.0, "{groups} x {rows} x {columns}, {kind:?}: {error}");
            let near =
                (&got - &expected).abs().to_kind(Kind::Float).le_tensor(&(expected.abs().to_kind(Kind::Float) * 1e-5));
            let share = near.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            assert!(share > 0.97, "{groups} x {rows} x {columns}, {kind:?}: {share} near");
            let untouched = wide.isnan().sum(Kind::Int64).int64_value(&[]);
            assert_eq!(untouched, groups * 3 * columns);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_nf4_dequantization_runs_near_memory_bandwidth() {
    kernels::prepare(0, 1).unwrap();
    for preset in ["qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"] {
        let spec = ModelSpec::preset(preset).unwrap().with_num_layers(1);
        let table = ParamTable::new(Arc::new(spec.clone()), 1);
        let layout = table.unit(Unit::Block(0));
        let flat = init_unit_on(layout, 1, Kind::BFloat16, GPU).unwrap();
        let format = Quantization::Nf4.format().unwrap();
        let block = StoredBlock::encode(&spec, layout, &flat, &*format.encoder(GPU).unwrap()).unwrap();
        let seconds = seconds(&mut || block.decode(layout, &flat).unwrap());
        let bytes = format.block_bytes(&spec, 0, Kind::BFloat16) + 2 * layout.len;
        let gb_s = bytes as f64 / seconds / 1e9;
        println!("{}", json!({"test": "nf4", "block": preset, "ms": seconds * 1e3, "gb_s": gb_s}));
        assert!(gb_s > 1000.0, "{preset}: {gb_s} GB/s");
    }
}

/// A few training steps on tokens that a small model can learn.
pub struct Training {
    pub spec: ModelSpec,
    pub lora: Option<LoraSpec>,
    pub quantization: Quantization,
    pub gradient_checkpointing: GradientCheckpointing,
    pub share_prompts: bool,
    /// Multiplier of the weights.
    pub scale: f64,
}

/// Chosen so that all layers contribute to the gradient. Its norm in bfloat16 is then within 3 % of float32 on a CPU;
/// with 5 instead of 2 it is between a third and three times of it.
pub const SCALE: f64 = 2.0;

/// Multiplier for a base in NF4 with adapters on all layers. Noise of 0.1 % in weights before NF4 quantization changes some codes. It changes the
/// norm of tiny-moe's gradient by up to 1.2 % on a CPU (six samples); with 2 instead of 1 by up to 12.8 %, as much as a fault would.
const SCALE_OF_NF4: f64 = 1.0;

/// Experts of the tokens of the `n`th sequence in all layers.
fn routes(spec: &ModelSpec, n: usize, len: usize) -> RoutedExperts {
    let Some(experts) = spec.experts() else { return RoutedExperts::default() };
    let (count, choices) = (experts.num_experts, experts.router.num_experts_per_tok);
    let first = |at: usize, layer: usize| 5 * n + at * at + 3 * at + 7 * layer;
    let of_layer = |at, layer| (0..choices).map(move |choice| ((first(at, layer) + choice) % count) as u16);
    let of_token = |at| (0..spec.num_expert_layers()).flat_map(move |layer| of_layer(at, layer));
    let experts: Vec<u16> = (0..len).flat_map(of_token).collect();
    RoutedExperts { per_token: spec.routed_experts_per_token(), experts: experts.into() }
}

/// Four sequences; each pair of neighbors has the same prompt of nine tokens. With routes for all tokens, or without.
pub fn sequences(spec: &ModelSpec, with_experts: bool) -> Vec<Sequence> {
    let id = |n: usize, at: usize| ((at * 37 + if at < 9 { n / 2 } else { n } * 11) % 64) as u32;
    let sequence = |n: usize| {
        let token_ids: Vec<u32> = (0..20 + 7 * n).map(|at| id(n, at)).collect();
        let routed_experts = if with_experts { routes(spec, n, token_ids.len()) } else { RoutedExperts::default() };
        Sequence { routed_experts, ..Sequence::of_tokens(token_ids, 9) }
    };
    (0..4).map(sequence).collect()
}

/// Negative log-likelihoods of the first steps, before rounding differences accumulate, and the norm of the first gradient.
pub fn losses(device: Device, (kind, residual): (Kind, Kind), training: &Training) -> (Vec<f64>, f64) {
    let world = if device == GPU { World::single_on(Backend::Nccl).unwrap() } else { World::single() };
    let mesh = world.mesh(1, 1).unwrap();
    let table = Arc::new(ParamTable::new(Arc::new(training.spec.clone()), 1));
    let options = PolicyOptions {
        stage: 0,
        network: NetworkOptions { kind, residual, device, format: &Plain },
        gradient_checkpointing: training.gradient_checkpointing,
        optim: Optim::AdamW,
        adam: AdamOptions { beta1: 0.9, beta2: 0.99, eps: 1e-5, weight_decay: 0.0 },
        gradients: GradientOptions::default(),
    };
    let (lora, quantization) = (training.lora.clone(), training.quantization);
    let start = PolicyStart { lora, quantization, seed: 3, adapters: None, keeps_initial: false };
    let source = |layout: &UnitLayout| Ok(init_unit(layout, 1, Kind::Float)?.f_mul_scalar(training.scale)?);
    let mut policy = Policy::start(table, &mesh, options, OptimizerHome::Resident, &source, start).unwrap();
    // Roundings of bfloat16 send tokens to other experts, which a float32 router does not.
    let sequences = sequences(&training.spec, kind == Kind::BFloat16);
    let packing = PackOptions { max_tokens: 1000, share_prompts: training.share_prompts, device };
    let micro_batches = pack(&sequences, &packing).unwrap();
    let step = |_| {
        let mut nll = 0.0;
        for micro_batch in &micro_batches {
            let loss = &mut |scores: &colo_grpo::internal::train::Scores| {
                nll -= scores.logprobs.mean(Kind::Double).double_value(&[]);
                let count = scores.logprobs.numel() as f64;
                Ok(TokenGradients {
                    dlogprobs: Tensor::full_like(&scores.logprobs, -1.0 / count),
                    dentropy: None,
                    dtop: None,
                    daux_loss: 0.0,
                })
            };
            policy.forward_backward(micro_batch, 1.0, loss).unwrap();
        }
        let outcome = policy.optimizer_step(3e-3, 1.0).unwrap();
        assert!(!outcome.skipped);
        (nll, outcome.grad_norm)
    };
    let (nlls, norms): (Vec<f64>, Vec<f64>) = (0..3).map(step).unzip();
    (nlls, norms[0])
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_adapters_train_as_on_the_cpu() {
    kernels::prepare(0, 1).unwrap();
    for (quantization, dropout) in [(Quantization::None, 0.0), (Quantization::None, 0.2), (Quantization::Nf4, 0.0)] {
        let of_bfloat16 = [Kind::BFloat16, Kind::Float].map(|residual| ((Kind::BFloat16, residual), 5e-2));
        for (kinds, bound) in [((Kind::Float, Kind::Float), 2e-3)].into_iter().chain(of_bfloat16) {
            if is_small() && kinds.0 == Kind::Float {
                continue;
            }
            let training = Training {
                spec: ModelSpec::preset("tiny").unwrap(),
                lora: adapters(dropout),
                quantization,
                gradient_checkpointing: GradientCheckpointing::Selective,
                share_prompts: false,
                scale: SCALE,
            };
            assert_trains_as_on_the_cpu(&training, kinds, bound, &format!("{quantization:?}, dropout {dropout}"));
        }
    }
}

/// Every expert has its own adapters, on a base in full precision or 4 bits, with and without a shared expert; and full training of such models.
#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_train_as_on_the_cpu() {
    kernels::prepare(0, 1).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen2_moe");
    let (routed, shared) = (ModelSpec::preset("tiny-moe").unwrap(), ModelSpec::from_folder(&golden).unwrap());
    let float = ((Kind::Float, Kind::Float), 2e-3);
    let bfloat16 = ((Kind::BFloat16, Kind::Float), 5e-2);
    let bfloat16_of_nf4 = ((Kind::BFloat16, Kind::Float), 2e-2);
    let (plain, nf4) = (Quantization::None, Quantization::Nf4);
    for (spec, lora, quantization, scale, bounds) in [
        (&routed, adapters(0.0), nf4, SCALE_OF_NF4, &[bfloat16_of_nf4][..]),
        (&routed, adapters(0.0), nf4, SCALE, &[float]),
        (&routed, None, plain, SCALE, &[float, bfloat16]),
        (&routed, adapters(0.0), plain, SCALE, &[float, bfloat16]),
        (&shared, None, plain, SCALE, &[float]),
        (&shared, adapters(0.0), plain, SCALE, &[float]),
    ] {
        // Where routers are trained, too, float32's roundings send tokens to other experts after the first update, and the weights of all
        // experts carry bfloat16's further.
        let steps = if lora.is_some() { 3 } else { 1 };
        let training = Training {
            spec: spec.clone(),
            lora,
            quantization,
            gradient_checkpointing: GradientCheckpointing::Selective,
            share_prompts: false,
            scale,
        };
        for &(kinds, bound) in bounds {
            let what = format!("{quantization:?}, adapters {}, {steps} steps", training.lora.is_some());
            assert_steps_are_the_cpus(&training, (kinds, bound), steps, &what);
        }
    }
}

fn adapters(dropout: f64) -> Option<LoraSpec> {
    Some(LoraSpec { r: 8, alpha: 16.0, dropout, targets: TargetModule::ALL.to_vec() })
}

pub fn assert_trains_as_on_the_cpu(training: &Training, kinds: (Kind, Kind), bound: f64, what: &str) {
    assert_steps_are_the_cpus(training, (kinds, bound), 3, what);
}

/// Asserts that the first `steps` losses and the norm of the first gradient equal the CPU's.
fn assert_steps_are_the_cpus(training: &Training, (kinds, bound): ((Kind, Kind), f64), steps: usize, what: &str) {
    let off = |(host, got): (&f64, &f64)| (host - got).abs() / host;
    let (host, host_norm) = losses(Device::Cpu, kinds, training);
    assert!(host[2] < host[0], "{what}: {host:?}");
    let (got, norm) = losses(GPU, kinds, training);
    let worst = host.iter().zip(&got).take(steps).map(off).fold(off((&host_norm, &norm)), f64::max);
    println!("{}", json!({"test": "training", "kinds": format!("{kinds:?}"), "of": what, "worst": worst}));
    assert!(worst < bound, "{what}, {kinds:?}: {got:?} and {norm}, on the CPU {host:?} and {host_norm}");
}
