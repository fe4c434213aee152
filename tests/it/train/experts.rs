//! Mixture-of-experts models: gradients with the load balancing loss, and with replay of the sampler's routes.

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::ranks::{Backend, World};
use colo_grpo::internal::train::{PackOptions, Scores, Sequence, StatePart, pack};
use colo_grpo::internal::types::RoutedExperts;
use tch::{Kind, Tensor};

use super::follows_plain_adamw;
use super::run::{ADAM, ENTROPY_COEF, LR, Run, TEMPERATURE, max_difference, unpadded, weights};

/// Includes the router's gradient, with the load balancing loss.
#[test]
fn experts_train_like_plain_adamw() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full] {
        let run = Run { experts: true, recompute, ..Run::new(0, Kind::Double) };
        follows_plain_adamw(&mesh, Run { tied: true, ..run }, 1e-10);
        for share_prompts in [false, true] {
            follows_plain_adamw(&mesh, Run { share_prompts, aux_loss_coef: 0.5, budget: 1000, ..run }, 1e-10);
        }
    }
}

/// The sampler's routers are inexact, so that some tokens went to other experts. If these routes are replayed, the gradient is that of the network
/// that sampled; if the trainer computes its own routes, it differs.
#[test]
fn training_replays_recorded_experts() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for (delta_nets, share_prompts, recompute) in [
        (false, false, GradientCheckpointing::Full),
        (false, true, GradientCheckpointing::None),
        (true, true, GradientCheckpointing::Full),
    ] {
        let run =
            Run { experts: true, delta_nets, share_prompts, recompute, budget: 1000, ..Run::new(0, Kind::Double) };
        let mut sampler = run.autograd();
        sampler.router_noise = 0.1;
        let own = run.own_sequences(&mesh).into_iter().filter(|sequence| !sequence.masked);
        let recorded = own.map(|it| Sequence { routed_experts: sampler.routed_experts(&it), ..it }).collect::<Vec<_>>();
        let losses = recorded.iter().map(|sequence| {
            let (logprobs, entropy) = sampler.scores(sequence, TEMPERATURE);
            let terms = logprobs * -f64::from(sequence.advantage) + entropy * ENTROPY_COEF;
            terms.sum(Kind::Double) / run.denominator()
        });
        let loss = losses.reduce(|a, b| a + b).unwrap();
        let expected = sampler.step(loss, LR, 0.0, &ADAM);
        let step = |sequences: &[Sequence]| {
            let (mut policy, mut counts) = (run.policy(&mesh), None);
            let options = PackOptions { max_tokens: run.budget, share_prompts, device: mesh.world.device() };
            for micro_batch in &pack(sequences, &options).unwrap() {
                let mut loss = |scores: &Scores| {
                    counts = scores.differing_experts.as_ref().map(|counts| Vec::<i64>::try_from(counts).unwrap());
                    Ok(run.loss(micro_batch, scores))
                };
                policy.forward_backward(micro_batch, TEMPERATURE, &mut loss).unwrap();
            }
            (policy.optimizer_step(LR, 0.0).unwrap().grad_norm, weights(&policy), counts)
        };
        let plain = unpadded(&sampler.table, |unit| sampler.units[sampler.table.index(unit)].detach());
        let (norm, got, counts) = step(&recorded);
        let counts = counts.unwrap();
        assert!(counts[0] > 5 && counts[0] * 4 < counts[1], "{counts:?} choices differ");
        assert!((norm / expected - 1.0).abs() < 1e-9, "norm {norm} against {expected}");
        assert!(max_difference(&got, &plain) < 1e-10);
        let by_itself: Vec<Sequence> =
            recorded.iter().map(|it| Sequence { routed_experts: RoutedExperts::default(), ..it.clone() }).collect();
        let (other_norm, other, counts) = step(&by_itself);
        assert!(counts.is_none() && (other_norm / expected - 1.0).abs() > 1e-4, "norm {other_norm} against {expected}");
        assert!(max_difference(&other, &plain) > 1e-2 * LR);
    }
}

/// The sampler's router logits have noise of 0.001, as much as bfloat16 rounding causes: a few of thousands of choices
/// differ. With replay the trainer's gradient is that of the network that sampled, without replay it differs.
#[test]
fn small_router_errors_change_gradients_only_without_replay() {
    let mesh = World::single().mesh(1, 1).unwrap();
    let run = Run { experts: true, budget: 4000, ..Run::new(0, Kind::Double) };
    let mut sampler = run.autograd();
    sampler.router_noise = 1e-3;
    let sequence = |n: usize| {
        let token_ids = (0..26).map(|i| ((i * i * (n + 1) + 5 * n + 3 * i) % 47) as u32).collect();
        Sequence { advantage: ((n * 7) % 5) as f32 - 2.0, ..Sequence::of_tokens(token_ids, 4) }
    };
    let plain: Vec<Sequence> = (0..60).map(sequence).collect();
    let replayed: Vec<Sequence> =
        plain.iter().map(|it| Sequence { routed_experts: sampler.routed_experts(it), ..it.clone() }).collect();
    let losses = plain.iter().map(|it| {
        let (logprobs, entropy) = sampler.scores(it, TEMPERATURE);
        (logprobs * -f64::from(it.advantage) + entropy * ENTROPY_COEF).sum(Kind::Double) / run.denominator()
    });
    let loss = losses.reduce(|a, b| a + b).unwrap();
    let gradients = Tensor::run_backward(&[loss], &sampler.units, false, false);
    let error = |sequences: &[Sequence]| {
        let (mut policy, mut counts) = (run.policy(&mesh), None);
        let options = PackOptions { max_tokens: run.budget, share_prompts: false, device: mesh.world.device() };
        for micro_batch in &pack(sequences, &options).unwrap() {
            let mut loss = |scores: &Scores| {
                counts = scores.differing_experts.as_ref().map(|counts| Vec::<i64>::try_from(counts).unwrap());
                Ok(run.loss(micro_batch, scores))
            };
            policy.forward_backward(micro_batch, TEMPERATURE, &mut loss).unwrap();
        }
        let _ = policy.optimizer_step(0.0, 0.0).unwrap();
        let (mut off, mut all) = (0.0, 0.0);
        for shard in policy.export_state() {
            let shard = shard.unwrap();
            let layout = sampler.table.unit(shard.unit);
            let expected = layout.view(shard.name, &gradients[sampler.table.index(shard.unit)]).unwrap().reshape([-1]);
            let (first, count) = (shard.elements.start as i64, shard.elements.len() as i64);
            let expected = expected.narrow(0, first, count);
            let got = shard.state.part(StatePart::M).unwrap() / (1.0 - ADAM.beta1);
            off += (got - &expected).square().sum(Kind::Double).double_value(&[]);
            all += expected.square().sum(Kind::Double).double_value(&[]);
        }
        ((off / all).sqrt(), counts)
    };
    let ((with, counts), (without, _)) = (error(&replayed), error(&plain));
    let counts = counts.unwrap();
    println!(
        "{} of {} choices differ: gradient off by {with:.1e} with replay, {without:.1e} without",
        counts[0], counts[1]
    );
    assert!(counts[0] > 0 && counts[0] * 100 < counts[1], "{counts:?}");
    assert!(with < 1e-9 && without > 1e-4, "with replay {with:e}, without {without:e}");
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_experts_train_like_plain_adamw() {
    let mesh = World::single_on(Backend::Nccl).unwrap().mesh(1, 1).unwrap();
    for recompute in [GradientCheckpointing::None, GradientCheckpointing::Full] {
        let run = Run { experts: true, recompute, aux_loss_coef: 0.5, budget: 1000, ..Run::new(0, Kind::Double) };
        follows_plain_adamw(&mesh, run, 1e-10);
        follows_plain_adamw(&mesh, Run { kind: Kind::Float, residual: Kind::Float, ..run }, 0.1 * LR);
    }
}

/// The load balancing loss E sum_e f_e P_e over the rows of all layers and sequences, as in the paper.
pub fn load_balance(routes: &[[Tensor; 2]]) -> Tensor {
    let rows = |n: usize| Tensor::cat(&routes.iter().map(|both| &both[n]).collect::<Vec<_>>(), 0);
    let mean = |rows: Tensor| rows.mean_dim(0, false, None);
    (mean(rows(0)) * mean(rows(1))).sum(None) * routes[0][0].size()[1] as f64
}
