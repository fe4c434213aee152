//! Entropy in the objective: which tokens are trained on by it, the bonus for it, and the control of the bonus.

use super::options::LossConfig;

/// The entropy terms of an update, known before its first backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EntropyTerm {
    /// The policy term and the bonus leave out tokens whose entropy is below this, in nats.
    pub least: Option<f64>,
    /// Weight of the bonus.
    pub coef: f64,
    /// Tokens that the bonus is the mean over: of the update, over all ranks, without those that are left out.
    pub num_tokens: f64,
}

impl EntropyTerm {
    /// Keeps the share `quantile` of the tokens whose entropy is highest of all `entropies` of an update. The least of them is
    /// `torch.quantile(entropies, 1 - quantile)`, which interpolates between neighbours, in float32 as TRL does (arXiv 2506.01939).
    pub fn of_highest(mut entropies: Vec<f32>, quantile: f64, coef: f64) -> Self {
        entropies.sort_unstable_by(f32::total_cmp);
        let Some(last) = entropies.len().checked_sub(1) else { return Self { least: None, coef, num_tokens: 0.0 } };
        let rank = (1.0 - quantile) * last as f64;
        let below = rank.floor();
        let (low, high) = (entropies[below as usize], entropies[(below as usize + 1).min(last)]);
        let least = low + (rank - below) as f32 * (high - low);
        let num_tokens = entropies.iter().filter(|entropy| **entropy >= least).count() as f64;
        Self { least: Some(f64::from(least)), coef, num_tokens }
    }
}

/// The weight of the entropy bonus from one update to the next; constant unless it is adaptive (arXiv 2505.22312).
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(from = "SavedControl", into = "SavedControl")]
pub struct EntropyControl {
    /// The weight.
    pub coef: f64,
    /// Mean entropy of the newest update, in nats; none before the first one.
    pub entropy: Option<f64>,
}

impl EntropyControl {
    /// Before the first update.
    pub fn new(config: &LossConfig) -> Self {
        Self { coef: config.objective.entropy_coef, entropy: None }
    }

    /// Weight of the next update's bonus. An adaptive one is 0 until an update had an entropy of at most the target.
    pub fn applied(&self, config: &LossConfig) -> f64 {
        let is_low = self.entropy.is_some_and(|entropy| entropy <= config.objective.entropy_target);
        if config.objective.use_adaptive_entropy && !is_low { 0.0 } else { self.coef }
    }

    /// Takes in the mean entropy of an update. One that is not finite changes nothing.
    pub fn observe(&mut self, entropy: f64, config: &LossConfig) {
        if !config.objective.use_adaptive_entropy || !entropy.is_finite() {
            return;
        }
        self.entropy = Some(entropy);
        self.coef = if entropy <= config.objective.entropy_target {
            (self.coef + config.objective.entropy_coef_delta).min(config.objective.entropy_coef_max)
        } else {
            (self.coef - config.objective.entropy_coef_delta).max(config.objective.entropy_coef_min)
        };
    }
}

/// Bit patterns of the numbers of an [`EntropyControl`], which JSON does not round.
#[derive(serde::Serialize, serde::Deserialize)]
struct SavedControl {
    coef_bits: u64,
    entropy_bits: Option<u64>,
}

impl From<EntropyControl> for SavedControl {
    fn from(control: EntropyControl) -> Self {
        Self { coef_bits: control.coef.to_bits(), entropy_bits: control.entropy.map(f64::to_bits) }
    }
}

impl From<SavedControl> for EntropyControl {
    fn from(saved: SavedControl) -> Self {
        Self { coef: f64::from_bits(saved.coef_bits), entropy: saved.entropy_bits.map(f64::from_bits) }
    }
}
