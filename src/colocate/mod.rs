//! Where rollout and train meet: the guard `with_rollout`, gather, offload and reload.
