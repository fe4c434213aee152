//! Turns one generation batch into optimizer updates, on the ranks that train.

mod shares;

use std::sync::Arc;

use tch::Tensor;

use super::divergence::{Divergence, Numbered, exchange, gather_numbered};
use super::hand_out::{hand_out, hand_out_top};
use super::loss::UpdateSums;
use super::options::{ReferenceSync, UpdateOptions, UpdateOutcome, UpdateProgress};
use crate::error::{Error, Result};
use crate::grpo::{Denominators, EntropyControl, EntropyTerm, check_exactness};
use crate::memory;
use crate::phase::{self, Phase};
use crate::ranks::{Mesh, ReduceOp, World, all_gather_bytes, all_reduce_f64};
use crate::torch;
use crate::train::{MicroBatch, Policy, Reference, Sequence, learning_rate};

/// Consecutive updates that may be skipped because of a non-finite gradient before the run ends with exit code 13.
const MAX_CONSECUTIVE_SKIPS: u32 = 5;

/// The policy, the reference model and the ranks that train them together.
#[derive(Debug)]
pub struct Learner {
    world: Arc<World>,
    mesh: Mesh,
    policy: Policy,
    reference: Option<Reference>,
    teacher: Option<Reference>,
    num_consecutive_skips: u32,
}

/// Which log-probabilities must be computed before an update.
#[derive(Debug, Clone, Copy)]
struct NeededLogprobs {
    /// The policy's own: needed if there are several updates, or if dropout makes those of the training forward unusable.
    old: bool,
    /// Those of the reference model.
    reference: bool,
    /// Those of the teacher model, if there is one.
    teacher: bool,
}

impl Learner {
    /// Creates a learner. `mesh.world` are the ranks of `world` that train.
    pub fn new(world: Arc<World>, mesh: Mesh, policy: Policy, reference: Option<Reference>) -> Self {
        Self { world, mesh, policy, reference, teacher: None, num_consecutive_skips: 0 }
    }

    /// Adds a teacher model, which scores the samples for losses with a divergence from it.
    pub fn with_teacher(self, teacher: Option<Reference>) -> Self {
        Self { teacher, ..self }
    }

    /// The group of all processes, including those that do not train.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// This process's position among the ranks that train.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The policy, for example to load weights or to move its state.
    pub fn policy_mut(&mut self) -> &mut Policy {
        &mut self.policy
    }

    /// The reference model, if it is separate from the policy's base.
    pub fn reference(&self) -> Option<&Reference> {
        self.reference.as_ref()
    }

    /// Trains on the sequences of one generation batch; collective over the world. Ranks that do not train call
    /// [`gather_sequences`](crate::train::gather_sequences) and [`fetch`](crate::train::ExpertSources::fetch) (with no sequences to fetch) instead.
    /// Every rank passes the sequences that it sampled; in rank order these are the whole batch. They are distributed over the training ranks so that
    /// the cost is balanced.
    ///
    /// Sequence `i` of the whole batch takes part in update `i % updates_per_generation` of every iteration, so that the updates do not depend on the
    /// world size.
    ///
    /// # Errors
    /// This rank's error; [`Error::NonFinite`] after `MAX_CONSECUTIVE_SKIPS` consecutive skipped updates.
    pub fn train(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<UpdateOutcome> {
        let (mut shares, denominators) = phase::scope(Phase::Pack, || self.share_out(sequences, options))?;
        // The memory that the engine released must be available before libtorch needs it.
        phase::scope(Phase::Reload, || memory::settle(self.world.device()))?;
        let dropout = self.policy.lora().is_some_and(|lora| lora.dropout > 0.0);
        let needs = NeededLogprobs {
            old: dropout || options.needs_old_logprobs(),
            reference: options.loss.beta > 0.0,
            teacher: true,
        };
        if options.exact {
            for sequence in shares.iter_mut().flatten() {
                sequence.old_logprobs.clone_from(&sequence.rollout_logprobs);
            }
        }
        for share in &mut shares {
            self.score(share, needs, options, progress)?;
            if options.teaches_itself {
                self.score_as_teacher(share, options, progress)?;
            }
        }
        let mut outcome = UpdateOutcome {
            entropy_control: options.entropy_control,
            aux_loss: self.policy.table().spec.experts().is_some().then_some(0.0),
            ..UpdateOutcome::default()
        };
        let passes = (0..options.num_iterations).flat_map(|_| shares.iter().zip(&denominators));
        for (share, denominators) in passes.take(options.num_updates() as usize) {
            self.update_once(share, denominators, options, progress, &mut outcome)?;
            if options.exact {
                check_exactness(&outcome.stats)?;
            }
            self.move_reference(options, options.global_step + outcome.num_updates)?;
        }
        outcome.exposed_communication = self.policy.take_exposed_communication()?;
        outcome.exposed_exchange = self.policy.take_exposed_exchange()?;
        outcome.offloaded = self.policy.take_offloaded()?;
        outcome.loss /= outcome.num_updates.max(1) as f64;
        outcome.aux_loss = outcome.aux_loss.map(|sum| sum / outcome.num_updates.max(1) as f64);
        outcome.policy_loss /= outcome.num_updates.max(1) as f64;
        outcome.grad_norm /= (outcome.num_updates - outcome.num_skipped).max(1) as f64;
        Ok(outcome)
    }

    /// Drops what a failed step has begun: gradients and gathered weights.
    pub(crate) fn drop_unfinished(&mut self) {
        self.policy.drop_gradients();
        for frozen in self.reference.iter_mut().chain(&mut self.teacher) {
            frozen.free_gathered();
        }
    }

    /// Returns the KL divergences of `sequences` from the reference model, before an update on them; collective over the world. Ranks that do not
    /// train call [`super::await_divergences`] instead. The sequences are distributed over ranks so that the cost is balanced.
    ///
    /// # Errors
    /// Returns the errors of [`Learner::train`].
    pub fn divergences(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<Vec<Divergence>> {
        let group = self.world.group();
        let (num_sequences, own, mut share) = phase::scope(Phase::Pack, || {
            let Numbered { all, own, experts } = gather_numbered(sequences, &*group)?;
            let indexes = self.share_of(&all, options);
            let fetched = experts.fetch(sequences, &indexes, &*group)?;
            let share = indexes.iter().zip(fetched);
            let share = share.map(|(&index, routed_experts)| Sequence { routed_experts, ..all[index].clone() });
            Ok((all.len(), own, share.collect::<Vec<_>>()))
        })?;
        phase::scope(Phase::Reload, || memory::settle(self.world.device()))?;
        self.score(&mut share, NeededLogprobs { old: true, reference: true, teacher: false }, options, progress)?;
        let counted = if self.mesh.speaks_for_sequences() { &share[..] } else { &[] };
        exchange(counted, options.loss.objective.kl_estimator, (num_sequences, own), &*group)
    }

    /// Computes the log-probabilities that are needed. When a run trains adapters, the reference model is the policy's own base.
    fn score(
        &mut self,
        sequences: &mut [Sequence],
        needs: NeededLogprobs,
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<()> {
        let NeededLogprobs { old: needs_old, reference: needs_ref, teacher } = needs;
        let needs_teacher = teacher && self.teacher.is_some();
        if !needs_old && !needs_ref && !needs_teacher {
            return Ok(());
        }
        phase::scope(Phase::Score, || {
            let micro_batches = self.micro_batches(sequences, options)?;
            progress.begin(Phase::Score, micro_batches.len());
            for micro_batch in micro_batches {
                if needs_old {
                    let scores = self.policy.forward_logprobs(&micro_batch, options.temperature)?;
                    hand_out(&micro_batch, &scores, sequences, |sequence| &mut sequence.old_logprobs)?;
                }
                if needs_ref {
                    let scores = match &mut self.reference {
                        Some(reference) => reference.forward_logprobs(&micro_batch, options.temperature)?,
                        None => self.policy.reference_logprobs(&micro_batch, options.temperature)?,
                    };
                    hand_out(&micro_batch, &scores, sequences, |sequence| &mut sequence.ref_logprobs)?;
                }
                if let Some(teacher) = self.teacher.as_mut().filter(|_| needs_teacher) {
                    let scores = teacher.forward_logprobs(&micro_batch, options.temperature)?;
                    hand_out(&micro_batch, &scores, sequences, |sequence| &mut sequence.teacher_logprobs)?;
                    hand_out_top(&micro_batch, &scores, sequences)?;
                }
                progress.advance();
            }
            for frozen in self.reference.iter_mut().chain(&mut self.teacher) {
                frozen.free_gathered();
            }
            Ok(())
        })
    }

    /// Scores the sequences with the policy as their teacher, after the teacher prompts that they have.
    fn score_as_teacher(
        &mut self,
        sequences: &mut [Sequence],
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
    ) -> Result<()> {
        let num_top =
            options.loss.distillation.and_then(|distillation| distillation.top).map_or(0, |top| top.num_tokens);
        phase::scope(Phase::Score, || {
            let mut taught: Vec<Sequence> = sequences.iter().map(Sequence::behind_teacher_prompt).collect();
            let micro_batches = self.micro_batches(&taught, options)?;
            progress.begin(Phase::Score, micro_batches.len());
            for micro_batch in micro_batches {
                let scores = self.policy.teacher_logprobs(&micro_batch, options.temperature, num_top)?;
                hand_out(&micro_batch, &scores, &mut taught, |sequence| &mut sequence.teacher_logprobs)?;
                hand_out_top(&micro_batch, &scores, &mut taught)?;
                progress.advance();
            }
            sequences
                .iter_mut()
                .zip(taught)
                .for_each(|(sequence, taught)| sequence.take_teacher_scores(taught, num_top));
            Ok(())
        })
    }

    /// Runs one update on this rank's `share` and adds its results to `outcome`.
    fn update_once(
        &mut self,
        share: &[Sequence],
        denominators: &Denominators,
        options: &UpdateOptions,
        progress: &dyn UpdateProgress,
        outcome: &mut UpdateOutcome,
    ) -> Result<()> {
        let micro_batches = phase::scope(Phase::Pack, || self.micro_batches(share, options))?;
        progress.begin(Phase::ForwardBackward, micro_batches.len());
        let (term, entropies) = self.entropy_term(&micro_batches, denominators, options, &outcome.entropy_control)?;
        let coef = self.policy.table().spec.router_aux_loss_coef(options.router_aux_loss_coef)?;
        let (counts, sharers) = (self.mesh.speaks_for_sequences(), self.mesh.sequence.size());
        let mut sums = UpdateSums::new(term, coef, outcome.num_updates == 0).counting(counts);
        phase::scope(Phase::ForwardBackward, || {
            self.policy.weigh_drafts(denominators.num_update_tokens);
            sums.count_masked(share, options)?;
            for (index, micro_batch) in micro_batches.iter().enumerate() {
                if index + 1 == micro_batches.len() {
                    self.policy.finish_gradients_with_next_backward();
                }
                let flop = micro_batch.training_flop(&self.policy.table().spec, self.policy.lora().is_some());
                outcome.training_flop += flop / sharers as f64;
                let is_counted = counts && !micro_batch.is_empty();
                outcome.num_trained_tokens += if is_counted { micro_batch.num_tokens() } else { 0 };
                self.policy.forward_backward(micro_batch, options.temperature, &mut |scores| {
                    sums.differentiate(micro_batch, scores, entropies.get(index), denominators, options)
                })?;
                progress.advance();
            }
            Ok(())
        })?;
        outcome.learning_rate = learning_rate(&options.schedule, options.global_step + outcome.num_updates);
        let (rate, most) = (outcome.learning_rate, options.max_grad_norm);
        let step = phase::scope(Phase::Optimizer, || self.policy.optimizer_step(rate, most))?;
        // This does not wait for the device any more, because the step already read the gradient's norm.
        let mut mean_entropy = [sums.read_into(outcome)?];
        if options.loss.objective.use_adaptive_entropy {
            all_reduce_f64(&*self.mesh.world, &mut mean_entropy, ReduceOp::Sum)?;
            outcome.entropy_control.observe(mean_entropy[0], &options.loss);
        }
        outcome.num_updates += 1;
        if !step.skipped {
            self.num_consecutive_skips = 0;
            outcome.grad_norm += step.grad_norm;
            return Ok(());
        }
        outcome.num_skipped += 1;
        self.note_skip(options.global_step + outcome.num_updates, share, progress)
    }

    /// Mixes the policy into the reference model, if update `global_step` is one of those after which this is due.
    fn move_reference(&mut self, options: &UpdateOptions, global_step: u64) -> Result<()> {
        match (&mut self.reference, options.reference_sync) {
            (Some(reference), Some(ReferenceSync { steps, alpha })) if global_step.is_multiple_of(steps) => {
                phase::scope(Phase::Optimizer, || reference.mix_in(&self.policy, alpha))
            }
            _ => Ok(()),
        }
    }

    /// The entropy term of the update's objective. If it only covers the tokens with the highest entropy, an additional pass determines these over
    /// all ranks, and the entropies of every micro-batch are returned, too; collective.
    fn entropy_term(
        &mut self,
        micro_batches: &[MicroBatch],
        denominators: &Denominators,
        options: &UpdateOptions,
        control: &EntropyControl,
    ) -> Result<(Option<EntropyTerm>, Vec<Tensor>)> {
        let (config, coef) = (&options.loss, control.applied(&options.loss));
        if !config.selects_by_entropy() {
            let term = EntropyTerm { least: None, coef, num_tokens: denominators.num_update_tokens };
            return Ok((config.has_entropy_bonus().then_some(term), Vec::new()));
        }
        phase::scope(Phase::Score, || {
            let (mut own, mut of_micro_batches) = (Vec::new(), Vec::new());
            for micro_batch in micro_batches {
                let scores = self.policy.forward_logprobs(micro_batch, options.temperature)?;
                if !micro_batch.is_empty() && self.mesh.speaks_for_sequences() {
                    own.extend(torch::f32_vec(&scores.entropy)?.into_iter().flat_map(f32::to_le_bytes));
                }
                of_micro_batches.push(scores.entropy);
            }
            let all = all_gather_bytes(&*self.mesh.world, &own)?.concat();
            let entropies = all.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
            let term = EntropyTerm::of_highest(entropies, config.objective.top_entropy_quantile, coef);
            Ok((Some(term), of_micro_batches))
        })
    }

    /// Counts a skipped update.
    ///
    /// # Errors
    /// [`Error::NonFinite`] after too many consecutive skips.
    fn note_skip(&mut self, update: u64, share: &[Sequence], progress: &dyn UpdateProgress) -> Result<()> {
        self.num_consecutive_skips += 1;
        tracing::warn!("update {update}: the loss or gradient is not finite; the update is skipped on all ranks");
        progress.skipped(update, share)?;
        if self.num_consecutive_skips < MAX_CONSECUTIVE_SKIPS {
            return Ok(());
        }
        Err(Error::NonFinite {
            message: format!(
                "{MAX_CONSECUTIVE_SKIPS} updates in a row had a loss or gradient that is not finite, the last at step \
                 {update}; lower learning_rate or resume from an earlier checkpoint; the batches are in non_finite/"
            ),
        })
    }
}
