//! Experts in MXFP4, with weights that MXFP4 represents exactly: the sampler is as close to the trainer as in bfloat16.

use colo_grpo::internal::config::RolloutQuantization;
use colo_grpo::internal::model::{ModelSpec, ParamName, UnitLayout};
use colo_grpo::internal::ops::mxfp4;
use tch::{Device, Kind, Tensor};

use super::{EngineOptions, Model, sampled_as_trained, steps_do_not_see_their_batch};

/// Rounds a block's matrices of experts in place.
pub fn round_experts(layout: &UnitLayout, flat: &Tensor) {
    let views = [ParamName::GateUp, ParamName::Down].into_iter().filter_map(|name| layout.view(name, flat));
    for mut weight in views {
        let &[experts, rows, columns] = &weight.size()[..] else { continue };
        let packed = Tensor::zeros([mxfp4::bytes([experts, rows, columns])], (Kind::Uint8, weight.device()));
        mxfp4::round(&weight, &packed).unwrap();
        let packed = packed.to_device(Device::Cpu);
        weight.copy_(&mxfp4::values(&packed, [experts, rows, columns], weight.kind()).unwrap());
    }
}

fn model(name: &str) -> Model {
    let spec = ModelSpec::preset(name).unwrap();
    let small = spec.with_num_layers(2).map_experts(|experts| {
        (experts.num_experts, experts.own, experts.expert.intermediate) = (16, 16, 128);
    });
    Model { quantization: RolloutQuantization::Mxfp4, ..Model::of(small) }
}

/// Silu without biases, and the clamped SwiGLU with them.
#[test]
#[ignore = "needs a GPU"]
fn gpu_mxfp4_of_published_weights_samples_as_trained() {
    for name in ["qwen3-30b-a3b", "gpt-oss-20b"] {
        sampled_as_trained(&model(name), &format!("{name} in MXFP4, 2 layers"), [1.5, 1.5]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_strict_steps_of_mxfp4_experts_are_independent_of_the_batch() {
    let format = |options| EngineOptions { quantization: RolloutQuantization::Mxfp4, ..options };
    steps_do_not_see_their_batch(&model("qwen3-30b-a3b"), &format, &[(256, 170, 80, 50)]);
}
