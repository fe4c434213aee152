//! Two attentions of the same queries to disjoint keys as one, by their log-sum-exp.

use tch::Tensor;

/// lse = log(exp(lse_a) + exp(lse_b)), o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b: the softmax over both sets of keys.
pub(super) fn merge(
    (o_a, lse_a): &(Tensor, Tensor), // [T, H, hd], [T, H]
    (o_b, lse_b): &(Tensor, Tensor), // likewise
) -> (Tensor, Tensor) {
    let lse = lse_a.logaddexp(lse_b);
    let weight = |part: &Tensor| (part - &lse).exp_().unsqueeze(-1); // [T, H, 1]
    let o = o_a.to_kind(lse.kind()) * weight(lse_a) + o_b.to_kind(lse.kind()) * weight(lse_b);
    (o.to_kind(o_a.kind()), lse)
}
