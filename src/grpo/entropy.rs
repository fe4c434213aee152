//! Entropy in the objective: selection of tokens by entropy, the entropy bonus, and its adaptive coefficient.

use super::options::LossConfig;

/// The entropy terms of an update; they must be known before its first backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EntropyTerm {
    /// Tokens with an entropy below this, in nats, are left out of the policy term and the bonus.
    pub least: Option<f64>,
    /// Coefficient of the bonus.
    pub coef: f64,
    /// Number of tokens that the bonus averages over: those of the update on all ranks, without the ones left out.
    pub num_tokens: f64,
}

impl EntropyTerm {
    /// Keeps the share `quantile` of an update's tokens with the highest entropy. The threshold is `torch.quantile(entropies, 1 - quantile)`, which
    /// interpolates between neighbours; rank and interpolation are in float32 as in TRL (arXiv 2506.01939).
    pub fn of_highest(mut entropies: Vec<f32>, quantile: f64, coef: f64) -> Self {
        entropies.sort_unstable_by(f32::total_cmp);
        let Some(last) = entropies.len().checked_sub(1) else { return Self { least: None, coef, num_tokens: 0.0 } };
        let rank = (1.0 - quantile) as f32 * last as f32;
        let below = rank.floor();
        let (low, high) = (entropies[below as usize], entropies[(below as usize + 1).min(last)]);
        let (weight, distance) = (rank - below, high - low);
        let least = if weight < 0.5 { low + weight * distance } else { high - distance * (1.0 - weight) };
        let num_tokens = entropies.iter().filter(|entropy| **entropy >= least).count() as f64;
        Self { least: Some(f64::from(least)), coef, num_tokens }
    }
}

/// The coefficient of the entropy bonus from one update to the next. It is constant unless it is adaptive (arXiv 2505.22312).
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(from = "SavedControl", into = "SavedControl")]
pub struct EntropyControl {
    /// The coefficient.
    pub coef: f64,
    /// Mean entropy of the newest update, in nats; `None` before the first one.
    pub entropy: Option<f64>,
}

impl EntropyControl {
    /// The control before the first update.
    pub fn new(config: &LossConfig) -> Self {
        Self { coef: config.objective.entropy_coef, entropy: None }
    }

    /// The coefficient for the next update's bonus. An adaptive one is 0 until an update's entropy is at or below the target.
    pub fn applied(&self, config: &LossConfig) -> f64 {
        let is_low = self.entropy.is_some_and(|entropy| entropy <= config.objective.entropy_target);
        if config.objective.use_adaptive_entropy && !is_low { 0.0 } else { self.coef }
    }

    /// Updates the coefficient with the mean entropy of an update. A non-finite entropy changes nothing.
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

/// Bit patterns of an [`EntropyControl`]'s numbers, which JSON does not round.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `torch.quantile` of 86 numbers for 0.6 has the rank 0.6f * 85 = 51.000003 in float32, and so lies above the 51st number.
    #[test]
    fn ranks_are_rounded_as_torch_rounds_them() {
        let entropies: Vec<f32> = (0..86u8).map(f32::from).collect();
        let term = EntropyTerm::of_highest(entropies, 0.4, 0.0);
        assert_eq!(term.num_tokens, 34.0);
    }
}
