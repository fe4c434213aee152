//! Where rollout and train meet. [`Colocated::with_rollout`] is the guard of the phases: inside it every rank generates,
//! outside it every rank trains, and the borrow of the policy keeps the two apart.
//!
//! Entering: drop gradients | optimizer state starts for the host pool | beside it, weights reach the engine | the state's
//! memory goes as its copies are done | the engine's memory is mapped. Leaving, also after an error or a panic: the engine's
//! memory is given back, unless it keeps it | optimizer state starts on its way back, for which the next step waits | all ranks
//! agree on the outcome (`World::scope` says why in this order). At no moment do the whole optimizer state and the KV cache coexist if
//! the plan says `swap`, unless the engine keeps what is in its cache (`carried_kv = keep`).

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

/// The policy, the reference model and one rank of a generation engine on one device.
///
/// The phases cannot be mixed up. Training inside the scope does not compile:
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
/// nor does reading the policy there:
/// ```compile_fail,E0502
/// # use colo_grpo::{Colocated, Result};
/// fn read_inside(colocated: &mut Colocated) -> Result<u64> {
///     colocated.with_rollout(|_rollout| Ok(colocated.policy().version()))
/// }
/// ```
/// nor keeping the engine for later:
/// ```compile_fail
/// # use colo_grpo::{Colocated, Result, RolloutEngine};
/// fn keep_outside<'a>(colocated: &'a mut Colocated) -> Result<&'a mut RolloutEngine<'a>> {
///     colocated.with_rollout(|rollout| Ok(rollout))
/// }
/// ```
/// nor a scope inside a scope:
/// ```compile_fail,E0501
/// # use colo_grpo::{Colocated, Result};
/// fn nest(colocated: &mut Colocated) -> Result<()> {
///     colocated.with_rollout(|_outer| colocated.with_rollout(|_inner| Ok(())))
/// }
/// ```
/// The twins in the right order do:
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
    /// Puts the parts together. Where the optimizer state is during rollout is the policy's to know.
    pub fn new(learner: Learner, engine: Engine, slices: EngineSlices) -> Self {
        Self { learner, engine, slices }
    }

    /// Runs `work` with the engine awake on every rank; collective over the world.
    ///
    /// Whatever `work` does and wherever entering or leaving fails, afterwards the engine sleeps, its memory is given back
    /// unless it keeps it, and the optimizer state is on the device again or on its way there, bit for bit. A panic goes on
    /// unwinding after that.
    ///
    /// # Errors
    /// The first failure of any rank: the failing rank gets its own error, its peers [`PeerFailed`](crate::Error::PeerFailed); none is
    /// left waiting in a collective, and the next scope can be entered.
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

    /// Frees the engine's weights and starts the optimizer state's way back; nothing to do if that is done.
    fn restore(&mut self) -> Result<()> {
        self.slices.release();
        let needed_bytes = self.learner.policy().absent_optimizer_bytes();
        if needed_bytes > 0 {
            self.make_room(needed_bytes)?;
        }
        self.learner.policy_mut().reload_optimizer()
    }

    /// Gives back what libtorch keeps of freed tensors, unless `needed_bytes` fit beside it. A GPU's driver clears memory
    /// before anybody gets it again, which takes 2 ms a GiB, and the next tensors would have to take it anew.
    fn make_room(&self, needed_bytes: usize) -> Result<()> {
        let device = self.world().device();
        if device.is_cuda() && cuda::available_bytes()? >= needed_bytes + SPARE_BYTES {
            return Ok(());
        }
        torch::release_memory(device)
    }

    /// [`Learner::train`] to an outcome that all ranks agree on; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, on every rank, as [`Colocated::with_rollout`] has it: none is left waiting in a
    /// collective, and gradients added so far are dropped.
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

    /// [`Learner::divergences`] to an outcome that all ranks agree on; collective over the world.
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

    /// The policy, between scopes.
    pub fn policy(&self) -> &Policy {
        self.learner.policy()
    }

    /// The models that are trained with, between scopes.
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// The policy, to be loaded between scopes. The engine gives up what it keeps of sequences: their keys and values are those of
    /// other weights.
    pub fn policy_mut(&mut self) -> &mut Policy {
        self.engine.drop_kept();
        self.learner.policy_mut()
    }

    /// The sleeping engine, for its sizes and times.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The sleeping engine, to be set up between scopes.
    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The process's place among its peers.
    pub fn mesh(&self) -> &Mesh {
        self.learner.mesh()
    }

    /// All processes.
    pub fn world(&self) -> &Arc<World> {
        self.learner.world()
    }

    /// Puts this rank in order after a failure of any.
    fn recover(&mut self) {
        self.learner.drop_unfinished();
        if let Err(error) = self.restore() {
            tracing::error!(
                "cannot restore the optimizer state: {error}; it stays in host memory until the end of the next rollout"
            );
        }
    }
}

/// This rank's part of the policy's current weights; collective at ZeRO stage 3. Of an engine in stages a rank gathers the units of its
/// own alone: in every round each rank of the shard group gets the next unit that its stage has.
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
    // Engines are consecutive from rank 0 on, stage by stage.
    let stage_of = |rank: &usize| ranks.stages.stage(rank % ranks.all.size() / ranks.tp.size());
    let units: Vec<Vec<Unit>> = shard.ranks().iter().map(|rank| stage_of(rank).units(&table.spec)).collect();
    let wanted = |round: usize| -> Vec<Option<Unit>> { units.iter().map(|units| units.get(round).copied()).collect() };
    let num_rounds = units.iter().map(Vec::len).max().unwrap_or(0);
    let mut rounds = 0..num_rounds;
    let mut next = |unit: Unit| {
        let found = rounds.next().map(&wanted).map(|wanted| policy.wanted_weights(&wanted)).transpose()?.flatten();
        Ok(found.unwrap_or_else(|| panic!("the {unit} is one that the rank wants")))
    };
    let weights = slices.of_units(table, version, &mut next, adapters, quantized)?;
    for round in rounds {
        policy.wanted_weights(&wanted(round))?; // of stages that have more
    }
    Ok(weights)
}
