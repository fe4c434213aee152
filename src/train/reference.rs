//! Models that only score: the reference model of the KL term, and a teacher.

use std::sync::Arc;

use tch::Tensor;

use super::adapters::AdapterUse;
use super::micro_batch::MicroBatch;
use super::network::Network;
use super::network_options::NetworkOptions;
use super::policy::Policy;
use super::scores::Scores;
use super::sequence::Sequence;
use super::sharding::Sharding;
use super::weights::Weights;
use crate::error::Result;
use crate::memory::HostPool;
use crate::model::{ParamTable, Unit, UnitLayout};
use crate::ranks::Mesh;

/// A model that only scores. Its weights are sharded over the shard group as in ZeRO-3, on the device or the host; it has no gradients or optimizer.
#[derive(Debug)]
pub struct Reference {
    network: Network,
}

/// Result of [`Reference::forward_blocks`], which runs every block on a given input.
#[derive(Debug)]
pub struct BlockOutputs {
    /// Output of each block: the residual stream after it. `[T, D]` each
    pub blocks: Vec<Tensor>,
    /// Logits of every position but the last. `[T - 1, V]` f32
    pub logits: Tensor,
}

impl Reference {
    /// Loads this rank's slices unit by unit. `source` and the errors are as in [`super::Policy::new`].
    pub fn new(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: NetworkOptions,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        Self::load("reference_weights", table, mesh, options, None, source)
    }

    /// Loads this rank's slices to the device, or into `pool` of [`super::reference_bytes`] bytes on the host; the memory ledger records them under
    /// `owner`. Units in host memory are copied to the device and gathered while the previous unit is used.
    ///
    /// # Errors
    /// The errors of [`Reference::new`].
    pub fn load(
        owner: &'static str,
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: NetworkOptions,
        pool: Option<HostPool>,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let (sharding, place) = (Sharding::new(&table, mesh, 3)?, (options.kind, options.device));
        let weights = match pool {
            Some(pool) => Weights::load_to_host(owner, table, sharding, place, pool, source)?,
            None => Weights::load(owner, table, sharding, place, source, |_, _| Ok(()))?,
        };
        Ok(Self { network: Network::new(weights, None, options, mesh)? })
    }

    /// Also scores the `num_top` most probable tokens of each distribution.
    pub fn scoring_top(mut self, num_top: usize) -> Self {
        self.network.num_top = num_top;
        self
    }

    /// Scores a micro-batch (collective over the shard group).
    ///
    /// # Errors
    /// The errors of [`Collective`](crate::ranks::Collective); errors of earlier device work.
    pub fn forward_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.score(micro_batch, temperature, AdapterUse::Off)
    }

    /// Logits of every position of one sequence but its last, in float32 on the device (collective over the shard group).
    ///
    /// # Errors
    /// Returns the errors of [`Reference::forward_logprobs`].
    pub fn forward_logits(&mut self, token_ids: &[u32]) -> Result<Tensor /* [T - 1, V] */> {
        let sequence = [Sequence::of_tokens(token_ids.to_vec(), 1)];
        let micro_batch = MicroBatch::new(&sequence, &[vec![0]], self.network.device())?;
        self.network.logits(&micro_batch)
    }

    /// Runs each block on a given input, and the head on the last one. `inputs` has the residual stream before every block and after the last, `[T,
    /// D]` each on the device (collective over the shard group). This shows which block differs from another implementation's, where
    /// [`Reference::forward_logits`] shows only the total difference.
    ///
    /// # Errors
    /// Returns the errors of [`Reference::forward_logprobs`].
    pub fn forward_blocks(&mut self, token_ids: &[u32], inputs: &[Tensor]) -> Result<BlockOutputs> {
        let sequence = [Sequence::of_tokens(token_ids.to_vec(), 1)];
        let micro_batch = MicroBatch::new(&sequence, &[vec![0]], self.network.device())?;
        let (blocks, logits) = self.network.block_outputs(&micro_batch, inputs)?;
        Ok(BlockOutputs { blocks, logits })
    }

    /// The layout of the weights.
    pub fn table(&self) -> &Arc<ParamTable> {
        self.network.weights.table()
    }

    /// A whole unit's weights `[len]` (collective over the shard group).
    ///
    /// # Errors
    /// Returns the errors of [`Reference::forward_logprobs`].
    pub fn unit_weights(&self, unit: Unit) -> Result<Tensor> {
        self.network.weights.gather(unit)
    }

    /// Moves this model towards the policy, like TRL's `sync_ref_model`: `reference = (1 - alpha) reference + alpha policy` (arXiv 2404.09656). The
    /// first term and the sum are rounded to the weights' dtype. Every rank updates its own slices.
    ///
    /// # Errors
    /// Returns errors of the device, also of earlier work.
    pub fn mix_in(&mut self, policy: &Policy, alpha: f64) -> Result<()> {
        self.network.weights.mix_in(&policy.network.weights, alpha)
    }

    /// Frees gathered weights.
    pub fn free_gathered(&mut self) {
        self.network.weights.free_gathered();
    }
}
