//! Collectives over a shared memory segment.
//!
//! Every operation is a sequence of *exchanges*, one per chunk that fits into half a slot. In an exchange a rank writes its half, announces its
//! arrival, waits for its peers, and reads their halves. The two halves alternate, so one synchronisation per chunk is enough: before a rank can
//! write the same half again, every peer has arrived at the exchange in between, and so has finished reading.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tch::{Device, Kind, Tensor};

use super::member::{Member, Until};
use super::reduce::reduce;
use super::signature::{CollectiveOp, Signature};
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::checks::{self, MemoryRange};
use crate::ranks::control::RankGroup;
use crate::ranks::{Collective, ReduceOp};

/// A group of ranks on this host, for CPU tensors.
#[derive(Debug)]
pub(in crate::ranks) struct ShmGroup {
    member: Arc<Member>,
    group: Arc<RankGroup>,
}

impl ShmGroup {
    /// Creates the group on this rank, whose place in shared memory is `member`. `group.division` says which partition of the segment it uses.
    pub(in crate::ranks) fn new(member: Arc<Member>, group: Arc<RankGroup>) -> Self {
        Self { member, group }
    }

    /// One exchange: `write` fills this rank's half of its slot; `read` gets every rank's half, in group order.
    fn exchange(
        &self,
        called: Signature,
        write: impl FnOnce(*mut u8),
        read: impl FnOnce(&[*const u8]) -> Result<()>,
    ) -> Result<()> {
        let (member, partition, ranks) = (&self.member, self.group.division, &self.group.ranks);
        let half = (member.next_turn(partition) & 1) as usize;
        write(member.half(partition, member.rank, half));
        let signature = |rank| &member.line(partition, rank).signature[half];
        signature(member.rank).store(called.pack(), Ordering::Relaxed);
        let (turn, deadline) = (member.arrive(partition), member.deadline());
        let op = called.op.name();
        member
            .wait(partition, ranks, turn, deadline, Until::Failure)
            .map_err(|stopped| stopped.error(op, &self.group.name, member.rank, deadline))?;
        for &rank in ranks {
            let theirs = signature(rank).load(Ordering::Relaxed);
            if theirs != called.pack() {
                let theirs = Signature::unpack(theirs);
                return Err(self.error(op, format!("this rank called {called}, but rank {rank} called {theirs}")));
            }
        }
        let halves: Vec<*const u8> =
            ranks.iter().map(|&rank| member.half(partition, rank, half).cast_const()).collect();
        read(&halves)
    }

    /// Calls `exchange` for each chunk of the operation `called`, at least once. `parts` chunks together must fit into half a slot.
    fn chunked(
        &self,
        called: Signature,
        parts: usize,
        mut exchange: impl FnMut(TransferChunk) -> Result<()>,
    ) -> Result<()> {
        let _turn = self.member.turn(self.group.division);
        let bytes = called.bytes;
        let _seen = phase::collective(called.op.name(), &self.group.name, bytes);
        let room = self.member.half_bytes() / parts / 64 * 64;
        let mut start = 0;
        loop {
            let len = room.min(bytes - start);
            exchange(TransferChunk { start, len, room })?;
            start += len;
            if start == bytes {
                return Ok(());
            }
        }
    }

    fn error(&self, op: &'static str, message: String) -> Error {
        Error::Collective { op, group: self.group.name.clone(), rank: self.member.rank, message }
    }
}

/// A chunk of an operation: `len` bytes from `start` of every block; blocks are `room` bytes apart in a half.
#[derive(Clone, Copy)]
struct TransferChunk {
    start: usize,
    len: usize,
    room: usize,
}

/// Copies between ranges that may overlap.
///
/// # Safety
/// Both ranges are valid for `len` bytes.
unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(source, target, len) }
}

// SAFETY, for every block below: `checks` made sure that tensors span the bytes named; a chunk lies within its
// block and `parts` chunks within a half; halves are read and written under the protocol above. Tensors may alias one
// another where the trait allows it, so everything goes through raw pointers and overlapping copies.
impl Collective for ShmGroup {
    fn members(&self) -> &RankGroup {
        &self.group
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let MemoryRange { address, kind, bytes } = checks::memory("all_reduce", tensor, Device::Cpu)?;
        checks::reducible("all_reduce", kind)?;
        let called = Signature { op: CollectiveOp::AllReduce, kind, detail: op as u8, bytes };
        self.chunked(called, 1, |TransferChunk { start, len, .. }| {
            self.exchange(
                called,
                // SAFETY: see above the impl.
                |own| unsafe { copy(address.add(start), own, len) },
                // SAFETY: see above the impl; halves are aligned to 64 bytes and chunks are whole elements.
                |halves| unsafe { reduce(kind, op, halves, address.add(start), len / kind.elt_size_in_bytes()) },
            )
        })
    }

    fn all_gather(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (input, output) = checks::pair("all_gather", input, output, self.size(), Device::Cpu)?;
        let (input, output, kind, bytes) = (input.address, output.address, input.kind, input.bytes);
        let called = Signature { op: CollectiveOp::AllGather, kind, detail: 0, bytes };
        self.chunked(called, 1, |TransferChunk { start, len, .. }| {
            self.exchange(
                called,
                // SAFETY: see above the impl.
                |own| unsafe { copy(input.add(start), own, len) },
                |halves| {
                    for (rank, half) in halves.iter().enumerate() {
                        // SAFETY: see above the impl.
                        unsafe { copy(*half, output.add(rank * bytes + start), len) };
                    }
                    Ok(())
                },
            )
        })
    }

    fn reduce_scatter(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (output, input) = checks::pair("reduce_scatter", output, input, self.size(), Device::Cpu)?;
        let (input, output, kind, bytes) = (input.address, output.address, output.kind, output.bytes);
        checks::reducible("reduce_scatter", kind)?;
        let called = Signature { op: CollectiveOp::ReduceScatter, kind, detail: 0, bytes };
        self.chunked(called, self.size(), |TransferChunk { start, len, room }| {
            self.exchange(
                called,
                |own| {
                    for rank in 0..self.size() {
                        // SAFETY: see above the impl.
                        unsafe { copy(input.add(rank * bytes + start), own.add(rank * room), len) };
                    }
                },
                |halves| {
                    // SAFETY: see above the impl; `room` is a multiple of 64, so blocks are aligned.
                    unsafe {
                        let blocks: Vec<_> = halves.iter().map(|half| half.add(self.group.rank * room)).collect();
                        reduce(kind, ReduceOp::Sum, &blocks, output.add(start), len / kind.elt_size_in_bytes())
                    }
                },
            )
        })
    }

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        let MemoryRange { address, kind, bytes } = checks::memory("broadcast", tensor, Device::Cpu)?;
        checks::root("broadcast", root, self.size())?;
        let called = Signature { op: CollectiveOp::Broadcast, kind, detail: root as u8, bytes };
        self.chunked(called, 1, |TransferChunk { start, len, .. }| {
            self.exchange(
                called,
                |own| {
                    if self.rank() == root {
                        // SAFETY: see above the impl.
                        unsafe { copy(address.add(start), own, len) };
                    }
                },
                |halves| {
                    if self.rank() != root {
                        // SAFETY: see above the impl.
                        unsafe { copy(halves[root], address.add(start), len) };
                    }
                    Ok(())
                },
            )
        })
    }

    fn all_to_all(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let size = self.size();
        let (input, output) = checks::split("all_to_all", input, output, size, Device::Cpu)?;
        let (input, output, kind, bytes) = (input.address, output.address, input.kind, input.bytes / size);
        let called = Signature { op: CollectiveOp::AllToAll, kind, detail: 0, bytes };
        self.chunked(called, size, |TransferChunk { start, len, room }| {
            self.exchange(
                called,
                |own| {
                    for rank in 0..size {
                        // SAFETY: see above the impl.
                        unsafe { copy(input.add(rank * bytes + start), own.add(rank * room), len) };
                    }
                },
                |halves| {
                    for (rank, half) in halves.iter().enumerate() {
                        // SAFETY: see above the impl.
                        unsafe { copy(half.add(self.group.rank * room), output.add(rank * bytes + start), len) };
                    }
                    Ok(())
                },
            )
        })
    }

    fn shift(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (input, output) = checks::pair("shift", input, output, 1, Device::Cpu)?;
        let (input, output, kind, bytes) = (input.address, output.address, input.kind, input.bytes);
        let before = (self.rank() + self.size() - 1) % self.size();
        let called = Signature { op: CollectiveOp::Shift, kind, detail: 0, bytes };
        self.chunked(called, 1, |TransferChunk { start, len, .. }| {
            self.exchange(
                called,
                // SAFETY: see above the impl.
                |own| unsafe { copy(input.add(start), own, len) },
                |halves| {
                    // SAFETY: see above the impl.
                    unsafe { copy(halves[before], output.add(start), len) };
                    Ok(())
                },
            )
        })
    }

    fn barrier(&self) -> Result<()> {
        let called = Signature { op: CollectiveOp::Barrier, kind: Kind::Uint8, detail: 0, bytes: 0 };
        self.chunked(called, 1, |_| self.exchange(called, |_| (), |_| Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ranks::checks::REDUCIBLE;
    use crate::ranks::{all_gather_bytes, testing};

    /// Values of one rank whose sums are inexact in f32, so that the order of addition shows.
    fn values(rank: usize, len: i64, kind: Kind) -> Tensor {
        let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
        ((index * 0.37 + rank as f64 * 1.7).sin() * 1000.0).to_kind(kind)
    }

    /// The sum of all ranks' values in rank order, in the dtype in which sums are computed.
    fn expected_sum(num_ranks: usize, len: i64, kind: Kind) -> Tensor {
        let wide = |rank| {
            let own = values(rank, len, kind);
            if kind == Kind::BFloat16 { own.to_kind(Kind::Float) } else { own }
        };
        (1..num_ranks).fold(wide(0), |sum, rank| sum + wide(rank)).to_kind(kind)
    }

    #[test]
    fn shared_memory_collectives_handle_every_size() {
        // Halves of 2048 bytes; 3 ranks share one in reduce_scatter and all_to_all.
        testing::worlds_with(3, 4096, Duration::from_secs(60), |world| {
            let group = world.group();
            let rank = world.rank() as i64;
            for len in [0, 1, 5, 168, 170, 511, 512, 513, 3001] {
                for kind in REDUCIBLE {
                    let own = values(world.rank(), 3 * len, kind);
                    let total = expected_sum(3, 3 * len, kind);
                    let mut reduced = own.copy();
                    group.all_reduce(&mut reduced, ReduceOp::Sum).unwrap();
                    assert_eq!(reduced, total, "all_reduce {len} {kind:?}");

                    let mut scattered = Tensor::zeros([len], (kind, Device::Cpu));
                    group.reduce_scatter(&own, &mut scattered).unwrap();
                    assert_eq!(scattered, total.narrow(0, rank * len, len), "reduce_scatter {len} {kind:?}");

                    let mut gathered = Tensor::zeros([3, len], (kind, Device::Cpu));
                    group.all_gather(&scattered, &mut gathered).unwrap();
                    assert_eq!(gathered.view([-1]), total, "all_gather {len} {kind:?}");

                    let mut exchanged = own.zeros_like();
                    group.all_to_all(&own, &mut exchanged).unwrap();
                    let parts: Vec<_> =
                        (0..3).map(|peer| values(peer, 3 * len, kind).narrow(0, rank * len, len)).collect();
                    assert_eq!(exchanged, Tensor::cat(&parts, 0), "all_to_all {len} {kind:?}");

                    let mut shifted = own.zeros_like();
                    group.shift(&own, &mut shifted).unwrap();
                    assert_eq!(shifted, values((world.rank() + 2) % 3, 3 * len, kind), "shift {len} {kind:?}");

                    let mut shared = own.copy();
                    group.broadcast(&mut shared, 2).unwrap();
                    assert_eq!(shared, values(2, 3 * len, kind), "broadcast {len} {kind:?}");
                }
            }
        });
    }

    #[test]
    fn input_and_output_may_share_memory() {
        testing::threads(2, |group| {
            let rank = group.rank() as i64;
            let mut whole = values(group.rank(), 400, Kind::Float);
            let total = expected_sum(2, 400, Kind::Float);
            let mut own = whole.narrow(0, rank * 200, 200);
            group.reduce_scatter(&whole, &mut own).unwrap();
            assert_eq!(own, total.narrow(0, rank * 200, 200));
            let other = whole.narrow(0, (1 - rank) * 200, 200);
            assert_eq!(other, values(group.rank(), 400, Kind::Float).narrow(0, (1 - rank) * 200, 200));
            group.all_gather(&own, &mut whole).unwrap();
            assert_eq!(whole, total);
        });
    }

    #[test]
    fn max_and_min_reductions_propagate_nan() {
        testing::threads(2, |group| {
            let own = [[1f32, f32::NAN, 3.0], [2.0, 0.0, f32::NAN]][group.rank()];
            for (op, first) in [(ReduceOp::Max, 2.0), (ReduceOp::Min, 1.0)] {
                let mut tensor = Tensor::from_slice(&own);
                group.all_reduce(&mut tensor, op).unwrap();
                assert_eq!(tensor.double_value(&[0]), first);
                assert!(tensor.narrow(0, 1, 2).isnan().all() == Tensor::from(true));
            }
        });
    }

    #[test]
    fn all_gather_accepts_byte_strings_of_different_lengths() {
        testing::threads(3, |group| {
            let own = vec![group.rank() as u8; group.rank() * 3];
            let all = all_gather_bytes(group.as_ref(), &own).unwrap();
            assert_eq!(all, [vec![], vec![1; 3], vec![2; 6]]);
        });
    }

    #[test]
    fn unsupported_tensors_are_refused_before_communication() {
        testing::threads(2, |group| {
            let mut strided = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu)).tr();
            assert!(group.all_reduce(&mut strided, ReduceOp::Sum).unwrap_err().to_string().contains("contiguous"));
            let mut bytes = Tensor::zeros([4], (Kind::Uint8, Device::Cpu));
            assert!(group.all_reduce(&mut bytes, ReduceOp::Sum).unwrap_err().to_string().contains("one of [Float"));
            assert!(group.all_gather(&Tensor::zeros([3], (Kind::Uint8, Device::Cpu)), &mut bytes).is_err());
            assert!(group.broadcast(&mut bytes, 2).is_err());
            group.barrier().unwrap();
        });
    }
}
