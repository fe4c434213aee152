//! How ranks are divided: tensor-parallel, data-parallel and shard groups.

use std::sync::Arc;

use super::collective::Collective;
use super::lane::Lane;
use super::world::World;
use crate::error::{Error, Result};

/// This rank's groups.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// Ranks that share one engine: consecutive.
    pub tp: Arc<dyn Collective>,
    /// Ranks with this one's place in their tp groups.
    pub dp: Arc<dyn Collective>,
    /// Ranks that share one copy of the sharded state: consecutive.
    pub shard: Arc<dyn Collective>,
    /// Ranks with this one's place in their shard groups: they hold the same shard.
    pub replicate: Arc<dyn Collective>,
    /// All ranks.
    pub world: Arc<dyn Collective>,
    /// Where any of them work beside computation.
    pub lane: Arc<Lane>,
}

impl World {
    /// Divides the world into tp groups of `tensor_parallel_size` and shard groups of `shard_group_size` ranks. Collective
    /// over the world.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a size does not divide the world's, with those that do.
    pub fn mesh(&self, tensor_parallel_size: usize, shard_group_size: usize) -> Result<Mesh> {
        let world_size = self.size();
        for (key, size) in [("tensor_parallel_size", tensor_parallel_size), ("zero.shard_group_size", shard_group_size)]
        {
            if size == 0 || !world_size.is_multiple_of(size) {
                let valid: Vec<_> = (1..=world_size).filter(|&size| world_size.is_multiple_of(size)).collect();
                return Err(Error::invalid_value(key, size, format!("a divisor of {world_size} ranks: {valid:?}")));
            }
        }
        let rank = self.rank();
        Ok(Mesh {
            tp: self.subgroup("tp", &consecutive(rank, tensor_parallel_size))?,
            dp: self.subgroup("dp", &strided(rank, tensor_parallel_size, world_size))?,
            shard: self.subgroup("shard", &consecutive(rank, shard_group_size))?,
            replicate: self.subgroup("replicate", &strided(rank, shard_group_size, world_size))?,
            world: self.group(),
            lane: self.lane(),
        })
    }
}

/// The block of `size` ranks that `rank` lies in.
fn consecutive(rank: usize, size: usize) -> Vec<usize> {
    let start = rank / size * size;
    (start..start + size).collect()
}

/// Every `stride`-th rank, `rank` among them.
fn strided(rank: usize, stride: usize, world_size: usize) -> Vec<usize> {
    (rank % stride..world_size).step_by(stride).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::testing;

    #[test]
    fn every_dimension_divides_the_world() {
        let meshes = testing::worlds(4, |world| {
            let mesh = world.mesh(2, 4).unwrap();
            [&mesh.tp, &mesh.dp, &mesh.shard, &mesh.replicate].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[2], [vec![2, 3], vec![0, 2], vec![0, 1, 2, 3], vec![2]]);
        assert_eq!(meshes[1], [vec![0, 1], vec![1, 3], vec![0, 1, 2, 3], vec![1]]);
    }

    #[test]
    fn a_size_that_does_not_divide_is_refused_with_those_that_do() {
        let error = World::single().mesh(2, 1).unwrap_err().to_string();
        assert_eq!(error, "tensor_parallel_size = 2: expected a divisor of 1 ranks: [1]");
    }
}
