//! Collectives in shared memory, for ranks on one host: the CPU backend, and the host-side meeting place of every backend.

mod control;
mod group;
mod member;
mod reduce;
mod segment;
mod signature;

pub(in crate::dist) use control::ShmControl;
pub(in crate::dist) use group::ShmGroup;
pub(in crate::dist) use member::Member;
pub(in crate::dist) use reduce::accumulate;
pub(in crate::dist) use segment::{PARTITIONS, Segment};
pub(in crate::dist) use signature::{CollectiveOp, Signature};
