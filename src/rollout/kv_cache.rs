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
        all_or_half(num_blocks, |num_blocks| self.arena.map(num_blocks * self.block_bytes))
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
        self.arena.absent_bytes()
    }

    /// Physical memory behind the cache.
    pub(super) fn resident_bytes(&self) -> Result<usize> {
        self.arena.resident_bytes()
    }

    fn cache(&self) -> &Tensor {
        self.awake.as_ref().expect("the KV cache is used only while the engine is awake")
    }
}

/// Maps `num_blocks`, or, when memory is short, half of them, and says so. Returns how many there are.
fn all_or_half(num_blocks: usize, mut map: impl FnMut(usize) -> Result<()>) -> Result<usize> {
    match map(num_blocks) {
        Err(error @ Error::OutOfMemory { .. }) if num_blocks > 1 => {
            tracing::warn!("{error}; the KV cache shrinks from {num_blocks} to {} blocks", num_blocks / 2);
            map(num_blocks / 2).map(|()| num_blocks / 2)
        }
        mapped => mapped.map(|()| num_blocks),
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
        let map = |num_reserved, room| {
            let mut tried = Vec::new();
            let mapped = all_or_half(num_reserved, |num_blocks| {
                tried.push(num_blocks);
                let no_room = || Error::OutOfMemory { owner: "a test".to_owned(), requested_bytes: num_blocks };
                (num_blocks <= room).then_some(()).ok_or_else(no_room)
            });
            (mapped.ok(), tried)
        };
        assert_eq!(map(9, 9), (Some(9), vec![9]));
        assert_eq!(map(9, 8), (Some(4), vec![9, 4]));
        assert_eq!(map(9, 3), (None, vec![9, 4]));
        assert_eq!(map(1, 0), (None, vec![1]));

        let spec = ModelSpec::preset("micro").unwrap();
        let too_many = available_host_bytes().unwrap() * 8;
        let mut cache = KvCache::reserve(&spec, 1, 16, too_many, (Kind::Float, Device::Cpu)).unwrap();
        let error = cache.map().unwrap_err();
        assert!(error.to_string().contains("out of memory: kv_cache ("), "{error}");
    }
}
