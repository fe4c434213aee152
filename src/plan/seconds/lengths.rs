//! Expected lengths of a run's prompts and completions.

use std::str::FromStr;

/// Expected lengths of prompts and completions, in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpectedLengths {
    /// Mean length of prompts.
    pub prompt: f64,
    /// Distribution of completion lengths.
    pub completion: CompletionLengths,
}

/// A range of completion lengths, including both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionLengths {
    /// Minimum length in tokens, at least 1.
    pub shortest: usize,
    /// Maximum length in tokens.
    pub longest: usize,
    /// Whether lengths are distributed evenly on a log scale, so that few are long, instead of evenly.
    pub long_tailed: bool,
}

impl CompletionLengths {
    /// All completions have this length.
    pub const fn fixed(length: usize) -> Self {
        Self { shortest: length, longest: length, long_tailed: false }
    }

    /// Lengths that represent all completions, in ascending order.
    pub(super) fn quantiles(self) -> Vec<f64> {
        const COUNT: u64 = 256;
        let Self { shortest, longest, long_tailed } = self;
        if shortest == longest {
            return vec![longest as f64];
        }
        let of = |share: f64| match long_tailed {
            true => shortest as f64 * ((longest + 1) as f64 / shortest as f64).powf(share),
            false => shortest as f64 + share * (longest - shortest + 1) as f64,
        };
        (0..COUNT).map(|index| of((index as f64 + 0.5) / COUNT as f64)).collect()
    }
}

impl FromStr for CompletionLengths {
    type Err = &'static str;

    /// Parses `512`, `64..1024`, or `tail:64..1024` for a long-tailed range.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(length) = text.parse().ok().filter(|length| *length > 0) {
            return Ok(Self::fixed(length));
        }
        let (long_tailed, range) = text.strip_prefix("tail:").map_or((false, text), |range| (true, range));
        let ends = range.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        let ends = ends.filter(|(low, high): &(usize, usize)| (1..=*high).contains(low));
        let (shortest, longest) = ends.ok_or("expected a length such as 512, or a range: 64..1024 or tail:64..1024")?;
        Ok(Self { shortest, longest, long_tailed })
    }
}
