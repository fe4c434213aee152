//! Batch sizes that follow from the configuration and the number of ranks.

use super::numbers::{check_divides, divisors, gcd, listed, nearest_multiples};
use super::range::MAX_COUNT;
use super::{AutoOr, Config, EngineShape, Roles};
use crate::error::{Error, Result};

/// Number of ranks of a run, in all and on each node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldSize {
    /// Number of ranks in all.
    pub ranks: usize,
    /// Number of ranks on each node.
    pub local_ranks: usize,
}

impl WorldSize {
    /// Refuses a sequence parallel size that does not divide the `num_trainers` ranks that train, or that does not fit on a node.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the valid sizes.
    pub fn check_sequence_groups(self, num_trainers: usize, size: usize) -> Result<()> {
        let (key, local) = ("sequence_parallel_size", self.local_ranks);
        check_divides(key, size, num_trainers, "train")?;
        if self.ranks == local || local.is_multiple_of(size) {
            return Ok(());
        }
        let valid: Vec<usize> = divisors(local).into_iter().filter(|&size| num_trainers.is_multiple_of(size)).collect();
        let expected = format!("a number of ranks within one node, which has {local}: {}", listed(&valid));
        Err(Error::invalid_value(key, size, expected))
    }

    /// Refuses engines that would span several nodes. `first` is the first rank that generates.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the sizes that fit on a node.
    pub fn check_engines(self, first: usize, engine: EngineShape) -> Result<()> {
        let local = self.local_ranks;
        let fits = |size: usize| local.is_multiple_of(size) && (first % local).is_multiple_of(size);
        if self.ranks == local || fits(engine.num_ranks()) {
            return Ok(());
        }
        let EngineShape { tensor_parallel_size: tp, pipeline_parallel_size: stages } = engine;
        let refuse = |key, got: usize, others: usize, what: &str| {
            let valid: Vec<usize> = divisors(local).into_iter().filter(|&size| fits(size * others)).collect();
            Err(Error::invalid_value(key, got, format!("{what}: {}", listed(&valid))))
        };
        match (fits(tp), tp) {
            (false, _) => {
                refuse("tensor_parallel_size", tp, 1, &format!("a number of ranks within one node, which has {local}"))
            }
            (true, 1) => {
                let what = format!("a number of stages within one node, which has {local} ranks");
                refuse("pipeline_parallel_size", stages, 1, &what)
            }
            (true, _) => {
                let what = format!("a number of stages of {tp} ranks within one node, which has {local} ranks");
                refuse("pipeline_parallel_size", stages, tp, &what)
            }
        }
    }
}

/// How one generation batch is divided over ranks and updates. All numbers follow from the configuration and the world size. Prompts are divided as
/// evenly as possible: if there are fewer prompts than ranks, or they do not divide, some ranks sample one group less than others. Completions are
/// balanced over the training ranks by their cost, whichever rank sampled them.
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::{BatchPlan, EngineShape, WorldSize};
///
/// let words = [
///     "tensor_parallel_size=2",
///     "num_generations=8",
///     "per_device_train_batch_size=16",
///     "gradient_accumulation_steps=2",
/// ]
/// .map(str::to_owned);
/// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
/// let BatchPlan { generation_batch_size, num_prompts, updates_per_generation, .. } = config.validate_world(4)?;
/// assert_eq!((generation_batch_size, num_prompts, updates_per_generation), (128, 16, 1)); // 16 x 4 ranks x 2 slices
/// let engine: EngineShape = config.engine_shape();
/// WorldSize { ranks: 4, local_ranks: 2 }.check_engines(0, engine)?; // no engine reaches over nodes
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    /// Number of ranks.
    pub world_size: usize,
    /// Completions per generation batch, over all ranks.
    pub generation_batch_size: usize,
    /// Prompts (groups) per generation batch over all ranks: `generation_batch_size / num_generations`.
    pub num_prompts: usize,
    /// Number of ranks that train and of ranks that generate.
    pub roles: Roles,
    /// Groups that are sampled at the same time over all ranks, the same number on each: those that a step uses and the surplus of `oversample`.
    pub num_begun: usize,
    /// Slices per generation batch, each of `per_device_train_batch_size` completions per rank.
    pub steps_per_generation: usize,
    /// Optimizer updates per pass over a generation batch: `steps_per_generation / gradient_accumulation_steps`.
    pub updates_per_generation: usize,
}

impl Config {
    /// Softmax temperature of evaluations; 0 is greedy.
    pub fn eval_temperature(&self) -> f32 {
        self.eval_temperature.unwrap_or(self.temperature)
    }

    /// Sequence parallel size: the number of ranks that share each micro-batch. 1 until the plan has chosen, if it is to choose.
    pub fn num_sharers(&self) -> usize {
        match self.sequence_parallel_size {
            AutoOr::Given(size) => size,
            AutoOr::Auto => 1,
        }
    }

    /// A copy of the configuration with this sequence parallel size.
    #[must_use]
    pub fn sharing(&self, size: usize) -> Self {
        Self { sequence_parallel_size: AutoOr::Given(size), ..self.clone() }
    }

    /// Checks the configuration against the number of ranks.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the nearest valid numbers; [`Error::InvalidConfig`] if several are wrong.
    pub fn validate_world(&self, world_size: usize) -> Result<BatchPlan> {
        let roles @ Roles { num_trainers, num_generators } = self.roles(world_size)?;
        let shards = self.zero.shard_group_size.unwrap_or(1);
        let divided = [
            self.engine_shape().check_divides(num_generators, "generate"),
            check_divides("zero.shard_group_size", shards, num_trainers, "train"),
            check_divides("sequence_parallel_size", self.num_sharers(), num_trainers, "train"),
        ];
        let mut wrong: Vec<Error> = divided.into_iter().filter_map(Result::err).collect();
        match self.batch_plan(world_size, roles) {
            Ok(plan) => Error::of_all(wrong).map_or(Ok(plan), Err),
            Err(error) => {
                wrong.push(error);
                Err(Error::of_all(wrong).expect("there is one"))
            }
        }
    }

    /// The batch plan for `world_size` ranks with these roles.
    fn batch_plan(&self, world_size: usize, roles: Roles) -> Result<BatchPlan> {
        let out_of_range = |batch: Option<usize>| {
            let got = batch.map_or_else(|| "a number above 2^64".to_owned(), |batch| batch.to_string());
            Error::invalid_value("generation_batch_size", got, format!("at most {MAX_COUNT} completions"))
        };
        let product = |a: usize, b: usize| a.checked_mul(b).ok_or_else(|| out_of_range(None));
        let slice = product(self.per_device_train_batch_size, world_size)?; // completions per slice over all ranks
        // A surplus of groups is counted on each rank, which then needs whole groups of its own.
        let num_shares = if self.oversample > 0.0 { world_size } else { 1 };
        let groups = product(self.num_generations, num_shares)?;
        let steps_per_generation = match self.generation_batch_size {
            Some(batch) if batch.is_multiple_of(slice) && batch.is_multiple_of(groups) => batch / slice,
            Some(batch) => return Err(invalid_generation_batch(batch, slice, groups, num_shares > 1)),
            None => self.steps_per_generation.unwrap_or(self.gradient_accumulation_steps),
        };
        let generation_batch_size = product(slice, steps_per_generation)?;
        if generation_batch_size > MAX_COUNT {
            return Err(out_of_range(Some(generation_batch_size)));
        }
        if !generation_batch_size.is_multiple_of(groups) {
            return Err(self.invalid_derived_batch(world_size, num_shares, steps_per_generation));
        }
        if !steps_per_generation.is_multiple_of(self.gradient_accumulation_steps) {
            let expected = format!(
                "a divisor of the {steps_per_generation} slices per generation batch: {}",
                listed(&divisors(steps_per_generation))
            );
            return Err(Error::invalid_value(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                expected,
            ));
        }
        let num_prompts = generation_batch_size / self.num_generations;
        let num_begun = match self.oversample {
            0.0 => num_prompts,
            surplus => world_size * ((num_prompts / world_size) as f64 * (1.0 + surplus)).ceil() as usize,
        };
        Ok(BatchPlan {
            world_size,
            generation_batch_size,
            num_prompts,
            roles,
            num_begun,
            steps_per_generation,
            updates_per_generation: steps_per_generation / self.gradient_accumulation_steps,
        })
    }

    /// Number of optimizer updates in `num_train_epochs` passes over `num_rows` rows. Epochs without an incomplete last batch give transformers'
    /// `ceil(num_train_epochs * updates of an epoch)`.
    pub fn updates_in_epochs(&self, batch: &BatchPlan, num_rows: usize) -> usize {
        let (epochs, updates) = (self.optimizer.num_train_epochs, batch.updates_per_generation * self.num_iterations);
        if self.dataloader_drop_last {
            return (epochs * (num_rows / batch.num_prompts * updates) as f64).ceil() as usize;
        }
        let batches = (epochs * num_rows as f64 / batch.num_prompts as f64).ceil() as usize;
        batches.saturating_mul(updates)
    }

    /// The error for a generation batch (with `oversample`, the share of each rank) that is not a whole number of groups.
    fn invalid_derived_batch(&self, world_size: usize, num_shares: usize, steps: usize) -> Error {
        let (per_device, group) = (self.per_device_train_batch_size, self.num_generations);
        let factor = world_size / num_shares * steps;
        let share = per_device * factor;
        let whose = match num_shares {
            1 => format!("x {world_size} ranks = {share} completions"),
            _ => format!("= {share} completions on each of {world_size} ranks, as oversample is above 0,"),
        };
        let group_sizes: Vec<usize> = divisors(share).into_iter().filter(|size| *size >= 2).collect();
        let group_sizes = match group_sizes.is_empty() {
            true => String::new(),
            false => format!(" or num_generations one of {}", listed(&group_sizes)),
        };
        let expected = format!(
            "per_device_train_batch_size {per_device} x steps_per_generation {steps} {whose} to be whole groups of \
             num_generations = {group}; nearest valid: per_device_train_batch_size {}{group_sizes}",
            nearest_multiples(per_device, group / gcd(group, factor)),
        );
        Error::invalid_value("generation_batch_size", share * num_shares, expected)
    }
}

fn invalid_generation_batch(batch: usize, slice: usize, groups: usize, on_each_rank: bool) -> Error {
    let unit = slice / gcd(slice, groups) * groups;
    let times = if on_each_rank { " x world_size, as oversample is above 0," } else { "" };
    let expected = format!(
        "a multiple of per_device_train_batch_size x world_size = {slice} and of num_generations{times} = {groups}; nearest \
         valid: {}",
        nearest_multiples(batch, unit)
    );
    Error::invalid_value("generation_batch_size", batch, expected)
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;

    #[test]
    fn batch_sizes_are_derived_as_in_trl() {
        let plan = config(&["gradient_accumulation_steps=2", "steps_per_generation=4"]).validate_world(2).unwrap();
        assert_eq!((plan.generation_batch_size, plan.num_prompts), (64, 8));
        assert_eq!((plan.steps_per_generation, plan.updates_per_generation), (4, 2));
        let explicit =
            config(&["gradient_accumulation_steps=2", "generation_batch_size=64"]).validate_world(2).unwrap();
        assert_eq!(explicit, plan);
    }

    /// TRL 1.16: 10 rows in batches of 4 prompts are 2 batches an epoch.
    #[test]
    fn the_number_of_updates_counts_whole_batches_only() {
        let updates = |more: &[&str]| {
            let config = config(&[&["generation_batch_size=32", "num_iterations=2"], more].concat());
            config.updates_in_epochs(&config.validate_world(1).unwrap(), 10)
        };
        assert_eq!(updates(&["gradient_accumulation_steps=4"]), 3 * 2 * 2, "three epochs by default");
        assert_eq!(updates(&["gradient_accumulation_steps=4", "num_train_epochs=1"]), 2 * 2);
        assert_eq!(updates(&["num_train_epochs=0.3"]), 5, "of 0.3 x 2 batches x 8 updates");
        let ragged = ["num_train_epochs=1", "gradient_accumulation_steps=4", "dataloader_drop_last=false"];
        assert_eq!(updates(&ragged), 3 * 2);
    }

    /// TRL's example of 4 completions per GPU in groups of 16.
    #[test]
    fn a_group_of_completions_may_span_ranks() {
        let plan = config(&["per_device_train_batch_size=4", "num_generations=16"]).validate_world(8).unwrap();
        assert_eq!((plan.generation_batch_size, plan.num_prompts, plan.num_begun), (32, 2, 2));
        let plan = config(&["generation_batch_size=72", "per_device_train_batch_size=12"]).validate_world(3).unwrap();
        assert_eq!((plan.num_prompts, plan.steps_per_generation), (9, 2));
    }

    #[test]
    fn oversampling_gives_every_rank_the_same_number_of_groups() {
        let num_begun = |oversample: &str| {
            let plan = config(&["generation_batch_size=80", oversample]).validate_world(2).unwrap();
            (plan.num_prompts, plan.num_begun)
        };
        assert_eq!(num_begun("oversample=0"), (10, 10));
        assert_eq!(num_begun("oversample=0.5"), (10, 16));
    }

    #[test]
    fn errors_for_indivisible_numbers_name_the_nearest_valid_ones() {
        let message = |overrides: &[&str], world| config(overrides).validate_world(world).unwrap_err().to_string();
        assert_eq!(
            message(&["generation_batch_size=24"], 2),
            "generation_batch_size = 24: expected a multiple of per_device_train_batch_size x world_size = 16 and of \
             num_generations = 8; nearest valid: 16 or 32"
        );
        assert_eq!(
            message(&["per_device_train_batch_size=6"], 2),
            "generation_batch_size = 12: expected per_device_train_batch_size 6 x steps_per_generation 1 x 2 ranks = 12 \
             completions to be whole groups of num_generations = 8; nearest valid: per_device_train_batch_size 4 or 8 or \
             num_generations one of 2, 3, 4, 6, 12"
        );
        assert_eq!(
            message(&["per_device_train_batch_size=4", "oversample=1"], 2),
            "generation_batch_size = 8: expected per_device_train_batch_size 4 x steps_per_generation 1 = 4 completions on \
             each of 2 ranks, as oversample is above 0, to be whole groups of num_generations = 8; nearest valid: \
             per_device_train_batch_size 8 or num_generations one of 2, 4"
        );
        assert!(
            message(&["tensor_parallel_size=4"], 6).ends_with("a divisor of the 6 ranks that generate: 1, 2, 3, 6")
        );
        assert!(
            message(&["tensor_parallel_size=2"], 1)
                .ends_with("1, as there is only one rank to generate; --nproc 2 starts more ranks")
        );
        assert!(message(&["zero.shard_group_size=3"], 4).ends_with("a divisor of the 4 ranks that train: 1, 2, 4"));
        assert!(message(&["gradient_accumulation_steps=3", "steps_per_generation=4"], 1).ends_with("batch: 1, 2, 4"));
    }
}
