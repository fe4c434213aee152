//! Training of gated delta nets on a GPU: compares the operation with the CPU's in float64, which unit tests compare with autograd through the
//! recurrence, and training steps of small hybrid models with the CPU's. Ignored without a GPU.

use std::path::Path;

use colo_grpo::internal::config::{GradientCheckpointing, Quantization, TargetModule};
use colo_grpo::internal::cuda::kernels;
use colo_grpo::internal::model::{AttentionSpec, LoraSpec, Mixer, Mlp, ModelSpec};
use colo_grpo::internal::ops::attention::{Bounds, SharedBounds};
use colo_grpo::internal::ops::delta_net::{DeltaHeads, DeltaOptions, DeltaRows, DeltaWeights, PackedSequences};
use tch::{Device, Kind, Tensor};

use crate::gpu_lora::{SCALE, Training, assert_trains_as_on_the_cpu};
use crate::on_gpu::{GPU, rand, relative_error};

/// Heads that the kernels support, and others, for which libtorch's operations are used.
const WIDE: DeltaHeads =
    DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 128, value_dim: 128, conv_width: 4 };
const NARROW: DeltaHeads = DeltaHeads { key_dim: 16, value_dim: 32, ..WIDE };

struct Inputs {
    rows: DeltaRows,
    weights: DeltaWeights,
    d_output: Tensor,
}

impl Inputs {
    fn random(tokens: i64, heads: DeltaHeads, kind: Kind) -> Self {
        let [channels, value_heads, value_dim, width] =
            [heads.channels(), heads.num_value_heads, heads.value_dim, heads.conv_width].map(|n| n as i64);
        let rows = DeltaRows {
            qkv: rand(&[tokens, channels], kind),
            z: rand(&[tokens, value_heads * value_dim], kind),
            b: rand(&[tokens, value_heads], kind),
            a: rand(&[tokens, value_heads], kind),
        };
        let weights = DeltaWeights {
            conv: rand(&[channels, width], kind) * 0.5,
            // The first head forgets so fast that exp of a chunk's sum is 0.
            a_log: Tensor::linspace(3.5, -4.0, value_heads, (Kind::Double, Device::Cpu)).to_kind(kind),
            dt_bias: rand(&[value_heads], kind),
            norm: rand(&[value_dim], kind),
        };
        Self { rows, weights, d_output: rand(&[tokens, value_heads * value_dim], kind) }
    }

    /// The `len` tokens from `start` on.
    fn narrow(&self, start: i64, len: i64) -> Self {
        let own = |t: &Tensor| t.narrow(0, start, len);
        let (DeltaRows { qkv, z, b, a }, DeltaWeights { conv, a_log, dt_bias, norm }) = (&self.rows, &self.weights);
        let all = |t: &Tensor| t.shallow_clone();
        Self {
            rows: DeltaRows { qkv: own(qkv), z: own(z), b: own(b), a: own(a) },
            weights: DeltaWeights { conv: all(conv), a_log: all(a_log), dt_bias: all(dt_bias), norm: all(norm) },
            d_output: own(&self.d_output),
        }
    }

    /// Runs forward and backward. Returns outputs and all gradients.
    fn run(&self, bounds: &Bounds, heads: DeltaHeads, kind: Kind, device: Device) -> Vec<(&'static str, Tensor)> {
        self.run_keeping(bounds, heads, (kind, device), false)
    }

    /// Runs forward and backward with chunks that the forward pass kept or that the backward pass recomputes. Returns outputs and all gradients.
    fn run_keeping(
        &self,
        bounds: &Bounds,
        heads: DeltaHeads,
        (kind, device): (Kind, Device),
        keeps_chunks: bool,
    ) -> Vec<(&'static str, Tensor)> {
        let on = |t: &Tensor| t.to_device(device).to_kind(kind);
        let DeltaRows { qkv, z, b, a } = &self.rows;
        let rows = DeltaRows { qkv: on(qkv), z: on(z), b: on(b), a: on(a) };
        let DeltaWeights { conv, a_log, dt_bias, norm } = &self.weights;
        let weights = DeltaWeights { conv: on(conv), a_log: on(a_log), dt_bias: on(dt_bias), norm: on(norm) };
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let zeros = |t: &Tensor| Tensor::zeros(t.size(), (wide, device));
        let mut grads =
            DeltaWeights { conv: zeros(conv), a_log: zeros(a_log), dt_bias: zeros(dt_bias), norm: zeros(norm) };
        let options = DeltaOptions { heads, eps: 1e-6 };
        let packed = PackedSequences::new(bounds, heads.conv_width, device);
        let (o, chunks) = packed.forward(&rows, &weights, options, keeps_chunks).unwrap();
        assert_eq!(chunks.is_some(), keeps_chunks, "sequences fill chunks");
        let d = packed.backward(&on(&self.d_output), &rows, &weights, options, chunks, &mut grads).unwrap();
        let of_rows = [("output", o), ("d_qkv", d.qkv), ("d_z", d.z), ("d_b", d.b), ("d_a", d.a)];
        let DeltaWeights { conv, a_log, dt_bias, norm } = grads;
        let of_weights = [("d_conv", conv), ("d_a_log", a_log), ("d_dt_bias", dt_bias), ("d_norm", norm)];
        of_rows.into_iter().chain(of_weights).collect()
    }
}

/// Packed sequences of odd lengths; and two prompts whose completions begin with copies of their states, next to a prompt without
/// completions.
fn layouts() -> [(i64, Bounds); 2] {
    let shared = SharedBounds {
        prompts: vec![0, 65, 70, 72],
        groups: vec![72, 76, 76, 146],
        completions: vec![72, 75, 76, 146],
    };
    [(271, Bounds::Separate(vec![0, 70, 70, 71, 202, 205, 271])), (146, Bounds::Shared(shared))]
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_delta_net_training_equals_the_cpus() {
    kernels::prepare(0, 1).unwrap();
    tch::manual_seed(11);
    for (heads, kind, bound) in [
        (WIDE, Kind::BFloat16, 2e-2),
        (NARROW, Kind::Float, 1e-4),
        (WIDE, Kind::Float, 1e-4),
        (NARROW, Kind::BFloat16, 2e-2),
    ] {
        for (tokens, bounds) in layouts() {
            let inputs = Inputs::random(tokens, heads, kind);
            let expected = inputs.run(&bounds, heads, Kind::Double, Device::Cpu);
            let (got, again) = (inputs.run(&bounds, heads, kind, GPU), inputs.run(&bounds, heads, kind, GPU));
            for (((name, got), (_, again)), (_, expected)) in got.iter().zip(&again).zip(&expected) {
                let what = format!("{name} of {heads:?}, {kind:?}, {tokens} tokens");
                let error = relative_error(got, expected);
                assert!(error < bound, "{what}: {error:e}");
                assert!(again.equal(got), "{what}: not the same twice");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_kept_chunks_of_delta_nets_change_no_bit() {
    kernels::prepare(0, 1).unwrap();
    tch::manual_seed(13);
    for (heads, kind) in [(WIDE, Kind::BFloat16), (NARROW, Kind::BFloat16), (NARROW, Kind::Float)] {
        let shared = SharedBounds {
            prompts: vec![0, 64, 127, 190],
            groups: vec![190, 316, 316, 506],
            completions: vec![190, 254, 316, 506],
        };
        for bounds in [Bounds::Separate(vec![0, 126, 126, 190, 506]), Bounds::Shared(shared)] {
            let inputs = Inputs::random(506, heads, kind);
            let [again, kept] = [false, true].map(|keeps| inputs.run_keeping(&bounds, heads, (kind, GPU), keeps));
            for ((name, again), (_, kept)) in again.iter().zip(&kept) {
                assert!(kept.equal(again), "{name} of {heads:?}, {kind:?}, {bounds:?}");
            }
        }
    }
}

/// Many sequences, whose heads' states are distributed over blocks differently than those of a single sequence.
#[test]
#[ignore = "needs a GPU"]
fn gpu_packed_delta_nets_equal_separate_ones_bit_for_bit() {
    kernels::prepare(0, 1).unwrap();
    tch::manual_seed(12);
    let lens = [70, 1, 131, 64, 3].into_iter().cycle().take(30);
    let mut bounds = vec![0];
    bounds.extend(lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    }));
    let tokens = bounds[bounds.len() - 1];
    let inputs = Inputs::random(tokens, WIDE, Kind::BFloat16);
    let packed = inputs.run(&Bounds::Separate(bounds.clone()), WIDE, Kind::BFloat16, GPU);
    for ends in bounds.windows(2).take(6) {
        let (start, len) = (ends[0], ends[1] - ends[0]);
        let alone = inputs.narrow(start, len).run(&Bounds::Separate(vec![0, len]), WIDE, Kind::BFloat16, GPU);
        for ((name, all), (_, one)) in packed.iter().zip(&alone).filter(|((_, all), _)| all.size()[0] == tokens) {
            assert!(all.narrow(0, start, len).equal(one), "{name} of {len} tokens from {start} on");
        }
    }
}

/// A hybrid with heads that the kernels support: attention heads of 256 columns, a quarter of which is rotated.
fn wide_hybrid() -> ModelSpec {
    let spec = ModelSpec::preset("tiny-hybrid").unwrap();
    spec.map_blocks(|_, block| match &mut block.mixer {
        Mixer::DeltaNet(delta_net) => delta_net.heads = WIDE,
        Mixer::Attention(attention) => {
            (attention.num_heads, attention.num_kv_heads, attention.head_dim) = (2, 1, 256);
            attention.scale = AttentionSpec::usual_scale(256);
        }
    })
}

/// The wide hybrid with experts, including a shared one.
fn wide_hybrid_with_experts() -> ModelSpec {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_5_moe");
    let mut experts = ModelSpec::from_folder(folder).unwrap().experts().unwrap();
    let hybrid = wide_hybrid();
    experts.expert.hidden = hybrid.hidden_size;
    experts.shared.as_mut().unwrap().0.hidden = hybrid.hidden_size;
    hybrid.map_blocks(|_, block| block.mlp = Mlp::Experts(experts))
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_hybrid_models_train_as_on_the_cpu() {
    use GradientCheckpointing::{Full, Selective};
    kernels::prepare(0, 1).unwrap();
    let narrow = || ModelSpec::preset("tiny-hybrid").unwrap();
    let all = Some(LoraSpec { r: 8, alpha: 16.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() });
    for (spec, lora, quantization, gradient_checkpointing, share_prompts) in [
        (wide_hybrid(), None, Quantization::None, Selective, true),
        (wide_hybrid(), None, Quantization::None, Full, false),
        (wide_hybrid(), all, Quantization::Nf4, Selective, true),
        (narrow(), None, Quantization::None, Selective, true),
        (wide_hybrid_with_experts(), None, Quantization::None, Selective, true),
        (wide_hybrid_with_experts(), None, Quantization::None, Full, false),
    ] {
        let (dim, experts) = (spec.attention().head_dim, spec.num_expert_layers());
        let what = format!("head_dim {dim}, {experts} layers of experts, {quantization:?}, {gradient_checkpointing:?}");
        let training = Training { spec, lora, quantization, gradient_checkpointing, share_prompts, scale: SCALE };
        for (kinds, bound) in [((Kind::Float, Kind::Float), 2e-3), ((Kind::BFloat16, Kind::Float), 5e-2)] {
            assert_trains_as_on_the_cpu(&training, kinds, bound, &what);
        }
    }
}
