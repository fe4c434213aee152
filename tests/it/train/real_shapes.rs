//! With the widths of Qwen2.5-1.5B on a GPU: loss and gradients of the fused network in bfloat16, and the output head's memory. On any
//! machine: the effect of a wider residual stream.

use std::sync::Arc;

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::model::{
    HeadParams, HeadSums, ModelSpec, ParamName, ParamTable, Plain, Scoring, UnitLayout, head_backward, head_forward,
    init_unit, init_unit_on,
};
use colo_grpo::internal::ops::head;
use colo_grpo::internal::ops::linear::Onto;
use colo_grpo::internal::ops::random::RandomKey;
use colo_grpo::internal::ops::rms_norm::NormOptions;
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::torch;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, PackOptions, Policy, PolicyOptions, Sequence, StatePart,
    TokenGradients, pack,
};
use tch::{Device, Kind, Tensor};

use super::autograd;

const PROMPT_LEN: usize = 200;

/// Both are compared with the unfused network in float32. The fused network's error must be at most that of the unfused network in bfloat16.
#[test]
#[ignore = "needs a GPU"]
fn gpu_fused_kernels_are_as_accurate_as_unfused_ones() {
    let world = World::single_on(Backend::Nccl).unwrap();
    let device = world.device();
    let spec = Arc::new(ModelSpec::preset("qwen2.5-1.5b").unwrap().with_num_layers(2));
    let weights = |layout: &UnitLayout| init_unit_on(layout, 3, Kind::BFloat16, device);
    let sequences: Vec<Sequence> = [900, 1400, 777].map(|len| sequence(len, spec.vocab_size)).into();
    let slopes: Vec<Tensor> = (sequences.iter())
        .map(|sequence| Tensor::randn([sequence.completion_len() as i64], (Kind::Float, device)))
        .collect();
    let unfused = |kind: Kind| {
        let table = ParamTable::new(spec.clone(), 1);
        let units: Vec<Tensor> = table.units.iter().map(|layout| weights(layout).unwrap()).collect();
        let model = autograd::Model::of_kind(kind, table, |index| units[index].shallow_clone());
        let logprobs: Vec<Tensor> = sequences.iter().map(|sequence| model.scores(sequence, 1.0).0).collect();
        let loss: Tensor =
            logprobs.iter().zip(&slopes).map(|(logprobs, slope)| (logprobs * slope).sum(Kind::Float)).sum();
        let gradients = Tensor::run_backward(&[loss], &model.units, false, false);
        std::iter::once(Tensor::cat(&logprobs, 0)).chain(gradients).collect::<Vec<_>>()
    };
    let (exact, rounded) = (unfused(Kind::Float), unfused(Kind::BFloat16));
    for keep in [GradientCheckpointing::None, GradientCheckpointing::Full] {
        let [narrow, wide] = [Kind::BFloat16, Kind::Float].map(|residual| {
            let fused = fused(&world, &spec, (&sequences, &slopes), (Kind::BFloat16, residual), keep, &weights);
            for (at, ((fused, rounded), exact)) in fused.iter().zip(&rounded).zip(&exact).enumerate() {
                let (own, bound) = (off(fused, exact), off(rounded, exact));
                println!("{residual:?}, {keep:?}, {at}: fused off by {own:.2e}, unfused in bfloat16 by {bound:.2e}");
                assert!(own < 1.2 * bound, "{residual:?}, {keep:?}, {at}: {own:e}, unfused {bound:e}");
            }
            off(&fused[0], &exact[0])
        });
        assert!(
            wide < narrow,
            "{keep:?}: log-probabilities with a float32 stream off by {wide:e}, without by {narrow:e}"
        );
    }
}

/// In sixteen blocks that each add little to their input, rounding of the residual stream causes most of bfloat16's error.
#[test]
fn a_float32_residual_stream_is_closer_to_float32_training() {
    let world = World::single();
    let spec = ModelSpec { tie_word_embeddings: false, ..ModelSpec::preset("tiny").unwrap() }.with_num_layers(16);
    let weights = |layout: &UnitLayout| {
        let flat = init_unit(layout, 3, Kind::Float)?;
        for param in &layout.params {
            let columns = param.shape.last().map_or(1.0, |&columns| columns as f64);
            let deviation = match param.name {
                ParamName::Embedding => 1.0,
                ParamName::O | ParamName::Down => (2.0 * 16.0 * columns).powf(-0.5),
                _ if param.decay => columns.powf(-0.5),
                _ => continue,
            };
            let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(deviation / 0.02);
        }
        Ok(flat.to_kind(Kind::BFloat16))
    };
    let spec = Arc::new(spec);
    let sequences: Vec<Sequence> = [230, 260, 301].map(|len| sequence(len, spec.vocab_size)).into();
    let slopes: Vec<Tensor> = (sequences.iter().zip(1..))
        .map(|(sequence, at)| (Tensor::arange(sequence.completion_len() as i64, (Kind::Float, Device::Cpu)) * at).sin())
        .collect();
    let run = |kinds, keep| fused(&world, &spec, (&sequences, &slopes), kinds, keep, &weights);
    let exact = run((Kind::Float, Kind::Float), GradientCheckpointing::None);
    let narrow = run((Kind::BFloat16, Kind::BFloat16), GradientCheckpointing::None);
    let wide = run((Kind::BFloat16, Kind::Float), GradientCheckpointing::None);
    for (at, ((narrow, wide), exact)) in narrow.iter().zip(&wide).zip(&exact).enumerate() {
        let (narrow, wide) = (off(narrow, exact), off(wide, exact));
        println!("{at}: off by {wide:.2e} with a float32 stream, {narrow:.2e} without");
        assert!(wide < if at == 0 { 0.67 } else { 1.0 } * narrow, "{at}: {wide:e}, not below {narrow:e}");
    }
    for keep in [GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        let again = run((Kind::BFloat16, Kind::Float), keep);
        assert!(wide.iter().zip(&again).all(|(a, b)| a.equal(b)), "{keep:?}: other bits");
    }
}

/// Log-probabilities, followed by the flat gradient of every unit (Adam's first moment with beta1 = 0).
fn fused(
    world: &World,
    spec: &Arc<ModelSpec>,
    (sequences, slopes): (&[Sequence], &[Tensor]),
    (kind, residual): (Kind, Kind),
    gradient_checkpointing: GradientCheckpointing,
    weights: &dyn Fn(&UnitLayout) -> colo_grpo::Result<Tensor>,
) -> Vec<Tensor> {
    let (mesh, device) = (world.mesh(1, 1).unwrap(), world.device());
    let table = Arc::new(ParamTable::new(spec.clone(), 1));
    let options = PolicyOptions {
        stage: 0,
        network: NetworkOptions { kind, residual, device, format: &Plain },
        gradient_checkpointing,
        optim: Optim::AdamW,
        adam: AdamOptions { beta1: 0.0, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 },
        gradients: GradientOptions::default(),
    };
    let mut policy = Policy::new(table.clone(), &mesh, options, weights).unwrap();
    let packed = pack(sequences, &PackOptions { max_tokens: 1 << 20, share_prompts: false, device }).unwrap();
    let [micro_batch] = &packed[..] else { panic!("all in one micro-batch") };
    let slopes = Tensor::cat(slopes, 0);
    let mut logprobs = None;
    let mut loss = |scores: &colo_grpo::internal::train::Scores| {
        logprobs = Some(scores.logprobs.shallow_clone());
        Ok(TokenGradients { dlogprobs: slopes.shallow_clone(), dentropy: None, dtop: None, daux_loss: 0.0 })
    };
    policy.forward_backward(micro_batch, 1.0, &mut loss).unwrap();
    let _made = policy.optimizer_step(1e-3, 0.0).unwrap();
    let gradients: Vec<Tensor> =
        table.units.iter().map(|layout| Tensor::zeros([layout.len as i64], (Kind::Float, device))).collect();
    for shard in policy.export_state() {
        let shard = shard.unwrap();
        let index = table.index(shard.unit);
        let param = table.units[index].params.iter().find(|param| param.name == shard.name).unwrap();
        gradients[index]
            .narrow(0, param.offset as i64, param.numel() as i64)
            .copy_(shard.state.part(StatePart::M).unwrap());
    }
    logprobs.into_iter().chain(gradients).collect()
}

/// Norm of the difference divided by the norm of `expected`.
fn off(got: &Tensor, expected: &Tensor) -> f64 {
    let [got, expected] = [got, expected].map(|t| t.to_kind(Kind::Float));
    ((got - &expected).norm() / expected.norm()).double_value(&[])
}

fn sequence(len: usize, vocab_size: usize) -> Sequence {
    let key = RandomKey::new(5, len as u64);
    let token_ids = (0..len as u64).map(|at| (key.word(0, at) % vocab_size as u64) as u32).collect();
    Sequence::of_tokens(token_ids, PROMPT_LEN)
}

/// 16,384 scored tokens, a vocabulary of 152,064, rows of 3,584: memory of forward and backward in addition to weights and their gradients.
#[test]
#[ignore = "needs a GPU"]
fn gpu_the_output_head_needs_less_than_a_gigabyte() {
    let device = Device::Cuda(0);
    colo_grpo::internal::cuda::kernels::prepare(0, 1).unwrap();
    let (tokens, dim, vocabulary) = (16_384, 3584, 152_064);
    let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::BFloat16, device));
    let (x, table) = (rand(&[tokens, dim]), rand(&[vocabulary, dim]) * 0.02);
    let targets = Tensor::randint(vocabulary, [tokens], (Kind::Int64, device));
    let head = HeadParams { final_norm: rand(&[dim]), lm_head: None };
    let [mut d_norm, mut d_table] =
        [vec![dim], vec![vocabulary, dim]].map(|size| Tensor::zeros(size, (Kind::Float, device)));
    let scoring = Scoring {
        targets: &targets,
        top: head::TopTokens::Nothing,
        temperature: 1.0,
        norm: NormOptions { eps: 1e-6, zero_centred: false },
        exact: None,
    };
    let dlogprobs = Tensor::ones([tokens], (Kind::Float, device));
    let mut run = || {
        let scored = head_forward(&head, &table, &x, &scoring, true).unwrap();
        let into = Some(HeadSums { final_norm: &mut d_norm, table: Some(&mut d_table), onto: Onto::Sum });
        head_backward(&head, &table, &scoring, scored.saved, &dlogprobs, None, None, into).unwrap()
    };
    drop(run());
    torch::reset_peak_memory(device).unwrap();
    let before = torch::device_memory(device).unwrap().unwrap().allocated;
    drop(run());
    let took = torch::device_memory(device).unwrap().unwrap().peak_allocated - before;
    println!("the head took {:.3} GB", took as f64 / 1e9);
    assert!(took < 1_000_000_000, "{took}");
}

/// More tokens than a chunk holds, so that backward processes slices of the vocabulary. Every slice contains targets; the last one is narrower.
#[test]
#[ignore = "needs a GPU"]
fn gpu_sliced_head_gradients_match_float32() {
    let device = Device::Cuda(0);
    colo_grpo::internal::cuda::kernels::prepare(0, 1).unwrap();
    let (tokens, dim, vocabulary, temperature) = (1500, 896, 50_000, 0.8);
    let rand = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, device));
    let (hidden, weight) = (rand(&[tokens, dim]), rand(&[vocabulary, dim]) * 0.05);
    let [hidden, weight] = [hidden, weight].map(|t| t.to_kind(Kind::BFloat16));
    let targets = Tensor::randint(vocabulary, [tokens], (Kind::Int64, device));
    let (dlogprobs, dentropy, before) = (rand(&[tokens]), rand(&[tokens]), rand(&[vocabulary, dim]));

    let [h, w] = [&hidden, &weight].map(|t| t.to_kind(Kind::Float).set_requires_grad(true));
    let log_p = (h.mm(&w.tr()) / temperature).log_softmax(-1, None::<Kind>);
    let entropy = -(log_p.exp() * &log_p).sum_dim_intlist([1i64].as_slice(), false, None::<Kind>);
    let chosen = log_p.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
    for dentropy in [None, Some(&dentropy)] {
        let loss = (&chosen * &dlogprobs).sum(None::<Kind>)
            + dentropy.map_or_else(|| Tensor::zeros([], (Kind::Float, device)), |d| (&entropy * d).sum(None::<Kind>));
        let exact = Tensor::run_backward(&[loss], &[&h, &w], true, false);
        for chunk in [128, 640, 2000] {
            let top = head::TopTokens::Nothing;
            let out = head::forward(&hidden, &weight, &targets, temperature, top, chunk, true).unwrap();
            let mut d_weight = before.copy();
            let d_hidden = head::backward(
                &hidden,
                &weight,
                &targets,
                temperature,
                out.saved,
                &dlogprobs,
                dentropy,
                None,
                Some(head::TableSum { sum: &mut d_weight, onto: Onto::Sum }),
            )
            .unwrap();
            let errors = [off(&d_hidden, &exact[0]), off(&(d_weight - &before), &exact[1])];
            println!("chunks of {chunk}, entropy {}: off by {errors:?}", dentropy.is_some());
            assert!(errors.iter().all(|error| *error < 5e-3), "{chunk}: {errors:?}");
        }
    }
}
