//! Collectives on CPU tensors over several nodes. The ranks of a node exchange in shared memory. The first of them, the group's leader on the node,
//! exchanges with the other leaders through the hub. A sum is passed from leader to leader in rank order, and each adds its node's ranks one after
//! the other, so the result has the same bits as on one node.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use super::control::NodesControl;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::checks;
use crate::ranks::control::{ControlPlane, RankGroup, Stopped};
use crate::ranks::shm::{CollectiveOp, ShmGroup, Signature, accumulate};
use crate::ranks::single::SingleRank;
use crate::ranks::{Collective, ReduceOp};

/// Maximum number of elements that are sent at once.
const PIECE: i64 = 1 << 20;

/// A group of ranks on several nodes.
#[derive(Debug)]
pub(in crate::ranks) struct NodesGroup {
    control: Arc<NodesControl>,
    group: Arc<RankGroup>,
    /// The group's ranks on this node.
    local: Arc<dyn Collective>,
    /// For each node, the indexes of its ranks within the group, in order.
    parts: Vec<Range<usize>>,
    /// Index of this node in `parts`.
    part: usize,
    turn: Mutex<()>,
}

impl NodesGroup {
    /// Creates the group for CPU tensors; it uses only shared memory if it is on one node.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if ranks are not in ascending order.
    pub(in crate::ranks) fn of(control: &Arc<NodesControl>, group: Arc<RankGroup>) -> Result<Arc<dyn Collective>> {
        if control.is_one_node(&group) {
            return Ok(Arc::new(ShmGroup::new(control.member.clone(), group)));
        }
        let ranks = &group.ranks;
        if !ranks.is_sorted() {
            let expected = "ranks in ascending order for a group over nodes".to_owned();
            return Err(Error::InvalidArgument { op: "World::subgroup", expected, got: format!("{ranks:?}") });
        }
        let mut parts: Vec<Range<usize>> = Vec::new();
        for (place, &rank) in ranks.iter().enumerate() {
            let node = control.layout.node_of(rank);
            match parts.last_mut().filter(|part| control.layout.node_of(ranks[part.start]) == node) {
                Some(part) => part.end = place + 1,
                None => parts.push(place..place + 1),
            }
        }
        let part = parts.iter().position(|part| part.contains(&group.rank)).expect("a member of its own group");
        let own = &ranks[parts[part].clone()];
        let rank = ranks[group.rank];
        let local: Arc<dyn Collective> = match own.len() {
            1 => Arc::new(SingleRank::new(&group.name, rank, Device::Cpu)),
            _ => {
                let local = RankGroup::new(group.division, &group.name, own, rank);
                Arc::new(ShmGroup::new(control.member.clone(), local))
            }
        };
        Ok(Arc::new(Self { control: control.clone(), group, local, parts, part, turn: Mutex::default() }))
    }

    fn is_leader(&self) -> bool {
        self.local.rank() == 0
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.parts.len()).filter(|&part| part != self.part)
    }

    /// Sends a tensor to the leader of a part.
    fn send(&self, called: Signature, part: usize, tensor: &Tensor) -> Result<()> {
        let tensor = tensor.f_contiguous()?;
        let mut bytes = vec![0; tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()];
        tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
        let to = self.group.ranks[self.parts[part].start];
        self.control.client.relay(self.group.division, to, called.pack(), bytes);
        Ok(())
    }

    /// Receives the next tensor from the leader of a part.
    fn receive(&self, called: Signature, part: usize, size: &[i64], kind: Kind) -> Result<Tensor> {
        let (op, name, division) = (called.op.name(), &self.group.name, self.group.division);
        let from = self.group.ranks[self.parts[part].start];
        let deadline = self.control.member.deadline();
        let received = self.control.client.receive(division, from, deadline, || self.control.ended());
        let (word, bytes) = received.map_err(|stopped| {
            let late = match stopped {
                Stopped::Late(_) => Stopped::Late(self.group.ranks[self.parts[part].clone()].to_vec()),
                other => other,
            };
            self.control.error(late, op, name, deadline)
        })?;
        let expected = size.iter().product::<i64>() as usize * kind.elt_size_in_bytes();
        if word != called.pack() || bytes.len() != expected {
            let theirs = Signature::unpack(word);
            let message = format!("this rank called {called}, but rank {from} called {theirs}");
            return Err(Error::Collective {
                op,
                group: name.clone(),
                rank: self.group.ranks[self.group.rank],
                message,
            });
        }
        Ok(Tensor::f_from_data_size(&bytes, size, kind)?)
    }

    /// The inputs of this node's ranks, one per row, in order.
    fn rows(&self, own: &Tensor) -> Result<Tensor> {
        let mut rows = Tensor::f_zeros([self.local.size() as i64, own.numel() as i64], (own.f_kind()?, Device::Cpu))?;
        self.local.all_gather(&own.f_contiguous()?, &mut rows)?;
        Ok(rows)
    }

    /// Reduces a piece over all ranks and returns the result on every rank.
    fn reduced(&self, called: Signature, op: ReduceOp, own: &Tensor) -> Result<Tensor> {
        let (kind, len) = (called.kind, own.numel() as i64);
        let wide = if kind == Kind::BFloat16 { Kind::Float } else { kind };
        let rows = self.rows(own)?;
        let mut total = Tensor::f_zeros([len], (kind, Device::Cpu))?;
        if self.is_leader() {
            let (mut sum, first) = match self.part {
                0 => (copy(&rows.f_get(0)?, wide)?, 1),
                part => (self.receive(called, part - 1, &[len], wide)?, 0),
            };
            for row in first..self.local.size() {
                accumulate(op, &mut sum, &rows.f_get(row as i64)?)?;
            }
            let last = self.parts.len() - 1;
            if self.part < last {
                self.send(called, self.part + 1, &sum)?;
                total = self.receive(called, last, &[len], kind)?;
            } else {
                total.f_copy_(&sum)?;
                self.others().try_for_each(|part| self.send(called, part, &total))?;
            }
        }
        self.local.broadcast(&mut total, 0)?;
        Ok(total)
    }

    /// Gathers every rank's `own` on every rank, one per row, in group order.
    fn gathered(&self, called: Signature, own: &Tensor) -> Result<Tensor> {
        let (kind, len) = (own.f_kind()?, own.numel() as i64);
        let rows = self.rows(own)?;
        let mut all = Tensor::f_zeros([self.size() as i64, len], (kind, Device::Cpu))?;
        if self.is_leader() {
            self.others().try_for_each(|part| self.send(called, part, &rows))?;
            for (index, part) in self.parts.iter().enumerate() {
                let size = [part.len() as i64, len];
                let theirs = match index == self.part {
                    true => rows.shallow_clone(),
                    false => self.receive(called, index, &size, kind)?,
                };
                all.narrow(0, part.start as i64, part.len() as i64).f_copy_(&theirs)?;
            }
        }
        self.local.broadcast(&mut all, 0)?;
        Ok(all)
    }

    fn begin(&self, called: Signature) -> (MutexGuard<'_, ()>, phase::CollectiveScope) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        (turn, phase::collective(called.op.name(), &self.group.name, called.bytes))
    }
}

/// Copies the tensor to dtype `kind`.
fn copy(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    let mut copy = Tensor::f_zeros(tensor.size(), (kind, Device::Cpu))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Starts and lengths of the pieces of `len` elements; at least one, so that ranks always communicate.
fn pieces(len: usize, piece: i64) -> impl Iterator<Item = (i64, i64)> {
    let len = len as i64;
    (0..(len + piece - 1).div_euclid(piece).max(1)).map(move |index| (index * piece, piece.min(len - index * piece)))
}

impl Collective for NodesGroup {
    fn members(&self) -> &RankGroup {
        &self.group
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let memory = checks::memory("all_reduce", tensor, Device::Cpu)?;
        checks::reducible("all_reduce", memory.kind)?;
        let called =
            Signature { op: CollectiveOp::AllReduce, kind: memory.kind, detail: op as u8, bytes: memory.bytes };
        let _scope = self.begin(called);
        let flat = tensor.f_view([-1])?;
        for (start, len) in pieces(tensor.numel(), PIECE) {
            let mut own = flat.narrow(0, start, len);
            own.f_copy_(&self.reduced(called, op, &own)?)?;
        }
        Ok(())
    }

    fn all_gather(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (one, _) = checks::pair("all_gather", input, output, self.size(), Device::Cpu)?;
        let called = Signature { op: CollectiveOp::AllGather, kind: one.kind, detail: 0, bytes: one.bytes };
        let _scope = self.begin(called);
        let output = output.f_view([self.size() as i64, input.numel() as i64])?;
        let own = copy(&input.f_reshape([-1])?, one.kind)?; // a copy, because the input may be this rank's slice of the output
        for (start, len) in pieces(own.numel(), (PIECE / self.size() as i64).max(1)) {
            let all = self.gathered(called, &own.narrow(0, start, len))?;
            output.narrow(1, start, len).f_copy_(&all)?;
        }
        Ok(())
    }

    fn reduce_scatter(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (one, _) = checks::pair("reduce_scatter", output, input, self.size(), Device::Cpu)?;
        checks::reducible("reduce_scatter", one.kind)?;
        let called = Signature { op: CollectiveOp::ReduceScatter, kind: one.kind, detail: 0, bytes: one.bytes };
        let _scope = self.begin(called);
        let size = self.size() as i64;
        let rows = copy(&input.f_view([size, output.numel() as i64])?, one.kind)?; // a copy, because the output may be a slice of the input
        let output = output.f_view([-1])?;
        for (start, len) in pieces(output.numel(), (PIECE / size).max(1)) {
            let own = rows.narrow(1, start, len).f_reshape([-1])?;
            let total = self.reduced(called, ReduceOp::Sum, &own)?;
            output.narrow(0, start, len).f_copy_(&total.narrow(0, self.group.rank as i64 * len, len))?;
        }
        Ok(())
    }

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        let memory = checks::memory("broadcast", tensor, Device::Cpu)?;
        checks::root("broadcast", root, self.size())?;
        let (kind, detail) = (memory.kind, root as u8);
        let called = Signature { op: CollectiveOp::Broadcast, kind, detail, bytes: memory.bytes };
        let _scope = self.begin(called);
        let from = self.parts.iter().position(|part| part.contains(&root)).expect("a rank of the group");
        let flat = tensor.f_view([-1])?;
        for (start, len) in pieces(tensor.numel(), PIECE) {
            let mut own = flat.narrow(0, start, len);
            if self.part == from {
                self.local.broadcast(&mut own, root - self.parts[from].start)?;
                if self.is_leader() {
                    self.others().try_for_each(|part| self.send(called, part, &own))?;
                }
                continue;
            }
            if self.is_leader() {
                own.f_copy_(&self.receive(called, from, &[len], kind)?)?;
            }
            self.local.broadcast(&mut own, 0)?;
        }
        Ok(())
    }

    fn all_to_all(&self, input: &Tensor, output: &mut Tensor) -> Result<()> {
        let (one, _) = checks::split("all_to_all", input, output, self.size(), Device::Cpu)?;
        let bytes = one.bytes / self.size();
        let called = Signature { op: CollectiveOp::AllToAll, kind: one.kind, detail: 0, bytes };
        let _scope = self.begin(called);
        let size = self.size() as i64;
        let per_rank = input.numel() / self.size();
        let [input, output] = [input, &*output].map(|tensor| tensor.f_view([size, per_rank as i64]));
        let (input, output) = (input?, output?);
        for (start, len) in pieces(per_rank, (PIECE / (size * size)).max(1)) {
            let own = input.narrow(1, start, len).f_reshape([-1])?;
            let all = self.gathered(called, &own)?.f_view([size, size, len])?;
            output.narrow(1, start, len).f_copy_(&all.select(1, self.group.rank as i64))?;
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.control.barrier(&self.group)
    }
}
