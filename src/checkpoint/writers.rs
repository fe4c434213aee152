//! Which ranks write a checkpoint together: all ranks that train, into one folder; or with `save_on_each_node` the ranks of each node, into a folder
//! on the node's own disk.

use std::ops::Range;

use super::TrainerState;
use crate::config::WorldSize;
use crate::error::{Error, Result};
use crate::ranks::{World, first_text};

/// Ranks that write one checkpoint together. The first of them writes everything except the others' optimizer state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writers {
    ranks: Range<usize>,
    rank: usize,
}

impl Writers {
    /// The writers that this rank belongs to, if the first `num_trainers` ranks of the world train. `on_each_node` has no effect on one node.
    pub fn of(world: &World, num_trainers: usize, on_each_node: bool) -> Self {
        let (rank, first) = (world.rank(), world.rank() - world.local_rank());
        let ranks = if is_apart(world, on_each_node) { first..first + world.local_size() } else { 0..num_trainers };
        Self { ranks, rank }
    }

    /// Whether this rank is the first of the writers.
    pub fn is_first(&self) -> bool {
        self.rank == self.ranks.start
    }

    /// The ranks of all writers, in order.
    pub fn ranks(&self) -> Range<usize> {
        self.ranks.clone()
    }

    /// All writers except the first.
    pub fn others(&self) -> Range<usize> {
        self.ranks.start + 1..self.ranks.end
    }
}

/// Whether this rank writes the files that exist once per folder: rank 0 or, with `on_each_node`, the first rank of each node.
pub fn writes_folder(world: &World, on_each_node: bool) -> bool {
    Writers::of(world, world.size(), on_each_node).is_first()
}

/// Whether nodes have separate folders.
pub fn is_apart(world: &World, on_each_node: bool) -> bool {
    on_each_node && world.num_nodes() > 1
}

/// Refuses `save_on_each_node` if a node would have only part of a checkpoint: the ranks of a node must together hold all of the optimizer state. The
/// key has no effect on one node.
///
/// # Errors
/// [`Error::InvalidValue`] with the size of the shard group.
pub fn check_each_node(on_each_node: bool, world: WorldSize, shard_group_size: usize) -> Result<()> {
    let local = world.local_ranks;
    if !on_each_node || world.ranks == local || local.is_multiple_of(shard_group_size) {
        return Ok(());
    }
    let expected = format!(
        "false with zero.shard_group_size = {shard_group_size} on nodes with {local} ranks: no node holds all shards; \
         put output_dir on a disk that the nodes share, or choose a zero.shard_group_size that divides {local}"
    );
    Err(Error::invalid_value("save_on_each_node", true, expected))
}

/// The text of rank 0's `trainer_state.json`. With separate folders all nodes write the same text, so copies of one checkpoint can be recognised.
/// Collective over the world.
pub fn common_state(world: &World, state: &TrainerState) -> Result<Option<String>> {
    first_text(&*world.group(), (world.rank() == 0).then(|| state.to_text()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ranks::testing;

    #[test]
    fn with_save_on_each_node_every_node_has_a_first_writer() {
        let found = testing::worlds_on_nodes(2, 2, Duration::from_secs(20), |world| {
            [false, true].map(|on_each_node| Writers::of(&world, 4, on_each_node))
        });
        let [together, apart] = found[3].clone();
        assert_eq!((together.ranks(), together.others(), together.is_first()), (0..4, 1..4, false));
        assert_eq!((apart.ranks(), apart.others(), apart.is_first()), (2..4, 3..4, false));
        assert!(found[2][1].is_first() && !found[2][0].is_first() && found[0].iter().all(Writers::is_first));
        let alone = World::single();
        assert_eq!(Writers::of(&alone, 1, true), Writers::of(&alone, 1, false));
    }

    #[test]
    fn save_on_each_node_with_shards_across_nodes_is_refused() {
        let two_nodes = WorldSize { ranks: 4, local_ranks: 2 };
        let check = |size| check_each_node(true, two_nodes, size);
        assert!(check(1).is_ok() && check(2).is_ok());
        let message = check(4).unwrap_err().to_string();
        assert!(
            message.starts_with("save_on_each_node = true: expected false with zero.shard_group_size = 4"),
            "{message}"
        );
        let one = WorldSize { ranks: 4, local_ranks: 4 };
        assert!(check_each_node(true, one, 4).is_ok() && check_each_node(false, two_nodes, 4).is_ok());
    }
}
