//! Predicted seconds of a planned run's step, and of the same step with other ZeRO stages and recomputation.

use std::fmt;

use super::planned_run::PlannedRun;
use super::preflight::{MakePlan, Preflight};
use super::sizing::{self, ExpectedStep};
use crate::config::{AutoOr, GradientCheckpointing, WorldSize};
use crate::cuda::Placement;
use crate::error::Result;
use crate::plan::{CompletionLengths, ExpectedLengths, Gpu, MemoryPlan, Room, StepSeconds, human};

impl PlannedRun {
    /// Lengths for which a run on `gpu` is predicted; lengths that are not given are the longest that the run allows. `None` if no prompt length is
    /// known.
    pub fn expected(
        &self,
        gpu: Gpu,
        prompt_len: Option<usize>,
        completion: Option<CompletionLengths>,
    ) -> Option<ExpectedStep> {
        let longest = self.config.max_completion_length;
        let completion = completion.unwrap_or(CompletionLengths::fixed(longest));
        let prompt = prompt_len.or(self.config.max_prompt_length)? as f64;
        Some(ExpectedStep { gpu, lengths: ExpectedLengths { prompt, completion } })
    }

    /// Predicts the seconds of a step of the run in `preflight`.
    ///
    /// # Errors
    /// Features of the run that no measured step had.
    pub fn seconds(
        &self,
        preflight: &Preflight,
        expected: ExpectedStep,
    ) -> std::result::Result<StepSeconds, &'static str> {
        sizing::seconds(&self.config, preflight, expected)
    }

    /// Plans the run with every ZeRO stage and recomputation mode that its configuration allows.
    pub fn compare_training(
        &self,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        expected: Option<ExpectedStep>,
    ) -> TrainingTable {
        let stages = if world_size.ranks > 1 { 0..=3 } else { 0..=0 };
        let keeps = [GradientCheckpointing::None, GradientCheckpointing::Selective, GradientCheckpointing::Full];
        let mut choices = Vec::new();
        for stage in stages {
            for keep in keeps {
                let mut config = self.config.clone();
                config.zero.stage = stage;
                config.gradient_checkpointing = AutoOr::Given(keep);
                if !self.can_be(&config, placement, world_size) {
                    continue;
                }
                let plan: &MakePlan<'_> = &|input, _| MemoryPlan::without_advice(input);
                let planned = Preflight::planned(&config, self.model.clone(), placement, world_size, room, plan);
                let choice = planned.map(|preflight| TrainingChoice {
                    peak_bytes: preflight.plan.peak_bytes(),
                    seconds: expected.and_then(|expected| sizing::seconds(&config, &preflight, expected).ok()),
                });
                choices.push((stage, keep, choice));
            }
        }
        TrainingTable { choices, own_stage: self.config.zero.stage }
    }
}

/// Peak memory and seconds of one ZeRO stage and recomputation mode.
#[derive(Debug)]
struct TrainingChoice {
    peak_bytes: usize,
    seconds: Option<StepSeconds>,
}

/// Seconds and memory of each ZeRO stage and recomputation mode, to print as a table.
#[derive(Debug)]
pub struct TrainingTable {
    choices: Vec<(u8, GradientCheckpointing, Result<TrainingChoice>)>,
    own_stage: u8,
}

impl fmt::Display for TrainingTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " zero.stage  gradient_checkpointing  peak a rank    train s     step s")?;
        for (stage, keep, choice) in &self.choices {
            let mark = if *stage == self.own_stage { '*' } else { ' ' };
            write!(f, "\n{mark}{stage:>10}  {:>22}", keep.name())?;
            match choice {
                Ok(TrainingChoice { peak_bytes, seconds }) => {
                    let of = |part: fn(&StepSeconds) -> f64| {
                        seconds.as_ref().map_or("-".to_owned(), |all| format!("{:.2}", part(all)))
                    };
                    let (train, step) = (of(|all| all.train_s), of(|all| all.step_s));
                    write!(f, "  {:>11}  {train:>9}  {step:>9}", human(*peak_bytes))?;
                }
                Err(error) => write!(f, "  {error}")?,
            }
        }
        Ok(())
    }
}
