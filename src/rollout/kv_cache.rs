//! The paged KV cache: keys and values of all sequences, in blocks, in an arena of its own.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::config::KvCacheDtype;
use crate::cuda::kernels::{self, AttentionPlan, HeadTransform, KvBlocks, QkvViews, ScaledRows};
use crate::cuda::{Capability, Context};
use crate::error::{Error, Result};
use crate::memory::{self, Arena};
use crate::model::{AttentionSpec, ModelSpec};
use crate::ops::attention::KvEntries;
use crate::torch;

/// GPU memory, in bytes, that stays free for activations, graphs and libraries while the engine is awake.
pub const SPARE_BYTES: usize = 8 << 30;
/// A cache that does not fit as a whole leaves [`SPARE_BYTES`] free, but at most 1 / `SPARE_SHARE` of the memory that was free before.
const SPARE_SHARE: usize = 8;
const GIB: usize = 1 << 30;

/// The dtype of the cache for weights of `kind`.
pub fn cache_kind(dtype: KvCacheDtype, kind: Kind) -> Kind {
    match dtype {
        KvCacheDtype::Auto => kind,
        KvCacheDtype::Fp8 => Kind::Float8e4m3fn,
        KvCacheDtype::Int8 => Kind::Int8,
    }
}

/// Checks that this device supports the configured cache dtype.
pub(super) fn check_kv_cache(dtype: KvCacheDtype, device: Device) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid_value("kv_cache_dtype", dtype.name(), reason));
    let (KvCacheDtype::Fp8, Device::Cuda(ordinal)) = (dtype, device) else { return Ok(()) };
    let context = Context::retain(ordinal)?;
    let capability = context.compute_capability()?;
    if capability >= Capability::new(8, 9) {
        return Ok(());
    }
    refuse(format!("auto: it needs a GPU of compute capability 8.9 or later, and {} has {capability}", context.name()?))
}

/// Whether entries of this dtype have scales.
fn has_scales(kind: Kind) -> bool {
    matches!(kind, Kind::Float8e4m3fn | Kind::Int8)
}

/// Bytes of one KV block on one rank: keys and values of `block_size` tokens in every layer. 8-bit entries have, in addition, a scale for each token
/// and head of both.
pub fn kv_block_bytes(spec: &ModelSpec, tp_size: usize, block_size: usize, kind: Kind) -> usize {
    let elements = spec.cached_elements(tp_size) * block_size;
    let scales = if has_scales(kind) { elements / spec.attention().head_dim * size_of::<f32>() } else { 0 };
    elements * kind.elt_size_in_bytes() + scales
}

/// Keys and values of one layer, each [num_blocks, Hkv, block_size, hd].
#[derive(Debug)]
pub(super) enum LayerCache {
    Plain([Tensor; 2]),
    /// 8-bit values with scales [num_blocks, Hkv, block_size].
    Scaled([ScaledRows; 2]),
}

impl LayerCache {
    pub(super) fn entries(&self) -> [&dyn KvEntries; 2] {
        match self {
            Self::Plain([k, v]) => [k, v],
            Self::Scaled([k, v]) => [k, v],
        }
    }

    /// Attention of one query token per row, by [`kernels::paged_attention`] on a GPU.
    pub(super) fn attend(
        &self,
        plan: &AttentionPlan,
        q: &Tensor,             // [S, H, hd]
        block_tables: &Tensor,  // [S, max_blocks] i32
        context_lens: &Tensor,  // [S] i32
        sinks: Option<&Tensor>, // [H]
        o: &mut Tensor,         // like q
    ) -> Result<()> {
        let cache = match self {
            Self::Plain([k, v]) => KvBlocks::plain(k, v),
            Self::Scaled([k, v]) => KvBlocks::scaled(k, v),
        };
        kernels::paged_attention(plan, q, cache, block_tables, context_lens, sinks, o)
    }

    /// Norms and rotates the queries, and writes keys and values of a step's tokens to their slots, by [`kernels::rope_write_kv`].
    pub(super) fn write(
        &self,
        qkv: &QkvViews,
        transform: &HeadTransform<'_>,
        (positions, slots): (&Tensor, &Tensor), // [T] i32
        q: &mut Tensor,                         // [T, H, hd]
    ) -> Result<()> {
        match self {
            Self::Plain([k, v]) => kernels::rope_write_kv(qkv, transform, positions, slots, q, k, v),
            Self::Scaled([k, v]) => kernels::rope_write_kv_scaled(qkv, transform, positions, slots, q, k, v),
        }
    }

    /// All tensors of this layer's cache.
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Plain([k, v]) => vec![k, v],
            Self::Scaled([k, v]) => vec![&k.values, &v.values, &k.scales, &v.scales],
        }
    }
}

/// The paged KV cache. While asleep it holds addresses only.
#[derive(Debug)]
pub(super) struct KvCache {
    arena: Arena,
    shape: [i64; 4], // Hkv of this rank, block_size, hd, 2 * layers with attention
    /// Index of every layer among the layers with attention; `None` for layers without.
    places: Vec<Option<i64>>,
    kind: Kind,
    block_bytes: usize,
    awake: Option<Tensor>, // [2 * layers with attention, num_blocks, Hkv, block_size, hd]; keys of layer l at 2 l, values at 2 l + 1
    scales: Option<Tensor>, // [2 * layers with attention, num_blocks, Hkv, block_size] f32, for 8-bit entries
}

impl KvCache {
    /// Reserves addresses for as many whole blocks as fit into `kv_cache_bytes`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if not even one block fits.
    pub(super) fn reserve(
        spec: &ModelSpec,
        tp_size: usize,
        block_size: usize,
        kv_cache_bytes: usize,
        (kind, device): (Kind, Device),
    ) -> Result<Self> {
        let block_bytes = kv_block_bytes(spec, tp_size, block_size, kind);
        let num_blocks = kv_cache_bytes / block_bytes;
        if num_blocks == 0 {
            let expected = format!("at least {block_bytes}, one block of {block_size} tokens");
            return Err(Error::invalid_value("kv_cache_bytes", kv_cache_bytes, expected));
        }
        let AttentionSpec { num_kv_heads, head_dim, .. } = spec.attention().tp_slice(tp_size);
        let draft_head = spec.draft_head.map(|_| spec.num_layers()); // one more layer after the last
        let layers: Vec<usize> = spec.attention_layers().chain(draft_head).collect();
        let shape = [num_kv_heads, block_size, head_dim, 2 * layers.len()].map(|size| size as i64);
        let place = |layer| layers.iter().position(|&own| own == layer).map(|place| place as i64);
        let places = (0..spec.num_layers()).chain(draft_head).map(place).collect();
        let arena = Arena::reserve("kv_cache", num_blocks * block_bytes, device)?;
        Ok(Self { arena, shape, places, kind, block_bytes, awake: None, scales: None })
    }

    /// Maps all reserved blocks. If memory is short, it logs a warning and maps as many as leave `beside_bytes` and some spare memory free. Returns
    /// the number of blocks, at least enough for one sequence of `max_model_length` tokens.
    pub(super) fn map(&mut self, max_model_length: usize, beside_bytes: usize) -> Result<usize> {
        let num_blocks = self.arena.reserved_bytes() / self.block_bytes;
        let device = self.arena.device();
        let room = || {
            torch::release_memory(device)?;
            let free = memory::free_bytes(device)?;
            Ok(free.saturating_sub(beside_bytes + SPARE_BYTES.min(free / SPARE_SHARE)))
        };
        let counts = (num_blocks, max_model_length.div_ceil(self.block_size()));
        all_or_what_fits(counts, self.block_bytes, room, |count| self.arena.map(count * self.block_bytes))
    }

    /// Creates the views over `num_blocks` mapped blocks.
    pub(super) fn open(&mut self, num_blocks: usize) -> Result<()> {
        let [num_kv_heads, block_size, head_dim, planes] = self.shape;
        let shape = [planes, num_blocks as i64, num_kv_heads, block_size, head_dim];
        let stays = self.scales.as_ref().map(|scales| scales.size()[1]); // blocks of a cache that stayed mapped
        // SAFETY: the only view of these bytes; it and what derives from it stay in this room, and `sleep` drops it before
        // the arena is unmapped.
        let entries = unsafe { self.arena.tensor(0, &shape, self.kind) }?;
        if has_scales(self.kind) {
            // SAFETY: as above, behind the entries.
            let scales = unsafe { self.arena.tensor(entries.numel(), &shape[..4], Kind::Float) }?;
            if stays.is_some_and(|before| before != num_blocks as i64) {
                // The scales have moved. Bytes of entries that are read as scales may not be finite, so zero both.
                let _ = entries.view_dtype(Kind::Uint8).f_zero_()?;
                let _ = scales.shallow_clone().f_zero_()?;
            }
            self.scales = Some(scales);
        }
        self.awake = Some(entries);
        Ok(())
    }

    /// Unmaps the memory. Never fails: the arena keeps an error for the next [`KvCache::map`].
    pub(super) fn sleep(&mut self) {
        (self.awake, self.scales) = (None, None);
        self.arena.unmap();
    }

    /// Keys and values of one layer. The draft head's layer comes after the model's last one.
    ///
    /// # Panics
    /// If the cache is asleep, or the layer has no attention.
    pub(super) fn layer(&self, layer: usize) -> LayerCache {
        let place = self.places[layer].expect("a layer with attention");
        let (cache, planes) = (self.cache(), [2 * place, 2 * place + 1]);
        match &self.scales {
            None => LayerCache::Plain(planes.map(|plane| cache.select(0, plane))),
            Some(scales) => LayerCache::Scaled(
                planes.map(|plane| ScaledRows { values: cache.select(0, plane), scales: scales.select(0, plane) }),
            ),
        }
    }

    /// Copies whole blocks in all layers at once.
    pub(super) fn copy_blocks(
        &self,
        from: &Tensor, // [n] i32
        to: &Tensor,   // [n] i32
    ) -> Result<()> {
        let to = to.f_to_kind(Kind::Int64)?;
        let copy = |all: Tensor| -> Result<()> {
            let blocks = all.f_index_select(1, from)?;
            let _ = all.shallow_clone().f_index_copy_(1, &to, &blocks)?;
            Ok(())
        };
        let Some(scales) = &self.scales else { return copy(self.cache().shallow_clone()) };
        copy(self.cache().view_dtype(Kind::Uint8))?; // every operation supports bytes
        copy(scales.shallow_clone())
    }

    /// Dtype of the entries.
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Number of key/value heads on this rank.
    pub(super) fn num_kv_heads(&self) -> usize {
        self.shape[0] as usize
    }

    /// Bytes of one token in all layers.
    pub(super) fn token_bytes(&self) -> f64 {
        (self.block_bytes / self.block_size()) as f64
    }

    /// Tokens per block.
    pub(super) fn block_size(&self) -> usize {
        self.shape[1] as usize
    }

    /// Maximum bytes of the cache.
    pub(super) fn reserved_bytes(&self) -> usize {
        self.arena.reserved_bytes()
    }

    /// Bytes that waking has to map.
    pub(super) fn absent_bytes(&self) -> usize {
        self.arena.absent_bytes()
    }

    /// Physical memory of the cache, in bytes.
    pub(super) fn resident_bytes(&self) -> Result<usize> {
        self.arena.resident_bytes()
    }

    fn cache(&self) -> &Tensor {
        self.awake.as_ref().expect("the KV cache is used only while the engine is awake")
    }
}

/// Maps `num_blocks` blocks. If memory is short, it logs a warning and maps as many as `room` bytes hold, if at least `least`. Returns the number of
/// blocks. `room` is rounded down to whole GiB, so that other wakes find as many.
fn all_or_what_fits(
    (num_blocks, least): (usize, usize),
    block_bytes: usize,
    room: impl FnOnce() -> Result<usize>,
    mut map: impl FnMut(usize) -> Result<()>,
) -> Result<usize> {
    let error = match map(num_blocks) {
        Err(error @ Error::OutOfMemory { .. }) => error,
        mapped => return mapped.map(|()| num_blocks),
    };
    let room = room()?;
    let room = if room > GIB { room / GIB * GIB } else { room };
    let fitting = num_blocks.min(room / block_bytes);
    if fitting < least.max(1) {
        return Err(error);
    }
    tracing::warn!("{error}; the KV cache shrinks from {num_blocks} to {fitting} blocks");
    map(fitting).map(|()| fitting)
}

impl Drop for KvCache {
    fn drop(&mut self) {
        self.sleep();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::available_host_bytes;

    #[test]
    fn a_kv_cache_that_does_not_fit_shrinks_once() {
        let map = |num_reserved, free, block_bytes: usize| {
            let mut tried = Vec::new();
            let mapped = all_or_what_fits(
                (num_reserved, 1),
                block_bytes,
                || Ok(free),
                |num_blocks| {
                    tried.push(num_blocks);
                    let no_room = || Error::OutOfMemory { owner: "a test".to_owned(), requested_bytes: num_blocks };
                    (num_blocks * block_bytes <= free).then_some(()).ok_or_else(no_room)
                },
            );
            (mapped.ok(), tried)
        };
        assert_eq!(map(9, 900, 100), (Some(9), vec![9]));
        assert_eq!(map(9, 899, 100), (Some(8), vec![9, 8]));
        assert_eq!(map(9, 100, 100), (Some(1), vec![9, 1]));
        assert_eq!(map(9, 99, 100), (None, vec![9]));
        assert_eq!(map(159, 126 * GIB + 5, GIB), (Some(126), vec![159, 126]));
        assert_eq!(map(159, 7 * GIB / 2, GIB / 2), (Some(6), vec![159, 6]), "whole GiB");
        let short = |_| Err(Error::OutOfMemory { owner: "a test".to_owned(), requested_bytes: 9 });
        let too_few = all_or_what_fits((9, 5), 1, || Ok(4), short);
        assert!(too_few.is_err(), "four blocks do not hold the longest sequence");
    }

    #[test]
    fn an_fp8_kv_cache_with_a_new_layout_holds_finite_values() {
        let spec = ModelSpec::preset("micro").unwrap();
        let place = (Kind::Float8e4m3fn, Device::Cpu);
        let mut cache = KvCache::reserve(&spec, 1, 16, 9 * kv_block_bytes(&spec, 1, 16, place.0), place).unwrap();
        cache.map(16, 0).unwrap();
        let sum = |cache: &KvCache| {
            let sum = |tensor: &Tensor| tensor.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
            cache.layer(0).tensors().into_iter().map(sum).sum::<f64>()
        };
        cache.open(9).unwrap();
        let _ = cache.cache().view_dtype(Kind::Uint8).fill_(0x7e); // the largest e4m3 number
        let _ = cache.scales.as_ref().unwrap().shallow_clone().fill_(-1.0); // bytes that are not valid e4m3 numbers
        let full = sum(&cache);
        cache.open(9).unwrap();
        assert_eq!(sum(&cache), full, "what sequences left stays");
        cache.open(7).unwrap();
        assert_eq!(sum(&cache), 0.0);
    }

    #[test]
    fn a_kv_cache_larger_than_memory_is_mapped_as_far_as_it_fits() {
        let spec = ModelSpec::preset("micro").unwrap();
        let available = available_host_bytes().unwrap();
        let mut cache = KvCache::reserve(&spec, 1, 16, available * 8, (Kind::Float, Device::Cpu)).unwrap();
        let num_blocks = cache.map(16, 0).unwrap();
        let bytes = num_blocks * cache.block_bytes;
        assert!(bytes > available / 2 && bytes < available, "{bytes} of {available}"); // reserved, but never touched
        cache.sleep();
        // Beside buffers that need all there is, none fits.
        let error = cache.map(16, usize::MAX / 2).unwrap_err();
        assert!(error.to_string().contains("out of memory: kv_cache ("), "{error}");
    }
}
