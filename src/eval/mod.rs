//! Evaluation: avg@n and pass@k on held-out problems.
