//! The CUDA driver, streams and kernels. Knows nothing of models.
