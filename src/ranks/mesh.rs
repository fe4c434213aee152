//! How ranks are grouped: engines with their tensor-parallel groups and stages, data-parallel groups and shard groups.

use std::ops::Range;
use std::sync::Arc;

use super::collective::Collective;
use super::lane::Lane;
use super::single::SingleRank;
use super::world::World;
use crate::config::{EngineShape, divisors};
use crate::error::{Error, Result};
use crate::types::Place;

/// The groups of this rank.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// The ranks of one engine: consecutive, stage by stage.
    pub engine: Arc<dyn Collective>,
    /// The tensor-parallel group: ranks of the engine with the same layers as this one; consecutive.
    pub tp: Arc<dyn Collective>,
    /// The pipeline group: one rank of every stage, in order, with the same index in their tensor-parallel groups.
    pub pipe: Arc<dyn Collective>,
    /// The data-parallel group: ranks with the same index in their engines.
    pub dp: Arc<dyn Collective>,
    /// The shard group: ranks that together hold one copy of the sharded state; consecutive.
    pub shard: Arc<dyn Collective>,
    /// The replicate group: ranks that hold the same shard, with the same index in their shard groups.
    pub replicate: Arc<dyn Collective>,
    /// Ranks that share micro-batches, each with a part of the tokens; consecutive. Only this rank, unless [`Mesh::with_sequence_groups`] was called.
    pub sequence: Arc<dyn Collective>,
    /// All ranks with the same role as this one: the whole world, except in split mode.
    pub world: Arc<dyn Collective>,
    /// Runs collectives of any of these groups overlapped with computation.
    pub lane: Arc<Lane>,
}

impl World {
    /// Divides the world into engines and into shard groups of `shard_group_size` ranks. If `engine` is a number, it is the size of the engine's only
    /// tensor-parallel group. Collective over the world.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if a size does not divide the world size, or an engine would span nodes; it lists the sizes that are possible.
    pub fn mesh(&self, engine: impl Into<EngineShape>, shard_group_size: usize) -> Result<Mesh> {
        let engine = engine.into();
        self.world_size().check_engines(0, engine)?;
        let has_stages = engine.pipeline_parallel_size > 1;
        self.mesh_of(0..self.size(), self.group(), (engine, has_stages), shard_group_size)
    }

    /// The mesh in split mode: the last `num_generators` ranks have the engines, the others the shard groups. `Mesh::world` then is the ranks with
    /// this rank's role.
    ///
    /// # Errors
    /// The errors of [`World::mesh`], for the ranks of one role.
    pub fn split_mesh(
        &self,
        num_generators: usize,
        engine: impl Into<EngineShape>,
        shard_group_size: usize,
    ) -> Result<Mesh> {
        let (rank, num_trainers, engine) = (self.rank(), self.size() - num_generators, engine.into());
        self.world_size().check_engines(num_trainers, engine)?;
        let has_stages = engine.pipeline_parallel_size > 1;
        let (ranks, engine, shard_size) = match rank < num_trainers {
            true => (0..num_trainers, 1.into(), shard_group_size),
            false => (num_trainers..self.size(), engine, 1),
        };
        let role = self.subgroup("role", &ranks.clone().collect::<Vec<_>>())?;
        self.mesh_of(ranks, role, (engine, has_stages), shard_size)
    }

    /// Creates the groups of `ranks`, which include this one. All ranks of the world must create equally many groups, whatever their role;
    /// `has_stages` says whether any engine has several stages.
    fn mesh_of(
        &self,
        ranks: Range<usize>,
        all: Arc<dyn Collective>,
        (engine, has_stages): (EngineShape, bool),
        shard_group_size: usize,
    ) -> Result<Mesh> {
        let (num_ranks, tp_size) = (ranks.len(), engine.tensor_parallel_size);
        for (key, size, others) in [
            ("tensor_parallel_size", tp_size, 1),
            ("pipeline_parallel_size", engine.pipeline_parallel_size, tp_size),
            ("zero.shard_group_size", shard_group_size, 1),
        ] {
            if size == 0 || !num_ranks.is_multiple_of(size.saturating_mul(others)) {
                let valid = divisors(num_ranks / others);
                let shared = if others > 1 { format!(" in tensor-parallel groups of {others}") } else { String::new() };
                let expected = format!("a divisor of {num_ranks} ranks{shared}: {valid:?}");
                return Err(Error::invalid_value(key, size, expected));
            }
        }
        let rank = self.rank();
        let own_engine = consecutive(&ranks, rank, engine.num_ranks());
        let tp = self.subgroup("tp", &consecutive(&ranks, rank, tp_size))?;
        let (of_engine, pipe): (Arc<dyn Collective>, Arc<dyn Collective>) = match has_stages {
            false => (tp.clone(), Arc::new(SingleRank::new("pipe", rank, self.device()))),
            true => {
                let within = own_engine[0]..own_engine[0] + own_engine.len();
                (self.subgroup("engine", &own_engine)?, self.subgroup("pipe", &strided(&within, rank, tp_size))?)
            }
        };
        Ok(Mesh {
            engine: of_engine,
            tp,
            pipe,
            dp: self.subgroup("dp", &strided(&ranks, rank, engine.num_ranks()))?,
            shard: self.subgroup("shard", &consecutive(&ranks, rank, shard_group_size))?,
            replicate: self.subgroup("replicate", &strided(&ranks, rank, shard_group_size))?,
            sequence: Arc::new(SingleRank::new(SEQUENCE, rank, self.device())),
            world: all,
            lane: self.lane(),
        })
    }
}

const SEQUENCE: &str = "sequence";

impl Mesh {
    /// Adds groups of `size` ranks that share micro-batches, among the ranks that train, which are the first `num_trainers` of the world. Other ranks
    /// do not share. Collective over the world.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if the size does not divide the number of ranks that train, or a group would span nodes.
    pub fn with_sequence_groups(self, world: &World, num_trainers: usize, size: usize) -> Result<Self> {
        world.world_size().check_sequence_groups(num_trainers, size)?;
        if size == 1 {
            return Ok(self);
        }
        let rank = world.rank();
        let ranks = if rank < num_trainers { consecutive(&(0..num_trainers), rank, size) } else { vec![rank] };
        Ok(Self { sequence: world.subgroup(SEQUENCE, &ranks)?, ..self })
    }

    /// The index of this rank's sequence group among all of them.
    pub fn sequence_group(&self) -> Place {
        let size = self.sequence.size();
        Place { rank: self.world.rank() / size, size: self.world.size() / size }
    }

    /// Whether this rank is the first of the ranks that share its micro-batches. Sums over ranks then count each micro-batch once.
    pub fn speaks_for_sequences(&self) -> bool {
        self.sequence.rank() == 0
    }
}

/// The consecutive block of `size` ranks that contains `rank`.
fn consecutive(ranks: &Range<usize>, rank: usize, size: usize) -> Vec<usize> {
    let start = rank - (rank - ranks.start) % size;
    (start..start + size).collect()
}

/// Every `stride`-th of the `ranks`, including `rank`.
fn strided(ranks: &Range<usize>, rank: usize, stride: usize) -> Vec<usize> {
    (ranks.start + (rank - ranks.start) % stride..ranks.end).step_by(stride).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;

    #[test]
    fn every_mesh_dimension_divides_the_world_size() {
        let meshes = testing::worlds(4, |world| {
            let mesh = world.mesh(2, 4).unwrap();
            [&mesh.tp, &mesh.dp, &mesh.shard, &mesh.replicate].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[2], [vec![2, 3], vec![0, 2], vec![0, 1, 2, 3], vec![2]]);
        assert_eq!(meshes[1], [vec![0, 1], vec![1, 3], vec![0, 1, 2, 3], vec![1]]);
    }

    #[test]
    fn pipeline_stages_of_an_engine_are_consecutive_ranks() {
        let shape = EngineShape { tensor_parallel_size: 2, pipeline_parallel_size: 2 };
        let meshes = testing::worlds(8, |world| {
            let mesh = world.mesh(shape, 8).unwrap();
            [&mesh.engine, &mesh.tp, &mesh.pipe, &mesh.dp].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[1], [vec![0, 1, 2, 3], vec![0, 1], vec![1, 3], vec![1, 5]]);
        assert_eq!(meshes[6], [vec![4, 5, 6, 7], vec![6, 7], vec![4, 6], vec![2, 6]]);
        testing::worlds(6, |world| {
            let error = world.mesh(shape, 6).unwrap_err().to_string();
            let expected = "a divisor of 6 ranks in tensor-parallel groups of 2: [1, 3]";
            assert_eq!(error, format!("pipeline_parallel_size = 2: expected {expected}"));
        });
    }

    #[test]
    fn trainers_and_generators_have_separate_meshes() {
        let meshes = testing::worlds(5, |world| {
            let mesh = world.split_mesh(2, 2, 3).unwrap();
            [&mesh.world, &mesh.tp, &mesh.dp, &mesh.shard, &mesh.replicate].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[1], [vec![0, 1, 2], vec![1], vec![0, 1, 2], vec![0, 1, 2], vec![1]]);
        assert_eq!(meshes[4], [vec![3, 4], vec![3, 4], vec![4], vec![4], vec![3, 4]]);
        let staged = testing::worlds(5, |world| {
            let mesh = world.split_mesh(4, EngineShape { pipeline_parallel_size: 2, ..1.into() }, 1).unwrap();
            [&mesh.engine, &mesh.tp, &mesh.pipe].map(|group| group.ranks().to_vec())
        });
        assert_eq!(staged[0], [vec![0], vec![0], vec![0]]);
        assert_eq!(staged[4], [vec![3, 4], vec![4], vec![3, 4]]);
    }

    #[test]
    fn engines_stay_within_a_node_but_shard_groups_may_span_nodes() {
        let timeout = std::time::Duration::from_secs(20);
        let meshes = testing::worlds_on_nodes(2, 2, timeout, |world| {
            let error = world.mesh(4, 4).unwrap_err().to_string();
            assert_eq!(
                error,
                "tensor_parallel_size = 4: expected a number of ranks within one node, which has 2: 1, 2"
            );
            assert!(world.split_mesh(3, 3, 1).unwrap_err().to_string().contains("which has 2: 1"));
            let staged = EngineShape { pipeline_parallel_size: 2, ..2.into() };
            let error = world.mesh(staged, 4).unwrap_err().to_string();
            assert_eq!(
                error,
                "pipeline_parallel_size = 2: expected a number of stages of 2 ranks within one node, which has 2 \
                 ranks: 1"
            );
            let staged = EngineShape { pipeline_parallel_size: 4, ..1.into() };
            let error = world.mesh(staged, 4).unwrap_err().to_string();
            assert_eq!(
                error,
                "pipeline_parallel_size = 4: expected a number of stages within one node, which has 2 ranks: 1, 2"
            );
            let mesh = world.mesh(2, 4).unwrap();
            [&mesh.tp, &mesh.shard].map(|group| group.ranks().to_vec())
        });
        assert_eq!(meshes[1], [vec![0, 1], vec![0, 1, 2, 3]]);
    }

    #[test]
    fn sequence_parallel_ranks_are_neighbours_within_a_node() {
        let meshes = testing::worlds(5, |world| {
            let mesh = world.split_mesh(1, 1, 4).unwrap().with_sequence_groups(&world, 4, 2).unwrap();
            (mesh.sequence.ranks().to_vec(), mesh.sequence_group(), mesh.speaks_for_sequences())
        });
        assert_eq!(meshes[3], (vec![2, 3], Place { rank: 1, size: 2 }, false));
        assert_eq!(meshes[4], (vec![4], Place { rank: 0, size: 1 }, true));
        let timeout = std::time::Duration::from_secs(20);
        testing::worlds_on_nodes(2, 2, timeout, |world| {
            let groups = |size| world.mesh(1, 4).unwrap().with_sequence_groups(&world, 4, size);
            let error = groups(4).unwrap_err().to_string();
            assert_eq!(
                error,
                "sequence_parallel_size = 4: expected a number of ranks within one node, which has 2: 1, 2"
            );
            let error = groups(3).unwrap_err().to_string();
            assert_eq!(error, "sequence_parallel_size = 3: expected a divisor of the 4 ranks that train: 1, 2, 4");
        });
    }

    #[test]
    fn an_indivisible_mesh_size_is_refused_with_the_valid_ones() {
        let error = World::single().mesh(2, 1).unwrap_err().to_string();
        assert_eq!(error, "tensor_parallel_size = 2: expected a divisor of 1 ranks: [1]");
    }
}
