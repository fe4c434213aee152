//! The generation engine. Knows nothing of training.
