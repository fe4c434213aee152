//! Gated delta nets with CUDA kernels: bfloat16, heads of width 128, a convolution over four tokens. On a GPU all other cases use libtorch's
//! operations, as on CPUs.

use tch::Tensor;

use super::{DeltaChunks, DeltaOptions, DeltaRows, DeltaState, DeltaWeights, Forward, Results, Sequences};
use crate::cuda::kernels::{self, DeltaSaved, DeltaScan, DeltaSizes};
use crate::error::Result;

/// Whether the kernels support these rows and heads.
pub(super) fn serves(rows: &DeltaRows, options: DeltaOptions) -> bool {
    let heads = options.heads;
    kernels::delta_serves(&rows.qkv, [heads.key_dim, heads.value_dim, heads.conv_width])
}

/// Computes a forward like [`super::run`].
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn run(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
    keeps_chunks: bool,
) -> Result<Results> {
    let tails = initial.map(|state| &state.conv);
    let mixed = kernels::delta_mix(&rows.qkv, &weights.conv, tails, &sequences.layout, sizes(options))?;
    let states = initial.map(|state| &state.rule);
    let DeltaScan { o, last, kept } = scan(&mixed, (rows, weights), states, sequences, options, keeps_chunks)?;
    drop(mixed);
    let output = kernels::delta_norm(&o, &rows.z, &weights.norm, options.eps)?.flatten(1, 2);
    Ok(Results { output, last, chunks: kept.map(|kept| DeltaChunks::Kernels(o, kept)) })
}

/// Computes gradients like [`super::backward`], for rows in bfloat16.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If the chunks come from other operations than these kernels.
pub(super) fn backward(
    (d_output, d_last): (&Tensor, Option<&DeltaState>), // [T, H dv]
    rows: &DeltaRows,
    weights: &DeltaWeights,
    forward: Forward<'_>,
    sequences: &Sequences,
    options: DeltaOptions,
    grads: &mut DeltaWeights,
) -> Result<(DeltaRows, DeltaState)> {
    let (layout, sizes, tails) = (&sequences.layout, sizes(options), forward.tails());
    let mixed = kernels::delta_mix(&rows.qkv, &weights.conv, tails, layout, sizes)?;
    let (o, kept) = match forward {
        Forward::Kept(DeltaChunks::Kernels(o, kept), _) => (o, kept),
        Forward::Kept(DeltaChunks::Composed(..), _) => {
            panic!("the forward pass kept chunks of the composed operations, not of the kernels")
        }
        Forward::Again(initial) => {
            let states = initial.map(|state| &state.rule);
            let DeltaScan { o, kept, .. } = scan(&mixed, (rows, weights), states, sequences, options, true)?;
            (o, kept.expect("asked for"))
        }
    };
    let d_output = d_output.f_contiguous()?;
    let [d_o, dz] =
        kernels::delta_norm_backward(&d_output, [&o, &rows.z], &weights.norm, options.eps, &mut grads.norm)?;
    drop(o);
    let d_rule = d_last.map(|state| &state.rule);
    let of_heads = [&weights.a_log, &weights.dt_bias];
    let saved = DeltaSaved { mixed: &mixed, kept: &kept, a: &rows.a, of_heads };
    let d = kernels::delta_backward(&d_o, d_rule, &saved, layout, sizes)?;
    drop((d_o, mixed, kept));
    if layout.num_tokens > 0 {
        kernels::add_columns(&d.of_heads.get(0), &mut grads.a_log)?;
        kernels::add_columns(&d.of_heads.get(1), &mut grads.dt_bias)?;
    }
    let [mut d_qkv, mut d_tails] =
        kernels::delta_mix_backward(&d.mixed, [&rows.qkv, &weights.conv], tails, layout, sizes, &mut grads.conv)?;
    if let Some(d_last) = d_last {
        add_last_rows(&mut d_qkv, &mut d_tails, &d_last.conv, sequences)?;
    }
    Ok((DeltaRows { qkv: d_qkv, z: dz, b: d.b, a: d.a }, DeltaState { conv: d_tails, rule: d.initial }))
}

fn sizes(options: DeltaOptions) -> DeltaSizes {
    let heads = options.heads;
    DeltaSizes { key_heads: heads.num_key_heads as i64, heads: heads.num_value_heads as i64 }
}

/// Runs the scan over chunks.
fn scan(
    mixed: &Tensor, // [T, C]
    (rows, weights): (&DeltaRows, &DeltaWeights),
    initial: Option<&Tensor>, // [N, H, dk, dv]
    sequences: &Sequences,
    options: DeltaOptions,
    keeps_chunks: bool,
) -> Result<DeltaScan> {
    let (layout, sizes) = (&sequences.layout, sizes(options));
    let (of_rows, of_heads) = ([&rows.a, &rows.b], [&weights.a_log, &weights.dt_bias]);
    let prepared = kernels::delta_prepare(mixed, of_rows, of_heads, layout, sizes, keeps_chunks)?;
    kernels::delta_scan(mixed, prepared, initial, layout, sizes)
}

/// Adds the gradient of the result of [`super::conv::last_rows`].
fn add_last_rows(d_x: &mut Tensor, d_tails: &mut Tensor, d_last: &Tensor, sequences: &Sequences) -> Result<()> {
    let (tokens, channels) = (d_x.size()[0], d_x.size()[1]);
    let d_last = d_last.f_reshape([-1, channels])?;
    let is_own = sequences.tails.f_lt(tokens)?.unsqueeze(1);
    if tokens > 0 {
        // A sequence's rows are only its own, so each row's sum has one order. Tail rows add zeros to the last row.
        let own = d_last.f_mul(&is_own)?;
        let rows = sequences.tails.f_clamp_max(tokens - 1)?;
        kernels::add_rows(&own, &rows, d_x)?;
    }
    let rows = sequences.tails.f_sub_scalar(tokens)?.f_clamp_min_(0)?;
    kernels::add_rows(&d_last.f_mul(&is_own.f_logical_not()?)?, &rows, &mut d_tails.view([-1, channels]))
}
