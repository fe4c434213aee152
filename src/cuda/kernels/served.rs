//! Which decoder sizes the GPU kernels support. This is checked before a run; otherwise a kernel would fail only in the first step.

use tch::Kind;

use super::{add_rms_norm, heads, rms_norm, rope_write_kv};
use crate::torch::{FLASH_HEAD_STEP, FLASH_MOST_HEAD_DIM};

/// Sizes of a decoder that kernels limit.
#[derive(Debug, Clone, Copy)]
pub struct DecoderSizes {
    /// Head width of the attention layers.
    pub head_dim: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
}

/// A size that no kernel supports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unserved {
    /// Name of the size in `config.json`.
    pub name: &'static str,
    /// The model's size.
    pub got: usize,
    /// The supported sizes, as text.
    pub served: String,
}

/// The first size that weights of `kind` cannot have on a GPU; `None` if all are supported.
pub fn unserved(sizes: DecoderSizes, kind: Kind) -> Option<Unserved> {
    let DecoderSizes { head_dim, hidden_size } = sizes;
    let (step, most) = served_heads(kind);
    let is_unserved = |head_dim: &usize| *head_dim == 0 || !head_dim.is_multiple_of(step) || *head_dim > most;
    if let Some(head_dim) = head_dim.filter(is_unserved) {
        let served = format!("multiples of {step} up to {most}");
        return Some(Unserved { name: "head_dim", got: head_dim, served });
    }
    let pack = 16 / kind.elt_size_in_bytes();
    let most = |width| add_rms_norm::most_columns(width).min(rms_norm::MOST_COLUMNS);
    let is_served = hidden_size <= if hidden_size.is_multiple_of(pack) { most(pack) } else { most(1) };
    (!is_served || hidden_size == 0).then(|| Unserved {
        name: "hidden_size",
        got: hidden_size,
        served: format!("multiples of {pack} up to {}, others up to {}", most(pack), most(1)),
    })
}

/// Supported head widths, as (multiple of, at most).
fn served_heads(kind: Kind) -> (usize, usize) {
    let most = rope_write_kv::MOST_HEAD_DIM.min(heads::MOST_HEAD_DIM as usize);
    match kind {
        Kind::BFloat16 => (FLASH_HEAD_STEP, most.min(FLASH_MOST_HEAD_DIM)),
        _ => (2, most), // rotary embeddings rotate pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supported_sizes_exclude_what_a_kernel_refuses() {
        let name = |head_dim, hidden_size, kind| {
            unserved(DecoderSizes { head_dim: Some(head_dim), hidden_size }, kind).map(|unserved| unserved.name)
        };
        for head_dim in [8, 24, 64, 80, 96, 128, 256] {
            assert_eq!(name(head_dim, 896, Kind::BFloat16), None, "{head_dim}");
        }
        for head_dim in [4, 6, 12, 100, 264, 512] {
            assert_eq!(name(head_dim, 896, Kind::BFloat16), Some("head_dim"), "{head_dim}");
        }
        assert_eq!((name(6, 896, Kind::Float), name(258, 896, Kind::Float)), (None, Some("head_dim")));
        for (hidden_size, kind, is_served) in [
            (8192, Kind::Float, true),
            (8196, Kind::Float, false),
            (4095, Kind::Float, true),
            (4097, Kind::Float, false),
            (12_000, Kind::BFloat16, true),
            (12_008, Kind::BFloat16, false),
            (4100, Kind::BFloat16, false),
        ] {
            assert_eq!(name(64, hidden_size, kind).is_none(), is_served, "{hidden_size} {kind:?}");
        }
        let heads = unserved(DecoderSizes { head_dim: Some(100), hidden_size: 64 }, Kind::BFloat16).unwrap();
        assert_eq!(heads.served, "multiples of 8 up to 256");
    }
}
