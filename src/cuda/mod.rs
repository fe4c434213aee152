//! The GPUs of this machine, and libtorch's CUDA half, opened at run time so that one program serves both worlds. Knows
//! nothing of models.

mod devices;
mod library;

pub use devices::devices;
pub use library::{is_available, require};
