//! `sequence_parallel_size = auto`: chooses the smallest number of ranks that share micro-batches for which the plan fits, and compares the plans of
//! all numbers.

use std::fmt;

use super::planned_run::PlannedRun;
use super::preflight::{MakePlan, OpenModel, Preflight, combination};
use super::sizing::{self, ExpectedStep};
use super::teacher::Teacher;
use crate::config::{AutoOr, Config, WorldSize, divisors};
use crate::cuda::Placement;
use crate::error::Result;
use crate::model::ModelSpec;
use crate::plan::{MemoryPlan, Room, StepSeconds, human};

impl Preflight {
    /// Like [`Preflight::of_model`], with a function that makes plans. `auto` chooses the smallest `sequence_parallel_size` that leaves a tenth of
    /// the memory free while training or, if none does, the smallest that fits.
    pub(super) fn planned(
        config: &Config,
        model: OpenModel,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        plan: &MakePlan<'_>,
    ) -> Result<Self> {
        let of_size = |size: usize, plan: &MakePlan<'_>| {
            Self::of_size(&config.sharing(size), model.clone(), placement, world_size, room, plan)
        };
        if let AutoOr::Given(size) = config.sequence_parallel_size {
            return of_size(size, plan);
        }
        let sizes = sizes(config, &model.spec, placement, world_size)?;
        let trial: &MakePlan<'_> = &|input, _| MemoryPlan::without_advice(input);
        let mut fitting = None;
        for &size in &sizes {
            match of_size(size, trial) {
                Ok(preflight) if preflight.plan.leaves_share() => {
                    fitting = Some((size, "the least that leaves a tenth of the memory free while training"));
                    break;
                }
                Ok(_) => fitting = fitting.or(Some((size, "the least that fits"))),
                Err(_) => {}
            }
        }
        let listed = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        // If none fits, return the error of the size that needs least memory.
        let (size, why) = fitting.unwrap_or((sizes.last().copied().unwrap_or(1), ""));
        let preflight = of_size(size, plan)?;
        Ok(Self { why_shared: Some(format!("sequence_parallel_size: {size}, {why}, of {listed}")), ..preflight })
    }
}

/// The possible values of `sequence_parallel_size`, ascending, apart from memory.
fn sizes(config: &Config, spec: &ModelSpec, placement: Placement, world_size: WorldSize) -> Result<Vec<usize>> {
    let num_trainers = config.roles(world_size.ranks)?.num_trainers;
    let teacher = Teacher::spec(config)?;
    let can_be = |size: &usize| {
        world_size.check_sequence_groups(num_trainers, *size).is_ok()
            && spec.validate_sequence_parallel(*size).is_ok()
            && teacher.as_ref().is_none_or(|teacher| teacher.validate_sequence_parallel(*size).is_ok())
            && combination(&config.sharing(*size), spec, placement, world_size).check().is_ok()
    };
    Ok(divisors(num_trainers).into_iter().filter(can_be).collect())
}

impl PlannedRun {
    /// Plans the run with every `sequence_parallel_size` that its model and world size allow; `None` if there is only one.
    ///
    /// # Errors
    /// An error if the configuration cannot be divided among the ranks.
    pub fn compare_sharing(
        &self,
        placement: Placement,
        world_size: WorldSize,
        room: Room,
        expected: Option<ExpectedStep>,
    ) -> Result<Option<SharingTable>> {
        let sizes = sizes(&self.config, &self.model.spec, placement, world_size)?;
        if sizes.len() < 2 {
            return Ok(None);
        }
        let plan: &MakePlan<'_> = &|input, _| MemoryPlan::without_advice(input);
        let planned =
            |config: &Config| Preflight::planned(config, self.model.clone(), placement, world_size, room, plan);
        let choice = |size: usize| {
            let config = self.config.sharing(size);
            let planned = planned(&config).map(|preflight| {
                let seconds = expected.and_then(|expected| sizing::seconds(&config, &preflight, expected).ok());
                SharingChoice { plan: preflight.plan, seconds }
            });
            (size, planned)
        };
        let own = planned(&self.config).ok().map(|preflight| preflight.plan.sequence_parallel_size);
        Ok(Some(SharingTable { choices: sizes.into_iter().map(choice).collect(), own }))
    }
}

/// The plan for one `sequence_parallel_size`.
#[derive(Debug)]
struct SharingChoice {
    plan: MemoryPlan,
    seconds: Option<StepSeconds>,
}

/// Memory and seconds for each `sequence_parallel_size`, to print as a table.
#[derive(Debug)]
pub struct SharingTable {
    choices: Vec<(usize, Result<SharingChoice>)>,
    own: Option<usize>,
}

impl fmt::Display for SharingTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            " sequence_parallel_size  gradient_checkpointing  peak a rank  largest micro-batch    train s     step s"
        )?;
        for (size, choice) in &self.choices {
            let mark = if Some(*size) == self.own { '*' } else { ' ' };
            write!(f, "\n{mark}{size:>22}")?;
            match choice {
                Ok(SharingChoice { plan, seconds }) => {
                    let (keep, peak, tokens) =
                        (plan.gradient_checkpointing.name(), human(plan.peak_bytes()), plan.largest_micro_batch);
                    let of = |part: fn(&StepSeconds) -> f64| {
                        seconds.as_ref().map_or("-".to_owned(), |all| format!("{:.2}", part(all)))
                    };
                    let (train, step) = (of(|all| all.train_s), of(|all| all.step_s));
                    write!(f, "  {keep:>22}  {peak:>11}  {tokens:>19}  {train:>9}  {step:>9}")?;
                }
                Err(error) => write!(f, "  {error}")?,
            }
        }
        Ok(())
    }
}
