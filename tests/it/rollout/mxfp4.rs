//! Experts in MXFP4 as simulated on a CPU: the engine samples like one whose weights were rounded beforehand, and without any difference where the
//! weights came from MXFP4 files.

use std::sync::Arc;

use colo_grpo::internal::config::RolloutQuantization;
use colo_grpo::internal::model::{ModelSpec, Use};
use colo_grpo::internal::ops::mxfp4;
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{Engine, EngineOptions};
use colo_grpo::internal::types::RolloutGroup;
use tch::{Device, Kind, Tensor};

use super::setup::{Model, alone, golden, options, prompts, sampled, token_ids, words};
use crate::ranks;

fn mxfp4() -> EngineOptions {
    EngineOptions { quantization: RolloutQuantization::Mxfp4, ..options() }
}

/// Few layers with experts of 192, half of which is a multiple of 32, too.
fn model() -> Model {
    let spec = ModelSpec { vocab_size: 96, ..ModelSpec::preset("tiny-moe").unwrap() };
    Model::random(spec.with_num_layers(2), 3)
}

/// Rounds all matrices of experts in place.
fn round(model: &Model) {
    let linears = model.blocks.iter().flat_map(|block| block.linears());
    for weight in linears.map(|(_, linear)| linear.weight()).filter(|weight| weight.dim() == 3) {
        let &[experts, rows, columns] = &weight.size()[..] else { unreachable!() };
        let size = [experts, rows, columns];
        let packed = Tensor::zeros([mxfp4::bytes(size)], (Kind::Uint8, Device::Cpu));
        mxfp4::round(weight, &packed).unwrap();
        weight.shallow_clone().copy_(&mxfp4::values(&packed, size, weight.kind()).unwrap());
    }
}

fn logprobs(groups: &[RolloutGroup]) -> Vec<f32> {
    let completions = groups.iter().flat_map(|group| &group.completions);
    completions.flat_map(|completion| completion.rollout_logprobs.clone()).collect()
}

fn assert_same(got: &[RolloutGroup], expected: &[RolloutGroup]) {
    assert_eq!(token_ids(got), token_ids(expected));
    assert_eq!(logprobs(got), logprobs(expected));
}

#[test]
fn experts_in_mxfp4_sample_like_weights_that_were_rounded_before() {
    let model = model();
    let sample = |model: &Model, options| model.generate(options, &prompts(6), &sampled()).0;
    let (plain, own) = (sample(&model, options()), sample(&model, mxfp4()));
    assert_ne!(logprobs(&plain), logprobs(&own), "nothing is rounded");
    round(&model);
    assert_same(&own, &sample(&model, options()));
    assert_same(&sample(&model, mxfp4()), &own);
}

#[test]
fn a_model_of_mxfp4_files_is_sampled_as_published() {
    let model = Model::golden("gpt_oss_mxfp4");
    let sample = |options| model.generate(options, &prompts(6), &sampled()).0;
    assert_same(&sample(mxfp4()), &sample(options()));
}

/// Slices of experts, and whole experts on each rank, are rounded like the whole matrices: blocks of 32 columns are not divided.
fn ranks_sample_alike(world: &World) {
    let (model, tp) = (model(), world.group());
    let own = model.generate_on(tp.clone(), mxfp4(), &prompts(6), &sampled()).0;
    round(&model);
    assert_same(&own, &model.generate_on(tp, options(), &prompts(6), &sampled()).0);
}

#[test]
fn two_ranks_sample_experts_in_mxfp4() {
    ranks::run(2, "rollout::mxfp4::two_ranks_sample_experts_in_mxfp4", |world: World| ranks_sample_alike(&world));
}

#[test]
fn what_mxfp4_does_not_support_is_refused() {
    let refused = |spec: ModelSpec, options: EngineOptions| -> String {
        let tokenizer = Arc::new(words(spec.vocab_size));
        Engine::new(Arc::new(spec), tokenizer, options, alone()).unwrap_err().to_string()
    };
    let error = refused(ModelSpec::preset("micro").unwrap(), mxfp4());
    assert!(error.contains("the model has no experts"), "{error}");
    let error = refused(ModelSpec::from_folder(golden("qwen3_moe")).unwrap(), mxfp4());
    assert!(error.contains("multiples of 32 elements long, but Down is [32, 16]"), "{error}");
    let moe = || ModelSpec::preset("tiny-moe").unwrap();
    let error = refused(moe(), EngineOptions { exact: true, ..mxfp4() });
    assert!(error.contains("exact"), "{error}");
    let tp_size = 4; // 48 columns of a rank
    let slice = Use::Engine { tp_size };
    let error = RolloutQuantization::Mxfp4.format().check(slice, &moe(), true).unwrap_err().to_string();
    assert!(error.contains("Down is [128, 48]"), "{error}");
}
