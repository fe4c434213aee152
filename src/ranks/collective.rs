//! Collective operations of a group of ranks, independent of the backend.

use std::fmt::Debug;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};

use super::control::RankGroup;
use crate::cuda::PeerMemory;
use crate::error::{Error, Result};
use crate::torch;

/// How elements of several ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum, in rank order.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
}

/// A tensor for another rank of a group, and the memory for the one that it sends in return.
#[derive(Debug)]
pub struct Trade {
    /// The other rank, by its index in the group.
    pub rank: usize,
    /// The tensor to send.
    pub sent: Tensor,
    /// Where the other rank's tensor is written; it must not overlap any tensor that is sent.
    pub received: Tensor,
}

/// A group of ranks. Every operation is collective: all ranks of the group must call it in the same order, with tensors of equal dtype and size that
/// are contiguous and on [`Collective::device`].
///
/// Reductions support f32, f64, bf16 and i64; the other operations support any dtype. Shared memory adds in rank order, bf16 in f32 with one
/// rounding, which gives the same bits on every rank and in every run. NCCL adds in its own order, and only queues the work on libtorch's current
/// stream.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a tensor that the operation does not support,
/// [`Error::Collective`](crate::Error::Collective) if ranks call different operations, [`Error::CollectiveTimeout`](crate::Error::CollectiveTimeout)
/// if peers do not arrive, and [`Error::PeerFailed`](crate::Error::PeerFailed) as soon as any rank of the world has posted a failure.
pub trait Collective: Send + Sync + Debug {
    /// The ranks of the group.
    fn members(&self) -> &RankGroup;
    /// The group's name, for messages.
    fn name(&self) -> &str {
        &self.members().name
    }
    /// Index of this rank within the group.
    fn rank(&self) -> usize {
        self.members().rank
    }
    /// World ranks of the group, in group order.
    fn ranks(&self) -> &[usize] {
        &self.members().ranks
    }
    /// Device on which tensors must be.
    fn device(&self) -> Device;
    /// Number of ranks in the group.
    fn size(&self) -> usize {
        self.ranks().len()
    }
    /// A number that changes whenever the group builds new communicators, which happens after a failure. Captured CUDA graphs of an earlier epoch
    /// must not be replayed.
    ///
    /// # Errors
    /// The failure, until all ranks have agreed on it.
    fn epoch(&self) -> Result<u64> {
        Ok(0)
    }
    /// At least `bytes` of GPU memory of every rank that all ranks of the group map. It is zeroed at the first call and after a failure, and the same
    /// memory is returned otherwise, so only one user at a time may call this. `None` on all ranks if there is no such memory, which is logged once.
    fn peer_memory(&self, _bytes: usize) -> Result<Option<Arc<PeerMemory>>> {
        Ok(None)
    }
    /// Replaces `tensor` by its reduction over the ranks.
    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()>;
    /// Gathers every rank's `input` (numel) into `output` (size x numel) in rank order. `input` may be this rank's slice of `output`.
    fn all_gather(&self, input: &Tensor, output: &mut Tensor) -> Result<()>;
    /// Writes this rank's slice of the sum of `input` (size x numel) to `output` (numel). In shared memory it has the same bits as all_reduce.
    /// `output` may be this rank's slice of `input`; the rest of `input` is kept.
    fn reduce_scatter(&self, input: &Tensor, output: &mut Tensor) -> Result<()>;
    /// Replaces `tensor` by that of group rank `root`.
    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()>;
    /// Sends slice j of `input` to group rank j, which receives it in slice `rank` of its `output`. The two tensors must not overlap.
    fn all_to_all(&self, input: &Tensor, output: &mut Tensor) -> Result<()>;
    /// Sends tensors to other ranks and receives theirs. The n-th trade with a rank meets that rank's n-th trade with this one: what one sends has the
    /// size and dtype of what the other receives. A backend without point-to-point transfers sends equally many bytes to every rank.
    fn trade(&self, trades: &[Trade]) -> Result<()> {
        let bytes_of = |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.f_view([-1])?.f_view_dtype(Kind::Uint8)?) };
        let of_rank = |rank: usize| trades.iter().filter(move |trade| trade.rank == rank);
        let sent_bytes = |rank| of_rank(rank).map(|trade| trade.sent.numel() * trade.sent.kind().elt_size_in_bytes());
        let most = (0..self.size()).map(|rank| sent_bytes(rank).sum::<usize>()).max().unwrap_or(0);
        let mut part = Tensor::from_slice(&[most as i64]).f_to_device(self.device())?;
        self.all_reduce(&mut part, ReduceOp::Max)?;
        let part = part.int64_value(&[0]);
        let input = Tensor::f_zeros([self.size() as i64, part], (Kind::Uint8, self.device()))?;
        let mut output = input.f_empty_like()?;
        let mut ends = vec![0; self.size()];
        for Trade { rank, sent, .. } in trades {
            let sent = bytes_of(sent)?;
            input.select(0, *rank as i64).narrow(0, ends[*rank], sent.numel() as i64).f_copy_(&sent)?;
            ends[*rank] += sent.numel() as i64;
        }
        self.all_to_all(&input, &mut output)?;
        ends.fill(0);
        for Trade { rank, received, .. } in trades {
            let mut received = bytes_of(received)?;
            received.f_copy_(&output.select(0, *rank as i64).narrow(0, ends[*rank], received.numel() as i64))?;
            ends[*rank] += received.numel() as i64;
        }
        Ok(())
    }
    /// Writes the `input` of the previous rank of the group to `output`; rank 0 gets that of the last rank. The two tensors must not overlap. A
    /// backend without point-to-point transfers gathers all inputs.
    fn shift(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let mut all = Tensor::f_empty([(self.size() * input.numel()) as i64], (input.kind(), self.device()))?;
        self.all_gather(input, &mut all)?;
        let before = (self.rank() + self.size() - 1) % self.size();
        let len = input.numel() as i64;
        output.f_view([len])?.f_copy_(&all.f_narrow(0, before as i64 * len, len)?)?;
        Ok(())
    }
    /// Sends `tensor` to group rank `to`, which must call [`Collective::receive`]. Only between GPUs, in the order of both streams.
    fn send(&self, _tensor: &Tensor, _to: usize) -> Result<()> {
        Err(between_gpus_alone("send", self.device()))
    }
    /// Receives into `tensor` what group rank `from` sends, which must have the same size.
    fn receive(&self, _tensor: &mut Tensor, _from: usize) -> Result<()> {
        Err(between_gpus_alone("receive", self.device()))
    }
    /// Waits until every rank of the group has arrived. Work queued on a GPU may still be running.
    fn barrier(&self) -> Result<()>;
}

fn between_gpus_alone(op: &'static str, device: Device) -> Error {
    Error::InvalidArgument { op, expected: "ranks that have one GPU each".into(), got: format!("{device:?}") }
}

/// Gathers every rank's bytes, in rank order; lengths may differ. Collective.
///
/// # Errors
/// The errors of [`Collective`].
pub fn all_gather_bytes(group: &dyn Collective, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let device = group.device();
    let own_len = Tensor::from_slice(&[bytes.len() as i64]).f_to_device(device)?;
    let mut lens = Tensor::f_zeros([group.size() as i64], (Kind::Int64, device))?;
    group.all_gather(&own_len, &mut lens)?;
    let lens = torch::i64_vec(&lens)?;
    let longest = lens.iter().copied().max().unwrap_or(0);
    let own = Tensor::f_zeros([longest], (Kind::Uint8, Device::Cpu))?;
    own.narrow(0, 0, bytes.len() as i64).f_copy_(&Tensor::f_from_slice(bytes)?)?;
    let mut all = Tensor::f_zeros([group.size() as i64, longest], (Kind::Uint8, device))?;
    group.all_gather(&own.f_to_device(device)?, &mut all)?;
    let all = all.f_to_device(Device::Cpu)?;
    let rows = torch::byte_vec(&all)?;
    let row = |rank: usize| &rows[rank * longest as usize..][..lens[rank] as usize];
    Ok((0..group.size()).map(|rank| row(rank).to_vec()).collect())
}

/// Gathers every rank's value, in rank order, as JSON. `op` names the exchange in errors. Collective.
///
/// # Errors
/// The errors of [`Collective`]; [`Error::Collective`] for a value that cannot be written as JSON or read as `U`.
pub fn all_gather_json<T: Serialize + ?Sized, U: DeserializeOwned>(
    group: &dyn Collective,
    op: &'static str,
    own: &T,
) -> Result<Vec<U>> {
    let rank = group.ranks()[group.rank()];
    gather_json((group.name(), rank), op, own, |own| all_gather_bytes(group, own))
}

/// Gathers every rank's value as JSON by the function `gather` for bytes. `group` and `rank` are for errors.
pub(super) fn gather_json<T: Serialize + ?Sized, U: DeserializeOwned>(
    (group, rank): (&str, usize),
    op: &'static str,
    own: &T,
    gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
) -> Result<Vec<U>> {
    let failed = |error: serde_json::Error| {
        let (group, message) = (group.to_owned(), error.to_string());
        Error::Collective { op, group, rank, message }
    };
    let all = gather(&serde_json::to_vec(own).map_err(failed)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(failed)).collect()
}

/// Gathers every rank's numbers from the host, in rank order; all ranks must pass equally many, at least one. Collective.
///
/// # Errors
/// The errors of [`Collective`].
pub fn all_gather_f64(group: &dyn Collective, values: &[f64]) -> Result<Vec<Vec<f64>>> {
    let own = Tensor::from_slice(values).f_to_device(group.device())?;
    let mut all = Tensor::f_zeros([(group.size() * values.len()) as i64], (Kind::Double, group.device()))?;
    group.all_gather(&own, &mut all)?;
    Ok(torch::f64_vec(&all)?.chunks_exact(values.len()).map(<[f64]>::to_vec).collect())
}

/// The text of the lowest rank that has one. Collective.
///
/// # Errors
/// The errors of [`Collective`].
pub fn first_text(group: &dyn Collective, own: Option<String>) -> Result<Option<String>> {
    let all: Vec<Option<String>> = all_gather_json(group, "first_text", &own)?;
    Ok(all.into_iter().flatten().next())
}

/// Whether `flag` is set on any rank. Collective.
///
/// # Errors
/// The errors of [`Collective`].
pub fn any_rank(group: &dyn Collective, flag: bool) -> Result<bool> {
    let mut flags = [f64::from(u8::from(flag))];
    all_reduce_f64(group, &mut flags, ReduceOp::Max)?;
    Ok(flags[0] != 0.0)
}

/// Reduces numbers on the host over the ranks, in place. Collective.
///
/// # Errors
/// The errors of [`Collective`].
pub fn all_reduce_f64(group: &dyn Collective, values: &mut [f64], op: ReduceOp) -> Result<()> {
    let mut tensor = Tensor::from_slice(values).f_to_device(group.device())?;
    group.all_reduce(&mut tensor, op)?;
    values.copy_from_slice(&torch::f64_vec(&tensor)?);
    Ok(())
}
