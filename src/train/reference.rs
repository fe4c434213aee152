//! Models that only score: the one that the KL term compares with, and a teacher.

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

/// Weights sharded over the shard group as in ZeRO-3, on the device or the host, without gradients or optimizer.
#[derive(Debug)]
pub struct Reference {
    network: Network,
}

/// The outputs of blocks that were each given an input.
#[derive(Debug)]
pub struct BlockOutputs {
    /// The residual stream behind each block. `[T, D]` each
    pub blocks: Vec<Tensor>,
    /// Logits of every position but the last. `[T - 1, V]` f32
    pub logits: Tensor,
}

impl Reference {
    /// Loads this rank's slices unit by unit; `source` is as in [`super::Policy::new`], and so are the errors.
    pub fn new(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: NetworkOptions,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        Self::load("reference_weights", table, mesh, options, None, source)
    }

    /// Loads this rank's slices on `owner`'s account in the ledger: to the device, or into `pool`, of [`super::reference_bytes`]' size.
    /// Each unit is brought from there to the device and gathered while the one before it is used.
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
        Ok(Self { network: Network::new(weights, None, options, &mesh.sequence)? })
    }

    /// Has the `num_top` most probable tokens of each distribution scored, too.
    pub fn scoring_top(mut self, num_top: usize) -> Self {
        self.network.num_top = num_top;
        self
    }

    /// Scores a micro-batch (collective over the shard group).
    ///
    /// # Errors
    /// The errors of [`Collective`](crate::ranks::Collective); what the device failed at until here.
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

    /// Each block's output for an input of its own, and the head's logits for the last: `inputs` has the residual stream before every block
    /// and behind the last, `[T, D]` each on the device (collective over the shard group). Shows which block differs from another
    /// implementation's, where [`Reference::forward_logits`] shows their sum.
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

    /// Mixes the policy into this model, as TRL's `sync_ref_model` does: `reference = (1 - alpha) reference + alpha policy`
    /// (arXiv 2404.09656), with the first term and the sum rounded to the weights' kind. Every rank mixes its own slices.
    ///
    /// # Errors
    /// Returns a failure of the device, of earlier work too.
    pub fn mix_in(&mut self, policy: &Policy, alpha: f64) -> Result<()> {
        self.network.weights.mix_in(&policy.network.weights, alpha)
    }

    /// Frees gathered weights.
    pub fn free_gathered(&mut self) {
        self.network.weights.free_gathered();
    }
}
