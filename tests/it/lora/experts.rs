//! Adapters of experts at every ZeRO stage, and on a 4-bit base.

use colo_grpo::internal::config::{Quantization, TargetModule};
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::ranks::World;
use tch::Kind;

use super::{adapted_from, base, four_updates, own_sequences, packed, trained};
use crate::ranks;

#[test]
fn zero_stages_with_expert_adapters_are_bitwise_equal() {
    ranks::run(2, "lora::experts::zero_stages_with_expert_adapters_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for (kinds, quantization) in [
            ((Kind::Float, Kind::Float), Quantization::None),
            ((Kind::BFloat16, Kind::Float), Quantization::None),
            ((Kind::Float, Kind::Float), Quantization::Nf4),
        ] {
            let after = |stage| {
                let spec = ModelSpec { vocab_size: 96, ..ModelSpec::preset("tiny-moe").unwrap() }.with_num_layers(2);
                let mut policy =
                    adapted_from((spec, TargetModule::ALL.to_vec()), &mesh, stage, kinds, 0.0, (quantization, false));
                let micro_batches = packed(&own_sequences(world.rank()), 1000);
                let before = base(&policy);
                let nlls = four_updates(&mut policy, &micro_batches);
                assert!(nlls[3] < nlls[0], "{nlls:?}");
                assert!(base(&policy) == before, "the base changed");
                trained(&policy)
            };
            let expected = after(0);
            for stage in 1..=3 {
                assert!(after(stage) == expected, "stage {stage}, {kinds:?}, {quantization:?}");
            }
        }
    });
}
