//! Completion lengths for random weights, whose completions never end by themselves.

use crate::rollout::CompletionLimit;

/// A range of completion lengths, including both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct LengthSpread {
    /// Minimum length in tokens, at least 1.
    pub shortest: usize,
    /// Maximum length in tokens.
    pub longest: usize,
    /// Whether lengths are distributed evenly on a log scale (few long ones), instead of evenly.
    pub long_tailed: bool,
}

impl LengthSpread {
    /// The range cut off at `most` tokens.
    #[must_use]
    pub fn up_to(self, most: usize) -> Self {
        Self { shortest: self.shortest.min(most), longest: self.longest.min(most), ..self }
    }

    /// A limit that samples the length of each completion, counter-based like its tokens.
    pub fn limit(self) -> CompletionLimit {
        CompletionLimit::new(move |key| self.length(key.word(0, u64::MAX)))
    }

    /// Maps a uniformly random word to a length.
    pub(super) fn length(self, word: u64) -> usize {
        let Self { shortest, longest, long_tailed } = self;
        if !long_tailed {
            return shortest + (word % (longest - shortest + 1) as u64) as usize;
        }
        let share = word as f64 / 2.0_f64.powi(64);
        let length = shortest as f64 * ((longest + 1) as f64 / shortest as f64).powf(share);
        (length as usize).clamp(shortest, longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_lengths_stay_in_range_and_a_tail_has_a_short_median() {
        let lengths = |long_tailed| -> Vec<usize> {
            let spread = LengthSpread { shortest: 16, longest: 255, long_tailed };
            let mut lengths: Vec<_> = (0..=1000).map(|part| spread.length(u64::MAX / 1000 * part)).collect();
            lengths.sort_unstable();
            lengths
        };
        let (even, tailed) = (lengths(false), lengths(true));
        let ends = |lengths: &[usize]| (lengths[0], lengths[1000]);
        assert!(ends(&even).0 >= 16 && ends(&even).1 <= 255, "{:?}", ends(&even));
        assert_eq!(ends(&tailed), (16, 255));
        assert!((125..145).contains(&even[500]), "{}", even[500]);
        assert!((60..68).contains(&tailed[500]), "{}", tailed[500]); // sqrt(16 x 256)
    }
}
