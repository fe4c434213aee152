//! Keys that divide ranks into trainers and generators (`mode`, `split.*`).

use super::field::keys;
use super::range::{COUNT, from_to};
use super::{Config, Mode};
use crate::error::{Error, Result};

/// Maximum number of steps that a batch may be sampled ahead.
pub const MAX_ASYNC_STEPS: usize = 8;

keys! {
    /// Keys of split mode, in which a rank either trains or generates (`split.*`, if `mode` is `split`).
    ///
    /// Two of eight GPUs generate, up to two steps ahead:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{MAX_ASYNC_STEPS, Mode, Roles, SplitConfig};
    ///
    /// let words = [
    ///     "mode=split",
    ///     "split.rollout_gpus=2",
    ///     "split.async_steps=2",
    ///     "residency.optimizer=resident",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let split: &SplitConfig = &config.split;
    /// assert!(config.mode == Mode::Split && split.async_steps <= MAX_ASYNC_STEPS);
    /// assert_eq!(config.roles(8)?, Roles { num_trainers: 6, num_generators: 2 });
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct SplitConfig {
        /// Number of ranks, the last ones, that only generate; the others only train.
        pub rollout_gpus: Option<usize> = None => COUNT,
        /// 0: each step trains on samples of the newest weights. N: while a step trains, the batches of the next N steps are sampled with the weights
        /// from before it; no token is sampled with weights older than N steps. The importance sampling correction accounts for the difference.
        pub async_steps: usize = 0 => from_to(0.0, MAX_ASYNC_STEPS as f64),
        /// Whether engines that sample more than one step ahead take new weights in the middle of batches, so that trainers never wait for a few long
        /// completions while another batch is complete. The samples then depend on timing. Otherwise each batch is sampled by one version of the
        /// weights. `none` is true on GPUs, unless `strict`, `full_determinism` or `dynamic_sampling = "replace"` is set.
        pub in_flight_updates: Option<bool> = None,
    }
}

/// The number of ranks that train and that generate; unless the mode is split, every rank does both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Roles {
    /// Number of ranks that train, the first ones.
    pub num_trainers: usize,
    /// Number of ranks that generate, the last ones.
    pub num_generators: usize,
}

impl Config {
    /// Whether split-mode engines take new weights in the middle of batches; the default depends on the device.
    pub fn updates_in_flight(&self, is_cuda: bool) -> bool {
        let in_flight = [("split.in_flight_updates", true.into())];
        let is_default = || is_cuda && self.combination().with(in_flight).check().is_ok();
        self.mode == Mode::Split
            && self.split.async_steps > 1
            && self.split.in_flight_updates.unwrap_or_else(is_default)
    }

    /// The roles of `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if no rank is left to train.
    pub fn roles(&self, world_size: usize) -> Result<Roles> {
        let Some(num_generators) = self.split.rollout_gpus else {
            return Ok(Roles { num_trainers: world_size, num_generators: world_size });
        };
        if num_generators < world_size {
            return Ok(Roles { num_trainers: world_size - num_generators, num_generators });
        }
        let expected = match world_size {
            1 => "at least 2 ranks (--nproc) for mode = split, or mode = colocated".to_owned(),
            _ => format!("1 to {}: at least one of the {world_size} ranks has to train", world_size - 1),
        };
        Err(Error::invalid_value("split.rollout_gpus", num_generators, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn ranks_are_split_into_trainers_and_generators_or_refused() {
        let split = config(&["mode=split", "split.rollout_gpus=3"]);
        assert_eq!(split.roles(4).unwrap(), Roles { num_trainers: 1, num_generators: 3 });
        assert_eq!(config(&[]).roles(4).unwrap(), Roles { num_trainers: 4, num_generators: 4 });
        let error = |world_size| split.roles(world_size).unwrap_err().to_string();
        assert_eq!(error(3), "split.rollout_gpus = 3: expected 1 to 2: at least one of the 3 ranks has to train");
        assert!(error(1).contains("at least 2 ranks"), "{}", error(1));
        let refused = |key: &str| {
            let config = config(&["mode=split", "split.rollout_gpus=3", "num_generations=2", key]);
            config.validate_world(5).unwrap_err().to_string()
        };
        assert!(refused("tensor_parallel_size=2").ends_with("a divisor of the 3 ranks that generate: 1, 3"));
        assert!(refused("zero.shard_group_size=4").ends_with("a divisor of the 2 ranks that train: 1, 2"));
    }
}
