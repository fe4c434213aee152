//! Where the sequences of a micro-batch lie among its rows.

/// The sequences of a micro-batch; every run of rows follows the one before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bounds {
    /// Sequence n has rows `bounds[n]..bounds[n + 1]`, its prompt and its completion.
    Separate(Vec<i64>), // [N + 1], from 0 to T
    /// The prompts, each once, then the completions of the first prompt, those of the second, and so on.
    Shared(SharedBounds),
}

/// G prompts with N completions. Completion n attends to its prompt and to itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBounds {
    /// Rows of each prompt.
    pub prompts: Vec<i64>, // [G + 1], from 0 to P
    /// Rows of all completions of each prompt.
    pub groups: Vec<i64>, // [G + 1], from P to T
    /// Rows of each completion.
    pub completions: Vec<i64>, // [N + 1], from P to T
}

impl Bounds {
    /// T.
    pub fn num_tokens(&self) -> i64 {
        let (Self::Separate(bounds) | Self::Shared(SharedBounds { completions: bounds, .. })) = self;
        bounds.last().copied().unwrap_or(0)
    }
}
