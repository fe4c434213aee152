//! One attention of packed runs, o = softmax(scale * q k^T) v, through the kernel that serves it best.
//!
//! On a GPU, bfloat16 takes cuDNN's kernels or flash attention ([`Kernel`] has the rule). On a CPU, runs are padded to buckets and
//! take libtorch's flash attention, which never holds [len, len]; the shortest take batched products with an explicit softmax,
//! which are faster there. So do kinds other than bfloat16 on a GPU, at any length.

use tch::{Kind, Tensor};

use super::kernel::Kernel;
use super::padded::Bucket;
use super::runs::{Runs, Sees};
use crate::torch::{SavedAttention, accumulation_kind, cudnn_backward, cudnn_forward, flash_backward, flash_forward};

/// Longest padded keys of the explicit path on a CPU.
const EXPLICIT_LEN: i64 = 48;

/// Why kernels may be trusted with the shapes of a decoder.
pub(super) const FITS: &str = "shapes that the kernel takes";

/// (o, log-sum-exp of the scaled scores in accumulation kind).
pub(super) fn forward(
    q: &Tensor, // [T, H, hd]
    k: &Tensor, // [Tk, Hkv, hd]
    v: &Tensor, // [Tk, Hkv, hd]
    runs: &Runs,
    scale: f64,
) -> (Tensor, Tensor) {
    if q.numel() == 0 {
        return (q.zeros_like(), q.select(2, 0).to_kind(accumulation_kind(q.kind())));
    }
    match runs.kernel(q) {
        Kernel::Dense(dense) => {
            let [q_runs, k, v] = [(q, dense.q_len), (k, dense.k_len), (v, dense.k_len)].map(|(t, len)| as_runs(t, len));
            let (o, lse) = cudnn_forward(&q_runs, &k, &v, runs.sees != Sees::All, scale).expect(FITS);
            let size = q.size(); // [T, H, hd]
            (o.transpose(1, 2).reshape(&size), lse.transpose(1, 2).reshape(&size[..2]))
        }
        Kernel::Mixed(mixed) => mixed.forward(q, k, v, scale),
        Kernel::Flash => {
            let (o, lse) = flash_forward(q, k, v, runs.varlen(), scale).expect(FITS);
            (o, lse.tr())
        }
        Kernel::Padded => padded_forward(q, k, v, runs, scale),
    }
}

/// (dq, dk, dv), from what [`forward`] took and gave. `o` and `lse` may be those of a larger softmax, of which the keys here are
/// a part: with p = exp(scale * q k^T - lse) and delta = rowsum(d_o * o) the gradients are exact for this part.
pub(super) fn backward(
    d_o: &Tensor,          // [T, H, hd]
    saved: SavedAttention, // q, o [T, H, hd], k, v [Tk, Hkv, hd], lse [T, H]
    runs: &Runs,
    scale: f64,
) -> (Tensor, Tensor, Tensor) {
    let SavedAttention { q, k, v, o, lse } = saved;
    if q.numel() == 0 {
        return (q.zeros_like(), k.zeros_like(), v.zeros_like());
    }
    match runs.kernel(q) {
        Kernel::Dense(dense) => {
            let [d_o, q_runs, o] = [d_o, q, o].map(|t| as_runs(t, dense.q_len));
            let [k_runs, v_runs] = [k, v].map(|t| as_runs(t, dense.k_len));
            // Unsqueezed last: of one run the copy is none, and cuDNN reads the stride of the last place.
            let lse = lse.reshape([dense.runs, dense.q_len, -1]).transpose(1, 2).contiguous().unsqueeze(-1); // [B, H, L, 1]
            let causal = runs.sees != Sees::All;
            let of_runs = SavedAttention { q: &q_runs, k: &k_runs, v: &v_runs, o: &o, lse: &lse };
            let (dq, dk, dv) = cudnn_backward(&d_o, of_runs, causal, scale).expect(FITS);
            let rows = |t: Tensor, like: &Tensor| t.transpose(1, 2).reshape(like.size());
            (rows(dq, q), rows(dk, k), rows(dv, v))
        }
        Kernel::Mixed(mixed) => mixed.backward(d_o, saved, scale),
        Kernel::Flash => {
            let lse = lse.tr().contiguous(); // [H, T], as the forward gave it
            let saved = SavedAttention { q, k, v, o: &o.contiguous(), lse: &lse };
            flash_backward(&d_o.contiguous(), saved, runs.varlen(), scale).expect(FITS)
        }
        Kernel::Padded => padded_backward(d_o, saved, runs, scale),
    }
}

/// [T, heads, hd] as [T / len, heads, len, hd], a view.
pub(super) fn as_runs(t: &Tensor, len: i64) -> Tensor {
    t.unflatten(0, [-1, len]).transpose(1, 2)
}

fn padded_forward(q: &Tensor, k: &Tensor, v: &Tensor, runs: &Runs, scale: f64) -> (Tensor, Tensor) {
    let attend = |bucket: &Bucket| {
        let (q, k, v) = (gather_q(q, bucket, runs), gather_k(k, bucket, runs), gather_k(v, bucket, runs));
        if is_explicit(bucket, &q) {
            explicit_forward(&q, &k, &v, bucket, scale)
        } else {
            cpu_flash_forward(&q, &k, &v, bucket, scale)
        }
    };
    let padded = runs.padded();
    let (o, lse): (Vec<_>, Vec<_>) = padded.buckets.iter().map(attend).unzip();
    let size = q.size();
    (scatter(o, &padded.unpad_q).view(size.as_slice()), scatter(lse, &padded.unpad_q).view(&size[..2]))
}

fn padded_backward(d_o: &Tensor, saved: SavedAttention, runs: &Runs, scale: f64) -> (Tensor, Tensor, Tensor) {
    let SavedAttention { q, k, v, o, lse } = saved;
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    let padded = runs.padded();
    for bucket in &padded.buckets {
        let [q, o, d_o] = [q, o, d_o].map(|t| gather_q(t, bucket, runs)); // [B, L, G, hd]
        let [k, v] = [k, v].map(|t| gather_k(t, bucket, runs)); // [B, Lk, 1, hd]
        let lse = gather_q(&lse.unsqueeze(-1), bucket, runs).squeeze_dim(-1); // [B, L, G]
        let _ = d_o.view([-1, d_o.size()[2] * d_o.size()[3]]).index_fill_(0, &bucket.q.padding, 0.0);
        let saved = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse };
        let grads = if is_explicit(bucket, &d_o) {
            explicit_backward(&d_o, saved, bucket, scale)
        } else {
            cpu_flash_backward(&d_o, saved, bucket, scale)
        };
        dq.push(grads.0);
        dk.push(grads.1);
        dv.push(grads.2);
    }
    let join = |parts, unpad, like: &Tensor| scatter(parts, unpad).view(like.size().as_slice());
    (join(dq, &padded.unpad_q, q), join(dk, &padded.unpad_k, k), join(dv, &padded.unpad_k, v))
}

fn gather_q(t: &Tensor, bucket: &Bucket, runs: &Runs) -> Tensor {
    bucket.q.gather(t, runs.num_kv_heads)
}

fn gather_k(t: &Tensor, bucket: &Bucket, runs: &Runs) -> Tensor {
    bucket.k.gather(t, runs.num_kv_heads)
}

/// The buckets' padded [B, L, ..] back as rows [T * Hkv, ..].
fn scatter(parts: Vec<Tensor>, unpad: &Tensor) -> Tensor {
    let rows: Vec<_> = parts.iter().map(|t| t.reshape([t.size()[0] * t.size()[1], -1])).collect();
    Tensor::cat(&rows, 0).index_select(0, unpad)
}

fn is_explicit(bucket: &Bucket, q: &Tensor) -> bool {
    bucket.k.len <= EXPLICIT_LEN || q.device().is_cuda()
}

fn explicit_forward(q: &Tensor, k: &Tensor, v: &Tensor, bucket: &Bucket, scale: f64) -> (Tensor, Tensor) {
    let (given, kind, size) = (q.kind(), accumulation_kind(q.kind()), q.size());
    let [q, k, v] = [q, k, v].map(|t| merge_heads(&t.to_kind(kind)));
    let scores = (q * scale).bmm(&k.transpose(1, 2)); // [B, L G, Lk]
    let _ = scores.view([-1, size[1], size[2], bucket.k.len]).g_add_(&bucket.mask((kind, scores.device())));
    let p = scores.softmax(-1, None::<Kind>);
    // The largest probability is at least 1 / Lk, so its logarithm is accurate.
    let lse = scores.amax([-1i64], false) - p.amax([-1i64], false).log_();
    (p.bmm(&v).view(size.as_slice()).to_kind(given), lse.view(&size[..3]))
}

fn explicit_backward(d_o: &Tensor, saved: SavedAttention, bucket: &Bucket, scale: f64) -> (Tensor, Tensor, Tensor) {
    let SavedAttention { q, k, v, o, lse } = saved;
    let (kind, size, given) = (lse.kind(), q.size(), d_o.kind());
    let [q, k, v, o, d_o] = [q, k, v, o, d_o].map(|t| merge_heads(&t.to_kind(kind)));
    let q = q * scale;
    let shifted = bucket.mask((kind, q.device())) - lse.unsqueeze(-1); // [B, L, G, Lk]
    let p = shifted.expand([-1, -1, -1, bucket.k.len], false).reshape([-1, size[1] * size[2], bucket.k.len]);
    let p = p.baddbmm(&q, &k.transpose(1, 2), 1.0, 1.0).exp_();
    let delta = (&d_o * o).sum_dim_intlist(-1, true, None::<Kind>); // [B, L G, 1]
    let mut ds = delta.baddbmm(&d_o, &v.transpose(1, 2), -1.0, 1.0);
    let ds = ds.g_mul_(&p); // [B, L G, Lk]
    let dq = ds.bmm(&k).g_mul_scalar_(scale);
    let (dk, dv) = (ds.transpose(1, 2).bmm(&q), p.transpose(1, 2).bmm(&d_o));
    (dq.view(size.as_slice()).to_kind(given), dk.to_kind(given), dv.to_kind(given))
}

fn cpu_flash_forward(q: &Tensor, k: &Tensor, v: &Tensor, bucket: &Bucket, scale: f64) -> (Tensor, Tensor) {
    let group = q.size()[2];
    let [q, k, v] = [q, k, v].map(|t| as_heads(t, group));
    let mask = cpu_flash_mask(&q, bucket);
    let flash = Tensor::internal_scaled_dot_product_flash_attention_for_cpu;
    let (o, lse) = flash(&q, &k, &v, 0.0, mask.is_none() && bucket.is_causal(), mask, scale);
    (o.transpose(1, 2), lse.transpose(1, 2)) // [B, L, G, hd], [B, L, G]
}

fn cpu_flash_backward(d_o: &Tensor, saved: SavedAttention, bucket: &Bucket, scale: f64) -> (Tensor, Tensor, Tensor) {
    let SavedAttention { q, k, v, o, lse } = saved;
    let group = q.size()[2];
    let [q, k, v, o, d_o] = [q, k, v, o, d_o].map(|t| as_heads(t, group));
    let lse = lse.transpose(1, 2);
    let mask = cpu_flash_mask(&q, bucket);
    let flash = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward;
    let (dq, dk, dv) = flash(&d_o, &q, &k, &v, &o, &lse, 0.0, mask.is_none() && bucket.is_causal(), mask, scale);
    // Each query head got a gradient of its own for the key-value head they share.
    let shared = |t: Tensor| t.sum_dim_intlist(1, false, None::<Kind>); // [B, Lk, hd]
    (dq.transpose(1, 2), shared(dk), shared(dv))
}

/// [B, L, heads, hd] as [B, G, L, hd]; a single head is expanded, not copied.
fn as_heads(t: &Tensor, group: i64) -> Tensor {
    let size = t.size();
    t.transpose(1, 2).expand([size[0], group, size[1], size[3]], false)
}

fn cpu_flash_mask(q: &Tensor, bucket: &Bucket) -> Option<Tensor> {
    let mask = || bucket.mask((q.kind(), q.device())).transpose(1, 2); // [B or 1, 1, L or 1, Lk]
    let shape = [q.size()[0], q.size()[1], q.size()[2], bucket.k.len];
    (!bucket.is_plain()).then(|| mask().expand(shape, false))
}

/// [B, L, heads, hd] as [B, L * heads, hd].
fn merge_heads(t: &Tensor) -> Tensor {
    let size = t.size();
    t.reshape([size[0], size[1] * size[2], size[3]])
}
