//! Positions of a micro-batch's sequences among its rows.

/// The sequences of a micro-batch. Each run of rows starts where the previous one ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bounds {
    /// Sequence n has the rows `bounds[n]..bounds[n + 1]`: its prompt and its completion.
    Separate(Vec<i64>), // [N + 1], from 0 to T
    /// All prompts, each once, followed by the completions of the first prompt, those of the second, and so on.
    Shared(SharedBounds),
}

/// G prompts with N completions. A completion attends to its prompt and to itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBounds {
    /// Bounds of each prompt's rows.
    pub prompts: Vec<i64>, // [G + 1], from 0 to P
    /// Bounds of the rows of each prompt's completions together.
    pub groups: Vec<i64>, // [G + 1], from P to T
    /// Bounds of each completion's rows.
    pub completions: Vec<i64>, // [N + 1], from P to T
}

impl Bounds {
    /// Number of tokens T.
    pub fn num_tokens(&self) -> i64 {
        let (Self::Separate(bounds) | Self::Shared(SharedBounds { completions: bounds, .. })) = self;
        bounds.last().copied().unwrap_or(0)
    }

    /// Number of sequences; prompts that completions share are sequences of their own.
    pub fn num_sequences(&self) -> usize {
        let count = |bounds: &[i64]| bounds.len().saturating_sub(1);
        match self {
            Self::Separate(bounds) => count(bounds),
            Self::Shared(SharedBounds { prompts, completions, .. }) => count(prompts) + count(completions),
        }
    }

    /// Adds padding rows after the last one, up to `num_tokens`. The padding is a separate sequence, or a separate completion of the last prompt.
    pub fn padded_to(&self, num_tokens: i64) -> Self {
        let mut padded = self.clone();
        if self.num_tokens() < num_tokens {
            match &mut padded {
                Self::Separate(bounds) => bounds.push(num_tokens),
                Self::Shared(SharedBounds { groups, completions, .. }) => {
                    completions.push(num_tokens);
                    groups.last_mut().expect("bounds begin with a row").clone_from(&num_tokens);
                }
            }
        }
        padded
    }

    /// Number of (query, key) pairs in causal attention without a window: half of the square of each sequence's length. Pairs within a shared prompt
    /// count once.
    pub fn attended_pairs(&self) -> f64 {
        let lens = |bounds: &[i64]| -> Vec<f64> { bounds.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect() };
        match self {
            Self::Separate(bounds) => lens(bounds).iter().map(|len| len * len / 2.0).sum(),
            Self::Shared(SharedBounds { prompts, groups, completions }) => {
                let of_prompt = |(prompt_len, rows): (&f64, &[i64])| {
                    let starts = completions.windows(2).filter(|pair| (rows[0]..rows[1]).contains(&pair[0]));
                    let own = starts.map(|pair| (pair[1] - pair[0]) as f64);
                    prompt_len * prompt_len / 2.0 + own.map(|len| len * (prompt_len + len / 2.0)).sum::<f64>()
                };
                lens(prompts).iter().zip(groups.windows(2)).map(of_prompt).sum()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_rows_form_their_own_sequence() {
        let separate = Bounds::Separate(vec![0, 4, 10]);
        assert_eq!(separate.padded_to(10), separate);
        assert_eq!(separate.padded_to(12), Bounds::Separate(vec![0, 4, 10, 12]));
        let shared = |last, completions: &[i64]| {
            let completions = completions.to_vec();
            Bounds::Shared(SharedBounds { prompts: vec![0, 4, 6], groups: vec![6, 10, last], completions })
        };
        assert_eq!(shared(12, &[6, 10, 12]).padded_to(15), shared(15, &[6, 10, 12, 15]));
    }

    #[test]
    fn attention_pairs_of_a_shared_prompt_count_once() {
        assert_eq!(Bounds::Separate(vec![0, 4, 10]).attended_pairs(), 8.0 + 18.0);
        // Prompts of 4 and 2 tokens; completions of 3 and 1 tokens for the first, of 2 for the second.
        let shared = SharedBounds { prompts: vec![0, 4, 6], groups: vec![6, 10, 12], completions: vec![6, 9, 10, 12] };
        let first = 8.0 + (3.0 * 4.0 + 4.5) + (4.0 + 0.5);
        assert_eq!(Bounds::Shared(shared).attended_pairs(), first + 2.0 + (2.0 * 2.0 + 2.0));
    }
}
