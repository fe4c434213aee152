//! The gated delta net of Qwen3.5 and Qwen3-Next between its projections: a causal convolution, the gated delta rule on normalized queries and keys,
//! and a gated norm. Instead of the keys and values of all tokens, a sequence has a [`DeltaState`].
//!
//! Packed sequences do not influence each other. A sequence may start from a state, so that it can be computed in parts, and several sequences can
//! continue from one: a fork copies the state, and a state's gradient is the sum of its forks' gradients.
//!
//! T tokens, N sequences, Hk key heads, H value heads, dk and dv widths of a head, C = 2 Hk dk + H dv channels, W the convolution's width. States of
//! the rule have the accumulation type, those of the convolution the rows' type.

mod conv;
mod drafts;
mod gates;
mod gpu;
mod packed;
mod rule;
mod sequences;
#[cfg(test)]
mod tests;

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels;
use crate::error::{Error, Result};
use crate::torch::accumulation_kind;
use rule::DeltaTokens;

pub use crate::cuda::kernels::{DeltaHeads, DeltaOptions, DeltaRows, DeltaWeights};
pub use drafts::{DraftedRows, DraftedState, StoredAndRows};
pub use packed::{PackedChunks, PackedSequences};
pub use sequences::Sequences;

/// The states of sequences after some of their tokens, or the gradients of these states.
#[derive(Debug)]
pub struct DeltaState {
    /// The last rows before the convolution.
    pub conv: Tensor, // [N, W - 1, C]
    /// The state of the delta rule.
    pub rule: Tensor, // [N, H, dk, dv]
}

impl DeltaHeads {
    /// Tokens of a sequence that are computed at once.
    pub const CHUNK: usize = sequences::CHUNK as usize;
    /// Average length of sequences that is assumed when memory of the last chunks and states is estimated. Shorter completions need more.
    pub const MEAN_TOKENS: usize = 256;

    /// Number of channels of the convolution.
    pub fn channels(self) -> usize {
        2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim
    }
}

impl DeltaState {
    /// The states of sequences without tokens, for rows of `kind`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn zeros(heads: DeltaHeads, num_sequences: usize, kind: Kind, device: Device) -> Result<Self> {
        let DeltaHeads { num_value_heads, key_dim, value_dim, conv_width, .. } = heads;
        let zeros = |shape: &[usize], kind| {
            let shape: Vec<_> = std::iter::once(&num_sequences).chain(shape).map(|&size| size as i64).collect();
            Tensor::f_zeros(shape, (kind, device))
        };
        Ok(Self {
            conv: zeros(&[conv_width - 1, heads.channels()], kind)?,
            rule: zeros(&[num_value_heads, key_dim, value_dim], accumulation_kind(kind))?,
        })
    }

    /// Bytes of one sequence's state, for rows of `kind`.
    pub fn bytes(heads: DeltaHeads, kind: Kind) -> usize {
        let DeltaHeads { num_value_heads, key_dim, value_dim, conv_width, .. } = heads;
        let wide = accumulation_kind(kind).elt_size_in_bytes();
        (conv_width - 1) * heads.channels() * kind.elt_size_in_bytes() + num_value_heads * key_dim * value_dim * wide
    }

    /// Copies the states of some sequences, each possibly several times.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn fork(&self, sequences: &Tensor /* [M] int64 */) -> Result<Self> {
        let select = |t: &Tensor| t.f_index_select(0, sequences);
        Ok(Self { conv: select(&self.conv)?, rule: select(&self.rule)? })
    }

    /// Sums the gradients of forks to the gradients of the `num_sequences` original states.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn sum_of_forks(&self, sequences: &Tensor /* [M] int64 */, num_sequences: i64) -> Result<Self> {
        let sum = |t: &Tensor| {
            let mut shape = t.size();
            shape[0] = num_sequences;
            let mut sums = Tensor::f_zeros(shape, (t.kind(), t.device()))?;
            if !kernels::serve(t) {
                return Ok(sums.f_index_add_(0, sequences, t)?);
            }
            if t.numel() > 0 {
                let rows = t.f_reshape([t.size()[0], -1])?;
                kernels::add_rows(&rows, sequences, &mut sums.view([num_sequences, -1]))?;
            }
            Ok::<_, Error>(sums)
        };
        Ok(Self { conv: sum(&self.conv)?, rule: sum(&self.rule)? })
    }
}

/// Tensors that the forward keeps for the backward: the outputs of the delta rule [T, H, dv], before the gated norm, and its intermediate results for
/// each chunk of 64 tokens.
#[derive(Debug)]
enum DeltaChunks {
    /// From a forward with libtorch's operations.
    Composed(Tensor, rule::Kept),
    /// From a forward with the CUDA kernels.
    Kernels(Tensor, kernels::DeltaKept),
}

/// How a backward obtains the forward's intermediate results per chunk.
enum Forward<'a> {
    /// They were kept. Also has the rows before the sequences' first tokens. [N, W - 1, C]
    Kept(DeltaChunks, Option<&'a Tensor>),
    /// They are recomputed from the sequences' initial states.
    Again(Option<&'a DeltaState>),
}

impl<'a> Forward<'a> {
    /// The rows before the sequences' first tokens.
    fn tails(&self) -> Option<&'a Tensor> {
        match *self {
            Self::Kept(_, tails) => tails,
            Self::Again(initial) => initial.map(|state| &state.conv),
        }
    }
}

/// Results of a forward.
struct Results {
    output: Tensor, // [T, H dv], of the rows' kind
    /// The delta rule's states after the sequences.
    last: Tensor, // [N, H, dk, dv]
    chunks: Option<DeltaChunks>,
}

/// Returns the outputs before the last projection [T, H dv], in the rows' type, and the states after the sequences.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
) -> Result<(Tensor, DeltaState)> {
    let Results { output, last, .. } = run(rows, weights, initial, sequences, options, false)?;
    let conv = conv::last_rows(&rows.qkv, initial.map(|state| &state.conv), sequences)?;
    Ok((output, DeltaState { conv, rule: last }))
}

/// Computes a forward without the convolution's last rows; keeps chunks if requested.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
fn run(
    rows: &DeltaRows,
    weights: &DeltaWeights,
    initial: Option<&DeltaState>,
    sequences: &Sequences,
    options: DeltaOptions,
    keeps_chunks: bool,
) -> Result<Results> {
    if gpu::serves(rows, options) {
        return gpu::run(rows, weights, initial, sequences, options, keeps_chunks);
    }
    let mixed = conv::forward(&rows.qkv, &weights.conv, initial.map(|state| &state.conv), sequences)?;
    let tokens = UnitHeads::new(&mixed, options.heads)?.tokens(rows, weights)?;
    drop(mixed);
    let states = initial.map(|state| &state.rule);
    let (o, last, kept) = rule::forward(&tokens, states, &sequences.chunks, keeps_chunks)?;
    let output = finish(&o, rows, weights, options)?;
    Ok(Results { output, last, chunks: kept.map(|kept| DeltaChunks::Composed(o, kept)) })
}

/// Processes one token of every sequence (T = N) and updates `state`. [N, H dv]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn step(rows: &DeltaRows, weights: &DeltaWeights, state: &mut DeltaState, options: DeltaOptions) -> Result<Tensor> {
    finish(&advance(rows, weights, state, options.heads)?, rows, weights, options)
}

/// Computes [`step`] up to the gated norm, without it. [N, H, dv]
fn advance(rows: &DeltaRows, weights: &DeltaWeights, state: &mut DeltaState, heads: DeltaHeads) -> Result<Tensor> {
    let mixed = conv::step(&rows.qkv, &weights.conv, &mut state.conv)?;
    let tokens = UnitHeads::new(&mixed, heads)?.tokens(rows, weights)?;
    rule::step(&tokens, &mut state.rule)
}

/// Returns the gradients of the rows and of the initial states, in the accumulation type; with the CUDA kernels those of rows are in the rows' type.
/// Adds the gradients of the weights in place. `d_last` is the gradient of the states that [`forward`] returned. The convolution and the
/// normalization are recomputed.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
///
/// # Panics
/// If kept chunks come from the CUDA kernels but these do not support such rows.
fn backward(
    (d_output, d_last): (&Tensor, Option<&DeltaState>), // [T, H dv]
    rows: &DeltaRows,
    weights: &DeltaWeights,
    forward: Forward<'_>,
    sequences: &Sequences,
    options: DeltaOptions,
    grads: &mut DeltaWeights,
) -> Result<(DeltaRows, DeltaState)> {
    if gpu::serves(rows, options) {
        return gpu::backward((d_output, d_last), rows, weights, forward, sequences, options, grads);
    }
    let tails = forward.tails();
    let mixed = conv::forward(&rows.qkv, &weights.conv, tails, sequences)?;
    let heads = UnitHeads::new(&mixed, options.heads)?;
    drop(mixed);
    let tokens = heads.tokens(rows, weights)?;
    let (o, kept) = match forward {
        Forward::Kept(DeltaChunks::Composed(o, kept), _) => (o, kept),
        Forward::Kept(DeltaChunks::Kernels(..), _) => {
            panic!("the forward pass kept chunks of the kernels, not of libtorch's operations")
        }
        Forward::Again(initial) => {
            let states = initial.map(|state| &state.rule);
            let (o, _, kept) = rule::forward(&tokens, states, &sequences.chunks, true)?;
            (o, kept.expect("asked for"))
        }
    };

    let z = rows.z.f_to_kind(o.kind())?.f_view_as(&o)?;
    let d_output = d_output.f_to_kind(o.kind())?.f_view_as(&o)?;
    let (d_o, dz) = gates::gated_norm_backward(&d_output, (&o, &z), &weights.norm, options.eps, &mut grads.norm)?;
    drop((o, z));
    let d_rule = d_last.map(|state| &state.rule);
    let (d_tokens, d_states) = rule::backward(&d_o, &tokens, kept, d_rule, &sequences.chunks)?;
    drop(d_o);
    let (da, db) = tokens.gates_backward(&d_tokens, rows, weights, grads)?;
    let d_mixed = heads.backward(&d_tokens)?;
    let d_conv = d_last.map(|state| &state.conv);
    let inputs = (&rows.qkv, &weights.conv);
    let (d_qkv, d_tails) = conv::backward(&d_mixed, inputs, (tails, d_conv), sequences, &mut grads.conv)?;
    let d_rows = DeltaRows { qkv: d_qkv, z: dz.f_flatten(1, 2)?, b: db, a: da };
    Ok((d_rows, DeltaState { conv: d_tails, rule: d_states }))
}

/// Normalized queries and keys with their multipliers, and values.
struct UnitHeads {
    q: Tensor,        // [T, Hk, dk]
    k: Tensor,        // [T, Hk, dk]
    v: Tensor,        // [T, H, dv]
    q_factor: Tensor, // [T, Hk, 1]
    k_factor: Tensor, // [T, Hk, 1]
    scale: f64,
}

impl UnitHeads {
    fn new(mixed: &Tensor /* [T, C] */, heads: DeltaHeads) -> Result<Self> {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, .. } = heads;
        let [key_heads, value_heads, key_dim, value_dim] =
            [num_key_heads, num_value_heads, key_dim, value_dim].map(|size| size as i64);
        let keys = key_heads * key_dim;
        let part = |first, len| mixed.narrow(1, first, len);
        let shape = [-1, key_heads, key_dim];
        let (q, q_factor) = gates::unit_length(&part(0, keys).f_contiguous()?.view(shape))?;
        let (k, k_factor) = gates::unit_length(&part(keys, keys).f_contiguous()?.view(shape))?;
        let v = part(2 * keys, value_heads * value_dim).f_contiguous()?.view([-1, value_heads, value_dim]);
        Ok(Self { q, k, v, q_factor, k_factor, scale: (key_dim as f64).powf(-0.5) })
    }

    fn tokens(&self, rows: &DeltaRows, weights: &DeltaWeights) -> Result<DeltaTokens> {
        let kind = self.v.kind();
        let [a, b, a_log, dt_bias] = [&rows.a, &rows.b, &weights.a_log, &weights.dt_bias].map(|t| t.f_to_kind(kind));
        Ok(DeltaTokens {
            q: self.q.f_mul_scalar(self.scale)?,
            k: self.k.shallow_clone(),
            v: self.v.shallow_clone(),
            g: gates::decay(&a?, &a_log?, &dt_bias?)?,
            beta: gates::sigmoid(&b?)?,
        })
    }

    /// Returns the gradient of the convolution's output. [T, C]
    fn backward(self, d: &DeltaTokens) -> Result<Tensor> {
        let dq = gates::unit_length_backward(&d.q.f_mul_scalar(self.scale)?, &self.q, &self.q_factor)?;
        let dk = gates::unit_length_backward(&d.k, &self.k, &self.k_factor)?;
        Ok(Tensor::f_cat(&[dq.f_flatten(1, 2)?, dk.f_flatten(1, 2)?, d.v.f_flatten(1, 2)?], 1)?)
    }
}

impl DeltaTokens {
    /// Returns the gradients of `a` and `b`, [T, H] each; adds those of A_log and dt_bias in place.
    fn gates_backward(
        &self,
        d: &DeltaTokens,
        rows: &DeltaRows,
        weights: &DeltaWeights,
        grads: &mut DeltaWeights,
    ) -> Result<(Tensor, Tensor)> {
        let kind = self.v.kind();
        let [a, a_log, dt_bias] = [&rows.a, &weights.a_log, &weights.dt_bias].map(|t| t.f_to_kind(kind));
        let [da, d_log, d_bias] = gates::decay_backward(&d.g, &a?, &a_log?, &dt_bias?)?;
        let _ = grads.a_log.f_add_(&d_log)?;
        let _ = grads.dt_bias.f_add_(&d_bias)?;
        let db = self.beta.f_rsub_scalar(1.0)?.f_mul_(&self.beta)?.f_mul_(&d.beta)?;
        Ok((da, db))
    }
}

/// Applies the gated norm to every head. [T, H dv]
fn finish(
    o: &Tensor, // [T, H, dv]
    rows: &DeltaRows,
    weights: &DeltaWeights,
    options: DeltaOptions,
) -> Result<Tensor> {
    let z = rows.z.f_to_kind(o.kind())?.f_view_as(o)?;
    Ok(gates::gated_norm(o, &z, &weights.norm, options.eps)?.f_flatten(1, 2)?)
}
