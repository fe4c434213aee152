//! A GPU's compute capability.

use std::fmt;

/// A GPU's compute capability; newer GPUs compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    /// The number before the dot.
    pub major: i32,
    /// The number after the dot.
    pub minor: i32,
}

impl Capability {
    /// Compute capability 9.0. Only this one has the instructions that `product.cu`, `gate_up.cu` and others use. It is also the first with thread
    /// block clusters and programmatic dependent launch.
    pub const HOPPER: Self = Self::new(9, 0);

    /// Creates the capability `major.minor`.
    pub const fn new(major: i32, minor: i32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
