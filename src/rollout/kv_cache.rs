//! Keys and values of all sequences, in blocks, on an arena of their own.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::memory::Arena;
use crate::model::ModelSpec;

/// Bytes of one KV block on one rank: keys and values of `block_size` tokens in every layer.
pub fn kv_block_bytes(spec: &ModelSpec, tp_size: usize, block_size: usize, kind: Kind) -> usize {
    let (_, num_kv_heads) = spec.tp_heads(tp_size);
    2 * spec.num_layers * block_size * num_kv_heads * spec.head_dim * kind.elt_size_in_bytes()
}

/// The paged cache. Once put to sleep it holds addresses only.
#[derive(Debug)]
pub(super) struct KvCache {
    arena: Arena,
    shape: [i64; 4], // Hkv of this rank, block_size, hd, 2 * layers
    kind: Kind,
    block_bytes: usize,
    awake: Option<Tensor>, // [2 * layers, num_blocks, Hkv, block_size, hd], keys of layer l at 2 l, values at 2 l + 1
}

impl KvCache {
    /// Reserves addresses for as many whole blocks as `kv_cache_bytes` hold.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if that is not one block.
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
        let (_, num_kv_heads) = spec.tp_heads(tp_size);
        let shape = [num_kv_heads, block_size, spec.head_dim, 2 * spec.num_layers].map(|size| size as i64);
        let arena = Arena::reserve("kv_cache", num_blocks * block_bytes, device)?;
        Ok(Self { arena, shape, kind, block_bytes, awake: None })
    }

    /// Maps all reserved blocks, or, when memory is short, half of them, and says so. Returns how many there are.
    pub(super) fn map(&mut self) -> Result<usize> {
        let num_blocks = self.arena.reserved_bytes() / self.block_bytes;
        match self.arena.map(num_blocks * self.block_bytes) {
            Err(error @ Error::OutOfMemory { .. }) if num_blocks > 1 => {
                tracing::warn!("{error}; the KV cache shrinks from {num_blocks} to {} blocks", num_blocks / 2);
                self.arena.map(num_blocks / 2 * self.block_bytes)?;
                Ok(num_blocks / 2)
            }
            mapped => mapped.map(|()| num_blocks),
        }
    }

    /// Lays `num_blocks` mapped blocks out.
    pub(super) fn open(&mut self, num_blocks: usize) -> Result<()> {
        let [num_kv_heads, block_size, head_dim, planes] = self.shape;
        let shape = [planes, num_blocks as i64, num_kv_heads, block_size, head_dim];
        // SAFETY: the only view of the arena; it and what derives from it stay in this room, and `sleep` drops it before
        // the arena is unmapped.
        self.awake = Some(unsafe { self.arena.tensor(0, &shape, self.kind) }?);
        Ok(())
    }

    /// Gives the memory back. Never fails: the arena keeps an error for the next [`KvCache::map`].
    pub(super) fn sleep(&mut self) {
        self.awake = None;
        self.arena.unmap();
    }

    /// Keys and values of one layer, each [num_blocks, Hkv, block_size, hd].
    ///
    /// # Panics
    /// If the cache is asleep.
    pub(super) fn layer(&self, layer: usize) -> (Tensor, Tensor) {
        let cache = self.cache();
        (cache.select(0, 2 * layer as i64), cache.select(0, 2 * layer as i64 + 1))
    }

    /// Copies whole blocks, all layers at once.
    pub(super) fn copy_blocks(
        &self,
        from: &Tensor, // [n] i32
        to: &Tensor,   // [n] i32
    ) {
        let blocks = self.cache().index_select(1, from);
        let _ = self.cache().shallow_clone().index_copy_(1, &to.to_kind(Kind::Int64), &blocks);
    }

    /// Its kind, and the key/value heads of this rank.
    pub(super) fn kind_and_heads(&self) -> (Kind, usize) {
        (self.kind, self.shape[0] as usize)
    }

    /// Tokens per block.
    pub(super) fn block_size(&self) -> usize {
        self.shape[1] as usize
    }

    /// Most memory behind the cache.
    pub(super) fn reserved_bytes(&self) -> usize {
        self.arena.reserved_bytes()
    }

    /// Memory that waking has to map.
    pub(super) fn absent_bytes(&self) -> usize {
        self.arena.reserved_bytes() - self.arena.mapped_bytes()
    }

    /// Physical memory behind the cache.
    pub(super) fn resident_bytes(&self) -> Result<usize> {
        self.arena.resident_bytes()
    }

    fn cache(&self) -> &Tensor {
        self.awake.as_ref().expect("the KV cache is used only while the engine is awake")
    }
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
    fn a_cache_that_does_not_fit_is_halved_once() {
        let spec = ModelSpec::preset("micro").unwrap();
        let reserve = |bytes| KvCache::reserve(&spec, 1, 16, bytes, (Kind::Float, Device::Cpu)).unwrap();
        let free = available_host_bytes().unwrap();
        let mut cache = reserve(free / 2 * 3);
        let num_reserved = cache.arena.reserved_bytes() / cache.block_bytes;
        assert_eq!(cache.map().unwrap(), num_reserved / 2);
        let error = reserve(free * 8).map().unwrap_err();
        assert!(error.to_string().contains("kv_cache (held: "), "{error}");
    }
}
