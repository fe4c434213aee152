//! Alternates rollout and training on the same GPUs. [`Colocated::with_rollout`] guards the two phases: inside its closure every rank generates,
//! outside of it every rank trains, and the borrow checker keeps the two apart.
//!
//! On entry: drop the gradients; start copying the optimizer state to the host pool; meanwhile gather the engine's weights; free the state's memory
//! as its copies complete; map the engine's memory. On exit, also after an error or a panic: unmap the engine's memory, unless it is to be kept;
//! start copying the optimizer state back, for which the next optimizer step waits; let all ranks agree on the outcome (`World::scope` explains this
//! order). If the plan says `swap`, the whole optimizer state and the KV cache are never in GPU memory at the same time, unless the engine keeps its
//! cache (`carried_kv = keep`).

use std::sync::Arc;

use crate::cuda;
use crate::error::Result;
use crate::model::Unit;
use crate::phase::{self, Phase};
use crate::ranks::{Collective, Mesh, World};
use crate::rollout::{Engine, EngineRanks, EngineWeights, RolloutEngine, SPARE_BYTES};
use crate::serve::EngineSlices;
use crate::torch;
use crate::train::{Policy, Sequence};
use crate::update::{Divergence, Learner, UpdateOptions, UpdateOutcome, UpdateProgress};

/// The policy, the reference model and one rank of a generation engine, all on the same device.
///
/// The compiler keeps the phases apart. Training inside the closure does not compile:
///
/// ```compile_fail,E0501
/// # use colo_grpo::{Colocated, Result, trainer::{Sequence, UpdateOptions}};
/// fn train_inside(colocated: &mut Colocated, batch: &[Sequence], options: &UpdateOptions) -> Result<()> {
///     colocated.with_rollout(|_rollout| {
///         colocated.update(batch, options, &())?;
///         Ok(())
///     })
/// }
/// ```
/// Nor does reading the policy there:
/// ```compile_fail,E0502
/// # use colo_grpo::{Colocated, Result};
/// fn read_inside(colocated: &mut Colocated) -> Result<u64> {
///     colocated.with_rollout(|_rollout| Ok(colocated.policy().version()))
/// }
/// ```
/// Nor does keeping the engine for later:
/// ```compile_fail
/// # use colo_grpo::{Colocated, Result, RolloutEngine};
/// fn keep_outside<'a>(colocated: &'a mut Colocated) -> Result<&'a mut RolloutEngine<'a>> {
///     colocated.with_rollout(|rollout| Ok(rollout))
/// }
/// ```
/// Nor does a nested call:
/// ```compile_fail,E0501
/// # use colo_grpo::{Colocated, Result};
/// fn nest(colocated: &mut Colocated) -> Result<()> {
///     colocated.with_rollout(|_outer| colocated.with_rollout(|_inner| Ok(())))
/// }
/// ```
/// In the right order these calls compile:
/// ```no_run
/// # use colo_grpo::{Colocated, Result, trainer::{Sequence, UpdateOptions}};
/// fn in_turn(colocated: &mut Colocated, batch: &[Sequence], options: &UpdateOptions) -> Result<u64> {
///     let tokens = colocated.with_rollout(|rollout| Ok(rollout.stats().num_generated_tokens))?;
///     colocated.update(batch, options, &())?;
///     colocated.with_rollout(|_rollout| Ok(()))?;
///     Ok(tokens as u64 + colocated.policy().version())
/// }
/// ```
#[derive(Debug)]
pub struct Colocated {
    learner: Learner,
    engine: Engine,
    slices: EngineSlices,
}

impl Colocated {
    /// Combines the models and the engine. The policy knows where the optimizer state is during rollout.
    pub fn new(learner: Learner, engine: Engine, slices: EngineSlices) -> Self {
        Self { learner, engine, slices }
    }

    /// Runs `work` with the engine awake on every rank; collective over the world.
    ///
    /// Whatever `work` does, and wherever entry or exit fails, afterwards the engine sleeps, its memory is unmapped unless it is to be kept, and the
    /// optimizer state is on the device again, or being copied there, bit for bit. A panic continues to unwind after that.
    ///
    /// # Errors
    /// The first failure of any rank. The failing rank returns its own error, its peers [`PeerFailed`](crate::Error::PeerFailed). No rank is left
    /// waiting in a collective, and `with_rollout` can be called again.
    pub fn with_rollout<R>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        let world = self.world().clone();
        world.scope(
            "with_rollout",
            self,
            |colocated| {
                colocated.learner.policy_mut().drop_gradients();
                let needed_bytes = colocated.engine.absent_bytes() + colocated.slices.reserved_bytes();
                phase::scope(Phase::Offload, || colocated.make_room(needed_bytes))?;
                phase::scope(Phase::Offload, || colocated.learner.policy_mut().offload_optimizer())?;
                let Self { learner, engine, slices } = colocated;
                let weights = phase::scope(Phase::Gather, || {
                    current_weights(slices, learner.policy(), engine.ranks(), &*learner.mesh().shard)
                })?;
                phase::scope(Phase::Offload, || learner.policy().finish_offload())?;
                let version = learner.policy().version();
                engine.awake(weights, version, |rollout| work(rollout).inspect_err(|error| world.post_failure(error)))
            },
            |colocated| phase::scope(Phase::Reload, || colocated.restore()),
            Self::recover,
        )
    }

    /// Frees the engine's weights and starts copying the optimizer state back; does nothing if that was done before.
    fn restore(&mut self) -> Result<()> {
        self.slices.release();
        let needed_bytes = self.learner.policy().absent_optimizer_bytes();
        if needed_bytes > 0 {
            self.make_room(needed_bytes)?;
        }
        self.learner.policy_mut().reload_optimizer()
    }

    /// Returns libtorch's cached memory to the driver, unless `needed_bytes` are free without it. The driver clears memory before it can be allocated
    /// again, which takes 2 ms per GiB, and later tensors would have to allocate it again.
    fn make_room(&self, needed_bytes: usize) -> Result<()> {
        let device = self.world().device();
        if device.is_cuda() && cuda::available_bytes()? >= needed_bytes + SPARE_BYTES {
            return Ok(());
        }
        torch::release_memory(device)
    }

    /// Runs [`Learner::train`], with an outcome that all ranks agree on; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank, as in [`Colocated::with_rollout`]. No rank is left waiting in a collective, and gradients added
    /// so far are dropped.
    pub fn update(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<UpdateOutcome> {
        let world = self.world().clone();
        let train = |colocated: &mut Self| colocated.learner.train(sequences, options, progress);
        world.scope("update", self, train, |_| Ok(()), Self::recover)
    }

    /// Runs [`Learner::divergences`], with an outcome that all ranks agree on; collective over the world.
    ///
    /// # Errors
    /// Returns the errors of [`Colocated::update`].
    pub fn divergences(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<Vec<Divergence>> {
        let world = self.world().clone();
        let score = |colocated: &mut Self| colocated.learner.divergences(sequences, options, progress);
        world.scope("divergences", self, score, |_| Ok(()), Self::recover)
    }

    /// The policy, for use outside of `with_rollout`.
    pub fn policy(&self) -> &Policy {
        self.learner.policy()
    }

    /// The models that are trained, for use outside of `with_rollout`.
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// The policy, for example to load weights. The engine drops cached keys and values of sequences, as they belong to other weights.
    pub fn policy_mut(&mut self) -> &mut Policy {
        self.engine.drop_kept();
        self.learner.policy_mut()
    }

    /// The sleeping engine, for its sizes and timings.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The sleeping engine, for configuration outside of `with_rollout`.
    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// This process's position in the device mesh.
    pub fn mesh(&self) -> &Mesh {
        self.learner.mesh()
    }

    /// The group of all processes.
    pub fn world(&self) -> &Arc<World> {
        self.learner.world()
    }

    /// Restores this rank's state after a failure of any rank.
    fn recover(&mut self) {
        self.learner.drop_unfinished();
        if let Err(error) = self.restore() {
            tracing::error!(
                "cannot restore the optimizer state: {error}; it stays in host memory until the end of the next rollout"
            );
        }
    }
}

/// This rank's slice of the policy's current weights; collective at ZeRO stage 3. With pipeline stages a rank gathers only its own stage's units: in
/// every round each rank of the shard group receives the next unit of its stage.
fn current_weights<'a>(
    slices: &'a mut EngineSlices,
    policy: &'a Policy,
    ranks: &EngineRanks,
    shard: &dyn Collective,
) -> Result<EngineWeights<'a>> {
    let adapters = &|layer| policy.block_adapters(layer);
    let (table, version, quantized) = (policy.table(), policy.version(), policy.quantized_blocks());
    if ranks.stages.count() == 1 {
        return slices.of_units(table, version, &mut |unit| policy.unit_weights(unit), adapters, quantized);
    }
    // Engines consist of consecutive ranks from rank 0 on, stage by stage.
    let stage_of = |rank: &usize| ranks.stages.stage(rank % ranks.all.size() / ranks.tp.size());
    let units: Vec<Vec<Unit>> = shard.ranks().iter().map(|rank| stage_of(rank).units(&table.spec)).collect();
    let wanted = |round: usize| -> Vec<Option<Unit>> { units.iter().map(|units| units.get(round).copied()).collect() };
    let num_rounds = units.iter().map(Vec::len).max().unwrap_or(0);
    let mut rounds = 0..num_rounds;
    let mut next = |unit: Unit| {
        let found = rounds.next().map(&wanted).map(|wanted| policy.wanted_weights(&wanted)).transpose()?.flatten();
        Ok(found.unwrap_or_else(|| panic!("no weights arrived for the {unit}, which this rank needs")))
    };
    let weights = slices.of_units(table, version, &mut next, adapters, quantized)?;
    for round in rounds {
        policy.wanted_weights(&wanted(round))?; // for stages with more units
    }
    Ok(weights)
}
