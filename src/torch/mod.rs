//! The shim over libtorch: TCPStore, threads, tensor bytes. Knows nothing of models.
