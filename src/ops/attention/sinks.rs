//! Attention sinks: a logit s for each query head that takes part in the softmax with the value 0, so that attention weights may sum to less than 1.
//! Sinks are applied to the result of attention without them: lse' = log(e^lse + e^s), o' = o sigmoid(lse - s). The usual attention backward, given
//! o' and lse', computes the right gradients of queries, keys and values.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::torch::{Attended, accumulation_kind};

/// Rows that [`accumulate`] processes at once, to bound its memory.
const ROWS_AT_ONCE: i64 = 4096;

/// Applies sinks to an attention result; outputs reuse its memory.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn join(
    attended: Attended, // [T, H, hd], [T, H]
    sinks: &Tensor,     // [H]
) -> Result<Attended> {
    let Attended { mut o, lse } = attended;
    let sinks = sinks.f_to_kind(lse.kind())?;
    let share = lse.f_sub(&sinks)?.f_sigmoid_()?.f_unsqueeze(-1)?;
    let _ = o.f_mul_(&share)?; // rounded once
    Ok(Attended { o, lse: lse.f_logaddexp(&sinks)? })
}

/// Accumulates the sinks' gradients: d_sinks -= the sum over tokens of e^(s - lse') (d_o' o').
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn accumulate(
    d_o: &Tensor,           // [T, H, hd]
    [o, lse]: [&Tensor; 2], // [T, H, hd], [T, H], with sinks
    sinks: &Tensor,         // [H]
    d_sinks: &mut Tensor,   // [H], in the accumulation kind
) -> Result<()> {
    let (wide, tokens) = (accumulation_kind(o.kind()), o.size()[0]);
    for first in (0..tokens).step_by(ROWS_AT_ONCE as usize) {
        let rows = |t: &Tensor| -> Result<Tensor> {
            Ok(t.f_narrow(0, first, ROWS_AT_ONCE.min(tokens - first))?.f_to_kind(wide)?)
        };
        let dot = rows(d_o)?.f_mul(&rows(o)?)?.f_sum_dim_intlist(-1, false, None::<Kind>)?; // [T, H]
        let mut share = sinks.f_to_kind(wide)?.f_sub(&rows(lse)?)?.f_exp_()?;
        let _ = d_sinks.f_sub_(&share.f_mul_(&dot)?.f_sum_dim_intlist(0, false, None::<Kind>)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn attention_sinks_match_a_softmax_with_one_more_logit() {
        let (scores, v) = (leaf(&rand(&[5, 3, 7])), rand(&[3, 7, 4])); // five tokens, three heads, seven keys
        let (sinks, d_o) = (leaf(&rand(&[3])), rand(&[5, 3, 4]));
        let all = Tensor::cat(&[scores.shallow_clone(), sinks.view([1, 3, 1]).expand([5, 3, 1], false)], -1);
        let weights = all.softmax(-1, None::<Kind>).narrow(-1, 0, 7);
        let expected = weights.transpose(0, 1).matmul(&v).transpose(0, 1);
        let grads = Tensor::run_backward(&[(&expected * &d_o).sum(None)], &[&sinks], false, false);

        let (scores, sinks) = (scores.detach(), sinks.detach());
        let o = scores.softmax(-1, None::<Kind>).transpose(0, 1).matmul(&v).transpose(0, 1).contiguous();
        let Attended { o, lse } = join(Attended { o, lse: scores.logsumexp([-1i64], false) }, &sinks).unwrap();
        assert_close(&o, &expected.detach());
        assert_close(&lse, &all.detach().logsumexp([-1i64], false));
        let mut d_sinks = rand(&[3]);
        let before = d_sinks.copy();
        accumulate(&d_o, [&o, &lse], &sinks, &mut d_sinks).unwrap();
        assert_close(&d_sinks, &(before + &grads[0]));
    }
}
