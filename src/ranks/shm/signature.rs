//! The called operation in one word. Ranks that called different operations get an error instead of hanging or mixing data.

use std::fmt;

use tch::Kind;

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::ranks) enum CollectiveOp {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    Shift,
    Barrier,
}

impl CollectiveOp {
    const ALL: [CollectiveOp; 7] = [
        CollectiveOp::AllReduce,
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter,
        CollectiveOp::Broadcast,
        CollectiveOp::AllToAll,
        CollectiveOp::Shift,
        CollectiveOp::Barrier,
    ];

    pub(in crate::ranks) fn name(self) -> &'static str {
        match self {
            CollectiveOp::AllReduce => "all_reduce",
            CollectiveOp::AllGather => "all_gather",
            CollectiveOp::ReduceScatter => "reduce_scatter",
            CollectiveOp::Broadcast => "broadcast",
            CollectiveOp::AllToAll => "all_to_all",
            CollectiveOp::Shift => "shift",
            CollectiveOp::Barrier => "barrier",
        }
    }
}

/// The parameters of a call, which must be equal on every rank of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::ranks) struct Signature {
    pub op: CollectiveOp,
    pub kind: Kind,
    /// The reduction of an all_reduce, or the root of a broadcast.
    pub detail: u8,
    /// Bytes of one rank's block.
    pub bytes: usize,
}

const KINDS: [Kind; 9] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::Bool,
];

impl Signature {
    /// Packs the signature, from the highest bits: op 8, kind 8, detail 8, bytes 40. All dtypes that are not listed have the same code.
    pub(in crate::ranks) fn pack(self) -> u64 {
        let kind = KINDS.iter().position(|&kind| kind == self.kind).unwrap_or(KINDS.len()) as u64;
        (self.op as u64) << 56 | kind << 48 | u64::from(self.detail) << 40 | (self.bytes as u64 & ((1 << 40) - 1))
    }

    pub(in crate::ranks) fn unpack(word: u64) -> Self {
        Self {
            op: CollectiveOp::ALL[(word >> 56) as usize % CollectiveOp::ALL.len()],
            kind: KINDS.get((word >> 48) as usize & 0xff).copied().unwrap_or(Kind::Half),
            detail: (word >> 40) as u8,
            bytes: (word & ((1 << 40) - 1)) as usize,
        }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes of {:?}", self.op.name(), self.bytes, self.kind)?;
        match self.op {
            CollectiveOp::AllReduce => write!(f, " ({})", ["sum", "max", "min"][usize::from(self.detail).min(2)]),
            CollectiveOp::Broadcast => write!(f, " (from group rank {})", self.detail),
            _ => Ok(()),
        }
    }
}
