//! GRPO with a reward, advantages, a loss and a callback of the program's own, and a loop that samples for itself:
//! `cargo run --example reinforce -- configs/tiny-cpu.toml output_dir=runs/reinforce`
#![allow(clippy::print_stdout)]

use std::sync::Arc;

use colo_grpo::data::RolloutGroup;
use colo_grpo::grpo::{Denominators, LossInput};
use colo_grpo::reward::RewardInput;
use colo_grpo::trainer::StepReport;
use colo_grpo::{Config, Result, Trainer, World};
use tch::{Kind, Tensor};

fn main() {
    colo_grpo::main(train)
}

fn train() -> Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let file = if arguments.is_empty() { "configs/tiny-cpu.toml".to_owned() } else { arguments.remove(0) };
    let rewards = ["reward_funcs=[\"numeric_answer\", \"brevity\"]", "reward_weights=[0.9, 0.1]"];
    arguments.extend([rewards[0], rewards[1], "tensor_parallel_size=1"].map(str::to_owned));
    let config = Config::load(Some(file.as_ref()), &arguments)?;
    let world = Arc::new(World::for_run(&config)?);
    let is_first = world.rank() == 0;
    let mut trainer = Trainer::builder(config, world)
        .reward("brevity", brevity)
        .advantages(center)
        .loss(reinforce)
        .on_step(move |report: &StepReport<'_>| {
            if is_first {
                println!("step {} of {}: reward {:.3}", report.step, report.max_steps, report.metrics["reward"]);
            }
            Ok(())
        })
        .build()?;
    let summary = trainer.run_with(|trainer| {
        trainer.start()?;
        while !trainer.is_finished() {
            let (prompts, params) = (trainer.next_prompts()?, trainer.sampling_params());
            let groups = trainer.with_rollout(|engine| engine.generate(&prompts, &params, |_| ()))?;
            let batch = trainer.score(groups)?;
            let metrics = trainer.update(batch)?;
            trainer.finish_step(&metrics)?;
        }
        trainer.finish()
    })?;
    if is_first {
        println!("{}", summary.model_dir.display());
    }
    Ok(())
}

/// 1 for an empty completion, less for longer ones.
fn brevity(input: &RewardInput<'_>) -> Result<f32> {
    Ok(1.0 / (1.0 + input.token_ids.len() as f32))
}

/// A reward less the mean of its group, not divided by the standard deviation.
fn center(groups: &mut [RolloutGroup]) -> Result<()> {
    for group in groups {
        let rewards: Vec<f32> = group.completions.iter().filter_map(|completion| completion.reward).collect();
        let mean = rewards.iter().sum::<f32>() / rewards.len().max(1) as f32;
        for completion in &mut group.completions {
            completion.advantage = completion.reward.map_or(0.0, |reward| reward - mean);
        }
    }
    Ok(())
}

/// `-advantage * logprob`, over the tokens of the batch.
fn reinforce(input: &LossInput<'_>, denominators: &Denominators) -> Result<Tensor> {
    let advantages = input.advantages.index_select(0, input.sequence_of_token); // [C]
    Ok(-(input.logprobs * advantages).sum(Kind::Float) / denominators.num_tokens)
}
