//! Two attentions of the same queries to disjoint keys as one, by their log-sum-exp.

use tch::{Kind, Tensor};

use crate::cuda::kernels;
use crate::error::{Error, Result};

/// Writes the softmax over both sets of keys into `to`: lse = log(exp(lse_a) + exp(lse_b)),
/// o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b. Each is (output [T, H, hd], log-sum-exp [T, H]).
pub(super) fn merge_into(a: &(Tensor, Tensor), b: &(Tensor, Tensor), to: (Tensor, Tensor)) -> Result<()> {
    let ((o_a, lse_a), (o_b, lse_b), (mut o, lse)) = (a, b, to);
    if o.device().is_cuda() && o.kind() == Kind::BFloat16 && o.size()[2] % 8 == 0 {
        return kernels::merge_attention((o_a, lse_a), (o_b, lse_b), (&o, &lse));
    }
    let _ = lse_a.f_logaddexp_out(&lse, lse_b)?;
    let weighted = |o: &Tensor, part: &Tensor| {
        let weight = part.f_sub(&lse)?.f_exp_()?.unsqueeze(-1); // [T, H, 1]
        Ok::<_, Error>(o.f_to_kind(lse.kind())?.f_mul(&weight)?)
    };
    Ok(o.f_copy_(&weighted(o_a, lse_a)?.f_add(&weighted(o_b, lse_b)?)?)?)
}
