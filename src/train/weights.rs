//! The network's weights, unit by unit: whole on every rank, or one slice per rank. Slices are gathered for use, overlapped with the computation of
//! the previous unit.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, narrow};
use crate::config::Quantization;
use crate::console::units_progress;
use crate::error::{Error, Result};
use crate::memory::{HostPool, Ledger, MemoryKind};
use crate::model::{ParamTable, StoredBlock, StoredFormat, Unit, UnitLayout};
use crate::ranks::Work;

/// Number of elements that are mixed at once, to limit the memory of their float32 copies.
const MIXED_LEN: i64 = 8 << 20;

/// The network's weights in its compute dtype.
#[derive(Debug)]
pub(crate) struct Weights {
    owner: &'static str,
    table: Arc<ParamTable>,
    sharding: Sharding,
    kind: Kind,
    device: Device,
    pool: Option<HostPool>, // used instead of `units` if weights are on the host
    units: Vec<Tensor>,     // [len], or [len / S] if weights are sharded, or [0] if they are quantized
    quantization: Quantization,
    quantized: Vec<StoredBlock>,  // by layer; empty if blocks are stored unquantized
    spreading: Vec<Option<Work>>, // broadcasts of new weights under way
    gathered: Vec<Gathered>,      // units in use or gathered ahead
}

/// A whole unit, gathered or dequantized.
#[derive(Debug)]
struct Gathered {
    index: usize,
    whole: Tensor,      // [len]
    work: Option<Work>, // the all-gather, while under way
}

impl Weights {
    /// Loads the weights unit by unit; the memory ledger records them under `owner`. `each` is called with the index and the tensor of every whole
    /// unit.
    ///
    /// The kept units are allocated before anything else. If they were cut from a larger tensor that dies (a float32 copy of the unit), they would
    /// keep the rest of its memory allocated for good.
    pub(super) fn load(
        owner: &'static str,
        table: Arc<ParamTable>,
        sharding: Sharding,
        (kind, device): (Kind, Device),
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        mut each: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Self> {
        let mut weights = Self::empty(owner, table, sharding, (kind, device));
        let table = weights.table.clone();
        for layout in &table.units {
            let kept = weights.kept(layout.len);
            weights.units.push(Tensor::f_zeros([kept.len() as i64], (kind, device))?);
        }
        let mut loaded = units_progress("weights", table.units.len());
        for (index, layout) in table.units.iter().enumerate() {
            let flat = whole(layout, source)?;
            each(index, &flat)?;
            let kept = weights.kept(layout.len);
            weights.units[index].f_copy_(&narrow(&flat, &kept))?;
            loaded();
        }
        let num_elements: usize = weights.units.iter().map(Tensor::numel).sum();
        Ledger::set(owner, MemoryKind::Device, num_elements * kind.elt_size_in_bytes());
        Ok(weights)
    }

    /// Loads frozen weights, with blocks stored in the format of `quantization` (only without sharding).
    pub(super) fn load_quantized(
        owner: &'static str,
        table: Arc<ParamTable>,
        sharding: Sharding,
        (kind, device): (Kind, Device),
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        (quantization, format): (Quantization, &'static dyn StoredFormat),
    ) -> Result<Self> {
        let (mut weights, encoder) = (Self::empty(owner, table, sharding, (kind, device)), format.encoder(device)?);
        weights.quantization = quantization;
        let (table, mut plain) = (weights.table.clone(), 0);
        let mut loaded = units_progress("weights", table.units.len());
        for layout in &table.units {
            let flat = whole(layout, source)?.f_to_device(device)?.f_to_kind(kind)?;
            let kept = match layout.unit {
                Unit::Embedding | Unit::DraftHead | Unit::Head => flat,
                Unit::Block(_) => {
                    weights.quantized.push(StoredBlock::encode(&table.spec, layout, &flat, &*encoder)?);
                    Tensor::f_empty([0], (kind, device))?
                }
            };
            plain += kept.numel() * kind.elt_size_in_bytes();
            weights.units.push(kept);
            loaded();
        }
        let blocks = (0..weights.quantized.len()).map(|layer| format.block_bytes(&table.spec, layer, kind));
        Ledger::set(owner, MemoryKind::Device, plain + blocks.sum::<usize>());
        Ok(weights)
    }

    /// Loads this rank's slices into host memory, one after another; units are copied to the device as they are gathered.
    pub(super) fn load_to_host(
        owner: &'static str,
        table: Arc<ParamTable>,
        sharding: Sharding,
        (kind, device): (Kind, Device),
        mut pool: HostPool,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let sharding = Sharding { keeps_weights: false, ..sharding };
        let mut weights = Self::empty(owner, table, sharding, (kind, device));
        let mut loaded = units_progress("weights", weights.table.units.len());
        for (index, layout) in weights.table.units.iter().enumerate() {
            let slice = narrow(&whole(layout, source)?, &weights.kept(layout.len));
            pool.copy_from(weights.byte_offset(index), &slice.f_to_kind(kind)?.f_to_device(Device::Cpu)?)?;
            loaded();
        }
        weights.pool = Some(pool);
        Ok(weights)
    }

    fn empty(owner: &'static str, table: Arc<ParamTable>, sharding: Sharding, (kind, device): (Kind, Device)) -> Self {
        let spreading = table.units.iter().map(|_| None).collect();
        let (units, quantized, gathered) = (Vec::new(), Vec::new(), Vec::new());
        let quantization = Quantization::None;
        Self { owner, table, sharding, kind, device, pool: None, units, quantization, quantized, spreading, gathered }
    }

    /// The range of a unit that this rank stores.
    fn kept(&self, len: usize) -> Range<usize> {
        if self.sharding.keeps_weights { 0..len } else { self.sharding.slice(len) }
    }

    /// Byte offset of a unit's slice in the pool.
    fn byte_offset(&self, index: usize) -> usize {
        let before: usize = self.table.units[..index].iter().map(|layout| self.kept(layout.len).len()).sum();
        before * self.kind.elt_size_in_bytes()
    }

    /// Storage format of the blocks.
    pub(crate) fn quantization(&self) -> Quantization {
        self.quantization
    }

    /// The stored blocks, if they are quantized.
    pub(crate) fn quantized(&self) -> &[StoredBlock] {
        &self.quantized
    }

    /// A block in its stored form, if it is quantized.
    fn quantized_block(&self, unit: Unit) -> Option<&StoredBlock> {
        match unit {
            Unit::Block(layer) => self.quantized.get(layer),
            Unit::Embedding | Unit::DraftHead | Unit::Head => None,
        }
    }

    fn dequantize(&self, index: usize, block: &StoredBlock) -> Result<Tensor> {
        let layout = &self.table.units[index];
        let whole = Tensor::f_empty([layout.len as i64], (self.kind, self.device))?;
        block.decode(layout, &whole)?;
        for padding in layout.padding() {
            let _ = narrow(&whole, &padding).f_fill_(0.0)?;
        }
        Ok(whole)
    }

    /// The layout of all units.
    pub(crate) fn table(&self) -> &Arc<ParamTable> {
        &self.table
    }

    /// A whole unit for use in the network. If weights are sharded this is collective: it also starts gathering the `upcoming` units, overlapped with
    /// the computation, and frees all others.
    pub(crate) fn unit(&mut self, unit: Unit, upcoming: &[Unit]) -> Result<Tensor> {
        let index = self.table.index(unit);
        if self.quantized_block(unit).is_some() {
            if !self.gathered.iter().any(|kept| kept.index == index) {
                self.gathered.clear(); // queued work may still read the previous one: libtorch frees in stream order
                let whole = self.gather(unit)?;
                self.gathered.push(Gathered { index, whole, work: None });
            }
            return Ok(self.gathered[0].whole.shallow_clone());
        }
        if self.sharding.keeps_weights {
            self.settle(index)?;
            return Ok(self.units[index].shallow_clone());
        }
        let upcoming: Vec<usize> = upcoming.iter().map(|&unit| self.table.index(unit)).collect();
        self.gathered.retain(|kept| kept.index == index || upcoming.contains(&kept.index));
        for wanted in std::iter::once(index).chain(upcoming) {
            if !self.gathered.iter().any(|kept| kept.index == wanted) {
                self.start_gathering(wanted)?;
            }
        }
        let found = self.gathered.iter_mut().find(|kept| kept.index == index).expect("gathered above");
        found.work.take().map_or(Ok(()), Work::hold_libtorch)?;
        Ok(found.whole.shallow_clone())
    }

    fn start_gathering(&mut self, index: usize) -> Result<()> {
        let len = self.table.units[index].len;
        let mut whole = Tensor::f_empty([len as i64], (self.kind, self.device))?;
        let (shard, held) = (&self.sharding.shard, vec![whole.shallow_clone()]);
        let work = self.sharding.lane.run(held, || match &self.pool {
            None => shard.all_gather(&self.units[index], &mut whole),
            Some(pool) => {
                let mut own = narrow(&whole, &self.kept(len));
                pool.copy_to_async(self.byte_offset(index), &mut own)?.hold_libtorch()?;
                shard.all_gather(&own, &mut whole)
            }
        })?;
        self.gathered.push(Gathered { index, whole, work: Some(work) });
        Ok(())
    }

    /// A whole unit: the stored tensor if weights are kept whole, else a new tensor gathered from the shard group (collective).
    pub(crate) fn gather(&self, unit: Unit) -> Result<Tensor> {
        let index = self.table.index(unit);
        if let Some(block) = self.quantized_block(unit) {
            return self.dequantize(index, block);
        }
        if self.sharding.keeps_weights {
            self.sharding.lane.join()?;
            return Ok(self.units[index].shallow_clone());
        }
        let mut whole = Tensor::f_empty([self.table.units[index].len as i64], (self.kind, self.device))?;
        self.sharding.shard.all_gather(&self.slice(index)?, &mut whole)?;
        Ok(whole)
    }

    /// Gathers whole units, each only on the rank of the shard group that wants it: `wanted` has for each rank the unit it wants, or none. Returns
    /// this rank's unit as in [`Weights::gather`] (collective).
    pub(crate) fn gather_wanted(&self, wanted: &[Option<Unit>]) -> Result<Option<Tensor>> {
        let (shard, own) = (&self.sharding.shard, wanted[self.sharding.shard.rank()]);
        if self.sharding.keeps_weights {
            return own.map(|unit| self.gather(unit)).transpose();
        }
        let slice_len = |unit: Unit| self.kept(self.table.unit(unit).len).len() as i64;
        let Some(longest) = wanted.iter().flatten().map(|&unit| slice_len(unit)).max() else { return Ok(None) };
        let rows = || Tensor::f_zeros([shard.size() as i64, longest], (self.kind, self.device)); // [S, len / S]
        let (sent, mut received) = (rows()?, rows()?);
        for (rank, unit) in wanted.iter().enumerate() {
            let Some(unit) = *unit else { continue };
            sent.f_get(rank as i64)?.f_narrow(0, 0, slice_len(unit))?.f_copy_(&self.slice(self.table.index(unit))?)?;
        }
        shard.all_to_all(&sent, &mut received)?;
        let whole = |unit| Ok(received.f_narrow(1, 0, slice_len(unit))?.f_contiguous()?.f_view([-1])?);
        own.map(whole).transpose()
    }

    /// This rank's slice of a unit on the device: the stored tensor, or a copy if weights are on the host.
    fn slice(&self, index: usize) -> Result<Tensor> {
        let Some(pool) = &self.pool else { return Ok(self.units[index].shallow_clone()) };
        let kept = self.kept(self.table.units[index].len);
        let mut slice = Tensor::f_empty([kept.len() as i64], (self.kind, self.device))?;
        pool.copy_to(self.byte_offset(index), &mut slice)?;
        Ok(slice)
    }

    /// Mixes every element: `(1 - alpha)` of itself plus `alpha` of that in `other`, which has the same layout over the same ranks and stores at
    /// least as much. The two terms are rounded to the dtype one after the other, as torch's `mul_` and `add_` do.
    pub(crate) fn mix_in(&mut self, other: &Self, alpha: f64) -> Result<()> {
        self.gathered.clear();
        self.sharding.lane.join()?;
        for (index, layout) in self.table.clone().units.iter().enumerate() {
            let kept = self.kept(layout.len);
            let theirs = match other.sharding.keeps_weights {
                true => narrow(&other.units[index], &kept),
                false => other.units[index].shallow_clone(),
            };
            let own = self.slice(index)?;
            mix(&own, &theirs, alpha)?;
            let offset = self.byte_offset(index);
            if let Some(pool) = &mut self.pool {
                pool.copy_from(offset, &own)?;
            }
        }
        Ok(())
    }

    /// This rank's slice of a unit, for writing; call [`Weights::spread`] afterwards.
    pub(crate) fn owned(&mut self, index: usize) -> Result<Tensor> {
        self.settle(index)?;
        let unit = &self.units[index];
        let whole = || narrow(unit, &self.sharding.owned(self.table.units[index].len));
        Ok(if self.sharding.keeps_weights { whole() } else { unit.shallow_clone() })
    }

    /// Broadcasts the slices of a unit to all ranks that keep it whole (collective), overlapped with later work.
    pub(crate) fn spread(&mut self, index: usize) -> Result<()> {
        self.gathered.clear();
        if !self.sharding.keeps_weights || self.sharding.owns_all {
            return Ok(());
        }
        let owned = self.owned(index)?;
        let (shard, mut whole) = (&self.sharding.shard, self.units[index].shallow_clone());
        let work = self.sharding.lane.run(Vec::new(), || shard.all_gather(&owned, &mut whole))?;
        self.spreading[index] = Some(work);
        Ok(())
    }

    /// Makes libtorch's stream wait for a unit's new weights.
    fn settle(&mut self, index: usize) -> Result<()> {
        self.spreading[index].take().map_or(Ok(()), Work::hold_libtorch)
    }

    /// Frees gathered units.
    pub(crate) fn free_gathered(&mut self) {
        self.gathered.clear();
    }
}

/// `target = (1 - alpha) target + alpha source` on flat tensors, computed like TRL's `SyncRefModelCallback`: `mul_`, which rounds, then `add_` with a
/// float32 multiplier, which rounds only the sum. (torch's CPU kernels round the multiplier to bfloat16 for bfloat16 tensors, its CUDA kernels do
/// not.)
fn mix(target: &Tensor, source: &Tensor, alpha: f64) -> Result<()> {
    let factor = f64::from(alpha as f32);
    for (target, source) in target.f_split(MIXED_LEN, 0)?.iter_mut().zip(source.f_split(MIXED_LEN, 0)?) {
        let _ = target.f_mul_scalar_(1.0 - alpha)?;
        let sum = source.f_to_kind(Kind::Double)?.f_mul_scalar_(factor)?.f_add(target)?;
        target.f_copy_(&sum)?;
    }
    Ok(())
}

/// A unit from `source`; its length must match the layout.
fn whole(layout: &UnitLayout, source: &dyn Fn(&UnitLayout) -> Result<Tensor>) -> Result<Tensor> {
    let flat = source(layout)?;
    if flat.size() == [layout.len as i64] {
        return Ok(flat);
    }
    Err(Error::InvalidArgument {
        op: "Weights::load",
        expected: format!("[{}] for the {}", layout.len, layout.unit),
        got: format!("{:?}", flat.size()),
    })
}

impl Drop for Weights {
    fn drop(&mut self) {
        Ledger::set(self.owner, MemoryKind::Device, 0);
    }
}

#[cfg(test)]
mod tests;
