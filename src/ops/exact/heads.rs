//! Heads for attention, bit-exact: norms of queries and keys, then the rotary embedding.

use tch::Tensor;

use super::gpu;
use super::rows::{normalise, rms_norm};
use crate::error::Result;
use crate::ops::heads::{HeadNormWeights, Heads};
use crate::ops::rms_norm::NormOptions;
use crate::ops::rope::RopeRows;
use crate::ops::try_map;
use crate::torch::{f32_vec, tensor_on};

/// Returns queries and keys, normalized if `norms` are given and then rotated, and values. Norm and rotation each round to the type of `qkv`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU the errors of its kernel.
///
/// # Panics
/// If `rows` do not come from [`Rope::exact_rows`](crate::ops::rope::Rope::exact_rows).
pub fn heads(
    qkv: Tensor, // [T, Hkv, G + 2, hd]
    norms: Option<HeadNormWeights<'_>>,
    rows: &RopeRows,
) -> Result<Heads> {
    if qkv.device().is_cuda() {
        return gpu::heads(qkv, norms, rows);
    }
    let [tokens, kv_heads, slots, head_dim] = qkv.size()[..] else { panic!("a projection, not {:?}", qkv.size()) };
    let group = slots - 2;
    let (turns, turned) = rows.turns();
    let weights = match norms {
        Some(norms) => Some((try_map([norms.q, norms.k], f32_vec)?, norms.eps)),
        None => None,
    };
    let mut rotated = Vec::new();
    for (which, [first, count]) in [[0, group], [group, 1]].into_iter().enumerate() {
        let heads = qkv.narrow(2, first, count);
        let mut host = f32_vec(&heads)?; // [T, Hkv, count, hd]
        if let Some((weights, eps)) = &weights {
            host.chunks_exact_mut(head_dim as usize).for_each(|head| normalise(head, &weights[which], *eps));
            host = f32_vec(&tensor_on(&host, qkv.device())?.f_to_kind(qkv.kind())?)?;
        }
        let of_token = (kv_heads * count * head_dim) as usize;
        for (token, turn) in host.chunks_exact_mut(of_token.max(1)).zip(turns.chunks_exact(2 * turned)) {
            token.chunks_exact_mut(head_dim as usize).for_each(|head| rotate(head, turn, turned));
        }
        let whole = tensor_on(&host, qkv.device())?.view([tokens, kv_heads * count, head_dim]);
        rotated.push(whole.f_to_kind(qkv.kind())?);
    }
    let v = qkv.select(2, group + 1).f_contiguous()?;
    let [q, k]: [Tensor; 2] = rotated.try_into().unwrap_or_else(|_| unreachable!("queries and keys"));
    Ok(Heads { q, k, v, qkv: norms.map(|_| qkv) })
}

/// Returns the projection with one norm applied over all query heads of a token and one over all key heads; values are unchanged.
///
/// # Errors
/// The errors of [`heads`].
pub fn norm_all(
    qkv: &Tensor,               // [T, Hkv, G + 2, hd]
    norms: HeadNormWeights<'_>, // [H hd] and [Hkv hd]
) -> Result<Tensor> {
    let normed = gpu::copy(qkv)?;
    if qkv.device().is_cuda() {
        gpu::norm_all(&normed, norms)?;
        return Ok(normed);
    }
    let group = qkv.size()[2] - 2;
    let options = NormOptions::plain(norms.eps);
    for (first, count, weight) in [(0, group, norms.q), (group, 1, norms.k)] {
        let heads = qkv.narrow(2, first, count);
        let rows = rms_norm(&heads.f_reshape([heads.size()[0], -1])?, weight, options)?;
        normed.narrow(2, first, count).f_copy_(&rows.view_as(&heads))?;
    }
    Ok(normed)
}

/// Rotates the pairs (i, i + turned) of a head by the cosines and sines of its token.
fn rotate(head: &mut [f32], turn: &[f32], turned: usize) {
    let (cosines, sines) = turn.split_at(turned);
    let (low, high) = head.split_at_mut(turned);
    for ((x, y), (cosine, sine)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
        (*x, *y) = (*x * cosine - *y * sine, *y * cosine + *x * sine);
    }
}
