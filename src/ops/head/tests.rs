use super::*;
use crate::ops::testing::{assert_close, leaf, rand};

const TEMPERATURE: f64 = 0.7;

fn reference(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> (Tensor, Tensor) {
    let logits = hidden.matmul(&weight.transpose(0, 1)) / TEMPERATURE;
    let log_p = &logits - logits.logsumexp([-1i64], true);
    let entropy = -(log_p.exp() * &log_p).sum_dim_intlist(-1, false, None);
    (log_p.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1), entropy)
}

#[test]
fn chunked_and_whole_head_match_autograd() {
    let (hidden, weight) = (leaf(&rand(&[7, 4])), leaf(&rand(&[9, 4])));
    let targets = Tensor::from_slice(&[0i64, 8, 3, 3, 1, 0, 5]);
    let (logprobs, entropy) = reference(&hidden, &weight, &targets);
    let (d_logprobs, d_entropy) = (rand(&[7]), rand(&[7]));
    for dentropy in [None, Some(&d_entropy)] {
        let scalar =
            (&logprobs * &d_logprobs).sum(None) + dentropy.map_or(Tensor::from(0.0), |d| (&entropy * d).sum(None));
        let grads = Tensor::run_backward(&[scalar], &[&hidden, &weight], true, false);
        // In slices, chunk size 4 computes three tokens and eight columns at once, 3 two tokens and all columns, 1 one token and five columns.
        for (chunk, keep) in [(100, true), (7, false), (4, true), (3, true), (1, false)] {
            let (hidden, weight) = (hidden.detach(), weight.detach());
            let out = forward(&hidden, &weight, &targets, TEMPERATURE, TopTokens::Nothing, chunk, keep).unwrap();
            assert_close(&out.logprobs, &logprobs);
            assert_close(&out.entropy, &entropy);
            let mut dweight = rand(&[9, 4]);
            let before = dweight.copy();
            let d = backward(
                &hidden,
                &weight,
                &targets,
                TEMPERATURE,
                out.saved,
                &d_logprobs,
                dentropy,
                None,
                Some(TableSum { sum: &mut dweight, onto: Onto::Sum }),
            )
            .unwrap();
            assert_close(&d, &grads[0]);
            assert_close(&dweight, &(before + &grads[1]));
        }
    }
}

/// Two or three tokens per row in addition to the target; one of them may be the target.
#[test]
fn several_scored_tokens_per_row_match_autograd() {
    let (hidden, weight) = (leaf(&rand(&[7, 4])), leaf(&rand(&[9, 4])));
    let targets = Tensor::from_slice(&[0i64, 8, 3, 3, 1, 0, 5]);
    let log_p = (hidden.matmul(&weight.transpose(0, 1)) / TEMPERATURE).log_softmax(-1, None::<Kind>);
    let (expected, ids) = log_p.topk(3, 1, true, true);
    let given = ids.narrow(1, 1, 2).contiguous();
    let (d_logprobs, d_entropy, d_top) = (rand(&[7]), rand(&[7]), rand(&[7, 2]));
    let (logprobs, entropy) = reference(&hidden, &weight, &targets);
    let scalar = (&logprobs * &d_logprobs).sum(None)
        + (&entropy * &d_entropy).sum(None)
        + (log_p.gather(1, &given, false) * &d_top).sum(None);
    let grads = Tensor::run_backward(&[scalar], &[&hidden, &weight], true, false);
    for (chunk, keep) in [(100, true), (3, true), (1, false)] {
        let (hidden, weight) = (hidden.detach(), weight.detach());
        let score = |top| forward(&hidden, &weight, &targets, TEMPERATURE, top, chunk, keep).unwrap();
        let most = score(TopTokens::MostProbable(3)).top.unwrap();
        assert!(most.ids.equal(&ids));
        assert_close(&most.logprobs, &expected);
        let HeadOutput { top, saved, .. } = score(TopTokens::At(&given));
        assert_close(&top.unwrap().logprobs, &expected.narrow(1, 1, 2));
        let mut dweight = rand(&[9, 4]);
        let before = dweight.copy();
        let top = Some([&given, &d_top]);
        let d = backward(
            &hidden,
            &weight,
            &targets,
            TEMPERATURE,
            saved,
            &d_logprobs,
            Some(&d_entropy),
            top,
            Some(TableSum { sum: &mut dweight, onto: Onto::Sum }),
        )
        .unwrap();
        assert_close(&d, &grads[0]);
        assert_close(&dweight, &(before + &grads[1]));
    }
}

#[test]
fn the_head_accepts_rows_without_scored_tokens() {
    let (hidden, weight, targets) = (rand(&[0, 4]), rand(&[9, 4]), Tensor::zeros([0], (Kind::Int64, tch::Device::Cpu)));
    let out = forward(&hidden, &weight, &targets, 1.0, TopTokens::MostProbable(2), 8, true).unwrap();
    let mut dweight = rand(&[9, 4]);
    let before = dweight.copy();
    let top = out.top.as_ref().map(|top| [&top.ids, &top.logprobs]);
    let d = backward(
        &hidden,
        &weight,
        &targets,
        1.0,
        out.saved,
        &out.logprobs,
        None,
        top,
        Some(TableSum { sum: &mut dweight, onto: Onto::Sum }),
    )
    .unwrap();
    assert_eq!(d.size(), [0, 4]);
    assert!(dweight.equal(&before));
}

#[test]
fn head_statistics_of_bfloat16_are_float32() {
    let hidden = rand(&[2, 4]).to_kind(Kind::BFloat16);
    let out = forward(&hidden, &hidden, &Tensor::from_slice(&[0i64, 1]), 1.0, TopTokens::Nothing, 8, true).unwrap();
    assert_eq!(out.logprobs.kind(), Kind::Float);
    let mut dweight = Tensor::zeros([2, 4], (Kind::Float, tch::Device::Cpu));
    let d = backward(
        &hidden,
        &hidden,
        &Tensor::from_slice(&[0i64, 1]),
        1.0,
        out.saved,
        &out.logprobs,
        None,
        None,
        Some(TableSum { sum: &mut dweight, onto: Onto::Sum }),
    )
    .unwrap();
    assert_eq!(d.kind(), Kind::BFloat16);
}
