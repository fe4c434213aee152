//! Advantages, losses, KL estimators, importance correction: pure functions with their papers.
