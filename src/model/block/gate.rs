//! The gate of attention's output: o sigmoid(gate). The query projection computes a gate for each query head.

use tch::Tensor;

use crate::error::Result;

/// Multiplies attention's output by the sigmoid of its gate, if there is one.
pub(super) fn forward(o: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
    match gate {
        None => Ok(o.shallow_clone()),
        Some(gate) => Ok(gate.f_sigmoid()?.f_mul_(o)?),
    }
}

/// Returns the gradient of the gate, and replaces the gradient of the gated output in `d_o` by that of the output before the gate.
pub(super) fn backward(
    d_o: &mut Tensor, // [T, H, hd]
    o: &Tensor,       // [T, H, hd]
    gate: &Tensor,    // [T, H, hd]
) -> Result<Tensor> {
    let gate = gate.f_sigmoid()?;
    let d_gate = gate.f_rsub_scalar(1.0)?.f_mul_(&gate)?.f_mul_(o)?.f_mul_(d_o)?;
    *d_o = d_o.f_mul(&gate)?;
    Ok(d_gate)
}

/// Splits a projection in which a gate follows each query, [T, Hkv, 2 G + 2, hd], into one without gates [T, Hkv, G + 2, hd] and the gates [T, H,
/// hd].
pub(super) fn split(qkv: Tensor) -> Result<(Tensor, Option<Tensor>)> {
    let [tokens, groups, slots, head_dim] = qkv.size()[..] else { panic!("a projection, not {:?}", qkv.size()) };
    let queries = slots / 2 - 1;
    let pairs = qkv.narrow(2, 0, 2 * queries).f_view([tokens, groups, queries, 2, head_dim])?;
    let gate = pairs.select(3, 1).f_contiguous()?.f_view([tokens, groups * queries, head_dim])?;
    Ok((Tensor::f_cat(&[pairs.select(3, 0), qkv.narrow(2, 2 * queries, 2)], 2)?, Some(gate)))
}

/// Combines the gradient of a projection without gates [T, (H + 2 Hkv) hd] and that of the gates [T, H, hd] into that of a projection with gates.
pub(super) fn join(d_qkv: Tensor, d_gate: Option<Tensor>, num_kv_heads: usize) -> Result<Tensor> {
    let Some(d_gate) = d_gate else { return Ok(d_qkv) };
    let [tokens, heads, head_dim] = d_gate.size()[..] else { panic!("gates, not {:?}", d_gate.size()) };
    let groups = num_kv_heads as i64;
    let queries = heads / groups;
    let d_qkv = d_qkv.f_view([tokens, groups, queries + 2, head_dim])?;
    let d_gate = d_gate.f_view([tokens, groups, queries, head_dim])?;
    let pairs = Tensor::f_stack(&[d_qkv.narrow(2, 0, queries), d_gate], 3)?.f_flatten(2, 3)?;
    Ok(Tensor::f_cat(&[pairs, d_qkv.narrow(2, queries, 2)], 2)?.f_flatten(1, 3)?)
}
