//! Models with multipliers of embedding, scores, sublayers and logits, and a layer without rotary embedding.

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::ranks::World;
use tch::Kind;

use super::follows_plain_adamw;
use super::run::Run;

/// The output head is tied to the embedding, whose gradient then contains both multipliers, or not; also with gated delta nets.
#[test]
fn layers_with_multipliers_train_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        for (tied, share_prompts, delta_nets) in [(false, true, false), (true, false, false), (false, true, true)] {
            let run = Run { factors: true, tied, share_prompts, delta_nets, recompute, ..Run::new(0, Kind::Double) };
            follows_plain_adamw(&mesh, run, 1e-10);
        }
    }
}
