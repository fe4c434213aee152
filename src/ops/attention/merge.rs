//! Two attentions of the same queries to disjoint keys as one, by their log-sum-exp.

use tch::{Kind, Tensor};

use crate::cuda::kernels;

/// Writes the softmax over both sets of keys into `to`: lse = log(exp(lse_a) + exp(lse_b)),
/// o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b. Each is (output [T, H, hd], log-sum-exp [T, H]).
pub(super) fn merge_into(a: &(Tensor, Tensor), b: &(Tensor, Tensor), to: (Tensor, Tensor)) {
    let ((o_a, lse_a), (o_b, lse_b), (mut o, lse)) = (a, b, to);
    if o.device().is_cuda() && o.kind() == Kind::BFloat16 && o.size()[2] % 8 == 0 {
        kernels::merge_attention((o_a, lse_a), (o_b, lse_b), (&o, &lse)).expect("outputs of attention");
        return;
    }
    let _ = lse_a.logaddexp_out(&lse, lse_b);
    let weight = |part: &Tensor| (part - &lse).exp_().unsqueeze(-1); // [T, H, 1]
    o.copy_(&(o_a.to_kind(lse.kind()) * weight(lse_a) + o_b.to_kind(lse.kind()) * weight(lse_b)));
}
