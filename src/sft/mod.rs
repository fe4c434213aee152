//! Supervised warm-up through the same trainer.
