//! Attention over packed sequences: o = softmax(scale * q k^T) v within each sequence, causal.
//!
//! On a CPU, sequences take libtorch's flash attention, which never holds [len, len]; the shortest take batched products with
//! an explicit softmax, which are faster there. On a GPU, bfloat16 takes flash attention over the sequences as they lie, and
//! other kinds the explicit softmax at any length.

use super::layout::{Bucket, PackedLayout};
use crate::torch::{accumulation_kind, flash_backward, flash_forward};
use tch::{Device, Kind, Tensor};

/// Longest padded length of the explicit path on a CPU.
const EXPLICIT_LEN: i64 = 48;

/// (o, log-sum-exp of the scaled scores in accumulation kind).
pub fn packed_forward(
    q: &Tensor, // [T, H, hd]
    k: &Tensor, // [T, Hkv, hd]
    v: &Tensor, // [T, Hkv, hd]
    layout: &PackedLayout,
    scale: f64,
) -> (Tensor, Tensor) {
    if layout.num_tokens == 0 {
        return (q.zeros_like(), q.select(2, 0).to_kind(accumulation_kind(q.kind())));
    }
    if takes_flash(q) {
        let (o, lse) = flash_forward(q, k, v, layout.packed(), scale).expect("shapes that flash attention takes");
        return (o, lse.tr());
    }
    let attend = |bucket: &Bucket| {
        let [q, k, v] = [q, k, v].map(|t| bucket.gather(t, layout));
        if bucket.is_explicit() {
            explicit_forward(&q, &k, &v, scale, layout.sliding_window)
        } else {
            cpu_flash_forward(&q, &k, &v, scale, layout.sliding_window)
        }
    };
    let (o, lse): (Vec<_>, Vec<_>) = layout.padded().buckets.iter().map(attend).unzip();
    let size = q.size();
    (layout.scatter(o).view(size.as_slice()), layout.scatter(lse).view(&size[..2])) // [T, H, hd], [T, H]
}

/// (dq, dk, dv), from what [`packed_forward`] took and gave. `o` and `lse` may be those of a larger softmax, of which the
/// keys here are a part: the gradients are exact for this part.
#[allow(clippy::too_many_arguments)]
pub fn packed_backward(
    d_o: &Tensor, // [T, H, hd]
    q: &Tensor,   // [T, H, hd]
    k: &Tensor,   // [T, Hkv, hd]
    v: &Tensor,   // [T, Hkv, hd]
    o: &Tensor,   // [T, H, hd]
    lse: &Tensor, // [T, H]
    layout: &PackedLayout,
    scale: f64,
) -> (Tensor, Tensor, Tensor) {
    if layout.num_tokens == 0 {
        return (q.zeros_like(), k.zeros_like(), v.zeros_like());
    }
    if takes_flash(q) {
        let lse = lse.tr().contiguous(); // [H, T], as the forward gave it
        let gradients = flash_backward(&d_o.contiguous(), q, k, v, o, &lse, layout.packed(), scale);
        return gradients.expect("shapes that flash attention takes");
    }
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for bucket in &layout.padded().buckets {
        let [q, k, v, o, d_o] = [q, k, v, o, d_o].map(|t| bucket.gather(t, layout));
        let lse = bucket.gather(&lse.unsqueeze(-1), layout).squeeze_dim(-1); // [B, L, G]
        let _ = d_o.view([-1, d_o.size()[2] * d_o.size()[3]]).index_fill_(0, &bucket.padding, 0.0);
        let saved = Saved { q, k, v, o, lse };
        let grads = if bucket.is_explicit() {
            explicit_backward(&d_o, saved, scale, layout.sliding_window)
        } else {
            cpu_flash_backward(&d_o, saved, scale, layout.sliding_window)
        };
        dq.push(grads.0);
        dk.push(grads.1);
        dv.push(grads.2);
    }
    let join = |parts, like: &Tensor| layout.scatter(parts).view(like.size().as_slice());
    (join(dq, q), join(dk, k), join(dv, v))
}

/// Whether the kernels of [`crate::torch::flash_forward`] serve such queries.
fn takes_flash(q: &Tensor) -> bool {
    let head_dim = q.size()[2];
    q.device().is_cuda() && q.kind() == Kind::BFloat16 && head_dim % 8 == 0 && head_dim <= 256
}

/// One bucket's share of what the forward took and gave. B = sequences * Hkv, L padded length.
struct Saved {
    q: Tensor,   // [B, L, G, hd]
    k: Tensor,   // [B, L, 1, hd]
    v: Tensor,   // [B, L, 1, hd]
    o: Tensor,   // [B, L, G, hd]
    lse: Tensor, // [B, L, G]
}

fn explicit_forward(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, window: Option<i64>) -> (Tensor, Tensor) {
    let (given, kind, size) = (q.kind(), accumulation_kind(q.kind()), q.size());
    let [q, k, v] = [q, k, v].map(|t| merge_heads(&t.to_kind(kind)));
    let len = size[1];
    let scores = (q * scale).bmm(&k.transpose(1, 2)); // [B, L G, L]
    let mask = causal_mask(len, window, (kind, scores.device()));
    let _ = scores.view([-1, len, size[2], len]).g_add_(&mask.unsqueeze(1));
    let p = scores.softmax(-1, None::<Kind>);
    // The largest probability is at least 1 / L, so its logarithm is accurate.
    let lse = scores.amax([-1i64], false) - p.amax([-1i64], false).log_();
    (p.bmm(&v).view(size.as_slice()).to_kind(given), lse.view(&size[..3]))
}

fn explicit_backward(d_o: &Tensor, saved: Saved, scale: f64, window: Option<i64>) -> (Tensor, Tensor, Tensor) {
    let (kind, size, given) = (saved.lse.kind(), saved.q.size(), d_o.kind());
    let len = size[1];
    let [q, k, v, o, d_o] = [&saved.q, &saved.k, &saved.v, &saved.o, d_o].map(|t| merge_heads(&t.to_kind(kind)));
    let q = q * scale;
    let mask = causal_mask(len, window, (kind, q.device()));
    let shifted = mask.unsqueeze(1) - saved.lse.unsqueeze(-1); // [B, L, G, L]
    let p = shifted.view([-1, len * size[2], len]).baddbmm_(&q, &k.transpose(1, 2)).exp_();
    let delta = (&d_o * o).sum_dim_intlist(-1, true, None::<Kind>); // [B, L G, 1]
    let mut ds = delta.baddbmm(&d_o, &v.transpose(1, 2), -1.0, 1.0);
    let ds = ds.g_mul_(&p); // [B, L G, L]
    let dq = ds.bmm(&k).g_mul_scalar_(scale);
    let (dk, dv) = (ds.transpose(1, 2).bmm(&q), p.transpose(1, 2).bmm(&d_o));
    (dq.view(size.as_slice()).to_kind(given), dk.to_kind(given), dv.to_kind(given))
}

fn cpu_flash_forward(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, window: Option<i64>) -> (Tensor, Tensor) {
    let [q, k, v] = as_heads([q, k, v], q);
    let mask = cpu_flash_mask(&q, window);
    let flash = Tensor::internal_scaled_dot_product_flash_attention_for_cpu;
    let (o, lse) = flash(&q, &k, &v, 0.0, mask.is_none(), mask, scale);
    (o.transpose(1, 2), lse.transpose(1, 2)) // [B, L, G, hd], [B, L, G]
}

fn cpu_flash_backward(d_o: &Tensor, saved: Saved, scale: f64, window: Option<i64>) -> (Tensor, Tensor, Tensor) {
    let [q, k, v, o, d_o] = as_heads([&saved.q, &saved.k, &saved.v, &saved.o, d_o], &saved.q);
    let lse = saved.lse.transpose(1, 2);
    let mask = cpu_flash_mask(&q, window);
    let flash = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward;
    let (dq, dk, dv) = flash(&d_o, &q, &k, &v, &o, &lse, 0.0, mask.is_none(), mask, scale);
    // Each query head got a gradient of its own for the key-value head they share.
    let shared = |t: Tensor| t.sum_dim_intlist(1, false, None::<Kind>); // [B, L, hd]
    (dq.transpose(1, 2), shared(dk), shared(dv))
}

/// [B, L, heads, hd] as [B, G, L, hd]; a single head is expanded, not copied.
fn as_heads<const N: usize>(tensors: [&Tensor; N], q: &Tensor) -> [Tensor; N] {
    let size = q.size();
    let shape = [size[0], size[2], size[1], size[3]];
    tensors.map(|t| t.transpose(1, 2).expand(shape, false))
}

fn cpu_flash_mask(q: &Tensor, window: Option<i64>) -> Option<Tensor> {
    let len = q.size()[2];
    window.filter(|&window| window < len).map(|window| causal_mask(len, Some(window), (q.kind(), q.device())))
}

/// [B, L, heads, hd] as [B, L * heads, hd].
fn merge_heads(t: &Tensor) -> Tensor {
    let size = t.size();
    t.reshape([size[0], size[1] * size[2], size[3]])
}

/// [len, len]: 0 where row i sees column j, that is i - window < j <= i; else -inf.
fn causal_mask(len: i64, window: Option<i64>, options: (Kind, Device)) -> Tensor {
    let hidden = Tensor::full([len, len], f64::NEG_INFINITY, options);
    match window.filter(|&window| window < len) {
        Some(window) => hidden.triu(1) + hidden.tril(-window),
        None => hidden.triu(1),
    }
}

impl Bucket {
    fn is_explicit(&self) -> bool {
        self.len <= EXPLICIT_LEN || self.rows.device().is_cuda()
    }

    /// [T, heads, hd] as padded [B, L, heads / Hkv, hd].
    fn gather(&self, t: &Tensor, layout: &PackedLayout) -> Tensor {
        let size = t.size();
        let group = size[1] / layout.num_kv_heads;
        let rows = t.reshape([layout.num_tokens * layout.num_kv_heads, group * size[2]]);
        rows.index_select(0, &self.rows).view([-1, self.len, group, size[2]])
    }
}

impl PackedLayout {
    /// The buckets' padded [B, L, ..] back as rows [T * Hkv, ..].
    fn scatter(&self, parts: Vec<Tensor>) -> Tensor {
        let rows: Vec<_> = parts.iter().map(|t| t.reshape([t.size()[0] * t.size()[1], -1])).collect();
        Tensor::cat(&rows, 0).index_select(0, &self.padded().unpad)
    }
}
