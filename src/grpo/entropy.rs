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

/// Difference, as a share of the larger one, up to which two entropies count as equal.
const TIE: f32 = 1e-6;
/// Entropies below this, in nats, are compared as if they were this large, since rounding errors of float32 do not become smaller with them.
const LEAST_COMPARED: f32 = 1.0;

impl EntropyTerm {
    /// Keeps the share `quantile` of an update's tokens with the highest entropy. The threshold is `torch.quantile(entropies, 1 - quantile)`, which
    /// interpolates between neighbours; rank and interpolation are in float32 as in TRL (arXiv 2506.01939).
    ///
    /// Tokens with one distribution, such as the first ones of a group, may differ in their last bits. If the threshold lies between two such tokens,
    /// all that are as near to the upper one are kept.
    pub fn of_highest(mut entropies: Vec<f32>, quantile: f64, coef: f64) -> Self {
        entropies.sort_unstable_by(f32::total_cmp);
        let Some(last) = entropies.len().checked_sub(1) else { return Self { least: None, coef, num_tokens: 0.0 } };
        let rank = (1.0 - quantile) as f32 * last as f32;
        let below = rank.floor();
        let (low, high) = (entropies[below as usize], entropies[(below as usize + 1).min(last)]);
        let (weight, distance) = (rank - below, high - low);
        let least = if weight < 0.5 { low + weight * distance } else { high - distance * (1.0 - weight) };
        let is_tie = |entropy: f32| high - entropy <= TIE * high.max(LEAST_COMPARED);
        let lowest = entropies.iter().copied().find(|entropy| is_tie(*entropy)).filter(|_| is_tie(low));
        let least = lowest.map_or(least, |lowest| lowest.min(least));
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

    #[test]
    fn equal_entropies_stay_together_though_their_last_bits_differ() {
        let tied = |ulps: u32| f32::from_bits(2.5f32.to_bits() + ulps);
        let entropies = vec![1.0, tied(0), tied(2), tied(1), tied(2), 3.0, 3.5, 4.0];
        for quantile in [0.75, 0.6, 0.5] {
            let term = EntropyTerm::of_highest(entropies.clone(), quantile, 0.0);
            assert_eq!((term.least, term.num_tokens), (Some(2.5), 7.0), "{quantile}");
        }
        assert_eq!(EntropyTerm::of_highest(entropies, 0.4, 0.0).num_tokens, 3.0);
    }
}
