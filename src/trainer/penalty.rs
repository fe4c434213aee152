//! `use_kl_in_reward`: subtracts the KL divergence from the reference model from the rewards.

use super::{Trainer, records};
use crate::error::Result;
use crate::metrics::StepMetrics;
use crate::types::RolloutGroup;
use crate::update::Divergence;

impl Trainer {
    /// Sets the KL penalty of every completion with a reward, if the configuration asks for it; collective over the world in that case. Returns the
    /// divergence over this rank's completions.
    pub(super) fn penalize(&mut self, groups: &mut [RolloutGroup]) -> Result<Option<Divergence>> {
        if !self.config.objective.use_kl_in_reward {
            return Ok(None);
        }
        let sequences = records::sequences(groups, &[], self.config.mask_truncated_completions, None);
        let options = self.update_options();
        let divergences = self.model.divergences(&sequences, &options, &self.output)?;
        let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
        for (completion, divergence) in completions.filter(|it| it.reward.is_some()).zip(&divergences) {
            completion.kl_penalty = (self.config.beta * divergence.sum) as f32;
        }
        let total = |field: fn(&Divergence) -> f64| divergences.iter().map(field).sum();
        Ok(Some(Divergence { sum: total(|it| it.sum), num_tokens: total(|it| it.num_tokens) }))
    }
}

/// Adds TRL's metric `kl` for a divergence that is subtracted from rewards, not part of the loss.
pub(super) fn add_metrics(metrics: &mut StepMetrics, divergence: Option<Divergence>) {
    if let Some(Divergence { sum, num_tokens }) = divergence {
        metrics.set_mean("kl", sum, num_tokens);
    }
}
