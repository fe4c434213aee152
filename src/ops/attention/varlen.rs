//! One attention over packed runs, o = softmax(scale * q k^T) v, computed by the most suitable kernel.
//!
//! On a GPU, bfloat16 uses cuDNN or flash attention ([`AttentionKernel`] has the rule). On a CPU, runs are padded in buckets for libtorch's flash
//! attention, which never stores [len, len]; the shortest runs use batched GEMMs with an explicit softmax, which are faster there. On a GPU, types
//! other than bfloat16 use the explicit path at any length.

use tch::{Kind, Tensor};

use super::kernel::AttentionKernel;
use super::padded::LengthBucket;
use super::planned::PlannedRuns;
use super::runs::{Sees, as_runs};
use crate::error::Result;
use crate::ops::try_map;
use crate::torch::{
    Attended, QkvGradients, SavedAttention, accumulation_kind, check_room, cudnn_backward, cudnn_forward,
    flash_backward, flash_forward, scalar,
};

/// Longest padded keys for which a CPU uses the explicit path.
const EXPLICIT_LEN: i64 = 48;

/// Computes attention; the log-sum-exp is in the accumulation type. o [T, H, hd], lse [T, H]
pub(super) fn forward(
    q: &Tensor, // [T, H, hd]
    k: &Tensor, // [Tk, Hkv, hd]
    v: &Tensor, // [Tk, Hkv, hd]
    runs: &PlannedRuns,
    scale: f64,
) -> Result<Attended> {
    if q.numel() == 0 {
        return Ok(Attended { o: q.f_zeros_like()?, lse: q.select(2, 0).f_to_kind(accumulation_kind(q.kind()))? });
    }
    match runs.kernel(q) {
        AttentionKernel::Dense(dense) => {
            let [q_runs, k, v] = [(q, dense.q_len), (k, dense.k_len), (v, dense.k_len)].map(|(t, len)| as_runs(t, len));
            let Attended { o, lse } = cudnn_forward(&q_runs, &k, &v, runs.rows.sees != Sees::All, scale)?;
            let size = q.size(); // [T, H, hd]
            Ok(Attended { o: o.transpose(1, 2).f_reshape(&size)?, lse: lse.transpose(1, 2).f_reshape(&size[..2])? })
        }
        AttentionKernel::Mixed(mixed) => mixed.forward(q, k, v, scale),
        AttentionKernel::Flash => {
            let Attended { o, lse } = flash_forward(q, k, v, runs.rows.varlen()?, scale)?;
            Ok(Attended { o, lse: lse.tr() })
        }
        AttentionKernel::Padded => padded_forward(q, k, v, runs, scale),
    }
}

/// Computes gradients from the inputs and results of [`forward`]. `o` and `lse` may come from a softmax over more keys than those given here: with p
/// = exp(scale * q k^T - lse) and delta = rowsum(d_o * o), the gradients of these keys' part are exact.
pub(super) fn backward(
    d_o: &Tensor,          // [T, H, hd]
    saved: SavedAttention, // q, o [T, H, hd], k, v [Tk, Hkv, hd], lse [T, H]
    runs: &PlannedRuns,
    scale: f64,
) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    if q.numel() == 0 {
        return Ok(QkvGradients { dq: q.f_zeros_like()?, dk: k.f_zeros_like()?, dv: v.f_zeros_like()? });
    }
    match runs.kernel(q) {
        AttentionKernel::Dense(dense) => {
            let [d_o, q_runs, o] = [d_o, q, o].map(|t| as_runs(t, dense.q_len));
            let [k_runs, v_runs] = [k, v].map(|t| as_runs(t, dense.k_len));
            // Unsqueezed last: for a single run there is no copy, and cuDNN reads the last dimension's stride.
            let lse = lse.f_reshape([dense.runs, dense.q_len, -1])?.transpose(1, 2); // [B, H, L]
            let lse = lse.f_contiguous()?.unsqueeze(-1); // [B, H, L, 1]
            let causal = runs.rows.sees != Sees::All;
            let of_runs = SavedAttention { q: &q_runs, k: &k_runs, v: &v_runs, o: &o, lse: &lse };
            let QkvGradients { dq, dk, dv } = cudnn_backward(&d_o, of_runs, causal, scale)?;
            let rows = |t: Tensor, like: &Tensor| t.transpose(1, 2).f_reshape(like.size());
            Ok(QkvGradients { dq: rows(dq, q)?, dk: rows(dk, k)?, dv: rows(dv, v)? })
        }
        AttentionKernel::Mixed(mixed) => mixed.backward(d_o, saved, scale),
        AttentionKernel::Flash => {
            let lse = lse.tr().f_contiguous()?; // [H, T], as the forward gave it
            let saved = SavedAttention { q, k, v, o: &o.f_contiguous()?, lse: &lse };
            flash_backward(&d_o.f_contiguous()?, saved, runs.rows.varlen()?, scale)
        }
        AttentionKernel::Padded => padded_backward(d_o, saved, runs, scale),
    }
}

fn padded_forward(q: &Tensor, k: &Tensor, v: &Tensor, runs: &PlannedRuns, scale: f64) -> Result<Attended> {
    let padded = runs.padded()?;
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for bucket in &padded.buckets {
        let (q, k, v) = (gather_q(q, bucket, runs)?, gather_k(k, bucket, runs)?, gather_k(v, bucket, runs)?);
        let own = if is_explicit(bucket, &q) {
            explicit_forward(&q, &k, &v, bucket, scale)?
        } else {
            cpu_flash_forward(&q, &k, &v, bucket, scale)?
        };
        o.push(own.o);
        lse.push(own.lse);
    }
    let size = q.size();
    Ok(Attended {
        o: scatter(o, &padded.unpad_q)?.view(size.as_slice()),
        lse: scatter(lse, &padded.unpad_q)?.view(&size[..2]),
    })
}

fn padded_backward(d_o: &Tensor, saved: SavedAttention, runs: &PlannedRuns, scale: f64) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    let padded = runs.padded()?;
    for bucket in &padded.buckets {
        let [q, o, d_o] = try_map([q, o, d_o], |t| gather_q(t, bucket, runs))?; // [B, L, G, hd]
        let [k, v] = try_map([k, v], |t| gather_k(t, bucket, runs))?; // [B, Lk, 1, hd]
        let lse = gather_q(&lse.unsqueeze(-1), bucket, runs)?.squeeze_dim(-1); // [B, L, G]
        let _ = d_o.view([-1, d_o.size()[2] * d_o.size()[3]]).f_index_fill_(0, &bucket.q.padding, 0.0)?;
        let saved = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse };
        let grads = if is_explicit(bucket, &d_o) {
            explicit_backward(&d_o, saved, bucket, scale)?
        } else {
            cpu_flash_backward(&d_o, saved, bucket, scale)?
        };
        dq.push(grads.dq);
        dk.push(grads.dk);
        dv.push(grads.dv);
    }
    let join =
        |parts, unpad, like: &Tensor| -> Result<Tensor> { Ok(scatter(parts, unpad)?.view(like.size().as_slice())) };
    Ok(QkvGradients {
        dq: join(dq, &padded.unpad_q, q)?,
        dk: join(dk, &padded.unpad_k, k)?,
        dv: join(dv, &padded.unpad_k, v)?,
    })
}

fn gather_q(t: &Tensor, bucket: &LengthBucket, runs: &PlannedRuns) -> Result<Tensor> {
    bucket.q.gather(t, runs.rows.num_kv_heads)
}

fn gather_k(t: &Tensor, bucket: &LengthBucket, runs: &PlannedRuns) -> Result<Tensor> {
    bucket.k.gather(t, runs.rows.num_kv_heads)
}

/// Converts the buckets' padded results [B, L, ..] back to rows [T * Hkv, ..].
fn scatter(parts: Vec<Tensor>, unpad: &Tensor) -> Result<Tensor> {
    let rows = parts.iter().map(|t| Ok(t.f_reshape([t.size()[0] * t.size()[1], -1])?)).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_cat(&rows, 0)?.f_index_select(0, unpad)?)
}

fn is_explicit(bucket: &LengthBucket, q: &Tensor) -> bool {
    bucket.k.len <= EXPLICIT_LEN || q.device().is_cuda()
}

fn explicit_forward(q: &Tensor, k: &Tensor, v: &Tensor, bucket: &LengthBucket, scale: f64) -> Result<Attended> {
    let (given, kind, size) = (q.kind(), accumulation_kind(q.kind()), q.size());
    let [q, k, v] = try_map([q, k, v], |t| merge_heads(&t.f_to_kind(kind)?))?;
    let scaled = q.f_mul(&scalar(scale))?;
    drop(q);
    let scores = scaled.f_bmm(&k.transpose(1, 2))?; // [B, L G, Lk]
    drop(scaled);
    let mask = bucket.mask((kind, scores.device()))?;
    let _ = scores.view([-1, size[1], size[2], bucket.k.len]).f_add_(&mask)?;
    let p = scores.f_softmax(-1, None::<Kind>)?;
    // The largest probability is at least 1 / Lk, so its logarithm is accurate.
    let lse = scores.f_amax([-1i64], false)?.f_sub(&p.f_amax([-1i64], false)?.f_log_()?)?;
    Ok(Attended { o: p.f_bmm(&v)?.view(size.as_slice()).f_to_kind(given)?, lse: lse.view(&size[..3]) })
}

fn explicit_backward(d_o: &Tensor, saved: SavedAttention, bucket: &LengthBucket, scale: f64) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    let (kind, size, given) = (lse.kind(), q.size(), d_o.kind());
    let [q, k, v, o, d_o] = try_map([q, k, v, o, d_o], |t| merge_heads(&t.f_to_kind(kind)?))?;
    let scaled = q.f_mul(&scalar(scale))?;
    drop(q);
    let shifted = bucket.mask((kind, lse.device()))?.f_sub(&lse.unsqueeze(-1))?; // [B, L, G, Lk]
    let p = shifted.expand([-1, -1, -1, bucket.k.len], false).f_reshape([-1, size[1] * size[2], bucket.k.len])?;
    let scores = p.f_empty_like()?; // [B, L G, Lk]
    let p = p.f_baddbmm_out(&scores, &scaled, &k.transpose(1, 2))?.f_exp_()?;
    let delta = d_o.f_mul(&o)?.f_sum_dim_intlist(-1, true, None::<Kind>)?; // [B, L G, 1]
    drop(o);
    check_room(&p.size(), (kind, p.device()))?;
    let mut ds = delta.f_baddbmm(&d_o, &v.transpose(1, 2), -1.0, 1.0)?;
    let ds = ds.f_mul_(&p)?; // [B, L G, Lk]
    let dq = ds.f_bmm(&k)?.f_mul_scalar_(scale)?;
    let (dk, dv) = (ds.transpose(1, 2).f_bmm(&scaled)?, p.transpose(1, 2).f_bmm(&d_o)?);
    let dq = dq.view(size.as_slice()).f_to_kind(given)?;
    Ok(QkvGradients { dq, dk: dk.f_to_kind(given)?, dv: dv.f_to_kind(given)? })
}

fn cpu_flash_forward(q: &Tensor, k: &Tensor, v: &Tensor, bucket: &LengthBucket, scale: f64) -> Result<Attended> {
    let group = q.size()[2];
    let [q, k, v] = [q, k, v].map(|t| as_heads(t, group));
    let mask = cpu_flash_mask(&q, bucket)?;
    let flash = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu;
    let (o, lse) = flash(&q, &k, &v, 0.0, mask.is_none() && bucket.is_causal(), mask, scale)?;
    Ok(Attended { o: o.transpose(1, 2), lse: lse.transpose(1, 2) }) // [B, L, G, hd], [B, L, G]
}

fn cpu_flash_backward(d_o: &Tensor, saved: SavedAttention, bucket: &LengthBucket, scale: f64) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    let group = q.size()[2];
    let [q, k, v, o, d_o] = [q, k, v, o, d_o].map(|t| as_heads(t, group));
    let lse = lse.transpose(1, 2);
    let mask = cpu_flash_mask(&q, bucket)?;
    let flash = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward;
    let (dq, dk, dv) = flash(&d_o, &q, &k, &v, &o, &lse, 0.0, mask.is_none() && bucket.is_causal(), mask, scale)?;
    // Each query head has its own gradient of the key/value head that it shares.
    let shared = |t: Tensor| t.f_sum_dim_intlist(1, false, None::<Kind>); // [B, Lk, hd]
    Ok(QkvGradients { dq: dq.transpose(1, 2), dk: shared(dk)?, dv: shared(dv)? })
}

/// Views [B, L, heads, hd] as [B, G, L, hd]; a single head is expanded, not copied.
fn as_heads(t: &Tensor, group: i64) -> Tensor {
    let size = t.size();
    t.transpose(1, 2).expand([size[0], group, size[1], size[3]], false)
}

fn cpu_flash_mask(q: &Tensor, bucket: &LengthBucket) -> Result<Option<Tensor>> {
    if bucket.is_plain() {
        return Ok(None);
    }
    let mask = bucket.mask((q.kind(), q.device()))?.transpose(1, 2); // [B or 1, 1, L or 1, Lk]
    Ok(Some(mask.expand([q.size()[0], q.size()[1], q.size()[2], bucket.k.len], false)))
}

/// Views [B, L, heads, hd] as [B, L * heads, hd].
fn merge_heads(t: &Tensor) -> Result<Tensor> {
    let size = t.size();
    Ok(t.f_reshape([size[0], size[1] * size[2], size[3]])?)
}
