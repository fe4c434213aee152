//! Packing, ZeRO shards, AdamW, learning-rate schedule. Knows nothing of generation.
