//! Biases of experts' matrices. Those of gate and up are added by a GEMM with one-hot rows, so that no special kernel is needed. Those of down are
//! added by a GEMM with each token's routing weights, because in the sum over a token's experts each bias is multiplied by its expert's weight.
//!
//! T tokens, K experts per token, R = T K rows sorted by expert, E experts, of which O are on this rank, I an expert's width, D hidden.

use tch::Tensor;

use super::grouped::Dispatch;
use super::linear;
use super::router::Routing;
use super::swiglu::GateUp;
use crate::error::Result;
use crate::torch;

/// One-hot rows: a one for the row's expert and zeros elsewhere; all zeros if the expert is on another rank. [R, O], like `bias`
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(crate) fn one_hot(
    dispatch: &Dispatch,
    experts: &Tensor, // [T, K] int64
    first_own: usize,
    bias: &Tensor, // [O, 2 I]
) -> Result<Tensor> {
    let own = torch::arange(bias.size()[0], experts.device())?.f_add(&torch::scalar(first_own as i64))?;
    Ok(dispatch.of_rows(experts)?.f_eq_tensor(&own)?.f_to_kind(bias.kind())?)
}

/// Adds the biases to gate and up, in place.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(crate) fn expand(
    gate_up: GateUp, // R rows
    hot: &Tensor,    // [R, O]
    bias: &Tensor,   // [O, 2 I]
) -> Result<GateUp> {
    Ok(match gate_up {
        GateUp::Interleaved(mut pairs) => {
            linear::accumulate_input(hot, bias, &mut pairs)?;
            GateUp::Interleaved(pairs)
        }
        GateUp::Split { mut gate, mut up } => {
            let [of_gate, of_up] = columns(bias);
            linear::accumulate_input(hot, &of_gate, &mut gate)?;
            linear::accumulate_input(hot, &of_up, &mut up)?;
            GateUp::Split { gate, up }
        }
    })
}

/// Adds the gradient of the biases in [`expand`].
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(crate) fn expand_backward(
    hot: &Tensor,        // [R, E]
    d: &GateUp,          // R rows
    d_bias: &mut Tensor, // [E, 2 I], in the accumulation kind
) -> Result<()> {
    match d {
        GateUp::Interleaved(d) => linear::accumulate_weight(hot, d, d_bias),
        GateUp::Split { gate, up } => {
            for (d, mut sum) in [gate, up].into_iter().zip(columns(d_bias)) {
                let _ = sum.f_add_(&hot.tr().f_mm(d)?.f_to_kind(sum.kind())?)?;
            }
            Ok(())
        }
    }
}

/// Adds the biases of each token's experts, multiplied by the routing weights, to a sum in the accumulation type.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(crate) fn contract(
    routing: &Routing,
    first_own: usize,
    bias: &Tensor,    // [O, D]
    sum: &mut Tensor, // [T, D]
) -> Result<()> {
    let shares = shares(routing)?.f_narrow(1, first_own as i64, bias.size()[0])?;
    linear::accumulate_input(&shares, &bias.f_to_kind(sum.kind())?, sum)
}

/// Adds to the gradients of the routing weights and, if they train, of the biases in [`contract`].
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub(crate) fn contract_backward(
    routing: &Routing,
    bias: &Tensor,               // [E, D]
    d_output: &Tensor,           // [T, D]
    d_weights: &mut Tensor,      // [T, K], in the accumulation kind
    d_bias: Option<&mut Tensor>, // [E, D], in the accumulation kind
) -> Result<()> {
    let of_all = linear::forward_wide(d_output, bias)?; // [T, E]
    let _ = d_weights.f_add_(&of_all.f_gather(1, &routing.experts, false)?)?;
    match d_bias {
        Some(d_bias) => linear::accumulate_weight(&shares(routing)?.f_to_kind(d_output.kind())?, d_output, d_bias),
        None => Ok(()),
    }
}

/// The routing weights of all experts; 0 for those that were not chosen. [T, E]
fn shares(routing: &Routing) -> Result<Tensor> {
    Ok(routing.probs.f_zeros_like()?.f_scatter_(1, &routing.experts, &routing.weights)?)
}

/// The columns of gate biases and of up biases [E, I], as views.
fn columns(bias: &Tensor /* [E, 2 I] */) -> [Tensor; 2] {
    let pairs = bias.unflatten(1, [-1, 2]);
    [pairs.select(2, 0), pairs.select(2, 1)]
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::ops::router::{self, RouterOptions, RouterScores};
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn expert_biases_match_autograd_row_by_row() {
        let options = RouterOptions { num_experts_per_tok: 2, norm_topk_prob: true, scores: RouterScores::Softmax };
        let probs = router::probabilities(&rand(&[6, 3]), &rand(&[4, 3]), None, options).unwrap();
        let experts = router::choose(&probs, None, options).unwrap();
        let routing = Routing::new(probs, experts, options).unwrap();
        let dispatch = Dispatch::new(&routing.experts, 4, 0..4, Kind::Double).unwrap();
        let (bias, down, weights) = (leaf(&rand(&[4, 10])), leaf(&rand(&[4, 3])), leaf(&routing.weights));
        let (rows, d_rows, d_sum) = (rand(&[12, 10]), rand(&[12, 10]), rand(&[6, 3]));
        let of_rows = dispatch.of_rows(&routing.experts).unwrap().view(-1);
        let expected = &rows + bias.index_select(0, &of_rows);
        let chosen = down.index_select(0, &routing.experts.view(-1)).view([6, 2, 3]);
        let sum = (chosen * weights.unsqueeze(-1)).sum_dim_intlist(1, false, None::<Kind>);
        let loss = (&expected * &d_rows).sum(None) + (&sum * &d_sum).sum(None);
        let grads = Tensor::run_backward(&[loss], &[&bias, &down, &weights], false, false);

        let (bias, down) = (bias.detach(), down.detach());
        let hot = one_hot(&dispatch, &routing.experts, 0, &bias).unwrap();
        let own = one_hot(&dispatch, &routing.experts, 1, &bias.narrow(0, 1, 2)).unwrap();
        assert!(own.equal(&hot.narrow(1, 1, 2)));
        let both = |pairs: Tensor| {
            let pairs = pairs.view([12, 5, 2]);
            let split = GateUp::Split { gate: pairs.select(2, 0).contiguous(), up: pairs.select(2, 1).contiguous() };
            [GateUp::Interleaved(pairs.copy().view([12, 10])), split]
        };
        for (gate_up, d) in both(rows).into_iter().zip(both(d_rows)) {
            assert_close(&expand(gate_up, &hot, &bias).unwrap().pairs().unwrap(), &expected.detach());
            let mut d_bias = Tensor::zeros([4, 10], (Kind::Double, tch::Device::Cpu));
            expand_backward(&hot, &d, &mut d_bias).unwrap();
            assert_close(&d_bias, &grads[0]);
        }
        let mut found = Tensor::zeros([6, 3], (Kind::Double, tch::Device::Cpu));
        contract(&routing, 0, &down, &mut found).unwrap();
        assert_close(&found, &sum.detach());
        let (mut d_weights, mut d_down) = (routing.weights.zeros_like(), down.zeros_like());
        contract_backward(&routing, &down, &d_sum, &mut d_weights, Some(&mut d_down)).unwrap();
        assert_close(&d_down, &grads[1]);
        assert_close(&d_weights, &grads[2]);
    }
}
