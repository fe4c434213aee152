//! The roles of ranks in a plan.

/// The role of a rank: generating, training or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The rank alternates between both.
    Both,
    /// The rank only trains.
    Trains,
    /// The rank only generates, with its own whole weights or those of its stage.
    Generates,
}

impl Role {
    /// The heading of the plan's table.
    pub(super) fn of_whom(self) -> &'static str {
        match self {
            Self::Both => "memory per rank",
            Self::Trains => "memory per rank that trains",
            Self::Generates => "memory per rank that generates",
        }
    }
}
