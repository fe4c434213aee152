//! Groups of some ranks of the world. Each call makes a new division of the world, in which every rank is in one group.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::collective::Collective;
use super::control::RankGroup;
use super::host_group::HostGroup;
use super::shm::PARTITIONS;
use super::single::SingleRank;
use super::world::{FIRST_DIVISION, World};
use crate::error::{Error, Result};

impl World {
    /// Creates the group of `ranks`, which must include this rank. Collective over the world: every rank calls it with the same name and the ranks of
    /// its own group.
    ///
    /// # Errors
    /// [`Error::Collective`] if the ranks disagree; [`Error::InvalidArgument`] if there are too many divisions.
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Collective>> {
        let group = self.division_of(name, ranks)?;
        if ranks.len() == 1 {
            return Ok(Arc::new(SingleRank::new(name, self.rank(), self.device())));
        }
        self.tensors.group(group, self.device())
    }

    /// Creates the group of `ranks`, for exchanging host memory only. It includes this rank, and may be all ranks in order. Collective over the
    /// world.
    ///
    /// # Errors
    /// Returns the errors of [`World::subgroup`].
    pub fn host_group(&self, name: &str, ranks: &[usize]) -> Result<HostGroup> {
        let ranks = match ranks.len() == self.size() {
            true => self.everyone.clone(),
            false => self.division_of(name, ranks)?,
        };
        Ok(HostGroup { control: self.control.clone(), ranks })
    }

    /// This rank's group in a new division. Collective over the world.
    fn division_of(&self, name: &str, ranks: &[usize]) -> Result<Arc<RankGroup>> {
        let division = self.next_division.fetch_add(1, Ordering::Relaxed);
        self.check_subgroup(name, ranks)?;
        if division >= PARTITIONS && ranks.len() > 1 {
            return Err(Error::InvalidArgument {
                op: "World::subgroup",
                expected: format!("at most {} subgroup divisions of the world", PARTITIONS - FIRST_DIVISION),
                got: format!("another one, '{name}'"),
            });
        }
        Ok(RankGroup::new(division, name, ranks, self.rank()))
    }

    /// Checks that the ranks of a group are distinct, and that all its members pass the same group.
    fn check_subgroup(&self, name: &str, ranks: &[usize]) -> Result<()> {
        let unique = (1..ranks.len()).all(|i| !ranks[..i].contains(&ranks[i]));
        if !unique || !ranks.contains(&self.rank()) || ranks.iter().any(|&rank| rank >= self.size()) {
            let expected = format!("distinct ranks below {} that include this rank {}", self.size(), self.rank());
            return Err(Error::InvalidArgument { op: "World::subgroup", expected, got: format!("{ranks:?}") });
        }
        let own = format!("'{name}' of {ranks:?}");
        let all = self.control.all_gather_bytes(&self.everyone, own.as_bytes())?;
        for (rank, theirs) in all.iter().enumerate() {
            let theirs = String::from_utf8_lossy(theirs);
            let same_name = theirs.starts_with(&format!("'{name}' of "));
            if !same_name || (ranks.contains(&rank) && theirs != own) {
                let message = format!("this rank wants the group {own}, but rank {rank} wants {theirs}");
                let group = name.to_owned();
                return Err(Error::Collective { op: "subgroup", group, rank: self.rank(), message });
            }
        }
        Ok(())
    }
}
