//! The shim over libtorch: TCPStore, threads, tensor bytes. Knows nothing of models.

use tch::Kind;

/// The type that sums, norms, softmax statistics and optimizer state are kept in: Double for Double, Float for all else.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
