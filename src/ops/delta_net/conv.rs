//! Causal depthwise convolution with SiLU within each sequence: y_t = silu(sum_j w_j x_(t - width + 1 + j)). The rows before a sequence are its tail:
//! the last `width - 1` rows of an earlier part of the sequence, or zeros.
//!
//! T tokens, N sequences, C channels, W the convolution's width. Computed in the accumulation type.

use tch::Tensor;

use super::{Sequences, gates};
use crate::error::{Error, Result};
use crate::torch::accumulation_kind;

/// Returns y, in the accumulation type. [T, C]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn forward(
    x: &Tensor,             // [T, C]
    weight: &Tensor,        // [C, W]
    tails: Option<&Tensor>, // [N, W - 1, C], of x's kind
    sequences: &Sequences,
) -> Result<Tensor> {
    gates::silu(&convolve(&extend(x, tails, sequences)?, weight, sequences)?)
}

/// Returns the last rows of every sequence, tails included, as tails for what follows. [N, W - 1, C]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn last_rows(
    x: &Tensor,             // [T, C]
    tails: Option<&Tensor>, // [N, W - 1, C], of x's kind
    sequences: &Sequences,
) -> Result<Tensor> {
    let (tokens, channels) = (x.size()[0], x.size()[1]);
    let shape = [sequences.num_sequences, sequences.earlier.len() as i64 - 1, channels];
    let earlier = match tails {
        Some(tails) => tails.f_reshape([-1, channels])?,
        None => Tensor::f_zeros([sequences.tails.size()[0], channels], (x.kind(), x.device()))?,
    };
    if tokens == 0 {
        return Ok(earlier.f_view(shape)?);
    }
    let own = x.f_index_select(0, &sequences.tails.f_clamp_max(tokens - 1)?)?;
    let earlier = earlier.f_index_select(0, &sequences.tails.f_sub_scalar(tokens)?.f_clamp_min_(0)?)?;
    let is_own = sequences.tails.f_lt(tokens)?.unsqueeze(1);
    Ok(own.f_where_self(&is_own, &earlier)?.f_view(shape)?)
}

/// Returns dx and the gradient of the tails; adds the weight's gradient in place. `d_last` is the gradient of [`last_rows`].
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn backward(
    dy: &Tensor,                                         // [T, C], in the accumulation kind
    (x, weight): (&Tensor, &Tensor),                     // [T, C], [C, W]
    (tails, d_last): (Option<&Tensor>, Option<&Tensor>), // [N, W - 1, C] both
    sequences: &Sequences,
    d_weight: &mut Tensor, // [C, W]
) -> Result<(Tensor, Tensor)> {
    let extended = extend(x, tails, sequences)?;
    let pre = convolve(&extended, weight, sequences)?;
    let d_pre = gates::silu_slope(&pre, &gates::sigmoid(&pre)?)?.f_mul_(dy)?;
    let wide = weight.f_to_kind(d_pre.kind())?;
    let width = weight.size()[1];
    let mut d_extended = Tensor::f_zeros(extended.size(), (d_pre.kind(), x.device()))?;
    for (distance, rows) in sequences.earlier.iter().enumerate() {
        let tap = width - 1 - distance as i64;
        d_extended = d_extended.f_index_add_(0, rows, &d_pre.f_mul(&wide.select(1, tap))?)?;
        let products = extended.f_index_select(0, rows)?.f_to_kind(d_pre.kind())?.f_mul_(&d_pre)?;
        let _ = d_weight.select(1, tap).f_add_(&products.f_sum_dim_intlist(0, false, d_pre.kind())?)?;
    }
    if let Some(d_last) = d_last {
        let rows = d_last.f_to_kind(d_pre.kind())?.f_reshape([-1, x.size()[1]])?;
        d_extended = d_extended.f_index_add_(0, &sequences.tails, &rows)?;
    }
    let (tokens, all) = (x.size()[0], d_extended.size()[0]);
    let d_tails = d_extended.narrow(0, tokens, all - tokens).view(tail_shape(x, weight, sequences));
    Ok((d_extended.narrow(0, 0, tokens), d_tails))
}

/// Processes one token of every sequence and shifts the tails by one row. [N, C] in the accumulation type
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn step(
    x: &Tensor,         // [N, C]
    weight: &Tensor,    // [C, W]
    tails: &mut Tensor, // [N, W - 1, C]
) -> Result<Tensor> {
    let window = Tensor::f_cat(&[tails.shallow_clone(), x.f_unsqueeze(1)?], 1)?; // [N, W, C]
    let kind = accumulation_kind(x.kind());
    let width = weight.size()[1];
    let wide = weight.f_to_kind(kind)?;
    let mut y = window.select(1, width - 1).f_to_kind(kind)?.f_mul(&wide.select(1, width - 1))?;
    for tap in (0..width - 1).rev() {
        y = y.f_addcmul_(&window.select(1, tap).f_to_kind(kind)?, &wide.select(1, tap))?;
    }
    tails.f_copy_(&window.narrow(1, 1, width - 1))?;
    gates::silu(&y)
}

/// Concatenates the rows of x and those of the tails. [T + N (W - 1), C]
fn extend(x: &Tensor, tails: Option<&Tensor>, sequences: &Sequences) -> Result<Tensor> {
    let channels = x.size()[1];
    let tails = match tails {
        Some(tails) => tails.f_reshape([-1, channels])?.f_to_kind(x.kind())?,
        None => Tensor::f_zeros([sequences.tails.size()[0], channels], (x.kind(), x.device()))?,
    };
    Ok(Tensor::f_cat(&[x, &tails], 0)?)
}

/// Computes the convolution, before SiLU. [T, C] in the accumulation type
fn convolve(extended: &Tensor, weight: &Tensor, sequences: &Sequences) -> Result<Tensor> {
    let kind = accumulation_kind(extended.kind());
    let wide = weight.f_to_kind(kind)?;
    let mut taps = (0..weight.size()[1]).rev().map(|tap| wide.select(1, tap)).zip(&sequences.earlier);
    let rows = |rows: &Tensor| Ok::<_, Error>(extended.f_index_select(0, rows)?.f_to_kind(kind)?);
    let (tap, own) = taps.next().expect("a convolution is over at least one token");
    let mut y = rows(own)?.f_mul_(&tap)?;
    for (tap, earlier) in taps {
        y = y.f_addcmul_(&rows(earlier)?, &tap)?;
    }
    Ok(y)
}

fn tail_shape(x: &Tensor, weight: &Tensor, sequences: &Sequences) -> [i64; 3] {
    [sequences.num_sequences, weight.size()[1] - 1, x.size()[1]]
}
