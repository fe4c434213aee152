//! Groups of ranks that must agree while engines sample.

use crate::config::{Config, DynamicSampling};
use crate::error::Result;
use crate::ranks::{HostGroup, World};

/// The ranks of this rank's engine, which has `size` ranks. On a rank without an engine: all ranks without one.
pub(super) fn engine_ranks(size: usize, world: &World, num_generators: usize) -> Vec<usize> {
    let num_trainers = world.size() - num_generators;
    let ranks = match world.rank().checked_sub(num_trainers) {
        None => 0..num_trainers,
        Some(place) => num_trainers + place / size * size..num_trainers + (place / size + 1) * size,
    };
    ranks.collect()
}

/// The group of ranks of this rank's engine, if they must agree on pauses; collective over the world in that case.
pub(super) fn pause_group(config: &Config, world: &World, num_generators: usize) -> Result<Option<HostGroup>> {
    let size = config.engine_shape().num_ranks();
    if size == 1 || !config.updates_in_flight(world.device().is_cuda()) {
        return Ok(None);
    }
    world.host_group("engine", &engine_ranks(size, world, num_generators)).map(Some)
}

/// The group of all ranks with engines, if they exchange which groups have a learning signal; collective over the world in that case.
pub(super) fn verdict_group(config: &Config, world: &World, num_generators: usize) -> Result<Option<HostGroup>> {
    if config.dynamic_sampling != DynamicSampling::Replace {
        return Ok(None);
    }
    world.host_group("verdicts", &engine_ranks(num_generators, world, num_generators)).map(Some)
}
