//! Curriculum by solve rates: the sampler draws rows that are always or never solved less often.

use std::collections::HashMap;

use super::Trainer;
use crate::config::Config;
use crate::data::Dataset;
use crate::error::Result;
use crate::eval;
use crate::metrics::{Reduce, StepMetrics};
use crate::ranks::all_gather_json;
use crate::types::RolloutGroup;

/// The row index of every prompt id, if solve rates are recorded.
#[derive(Debug, Default)]
pub(super) struct RowsById(HashMap<u64, usize>);

impl RowsById {
    /// Builds the map; empty if no solve rates are recorded.
    pub fn new(config: &Config, dataset: &Dataset) -> Self {
        let prompts = dataset.prompts().iter().filter(|_| config.curriculum.solve_rate.is_some());
        Self(prompts.enumerate().map(|(row, prompt)| (prompt.id, row)).collect())
    }
}

/// Row index, number of completions with a binary reward, and number of solved ones.
type Solved = (usize, u32, u32);

impl Trainer {
    /// Records how many completions of each sampled row are solved, equally on all ranks; collective over the world if there is a curriculum. Returns
    /// the share of solved completions, NaN if none has a binary reward.
    pub(super) fn observe_solved<'a>(&mut self, groups: impl Iterator<Item = &'a RolloutGroup>) -> Result<Option<f64>> {
        if self.config.curriculum.solve_rate.is_none() {
            return Ok(None);
        }
        let solved_by = self.config.deciding_rewards(self.rewards.judges());
        let of_group = |group: &RolloutGroup| -> Option<Solved> {
            let row = *self.data.rows_by_id.0.get(&group.prompt.id)?; // a program may sample its own prompts
            let verdicts = eval::verdicts(group, &solved_by);
            let num_solved = verdicts.iter().filter(|is_solved| **is_solved).count();
            Some((row, num_solved as u32, verdicts.len() as u32))
        };
        let own: Vec<Solved> = groups.filter_map(of_group).collect();
        let all: Vec<Vec<Solved>> = all_gather_json(&*self.world.group(), "gather solve rates", &own)?;
        let (mut total, mut count) = (0, 0);
        for (row, num_solved, num_judged) in all.into_iter().flatten() {
            self.data.sampler.observe(row, [num_solved, num_judged]);
            total += num_solved;
            count += num_judged;
        }
        Ok(Some(f64::from(total) / f64::from(count)))
    }

    /// Adds the metrics of the curriculum, if there is one.
    pub(super) fn add_curriculum_metrics(&self, metrics: &mut StepMetrics, solve_rate: Option<f64>) {
        let Some(solve_rate) = solve_rate else { return };
        let [num_hard, num_easy] = self.data.sampler.num_resting();
        for (name, value) in
            [("solve_rate", solve_rate), ("hard_rows", num_hard as f64), ("easy_rows", num_easy as f64)]
        {
            metrics.set(format!("curriculum/{name}"), value, Reduce::Last);
        }
    }
}
