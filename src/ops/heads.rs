//! Heads for attention from the fused QKV projection, and the backward: norms of query and key heads if the model has them, then the rotary
//! embedding. A token's row is [G query heads of group g, k_g, v_g] for g = 0, 1, ..

use tch::{Kind, Tensor};

use super::rope::{self, RopeRows};
use super::{linear, rms_norm, try_map};
pub use crate::cuda::kernels::HeadNormWeights;
use crate::cuda::{OpCost, kernels, timed};
use crate::error::{Error, Result};
use crate::torch::accumulation_kind;

/// Queries, keys and values, ready for attention.
#[derive(Debug)]
pub struct Heads {
    /// Rotated queries.
    pub q: Tensor, // [T, H, hd]
    /// Rotated keys.
    pub k: Tensor, // [T, Hkv, hd]
    /// Values.
    pub v: Tensor, // [T, Hkv, hd]
    /// The projection, kept if the backward of the norms needs it.
    pub qkv: Option<Tensor>, // [T, Hkv, G + 2, hd]
}

/// Sums to which [`backward`] adds the gradients of weights.
#[derive(Debug)]
pub struct HeadGradients<'a> {
    /// Gradient of the projection's bias.
    pub bias: Option<&'a mut Tensor>, // [(H + 2 Hkv) hd]
    /// Gradients of the weights of the query and key norms.
    pub norms: Option<[&'a mut Tensor; 2]>, // [hd] each
}

/// Splits the projection into heads, normalizes queries and keys if `norms` are given, and rotates them.
///
/// # Errors
/// [`Error::OutOfMemory`]; on a GPU [`Error::InvalidArgument`] for heads wider than 512.
pub fn forward(
    qkv: Tensor, // [T, Hkv, G + 2, hd]
    norms: Option<HeadNormWeights<'_>>,
    rows: &RopeRows,
) -> Result<Heads> {
    let [q, k, v] = if kernels::serve(&qkv) {
        let (cos, sin) = rows.tables();
        let run = || kernels::heads_forward(&qkv, norms, cos, sin);
        timed("rotation", || OpCost::pass(&[&qkv, &qkv]), run)?
    } else {
        let [q, k, v] = parts(&qkv);
        let rotate = |x: &Tensor| {
            let rotated = rope::forward(x, rows)?;
            Ok::<_, Error>(rotated.view([x.size()[0], -1, x.size()[x.dim() - 1]]))
        };
        let (q, k) = match norms {
            Some(HeadNormWeights { q: q_weight, k: k_weight, eps, .. }) => {
                let norm =
                    |x: &Tensor, weight| Ok::<_, Error>(rms_norm::forward(x, weight, eps)?.0.f_to_kind(qkv.kind())?);
                (norm(&q, q_weight)?, norm(&k, k_weight)?)
            }
            None => (q, k),
        };
        // Copying the values allows the projection's memory to be freed if nothing else uses it.
        [rotate(&q)?, rotate(&k)?, v.f_contiguous()?]
    };
    Ok(Heads { q, k, v, qkv: norms.map(|_| qkv) })
}

/// Returns the gradient of the projection [T, (H + 2 Hkv) hd]; adds those of its bias and of the norms' weights in place.
///
/// # Errors
/// The errors of [`forward`]; errors for gradients that do not fit.
pub fn backward(
    [dq, dk, dv]: [&Tensor; 3], // [T, H, hd], [T, Hkv, hd] twice
    qkv: Option<&Tensor>,       // [T, Hkv, G + 2, hd], if there are norms
    norms: Option<HeadNormWeights<'_>>,
    rows: &RopeRows,
    grads: HeadGradients<'_>,
) -> Result<Tensor> {
    if kernels::serve(dq) {
        let work = || OpCost::pass(&[dq, dk, dv, dq, dk, dv]);
        let run = || Ok(gpu_backward([dq, dk, dv], qkv, norms, rows, grads)?.flatten(1, 3));
        return timed("rotation, backward", work, run);
    }
    let [tokens, num_heads, head_dim] = dq.size()[..] else { panic!("queries [T, H, hd], not {:?}", dq.size()) };
    let kv_heads = dk.size()[1];
    let group = num_heads / kv_heads;
    let d_qkv = Tensor::f_empty([tokens, kv_heads, group + 2, head_dim], (dq.kind(), dq.device()))?;
    let [mut d_q, mut d_k, mut d_v] = parts(&d_qkv);
    rope::backward_into(&dq.view([tokens, kv_heads, group, head_dim]), rows, &mut d_q)?;
    rope::backward_into(dk, rows, &mut d_k)?;
    d_v.f_copy_(dv)?;
    if let (Some(qkv), Some(norms), Some([d_q_weight, d_k_weight])) = (qkv, norms, grads.norms) {
        let [q, k, _] = parts(qkv);
        for (mut d, x, weight, d_weight) in [(d_q, q, norms.q, d_q_weight), (d_k, k, norms.k, d_k_weight)] {
            let (_, rstd) = rms_norm::forward(&x, weight, norms.eps)?;
            d.f_copy_(&rms_norm::backward(&d, &x, weight, &rstd, None, d_weight)?)?;
        }
    }
    let d_qkv = d_qkv.flatten(1, 3);
    if let Some(d_bias) = grads.bias {
        linear::accumulate_bias(&d_qkv, d_bias)?;
    }
    Ok(d_qkv)
}

fn gpu_backward(
    [dq, dk, dv]: [&Tensor; 3],
    qkv: Option<&Tensor>,
    norms: Option<HeadNormWeights<'_>>,
    rows: &RopeRows,
    grads: HeadGradients<'_>,
) -> Result<Tensor> {
    let (cos, sin) = rows.tables();
    let [dq, dk, dv] = try_map([dq, dk, dv], |d| Ok(d.f_contiguous()?))?;
    let gradient = kernels::heads_backward(&dq, &dk, &dv, norms.and(qkv), norms, cos, sin, grads.bias.is_some())?;
    if let (Some(partial), Some(d_bias)) = (&gradient.d_bias, grads.bias) {
        kernels::add_columns(partial, d_bias)?;
    }
    if let (Some(partial), Some([d_q_weight, d_k_weight])) = (gradient.d_norm, grads.norms) {
        let by_head = partial.f_sum_dim_intlist(0, false, Kind::Float)?; // [Hkv, G + 2, hd]
        let group = by_head.size()[1] - 2;
        let of_queries = by_head.narrow(1, 0, group).f_sum_dim_intlist([0i64, 1].as_slice(), false, Kind::Float)?;
        let _ = d_q_weight.f_add_(&of_queries)?;
        let _ = d_k_weight.f_add_(&by_head.select(1, group).f_sum_dim_intlist(0, false, Kind::Float)?)?;
    }
    Ok(gradient.d_qkv)
}

/// The tensor-parallel ranks that have other heads of the same tokens.
pub struct OtherHeads<'a> {
    /// Number of elements of a token's queries on all ranks, and of its keys.
    pub widths: [usize; 2],
    /// Sums over all ranks the sums of squares of queries and keys. [T, 2]
    pub sum: &'a dyn Fn(&mut Tensor) -> Result<()>,
}

impl std::fmt::Debug for OtherHeads<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OtherHeads").field("widths", &self.widths).finish_non_exhaustive()
    }
}

/// Returns the projection with one norm applied over all query heads and one over all key heads; values are unchanged.
///
/// # Errors
/// [`Error::OutOfMemory`]; the errors of `others`.
pub fn norm_all(
    qkv: &Tensor,               // [T, Hkv, G + 2, hd]
    norms: HeadNormWeights<'_>, // [H hd] and [Hkv hd]
    others: Option<OtherHeads<'_>>,
) -> Result<Tensor> {
    let normed = qkv.f_empty_like()?;
    let ([q, k, v], [q_out, k_out, mut v_out]) = (parts(qkv), parts(&normed));
    v_out.f_copy_(&v)?;
    let rows = try_map([q, k], |heads| Ok::<_, Error>(heads.f_reshape([heads.size()[0], -1])?.f_contiguous()?))?;
    let weights = [norms.q, norms.k];
    let rstd = match others {
        None => None,
        Some(OtherHeads { widths, sum }) => {
            let kind = accumulation_kind(qkv.kind());
            let squares = |rows: &Tensor| {
                Ok::<_, Error>(rows.f_to_kind(kind)?.f_norm_scalaropt_dim(2, [1i64], true)?.f_square_()?)
            };
            let mut sums = Tensor::f_cat(&try_map(rows.each_ref(), squares)?, 1)?; // [T, 2]
            sum(&mut sums)?;
            let widths = Tensor::from_slice(&widths.map(|width| width as f64)).to_kind(kind).to_device(sums.device());
            Some(sums.f_div(&widths)?.f_add_scalar_(norms.eps)?.f_rsqrt_()?)
        }
    };
    for (index, mut out) in [q_out, k_out].into_iter().enumerate() {
        let (rows, weight) = (&rows[index], weights[index]);
        let y = match &rstd {
            None => rms_norm::forward(rows, weight, norms.eps)?.0,
            Some(rstd) => rows.f_to_kind(rstd.kind())?.f_mul(&rstd.narrow(1, index as i64, 1))?.f_mul_(weight)?,
        };
        out.f_copy_(&y.view_as(&out))?;
    }
    Ok(normed)
}

/// Converts the gradient of [`norm_all`]'s result into that of the projection, in place; adds the gradients of the weights in place.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn norm_all_backward(
    d_qkv: &Tensor,             // [T, Hkv, G + 2, hd]
    qkv: &Tensor,               // [T, Hkv, G + 2, hd]
    norms: HeadNormWeights<'_>, // [H hd] and [Hkv hd]
    d_weights: [&mut Tensor; 2],
) -> Result<()> {
    let ([d_q, d_k, _], [q, k, _]) = (parts(d_qkv), parts(qkv));
    for ((mut d, x), (weight, d_weight)) in
        [(d_q, q), (d_k, k)].into_iter().zip([norms.q, norms.k].into_iter().zip(d_weights))
    {
        let [dy, x] =
            try_map([&d, &x], |heads| Ok::<_, Error>(heads.f_reshape([heads.size()[0], -1])?.f_contiguous()?))?;
        let (_, rstd) = rms_norm::forward(&x, weight, norms.eps)?;
        let dx = rms_norm::backward(&dy, &x, weight, &rstd, None, d_weight)?;
        d.f_copy_(&dx.view_as(&d))?;
    }
    Ok(())
}

/// Views of queries [T, Hkv, G, hd], keys and values [T, Hkv, hd].
fn parts(qkv: &Tensor /* [T, Hkv, G + 2, hd] */) -> [Tensor; 3] {
    let group = qkv.size()[2] - 2;
    [qkv.narrow(2, 0, group), qkv.select(2, group), qkv.select(2, group + 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rope::Rope;
    use crate::ops::testing::{assert_close, leaf, rand};

    /// Rotates explicitly: x * cos + swapped halves of x * sin. The first half of the sines is negated.
    fn rotated(x: &Tensor, rows: &RopeRows) -> Tensor {
        let (cos, sin) = rows.tables();
        let [cos, sin] = [cos, sin].map(|t| t.view([t.size()[0], 1, 1, t.size()[2]]));
        let half = x.size()[3] / 2;
        let turned = Tensor::cat(&[x.narrow(3, half, half), x.narrow(3, 0, half)], 3);
        x * cos + turned * sin
    }

    #[test]
    fn head_splitting_matches_autograd_with_and_without_norms() {
        let (tokens, groups, group, hd) = (5, 2, 3, 8);
        let rows = Rope::new(hd as usize, 1e4, None)
            .rows(&Tensor::arange(tokens, (Kind::Int64, tch::Device::Cpu)), Kind::Double)
            .unwrap();
        for with_norms in [false, true] {
            let (qkv, bias) = (leaf(&rand(&[tokens, groups, group + 2, hd])), leaf(&rand(&[groups, group + 2, hd])));
            let [q_weight, k_weight] = [(); 2].map(|()| leaf(&rand(&[hd])));
            let norm = |x: &Tensor, weight: &Tensor| match with_norms {
                true => x / (x.square().mean_dim(-1, true, None::<Kind>) + 1e-6).sqrt() * weight,
                false => x + weight.zeros_like() * weight,
            };
            let biased = &qkv + &bias;
            let q = rotated(&norm(&biased.narrow(2, 0, group), &q_weight), &rows).view([tokens, -1, hd]);
            let k = rotated(&norm(&biased.narrow(2, group, 1), &k_weight), &rows).view([tokens, -1, hd]);
            let v = biased.select(2, group + 1);
            let d = [&q, &k, &v].map(|t| rand(&t.size()));
            let scalar = (&q * &d[0]).sum(None) + (&k * &d[1]).sum(None) + (&v * &d[2]).sum(None);
            let grads = Tensor::run_backward(&[scalar], &[&qkv, &bias, &q_weight, &k_weight], false, false);

            let weights = [&q_weight, &k_weight].map(Tensor::detach);
            let norms = with_norms.then_some(HeadNormWeights {
                q: &weights[0],
                k: &weights[1],
                eps: 1e-6,
                zero_centred: false,
            });
            let heads = forward(biased.detach(), norms, &rows).unwrap();
            for (got, expected) in [(&heads.q, &q), (&heads.k, &k), (&heads.v, &v)] {
                assert_close(got, expected);
            }
            let mut sums = [rand(&[groups * (group + 2) * hd]), rand(&[hd]), rand(&[hd])];
            let before = sums.each_ref().map(Tensor::copy);
            let [d_bias, d_q_weight, d_k_weight] = &mut sums;
            let into = HeadGradients { bias: Some(d_bias), norms: norms.map(|_| [d_q_weight, d_k_weight]) };
            let d_qkv = backward([&d[0], &d[1], &d[2]], heads.qkv.as_ref(), norms, &rows, into).unwrap();
            assert_close(&d_qkv.view_as(&qkv), &grads[0]);
            for ((after, before), expected) in sums.iter().zip(&before).zip(&grads[1..]) {
                assert_close(after, &(before + expected.flatten(0, -1)));
            }
        }
    }
}
