//! What a format is used for.

/// A use of a format.
#[derive(Debug, Clone, Copy)]
pub enum Use {
    /// Training.
    Training,
    /// An engine.
    Engine {
        /// Ranks that share its matrices.
        tp_size: usize,
    },
}
