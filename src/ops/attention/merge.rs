//! Merges two attention results of the same queries over disjoint keys, by their log-sum-exps.

use tch::{Kind, Tensor};

use crate::cuda::kernels;
use crate::error::{Error, Result};
use crate::torch::Attended;

/// Writes the attention over both sets of keys to `to`: lse = log(exp(lse_a) + exp(lse_b)), o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b. Outputs
/// are [T, H, hd]; log-sum-exps are [T, H].
pub(super) fn merge_into(a: &Attended, b: &Attended, mut to: Attended) -> Result<()> {
    let o = &to.o;
    if o.device().is_cuda() && o.kind() == Kind::BFloat16 && o.size()[2] % 8 == 0 {
        return kernels::merge_attention(a, b, &to);
    }
    let lse = &to.lse;
    let _ = a.lse.f_logaddexp_out(lse, &b.lse)?;
    let weighted = |o: &Tensor, part: &Tensor| {
        let weight = part.f_sub(lse)?.f_exp_()?.unsqueeze(-1); // [T, H, 1]
        Ok::<_, Error>(o.f_to_kind(lse.kind())?.f_mul(&weight)?)
    };
    let merged = weighted(&a.o, &a.lse)?.f_add(&weighted(&b.o, &b.lse)?)?;
    Ok(to.o.f_copy_(&merged)?)
}
