//! Which ranks are on which node, and what ranks report when they join.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ranks::env::WorkerEnv;

/// The nodes of a world: equally many ranks on each, numbered node by node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::ranks) struct NodeLayout {
    /// Number of ranks on each node.
    pub local_size: usize,
    /// Host names of the nodes, for messages.
    pub hosts: Vec<String>,
    /// Number of earlier starts of the run: the maximum over the nodes.
    pub attempt: u64,
}

impl NodeLayout {
    pub(in crate::ranks) fn num_nodes(&self) -> usize {
        self.hosts.len()
    }

    pub(in crate::ranks) fn node_of(&self, rank: usize) -> usize {
        rank / self.local_size
    }

    /// The leader of a node, which is its first rank.
    pub(in crate::ranks) fn leader_of(&self, node: usize) -> usize {
        node * self.local_size
    }

    /// Whether all `ranks` are on one node.
    pub(in crate::ranks) fn is_one_node(&self, ranks: &[usize]) -> bool {
        ranks.iter().all(|&rank| self.node_of(rank) == self.node_of(ranks[0]))
    }

    /// Describes the nodes of `ranks`, like `node 1 (host), node 3 (other)`.
    pub(in crate::ranks) fn describe(&self, ranks: &[usize]) -> String {
        let mut nodes: Vec<usize> = ranks.iter().map(|&rank| self.node_of(rank)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let describe = |node: &usize| named(*node, self.hosts.get(*node).map_or("", String::as_str));
        nodes.iter().map(describe).collect::<Vec<_>>().join(", ")
    }
}

fn named(node: usize, host: &str) -> String {
    if host.is_empty() { format!("node {node}") } else { format!("node {node} ({host})") }
}

/// A rank's description of itself when it joins the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub rank: usize,
    pub local_rank: usize,
    pub world_size: usize,
    pub local_size: usize,
    pub host: String,
    pub attempt: u64,
    /// Version and size of the program and its libraries.
    pub program: String,
    /// Configuration keys with values that must be equal on all ranks.
    pub compared: Vec<(String, String)>,
}

/// Why a world cannot be formed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum WorldRefusal {
    /// The nodes are incompatible.
    Nodes(String),
    /// A configuration key differs.
    Key { key: String, got: String, expected: String },
}

impl From<WorldRefusal> for Error {
    fn from(refusal: WorldRefusal) -> Self {
        match refusal {
            WorldRefusal::Nodes(message) => Error::Environment { message },
            WorldRefusal::Key { key, got, expected } => Error::InvalidValue { key, got, expected },
        }
    }
}

impl Greeting {
    pub(super) fn new(env: &WorkerEnv, compared: Vec<(String, String)>) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let bytes = std::fs::metadata(crate::process::PROGRAM).map_or(0, |program| program.len());
        Self {
            rank: env.rank,
            local_rank: env.local_rank,
            world_size: env.world_size,
            local_size: env.local_world_size,
            host: host.trim().to_owned(),
            attempt: env.attempt,
            program: format!("version {} of {bytes} bytes", env!("CARGO_PKG_VERSION")),
            compared,
        }
    }

    fn node(&self) -> String {
        named(self.rank / self.local_size.max(1), &self.host)
    }

    /// Refuses a rank whose node is incompatible with that of rank 0; `self` is rank 0's greeting.
    pub(super) fn check(&self, other: &Greeting) -> Result<(), WorldRefusal> {
        let (own, theirs) = (self.node(), other.node());
        let refuse = |message: String| Err(WorldRefusal::Nodes(message));
        if other.local_size != self.local_size || other.world_size != self.world_size {
            return refuse(format!(
                "nodes differ: {own} has {} of {} ranks, but {theirs} (its rank {}) has {} of {}; start the same \
                 number of ranks on every node, and give all nodes the same --nnodes",
                self.local_size, self.world_size, other.rank, other.local_size, other.world_size
            ));
        }
        if !self.world_size.is_multiple_of(self.local_size) {
            let (all, local) = (self.world_size, self.local_size);
            return refuse(format!(
                "{all} ranks in all cannot be split evenly with {local} on {own}: start the same number of ranks on \
                 every node"
            ));
        }
        if other.rank >= self.world_size || other.rank % self.local_size != other.local_rank {
            return refuse(format!(
                "rank {} of {} is local rank {} of {} on {theirs}: number ranks node by node (with srun: \
                 --distribution=block), the same number on each node",
                other.rank, other.world_size, other.local_rank, other.local_size
            ));
        }
        if other.program != self.program {
            return refuse(format!(
                "{theirs} runs another program than {own}: colo-grpo {} and {}; install the same file on every node",
                other.program, self.program
            ));
        }
        self.check_keys(other, &own, &theirs)
    }

    fn check_keys(&self, other: &Greeting, own: &str, theirs: &str) -> Result<(), WorldRefusal> {
        let find = |list: &[(String, String)], name: &str| list.iter().find(|(key, _)| key == name).cloned();
        let unset = |key: &str| (key.to_owned(), "not set".to_owned());
        let missing = other.compared.iter().filter(|(key, _)| find(&self.compared, key).is_none());
        let keys = self.compared.iter().chain(missing).map(|(key, _)| key.clone());
        for key in keys {
            let [(_, here), (_, there)] =
                [&self.compared, &other.compared].map(|list| find(list, &key).unwrap_or_else(|| unset(&key)));
            if here != there {
                let expected = format!("the same value on all nodes: {own} has {here}, {theirs} has this one");
                return Err(WorldRefusal::Key { key, got: there, expected });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting(rank: usize, local_size: usize) -> Greeting {
        let keys = vec![("learning_rate".to_owned(), "1e-6".to_owned())];
        Greeting {
            rank,
            local_rank: rank % local_size,
            world_size: 2 * local_size,
            local_size,
            host: format!("host{}", rank / local_size),
            attempt: 0,
            program: "version 1".to_owned(),
            compared: keys,
        }
    }

    #[test]
    fn differences_between_nodes_are_named_with_the_node() {
        let first = greeting(0, 2);
        assert_eq!(first.check(&greeting(3, 2)), Ok(()));
        let message = |change: fn(&mut Greeting)| {
            let mut other = greeting(2, 2);
            change(&mut other);
            Error::from(first.check(&other).unwrap_err()).to_string()
        };
        let uneven = message(|other| other.local_size = 1);
        assert!(uneven.contains("node 0 (host0) has 2 of 4 ranks") && uneven.contains("(host1)"), "{uneven}");
        let order = message(|other| other.local_rank = 1);
        assert!(order.contains("rank 2 of 4 is local rank 1 of 2 on node 1 (host1)"), "{order}");
        let program = message(|other| other.program = "version 2".to_owned());
        assert!(program.contains("node 1 (host1) runs another program than node 0 (host0)"), "{program}");
        let key = message(|other| other.compared[0].1 = "2e-6".to_owned());
        assert_eq!(
            key,
            "learning_rate = 2e-6: expected the same value on all nodes: node 0 (host0) has 1e-6, node 1 (host1) has \
             this one"
        );
        let unset = message(|other| other.compared.clear());
        assert!(unset.starts_with("learning_rate = not set"), "{unset}");
    }

    #[test]
    fn ranks_are_named_by_their_nodes() {
        let layout = NodeLayout { local_size: 2, hosts: vec!["a".into(), "b".into(), "c".into()], attempt: 0 };
        assert_eq!(layout.describe(&[5, 0, 1]), "node 0 (a), node 2 (c)");
        assert!(layout.is_one_node(&[2, 3]) && !layout.is_one_node(&[1, 2]));
        assert_eq!((layout.num_nodes(), layout.leader_of(2)), (3, 4));
    }
}
