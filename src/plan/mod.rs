//! MemoryPlan: bytes of every class in every phase, known before launch.
