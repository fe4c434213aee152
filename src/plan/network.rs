//! What crosses the network between nodes, by the run's own choices: known before launch, as memory is.

use std::fmt;

use crate::config::{Config, Dtype, WorldSize};
use crate::model::{LoraSpec, ParamTable};

/// Bytes that each node sends to others, with the time that they take alone.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkPlan {
    nodes: usize,
    gigabytes_per_second: f64,
    flows: Vec<Flow>,
}

/// One kind of traffic.
#[derive(Debug, Clone, PartialEq)]
struct Flow {
    what: &'static str,
    when: &'static str,
    bytes: f64,
}

impl NetworkPlan {
    /// The traffic of a run that trains the model of `table` or adapters of it, whose elements have `weight_bytes`, over a network that takes so many 10^9 bytes a second out of each node; none on one node.
    ///
    /// A ring of n parts sends (n - 1) / n of a tensor from each part to gather or scatter it, and twice that to reduce it everywhere.
    pub fn new(
        config: &Config,
        table: &ParamTable,
        world: WorldSize,
        weight_bytes: usize,
        gigabytes_per_second: f64,
    ) -> Option<Self> {
        let nodes = world.ranks / world.local_ranks;
        if nodes < 2 {
            return None;
        }
        let adapters = LoraSpec::new(&config.lora);
        let adapters = adapters.map(|lora| ParamTable::adapters(table.spec.clone(), &lora, table.shards));
        let table = adapters.as_ref().unwrap_or(table);
        let sum_bytes = if config.zero.reduce_dtype == Dtype::Bfloat16 { 2 } else { 4 };
        let (gradients, weights) = ((table.total * sum_bytes) as f64, (table.total * weight_bytes) as f64);
        let ring = |parts: usize| (parts - 1) as f64 / parts as f64;
        let (shards, stage) = (table.shards, config.zero.stage);
        let groups = (world.ranks / shards).max(1);
        let mut flows = Vec::new();
        let mut add = |what, when, bytes| flows.push(Flow { what, when, bytes });
        if shards <= world.local_ranks {
            // Of several copies on a node each slice has a ring, in rank order, which leaves the node once.
            add("gradients", "an update, beside backward", 2.0 * ring(groups) * gradients);
        } else {
            let (sums, when) = match stage {
                0 => (2.0, "an update, beside backward"),
                1 => (1.0, "an update, beside backward"),
                _ => (1.0, "a micro-batch, beside backward"),
            };
            add("gradients", when, sums * ring(shards) * gradients);
            match stage {
                0 => {}
                1 | 2 => add("new weights", "an update, beside AdamW", ring(shards) * weights),
                _ => {
                    add("weights", "a micro-batch, beside forward and backward", 2.0 * ring(shards) * weights);
                    add("weights", "a rollout, to the engines", ring(shards) * weights);
                }
            }
        }
        Some(Self { nodes, gigabytes_per_second, flows })
    }
}

impl fmt::Display for NetworkPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "network: {} nodes, {} GB/s out of each", self.nodes, self.gigabytes_per_second)?;
        for Flow { what, when, bytes } in &self.flows {
            let gigabytes = bytes / 1e9;
            let seconds = gigabytes / self.gigabytes_per_second;
            write!(f, "\n  {what}: {gigabytes:.2} GB from each node {when}: {seconds:.3} s")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::ModelSpec;

    fn plan(keys: &[&str], nodes: usize, shards: usize) -> (f64, NetworkPlan) {
        let required = ["model_name_or_path=x", "train_file=x", "reward_funcs=[\"format\"]"];
        let overrides: Vec<String> = required.iter().chain(keys).map(|key| (*key).to_owned()).collect();
        let config = Config::load(None, &overrides).unwrap();
        let table = ParamTable::new(Arc::new(ModelSpec::preset("tiny").unwrap()), shards);
        let world = WorldSize { ranks: 8 * nodes, local_ranks: 8 };
        (table.total as f64, NetworkPlan::new(&config, &table, world, 2, 50.0).unwrap())
    }

    #[test]
    fn bytes_are_those_of_rings() {
        let (params, two) = plan(&["zero.stage=3"], 2, 8);
        assert_eq!(two.flows.len(), 1, "gradients alone cross where state is sharded within nodes");
        assert_eq!(two.flows[0].bytes, 4.0 * params);
        assert_eq!(plan(&[], 4, 8).1.flows[0].bytes, 6.0 * plan(&[], 4, 8).0);
        let (params, halves) = plan(&["zero.reduce_dtype=bfloat16"], 2, 4);
        assert_eq!(halves.flows[0].bytes, 2.0 * 0.75 * 2.0 * params, "four copies, two on each node");
        let (params, whole) = plan(&["zero.stage=3", "zero.shard_group_size=16"], 2, 16);
        let bytes: Vec<f64> = whole.flows.iter().map(|flow| flow.bytes / params * 16.0 / 15.0).collect();
        assert_eq!(bytes, [4.0, 4.0, 2.0]);
        assert!(two.to_string().contains("network: 2 nodes, 50 GB/s"), "{two}");
    }
}
