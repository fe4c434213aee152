//! Parts of libtorch that `tch` does not bind, through a C++ shim: TCPStore, CUDA streams, flash and cuDNN attention; also tensors' bytes, cached
//! memory and threads. Knows nothing of models.

mod allocator;
mod bytes;
mod cudnn;
mod ffi;
mod flash;
mod number;
mod saved_attention;
mod store;

pub use allocator::{
    KEPT_BYTES, device_memory, keep_block, keep_memory, lacks_block, release_memory, reset_peak_memory,
};
pub use bytes::{accumulation_kind, byte_vec, bytes, f32_vec, f64_vec, filled_on, i64_vec, read_bytes, tensor_on};
pub use cudnn::{cudnn_backward, cudnn_forward};
pub use ffi::{current_cuda_stream, is_deterministic, set_cuda_device, set_deterministic};
pub(crate) use ffi::{exchange_cuda_stream, pool_cuda_stream};
pub use flash::{FLASH_HEAD_STEP, FLASH_MOST_HEAD_DIM, Varlen, flash_backward, flash_forward};
pub use number::{arange, check_room, full, scalar};
pub use saved_attention::{Attended, QkvGradients, SavedAttention};
pub use store::Store;
