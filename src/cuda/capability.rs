//! A GPU's compute capability.

use std::fmt;

/// A GPU's compute capability; later chips are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    /// The number before the dot.
    pub major: i32,
    /// The number behind the dot.
    pub minor: i32,
}

impl Capability {
    /// The only chips with the instructions that `product.cu`, `gate_up.cu` and others are written with. Clusters of blocks, and launches that
    /// overlap with the work before them, begin here.
    pub const HOPPER: Self = Self::new(9, 0);

    /// Capability `major.minor`.
    pub const fn new(major: i32, minor: i32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
