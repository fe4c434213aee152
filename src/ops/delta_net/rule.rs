//! The gated delta rule (arXiv 2412.06464). Each head has a state S [dk, dv]. A token decays the state, reads what it contains for the token's key,
//! and writes the difference to the token's value:
//!
//! ```text
//! S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S
//! ```
//!
//! [`step`] computes this for one token of every sequence. [`forward`] computes chunks of 64 tokens at once in WY form: with G the sum of g from the
//! chunk's start, D_ij = exp(G_i - G_j) for i >= j, and S the state before the chunk,
//!
//! ```text
//! A = strictly lower part of (beta k) k^T * D;   (I + A) [U W] = [beta v, beta exp(G) k]
//! N = U - W S;   P = q k^T * D;   o = exp(G) q S + P N;   S' = exp(G_last) S + (exp(G_last - G) k)^T N
//! ```
//!
//! B chunks of all sequences, C = 64 tokens of a chunk, N sequences, Hk key heads, H value heads, of which H / Hk share a key head. All in the
//! accumulation type.

use tch::{Kind, Tensor};

use super::sequences::{CHUNK, Chunks};
use crate::error::{Error, Result};

/// Inputs of the delta rule for each token. The caller has normalized queries and keys, and scaled queries.
#[derive(Debug)]
pub(super) struct DeltaTokens {
    pub q: Tensor,    // [T, Hk, dk]
    pub k: Tensor,    // [T, Hk, dk]
    pub v: Tensor,    // [T, H, dv]
    pub g: Tensor,    // [T, H]
    pub beta: Tensor, // [T, H]
}

/// Processes one token of every sequence and updates `state`. [N, H, dv]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn step(tokens: &DeltaTokens, state: &mut Tensor /* [N, H, dk, dv] */) -> Result<Tensor> {
    let heads = state.size()[1];
    let [q, k] = [&tokens.q, &tokens.k].map(|t| repeat(&t.unsqueeze(2), heads));
    let (q, k) = (q?, k?); // [N, H, 1, dk]
    let per_head = |t: &Tensor| t.unsqueeze(-1).unsqueeze(-1);
    *state = state.f_mul_(&per_head(&tokens.g.f_exp()?))?;
    let read = k.f_matmul(state)?; // [N, H, 1, dv]
    let delta = tokens.v.f_unsqueeze(2)?.f_sub(&read)?.f_mul_(&per_head(&tokens.beta))?;
    *state = state.f_add_(&k.transpose(2, 3).f_mul(&delta)?)?;
    Ok(q.f_matmul(state)?.squeeze_dim(2))
}

/// Returns the outputs [T, H, dv], the states after every sequence [N, H, dk, dv] and, if requested, the tensors that [`backward`] reads.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn forward(
    tokens: &DeltaTokens,
    initial: Option<&Tensor>, // [N, H, dk, dv]
    chunks: &Chunks,
    keeps: bool,
) -> Result<(Tensor, Tensor, Option<Kept>)> {
    let within = Within::new(tokens, chunks)?;
    let Scan { outputs, state, written } = Scan::new(&within, first_states(tokens, initial, chunks)?, chunks, keeps)?;
    let (o, last) = (unpad(&outputs, chunks)?, state.f_index_select(0, &chunks.rank)?);
    Ok((o, last, written.map(|written| Kept { within, written })))
}

/// Returns the gradients of the tokens and of the initial states [N, H, dk, dv]. `d_last` is the gradient of the states that [`forward`] returned.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(super) fn backward(
    d_o: &Tensor, // [T, H, dv]
    tokens: &DeltaTokens,
    Kept { within, written: Written { starts, news } }: Kept,
    d_last: Option<&Tensor>, // [N, H, dk, dv]
    chunks: &Chunks,
) -> Result<(DeltaTokens, Tensor)> {
    let d_o = pad(d_o, chunks)?;
    let d_state = first_states(tokens, d_last, chunks)?;
    let d_ends = starts.f_empty_like()?;
    let d_new = within.scores.transpose(2, 3).f_matmul(&d_o)?; // [B, H, C, dv]
    let d_start = within.q_now.transpose(2, 3).f_matmul(&d_o)?; // [B, H, dk, dv]
    for (first, count) in chunks.steps().rev() {
        let own = |t: &Tensor| t.narrow(0, first, count);
        let mut d_end = d_state.narrow(0, 0, count);
        own(&d_ends).f_copy_(&d_end)?;
        let d_new = own(&d_new).f_add_(&own(&within.k_end).f_matmul(&d_end)?)?;
        let mut d_start = own(&d_start).f_sub_(&own(&within.reads).transpose(2, 3).f_matmul(&d_new)?)?;
        d_end.f_copy_(&d_start.f_add_(&d_end.f_mul(&own(&within.whole))?)?)?;
    }
    drop(d_start);
    let d_scores = d_o.f_matmul(&news.transpose(2, 3))?;
    let d_q_now = d_o.f_matmul(&starts.transpose(2, 3))?;
    let d_k_end = news.f_matmul(&d_ends.transpose(2, 3))?;
    drop((d_o, news));
    let d_reads = d_new.f_matmul(&starts.transpose(2, 3))?.f_neg_()?;
    let d_whole = starts.f_mul(&d_ends)?.f_sum_dim_intlist([-2i64, -1].as_slice(), true, starts.kind())?;
    drop((starts, d_ends));
    let d_tokens = within.backward(Outward { d_scores, d_q_now, d_k_end, d_new, d_reads, d_whole }, tokens, chunks)?;
    Ok((d_tokens, d_state.f_index_select(0, &chunks.rank)?))
}

/// Tensors of chunks that a backward reads.
#[derive(Debug)]
pub(super) struct Kept {
    within: Within,
    written: Written,
}

/// The tensors of chunks that do not depend on states.
#[derive(Debug)]
struct Within {
    k: Tensor,      // [B, H, C, dk]
    v: Tensor,      // [B, H, C, dv]
    beta: Tensor,   // [B, H, C, 1]
    now: Tensor,    // [B, H, C, 1] exp(G)
    end: Tensor,    // [B, H, C, 1] exp(G_last - G)
    whole: Tensor,  // [B, H, 1, 1] exp(G_last)
    pairs: Tensor,  // [B, H, C, C] D
    system: Tensor, // [B, H, C, C] A
    q: Tensor,      // [B, H, C, dk]
    q_now: Tensor,  // [B, H, C, dk] exp(G) q
    k_end: Tensor,  // [B, H, C, dk] exp(G_last - G) k
    scores: Tensor, // [B, H, C, C] P
    values: Tensor, // [B, H, C, dv] U
    reads: Tensor,  // [B, H, C, dk] W
}

impl Within {
    fn new(tokens: &DeltaTokens, chunks: &Chunks) -> Result<Self> {
        let heads = tokens.v.size()[1];
        let [q, k] = [&tokens.q, &tokens.k].map(|t| repeat(&pad(t, chunks)?, heads));
        let (q, k, v) = (q?, k?, pad(&tokens.v, chunks)?);
        let [g, beta] = [&tokens.g, &tokens.beta].map(|t| pad(&t.unsqueeze(-1), chunks));
        // Sums are in float64, because differences of two large sums decide how strongly neighbouring tokens interact.
        let (sum, beta, kind) = (g?.f_cumsum(2, Kind::Double)?, beta?, v.kind());
        let last = sum.narrow(2, CHUNK - 1, 1);
        let exp = |sum: Tensor| sum.f_to_kind(kind)?.f_exp_();
        let (now, end, whole) = (exp(sum.copy())?, exp(last.f_sub(&sum)?)?, exp(last.copy())?);
        // Differences above the diagonal are positive and could overflow; they are clamped and not used.
        let pairs = exp(sum.f_sub(&sum.transpose(2, 3))?.f_clamp_max_(0.0)?)?.f_tril_(0)?;
        let k_beta = k.f_mul(&beta)?;
        let system = k_beta.f_matmul(&k.transpose(2, 3))?.f_mul_(&pairs)?.f_tril_(-1)?;
        let right = Tensor::f_cat(&[v.f_mul(&beta)?, k_beta.f_mul(&now)?], -1)?;
        let solved = system.f_linalg_solve_triangular(&right, false, true, true)?;
        let v_dim = v.size()[3];
        let (values, reads) = (solved.narrow(3, 0, v_dim), solved.narrow(3, v_dim, k.size()[3]));
        let scores = q.f_matmul(&k.transpose(2, 3))?.f_mul_(&pairs)?;
        let (q_now, k_end) = (q.f_mul(&now)?, k.f_mul(&end)?);
        let (values, reads) = (values.f_contiguous()?, reads.f_contiguous()?);
        Ok(Self { k, v, beta, now, end, whole, pairs, system, q, q_now, k_end, scores, values, reads })
    }
}

/// Gradients of those tensors of [`Within`] that the scan over chunks reads.
struct Outward {
    d_scores: Tensor, // [B, H, C, C]
    d_q_now: Tensor,  // [B, H, C, dk]
    d_k_end: Tensor,  // [B, H, C, dk]
    d_new: Tensor,    // [B, H, C, dv], which is that of U
    d_reads: Tensor,  // [B, H, C, dk]
    d_whole: Tensor,  // [B, H, 1, 1]
}

impl Within {
    fn backward(self, outward: Outward, tokens: &DeltaTokens, chunks: &Chunks) -> Result<DeltaTokens> {
        let Outward { mut d_scores, d_q_now, d_k_end, d_new, d_reads, d_whole } = outward;
        let last_row = |t: &Tensor| t.f_sum_dim_intlist(-1, true, t.kind());
        let transposed = self.system.transpose(2, 3);
        let d_solved = Tensor::f_cat(&[d_new, d_reads], -1)?;
        let d_right = transposed.f_linalg_solve_triangular(&d_solved, true, true, true)?;
        drop(d_solved);
        let solved = Tensor::f_cat(&[&self.values, &self.reads], -1)?;
        let mut d_system = d_right.f_matmul(&solved.transpose(2, 3))?.f_neg_()?.f_tril_(-1)?;
        drop(solved);
        let (v_dim, k_dim) = (self.v.size()[3], self.k.size()[3]);
        let (d_v_beta, d_k_now) = (d_right.narrow(3, 0, v_dim), d_right.narrow(3, v_dim, k_dim));
        let (k, beta) = (&self.k, &self.beta);
        let k_beta = k.f_mul(beta)?;

        // Gradients of the sums of g: through pairs, through the decay from the chunk's start, and through the decay to its end.
        let through = d_system.f_mul(&self.system)?.f_add_(&d_scores.f_mul(&self.scores)?)?;
        let to_end = last_row(&d_k_end.f_mul(&self.k_end)?)?;
        let mut d_sum = last_row(&through)?.f_sub_(&last_row(&through.transpose(2, 3))?)?;
        d_sum = d_sum.f_add_(&last_row(&d_k_now.f_mul(&k_beta)?.f_mul_(&self.now)?)?)?;
        d_sum = d_sum.f_add_(&last_row(&d_q_now.f_mul(&self.q_now)?)?)?.f_sub_(&to_end)?;
        let mut all = to_end.f_sum_dim_intlist(2, true, to_end.kind())?;
        let _ = d_sum.narrow(2, CHUNK - 1, 1).f_add_(&all.f_add_(&d_whole.f_mul(&self.whole)?)?)?;
        let dg = d_sum.f_flip([2])?.f_cumsum(2, d_sum.kind())?.f_flip([2])?;
        drop(through);

        let d_dots = d_scores.f_mul_(&self.pairs)?; // of q k^T
        let d_system = d_system.f_mul_(&self.pairs)?; // of (beta k) k^T
        let dq = d_dots.f_matmul(k)?.f_addcmul_(&d_q_now, &self.now)?;
        let d_k_beta = d_system.f_matmul(k)?.f_addcmul_(&d_k_now, &self.now)?;
        let mut dk = d_dots.transpose(2, 3).f_matmul(&self.q)?;
        dk = dk.f_add_(&d_system.transpose(2, 3).f_matmul(&k_beta)?)?;
        let dk = dk.f_addcmul_(&d_k_end, &self.end)?.f_addcmul_(&d_k_beta, beta)?;
        let d_beta = last_row(&d_v_beta.f_mul(&self.v)?)?.f_add_(&last_row(&d_k_beta.f_mul(k)?)?)?;
        let key_heads = tokens.k.size()[1];
        Ok(DeltaTokens {
            q: unpad(&sum_of_repeats(&dq, key_heads)?, chunks)?,
            k: unpad(&sum_of_repeats(&dk, key_heads)?, chunks)?,
            v: unpad(&d_v_beta.f_mul(beta)?, chunks)?,
            g: unpad(&dg, chunks)?.squeeze_dim(-1),
            beta: unpad(&d_beta, chunks)?.squeeze_dim(-1),
        })
    }
}

struct Scan {
    outputs: Tensor, // [B, H, C, dv]
    /// The states after the last chunk of every sequence, in the order of `Chunks::order`.
    state: Tensor, // [N, H, dk, dv]
    written: Option<Written>,
}

/// Results of the scan over chunks that a backward reads.
#[derive(Debug)]
struct Written {
    /// The states before chunks.
    starts: Tensor, // [B, H, dk, dv]
    /// The differences that chunks write.
    news: Tensor, // [B, H, C, dv]
}

impl Scan {
    fn new(within: &Within, state: Tensor, chunks: &Chunks, keeps: bool) -> Result<Self> {
        let rows = within.values.size();
        let empty = |shape: &[i64]| Tensor::f_empty(shape, (state.kind(), state.device()));
        let states = [rows[0], rows[1], within.k.size()[3], rows[3]];
        let room = || Ok::<_, Error>(Written { starts: empty(&states)?, news: empty(&rows)? });
        let (outputs, written) = (empty(&rows)?, keeps.then(room).transpose()?);
        for (first, count) in chunks.steps() {
            let own = |t: &Tensor| t.narrow(0, first, count);
            let mut start = state.narrow(0, 0, count);
            let new = own(&within.values).f_sub(&own(&within.reads).f_matmul(&start)?)?;
            let output = own(&within.q_now).f_matmul(&start)?.f_add_(&own(&within.scores).f_matmul(&new)?)?;
            own(&outputs).f_copy_(&output)?;
            if let Some(Written { starts, news }) = &written {
                own(starts).f_copy_(&start)?;
                own(news).f_copy_(&new)?;
            }
            let written = own(&within.k_end).transpose(2, 3).f_matmul(&new)?;
            start = start.f_mul_(&own(&within.whole))?;
            let _ = start.f_add_(&written)?;
        }
        Ok(Self { outputs, state, written })
    }
}

/// A copy of the states in the order of `Chunks::order`, or zeros. [N, H, dk, dv]
fn first_states(tokens: &DeltaTokens, states: Option<&Tensor>, chunks: &Chunks) -> Result<Tensor> {
    let (v, k_dim) = (&tokens.v, tokens.k.size()[2]);
    match states {
        Some(states) => Ok(states.f_index_select(0, &chunks.order)?.f_to_kind(v.kind())?),
        None => {
            let shape = [chunks.order.size()[0], v.size()[1], k_dim, v.size()[2]];
            Ok(Tensor::f_zeros(shape, (v.kind(), v.device()))?)
        }
    }
}

/// Copies rows [T, H, d] into chunks, with zeros after the last row of a sequence. [B, H, C, d]
fn pad(rows: &Tensor, chunks: &Chunks) -> Result<Tensor> {
    let size = rows.size();
    let mut padded = Tensor::f_zeros([chunks.count() * CHUNK, size[1], size[2]], (rows.kind(), rows.device()))?;
    let padded = padded.f_index_copy_(0, &chunks.places, rows)?;
    Ok(padded.view([chunks.count(), CHUNK, size[1], size[2]]).f_transpose(1, 2)?.f_contiguous()?)
}

/// Copies the rows back from chunks. [T, H, d]
fn unpad(padded: &Tensor /* [B, H, C, d] */, chunks: &Chunks) -> Result<Tensor> {
    Ok(padded.f_transpose(1, 2)?.f_flatten(0, 1)?.f_index_select(0, &chunks.places)?)
}

/// Repeats every key head for each of its value heads: [.., Hk, n, d] -> [.., H, n, d].
fn repeat(t: &Tensor, heads: i64) -> Result<Tensor> {
    let size = t.size();
    Ok(if size[1] == heads { t.shallow_clone() } else { t.f_repeat_interleave_self_int(heads / size[1], 1, None)? })
}

/// The gradient of [`repeat`].
fn sum_of_repeats(t: &Tensor /* [B, H, C, d] */, key_heads: i64) -> Result<Tensor> {
    let size = t.size();
    let grouped = t.f_view([size[0], key_heads, size[1] / key_heads, size[2], size[3]].as_slice())?;
    Ok(grouped.f_sum_dim_intlist(2, false, t.kind())?)
}
