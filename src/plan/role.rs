//! Plans of ranks that do one half of a step.

use super::ClassBytes;
use super::classes::in_rollout;

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

    /// The classes that a rank of this role holds: a trainer's, an engine's, `products` of either and an engine's own weights.
    pub(super) fn held(
        self,
        training: Vec<ClassBytes>,
        engine: Vec<ClassBytes>,
        products: Option<ClassBytes>,
        weights: usize,
    ) -> Vec<ClassBytes> {
        match self {
            Self::Both => training.into_iter().chain(engine).chain(products).collect(),
            Self::Trains => {
                let held = training.into_iter().chain(products).map(|class| ClassBytes { rollout_bytes: 0, ..class });
                held.filter(|class| class.train_bytes + class.host_bytes > 0).collect()
            }
            Self::Generates => {
                let engine = engine.into_iter().chain(products).map(|class| ClassBytes { train_bytes: 0, ..class });
                std::iter::once(in_rollout("weights", weights)).chain(engine).collect()
            }
        }
    }
}
