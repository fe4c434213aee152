//! How ranks are divided: tensor-parallel, data-parallel and shard groups.

use std::ops::Range;
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
    /// All ranks that do what this one does: those of the world, unless it is split.
    pub world: Arc<dyn Collective>,
    /// Where any of them work beside computation.
    pub lane: Arc<Lane>,
}

impl World {
    /// Divides the world into tp groups of `tensor_parallel_size` and shard groups of `shard_group_size` ranks. Collective
    /// over the world.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a size does not divide the world's, or an engine would reach over nodes, with the sizes that do.
    pub fn mesh(&self, tensor_parallel_size: usize, shard_group_size: usize) -> Result<Mesh> {
        self.world_size().check_engines(0, tensor_parallel_size)?;
        self.mesh_of(0..self.size(), self.group(), tensor_parallel_size, shard_group_size)
    }

    /// The mesh of a split world: the last `num_generators` ranks have the tp groups and the others the shard groups. All ranks
    /// of the mesh
    /// are those that do what this one does.
    ///
    /// # Errors
    /// The errors of [`World::mesh`], for the ranks of one kind.
    pub fn split_mesh(
        &self,
        num_generators: usize,
        tensor_parallel_size: usize,
        shard_group_size: usize,
    ) -> Result<Mesh> {
        let (rank, num_trainers) = (self.rank(), self.size() - num_generators);
        self.world_size().check_engines(num_trainers, tensor_parallel_size)?;
        let (ranks, tp_size, shard_size) = match rank < num_trainers {
            true => (0..num_trainers, 1, shard_group_size),
            false => (num_trainers..self.size(), tensor_parallel_size, 1),
        };
        let role = self.subgroup("role", &ranks.clone().collect::<Vec<_>>())?;
        self.mesh_of(ranks, role, tp_size, shard_size)
    }

    fn mesh_of(
        &self,
        ranks: Range<usize>,
        all: Arc<dyn Collective>,
        tensor_parallel_size: usize,
        shard_group_size: usize,
    ) -> Result<Mesh> {
        let num_ranks = ranks.len();
        for (key, size) in [("tensor_parallel_size", tensor_parallel_size), ("zero.shard_group_size", shard_group_size)]
        {
            if size == 0 || !num_ranks.is_multiple_of(size) {
                let valid: Vec<_> = (1..=num_ranks).filter(|&size| num_ranks.is_multiple_of(size)).collect();
                return Err(Error::invalid_value(key, size, format!("a divisor of {num_ranks} ranks: {valid:?}")));
            }
        }
        let rank = self.rank();
        Ok(Mesh {
            tp: self.subgroup("tp", &consecutive(&ranks, rank, tensor_parallel_size))?,
            dp: self.subgroup("dp", &strided(&ranks, rank, tensor_parallel_size))?,
            shard: self.subgroup("shard", &consecutive(&ranks, rank, shard_group_size))?,
            replicate: self.subgroup("replicate", &strided(&ranks, rank, shard_group_size))?,
            world: all,
            lane: self.lane(),
        })
    }
}

/// The block of `size` of the `ranks` that `rank` lies in.
fn consecutive(ranks: &Range<usize>, rank: usize, size: usize) -> Vec<usize> {
    let start = rank - (rank - ranks.start) % size;
    (start..start + size).collect()
}

/// Every `stride`-th of the `ranks`, `rank` among them.
fn strided(ranks: &Range<usize>, rank: usize, stride: usize) -> Vec<usize> {
    (ranks.start + (rank - ranks.start) % stride..ranks.end).step_by(stride).collect()
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
    fn ranks_that_train_and_ranks_that_generate_are_divided_apart() {
        let meshes = testing::worlds(5, |world| {
            let mesh = world.split_mesh(2, 2, 3).unwrap();
            [&mesh.world, &mesh.tp, &mesh.dp, &mesh.shard, &mesh.replicate].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[1], [vec![0, 1, 2], vec![1], vec![0, 1, 2], vec![0, 1, 2], vec![1]]);
        assert_eq!(meshes[4], [vec![3, 4], vec![3, 4], vec![4], vec![4], vec![3, 4]]);
    }

    #[test]
    fn engines_stay_within_nodes_and_shard_groups_need_not() {
        let timeout = std::time::Duration::from_secs(20);
        let meshes = testing::worlds_on_nodes((2, 2), timeout, |world| {
            let error = world.mesh(4, 4).unwrap_err().to_string();
            assert_eq!(error, "tensor_parallel_size = 4: expected ranks of one node, which has 2: 1, 2");
            assert!(world.split_mesh(3, 3, 1).unwrap_err().to_string().contains("which has 2: 1"));
            let mesh = world.mesh(2, 4).unwrap();
            [&mesh.tp, &mesh.shard].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[1], [vec![0, 1], vec![0, 1, 2, 3]]);
    }

    #[test]
    fn a_size_that_does_not_divide_is_refused_with_those_that_do() {
        let error = World::single().mesh(2, 1).unwrap_err().to_string();
        assert_eq!(error, "tensor_parallel_size = 2: expected a divisor of 1 ranks: [1]");
    }
}
