//! Gated delta nets by the kernels of a GPU: bfloat16, heads of 128, a convolution over four tokens. All others are composed of
//! libtorch's operations there as on CPUs.

use tch::Tensor;

use super::{DeltaOptions, DeltaRows, DeltaState, DeltaWeights, Sequences};
use crate::cuda::kernels::{self, DeltaLayout, DeltaSaved, DeltaScan, DeltaSizes};
use crate::error::Result;

/// Whether the kernels serve rows and heads.
pub(super) fn serves(rows: &DeltaRows, options: DeltaOptions) -> bool {
    let heads = options.heads;
    kernels::delta_serves(&rows.qkv, [heads.key_dim, heads.value_dim, heads.conv_width])
}

/// Outputs and last states, as [`super::forward`] has them.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn forward(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
) -> Result<(Tensor, DeltaState)> {
    let (o, rule) = outputs(rows, weights, initial, sequences, options)?;
    let conv = last_rows(rows, initial.map(|state| &state.conv), sequences)?;
    Ok((o, DeltaState { conv, rule }))
}

/// Outputs, and the rule's last states.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn outputs(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
) -> Result<(Tensor, Tensor)> {
    let (layout, sizes) = (&sequences.layout, sizes(options));
    let (_, scan) = scan(rows, weights, initial, layout, sizes, None)?;
    let o = kernels::delta_norm(&scan.o, &rows.z, &weights.norm, options.eps)?.flatten(1, 2);
    Ok((o, scan.last))
}

/// Gradients, as [`super::backward`] has them, of rows in bfloat16.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn backward(
    (d_output, d_last): (&Tensor, Option<&DeltaState>), // [T, H dv]
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
    grads: &mut DeltaWeights,
) -> Result<(DeltaRows, DeltaState)> {
    let (layout, sizes) = (&sequences.layout, sizes(options));
    let mut prepared = None;
    let (mixed, DeltaScan { o, kept, .. }) = scan(rows, weights, initial, layout, sizes, Some(&mut prepared))?;
    let (kept, prepared) = (kept.expect("asked for"), prepared.expect("asked for"));
    let d_output = d_output.f_contiguous()?;
    let [d_o, dz] =
        kernels::delta_norm_backward(&d_output, [&o, &rows.z], &weights.norm, options.eps, &mut grads.norm)?;
    drop(o);
    let d_rule = d_last.map(|state| &state.rule);
    let of_heads = [&weights.a_log, &weights.dt_bias];
    let saved = DeltaSaved { mixed: &mixed, prepared: &prepared, kept: &kept, a: &rows.a, of_heads };
    let d = kernels::delta_backward(&d_o, d_rule, &saved, layout, sizes)?;
    drop((d_o, mixed, prepared, kept));
    if layout.num_tokens > 0 {
        kernels::add_columns(&d.of_heads.get(0), &mut grads.a_log)?;
        kernels::add_columns(&d.of_heads.get(1), &mut grads.dt_bias)?;
    }
    let tails = initial.map(|state| &state.conv);
    let (mut d_qkv, mut d_tails) =
        kernels::delta_mix_backward(&d.mixed, (&rows.qkv, &weights.conv, tails), layout, sizes, &mut grads.conv)?;
    if let Some(d_last) = d_last {
        add_last_rows(&mut d_qkv, &mut d_tails, &d_last.conv, sequences)?;
    }
    Ok((DeltaRows { qkv: d_qkv, z: dz, b: d.b, a: d.a }, DeltaState { conv: d_tails, rule: d.initial }))
}

fn sizes(options: DeltaOptions) -> DeltaSizes {
    let heads = options.heads;
    DeltaSizes { key_heads: heads.num_key_heads as i64, heads: heads.num_value_heads as i64 }
}

/// What the convolution gives, and the scan over chunks; `prepared` is where a backward's tensors of chunks are kept.
fn scan(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    layout: &DeltaLayout,
    sizes: DeltaSizes,
    kept: Option<&mut Option<kernels::DeltaPrepared>>,
) -> Result<(Tensor, DeltaScan)> {
    let tails = initial.map(|state| &state.conv);
    let mixed = kernels::delta_mix(&rows.qkv, &weights.conv, tails, layout, sizes)?;
    let (of_rows, of_heads) = ([&rows.a, &rows.b], [&weights.a_log, &weights.dt_bias]);
    let prepared = kernels::delta_prepare(&mixed, of_rows, of_heads, layout, sizes, kept.is_some())?;
    let states = initial.map(|state| &state.rule);
    let scan = kernels::delta_scan(&mixed, &prepared, states, layout, sizes, kept.is_some())?;
    if let Some(kept) = kept {
        *kept = Some(prepared);
    }
    Ok((mixed, scan))
}

/// The last rows of every sequence, tails included. [N, W - 1, C]
fn last_rows(rows: &DeltaRows, tails: Option<&Tensor>, sequences: &Sequences) -> Result<Tensor> {
    let (tokens, channels) = (rows.qkv.size()[0], rows.qkv.size()[1]);
    let shape = [sequences.num_sequences, -1, channels];
    let earlier = match tails {
        Some(tails) => tails.f_reshape([-1, channels])?,
        None => Tensor::f_zeros([sequences.tails.size()[0], channels], (rows.qkv.kind(), rows.qkv.device()))?,
    };
    if tokens == 0 {
        return Ok(earlier.f_view(shape)?);
    }
    let own = rows.qkv.f_index_select(0, &sequences.tails.f_clamp_max(tokens - 1)?)?;
    let earlier = earlier.f_index_select(0, &sequences.tails.f_sub_scalar(tokens)?.f_clamp_min_(0)?)?;
    let is_own = sequences.tails.f_lt(tokens)?.unsqueeze(1);
    Ok(own.f_where_self(&is_own, &earlier)?.f_view(shape)?)
}

/// Adds the gradient of what [`last_rows`] returned.
fn add_last_rows(d_x: &mut Tensor, d_tails: &mut Tensor, d_last: &Tensor, sequences: &Sequences) -> Result<()> {
    let (tokens, channels) = (d_x.size()[0], d_x.size()[1]);
    let d_last = d_last.f_reshape([-1, channels])?;
    let is_own = sequences.tails.f_lt(tokens)?.unsqueeze(1);
    if tokens > 0 {
        // Rows of a sequence are its own, so that the sum of a row has one order; those of tails add zeros to the last row.
        let own = d_last.f_mul(&is_own)?;
        let rows = sequences.tails.f_clamp_max(tokens - 1)?;
        kernels::add_rows(&own, &rows, d_x)?;
    }
    let rows = sequences.tails.f_sub_scalar(tokens)?.f_clamp_min_(0)?;
    kernels::add_rows(&d_last.f_mul(&is_own.f_logical_not()?)?, &rows, &mut d_tails.view([-1, channels]))
}
