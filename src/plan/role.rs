//! Plans of ranks that do one half of a step.

/// The role of a rank: generating, training or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Both in turn.
    Both,
    /// It trains.
    Trains,
    /// It generates, with whole weights of its own, or those of its stage.
    Generates,
}

impl Role {
    /// For a table's head.
    pub(super) fn of_whom(self) -> &'static str {
        match self {
            Self::Both => "memory per rank",
            Self::Trains => "memory per rank that trains",
            Self::Generates => "memory per rank that generates",
        }
    }
}
