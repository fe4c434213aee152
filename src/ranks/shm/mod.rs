//! Collectives in shared memory for ranks on one host: the CPU backend, and host-side synchronisation for every backend.

mod control;
mod group;
mod member;
mod reduce;
mod segment;
mod signature;

pub(in crate::ranks) use control::ShmControl;
pub(in crate::ranks) use group::ShmGroup;
pub(in crate::ranks) use member::Member;
pub(in crate::ranks) use reduce::accumulate;
pub(in crate::ranks) use segment::{PARTITIONS, Segment};
pub(in crate::ranks) use signature::{CollectiveOp, Signature};
