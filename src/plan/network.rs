//! Predicts, before launch, the bytes sent over the network between nodes with the run's configuration.

use std::fmt;

use crate::config::{Config, Dtype, Mode, Quantization, Roles, WorldSize};
use crate::model::{LoraSpec, ParamTable};

/// Bytes that each node sends to others, and the time that they take alone.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkPlan {
    nodes: usize,
    gigabytes_per_second: f64,
    flows: Vec<NetworkFlow>,
}

/// One kind of traffic.
#[derive(Debug, Clone, PartialEq)]
struct NetworkFlow {
    what: &'static str,
    when: &'static str,
    bytes: f64,
}

impl NetworkPlan {
    /// The traffic of a run that trains the model of `table`, or adapters of it, with `weight_bytes` per element, on ranks with these `roles`. The
    /// network carries so many 10^9 bytes per second out of each node. `None` on one node.
    ///
    /// To gather or scatter a tensor, a ring of n parts sends (n - 1) / n of the tensor from each part, and twice that for an all-reduce. A chain, by
    /// which trainers reach separate engines, sends the tensor once.
    pub fn new(
        config: &Config,
        table: &ParamTable,
        world: WorldSize,
        roles: Roles,
        weight_bytes: usize,
        gigabytes_per_second: f64,
    ) -> Option<Self> {
        let nodes = world.ranks / world.local_ranks;
        if nodes < 2 {
            return None;
        }
        let adapters = LoraSpec::new(&config.lora);
        let adapters = adapters.map(|lora| ParamTable::adapters(table.spec.clone(), &lora, table.shards));
        let trained = adapters.as_ref().unwrap_or(table);
        let sum_bytes = if config.zero.reduce_dtype == Dtype::Bfloat16 { 2 } else { 4 };
        let gradients = (trained.total * sum_bytes) as f64;
        let [weights, new_weights] = [table, trained].map(|table| (table.total * weight_bytes) as f64);
        let ring = |parts: usize| (parts - 1) as f64 / parts as f64;
        let (shards, stage) = (table.shards, config.zero.stage);
        // Every rank holds adapters whole, and so it does quantized weights.
        let trained_stage = if adapters.is_some() { stage.min(2) } else { stage };
        let is_sharded = shards > world.local_ranks && stage == 3 && config.quantization == Quantization::None;
        let mut flows = Vec::new();
        let mut add = |what, when, bytes| flows.push(NetworkFlow { what, when, bytes });
        if shards > world.local_ranks {
            let (sums, when) = match trained_stage {
                0 => (2.0, "an update, beside backward"),
                1 => (1.0, "an update, beside backward"),
                _ => (1.0, "a micro-batch, beside backward"),
            };
            add("gradients", when, sums * ring(shards) * gradients);
            if let 1 | 2 = trained_stage {
                add("new weights", "an update, beside AdamW", ring(shards) * new_weights);
            }
        } else if roles.num_trainers > world.local_ranks {
            // With several copies per node, each slice has a ring in rank order, which leaves the node once.
            add("gradients", "an update, beside backward", 2.0 * ring(roles.num_trainers / shards) * gradients);
        }
        let gathered = if is_sharded { ring(shards) * weights } else { 0.0 };
        if is_sharded {
            add("weights", "a micro-batch, beside forward and backward", 2.0 * gathered);
        }
        match (config.mode, &adapters) {
            (Mode::Colocated, _) if is_sharded => add("weights", "a rollout, to the engines", gathered),
            (Mode::Colocated, _) => {}
            (Mode::Split, None) => add("weights", "a rollout, to the engines", gathered + weights),
            (Mode::Split, Some(_)) => {
                add("adapters", "a rollout, to the engines", new_weights);
                add("frozen weights", "at the start, to the engines", gathered + weights);
            }
        }
        Some(Self { nodes, gigabytes_per_second, flows })
    }
}

impl fmt::Display for NetworkPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "network: {} nodes, {} GB/s out of each", self.nodes, self.gigabytes_per_second)?;
        for NetworkFlow { what, when, bytes } in &self.flows {
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
        let roles = config.roles(world.ranks).unwrap();
        (table.total as f64, NetworkPlan::new(&config, &table, world, roles, 2, 50.0).unwrap())
    }

    #[test]
    fn network_bytes_match_ring_collectives() {
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

    /// The flows out of each node: their names, and bytes per parameter of the model.
    fn flows(keys: &[&str], nodes: usize, shards: usize) -> Vec<(&'static str, f64)> {
        let (params, plan) = plan(keys, nodes, shards);
        plan.flows.iter().map(|flow| (flow.what, flow.bytes / params)).collect()
    }

    #[test]
    fn split_nodes_exchange_only_weights() {
        let split = |gpus| ["mode=split", gpus];
        assert_eq!(flows(&split("split.rollout_gpus=8"), 2, 8), [("weights", 2.0)]);
        let three = flows(&split("split.rollout_gpus=8"), 3, 8);
        assert_eq!(three, [("gradients", 4.0), ("weights", 2.0)], "two of the nodes train");
        let sharded = flows(&["mode=split", "split.rollout_gpus=8", "zero.stage=3"], 3, 16);
        assert_eq!(sharded, [("gradients", 3.75), ("weights", 3.75), ("weights", 1.875 + 2.0)]);
    }

    /// Only adapters train and are sent; but a frozen base that is sharded over nodes is gathered like any other.
    #[test]
    fn with_lora_only_adapters_cross_the_network() {
        let hybrid = flows(&["lora.r=8", "zero.stage=3"], 2, 8);
        assert!(matches!(hybrid[..], [("gradients", bytes)] if bytes < 0.5), "{hybrid:?}");
        let sharded = flows(&["lora.r=8", "zero.stage=3"], 2, 16);
        let [("gradients", _), ("new weights", new), ("weights", twice), ("weights", once)] = sharded[..] else {
            panic!("{sharded:?}")
        };
        assert!(new < 0.5 && (twice, once) == (3.75, 1.875), "{sharded:?}");
        let stored = flows(&["lora.r=8", "zero.stage=3", "quantization=nf4"], 2, 16);
        assert_eq!(stored.len(), 2, "{stored:?}");
        let split = flows(&["lora.r=8", "mode=split", "split.rollout_gpus=8"], 2, 8);
        assert!(matches!(split[..], [("adapters", new), ("frozen weights", 2.0)] if new < 0.5), "{split:?}");
    }
}
