//! Causal runs of different lengths on a GPU: each long run is a separate rectangle for cuDNN's kernels; the short runs between them use flash
//! attention.
//!
//! A rectangle's length is rounded up, so that cuDNN plans few shapes. The rows after the run serve as its padding: no query of the run attends to
//! them, and in the backward an infinite log-sum-exp makes their probabilities 0.

use tch::{Kind, Tensor};

use super::runs::{Runs, as_runs, lens};
use crate::error::Result;
use crate::ops::try_map;
use crate::torch::{
    Attended, QkvGradients, SavedAttention, cudnn_backward, cudnn_forward, flash_backward, flash_forward, full,
};

/// Lengths of rectangles are multiples of this.
const LEN_STEP: i64 = 256;

/// Runs divided into parts of consecutive runs.
#[derive(Debug)]
pub(super) struct Mixed {
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    first: i64,
    len: i64,
    /// The short runs of the part; `None` if the part is one long run.
    short: Option<Runs>,
}

impl Mixed {
    /// Divides the runs by `is_long(rounded length)`. Returns `None` if no run is long, or if a window cuts runs.
    pub(super) fn new(runs: &Runs, is_long: impl FnMut(i64) -> bool) -> Option<Self> {
        let bounds = runs.causal_bounds()?;
        let is_long: Vec<bool> = lens(bounds).map(rounded).map(is_long).collect();
        if !is_long.contains(&true) {
            return None;
        }
        let (mut parts, mut at) = (Vec::new(), 0);
        for span in is_long.chunk_by(|a, b| !a && !b) {
            let bounds = &bounds[at..=at + span.len()];
            at += span.len();
            let short = (!span[0]).then(|| runs.some(bounds));
            parts.push(Part { first: bounds[0], len: bounds[span.len()] - bounds[0], short });
        }
        Some(Self { parts })
    }

    /// Computes attention: o [T, H, hd], log-sum-exp [T, H].
    pub(super) fn forward(
        &self,
        q: &Tensor, // [T, H, hd]
        k: &Tensor, // [T, Hkv, hd]
        v: &Tensor, // [T, Hkv, hd]
        scale: f64,
    ) -> Result<Attended> {
        let [tokens, heads, _] = q.size()[..] else { panic!("queries [T, H, hd], not {:?}", q.size()) };
        let o = Tensor::f_empty(q.size(), (q.kind(), q.device()))?;
        let lse = Tensor::f_empty([heads, tokens], (Kind::Float, q.device()))?;
        for part in &self.parts {
            let own = match &part.short {
                Some(runs) => {
                    let [q, k, v] = [q, k, v].map(|t| t.narrow(0, part.first, part.len));
                    flash_forward(&q, &k, &v, runs.varlen()?, scale)?
                }
                None => {
                    let [q, k, v] = try_map([q, k, v], |t| part.rectangle(t))?;
                    let Attended { o, lse } = cudnn_forward(&q, &k, &v, true, scale)?;
                    Attended { o: part.rows(&o), lse: lse.f_reshape([heads, -1])? }
                }
            };
            o.narrow(0, part.first, part.len).f_copy_(&own.o)?;
            lse.narrow(1, part.first, part.len).f_copy_(&own.lse.narrow(1, 0, part.len))?;
        }
        Ok(Attended { o, lse: lse.tr() })
    }

    /// Computes gradients from the inputs and results of [`Mixed::forward`], or from the results of a softmax over more keys.
    pub(super) fn backward(
        &self,
        d_o: &Tensor,          // [T, H, hd]
        saved: SavedAttention, // q, o [T, H, hd], k, v [T, Hkv, hd], lse [T, H]
        scale: f64,
    ) -> Result<QkvGradients> {
        let SavedAttention { q, k, v, o, lse } = saved;
        let gradients = try_map([q, k, v], |t| Ok(Tensor::f_empty(t.size(), (t.kind(), t.device()))?))?;
        let lse = lse.tr(); // [H, T]
        for part in &self.parts {
            let own_lse = lse.narrow(1, part.first, part.len);
            let QkvGradients { dq, dk, dv } = match &part.short {
                Some(runs) => {
                    let [d_o, q, k, v, o] =
                        try_map([d_o, q, k, v, o], |t| Ok(t.narrow(0, part.first, part.len).f_contiguous()?))?;
                    let saved = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &own_lse.f_contiguous()? };
                    flash_backward(&d_o, saved, runs.varlen()?, scale)?
                }
                None => {
                    let [d_o, q, k, v, o] = try_map([d_o, q, k, v, o], |t| part.rectangle(t))?;
                    let len = rounded(part.len);
                    let padded = full(&[q.size()[1], len], f64::INFINITY, (lse.kind(), lse.device()))?;
                    padded.narrow(1, 0, part.len).f_copy_(&own_lse)?;
                    let padded = padded.view([1, -1, len, 1]);
                    let saved = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &padded };
                    let QkvGradients { dq, dk, dv } = cudnn_backward(&d_o, saved, true, scale)?;
                    QkvGradients { dq: part.rows(&dq), dk: part.rows(&dk), dv: part.rows(&dv) }
                }
            };
            for (whole, own) in gradients.iter().zip([&dq, &dk, &dv]) {
                whole.narrow(0, part.first, part.len).f_copy_(own)?;
            }
        }
        let [dq, dk, dv] = gradients;
        Ok(QkvGradients { dq, dk, dv })
    }
}

impl Part {
    /// The rows of the run and of the following ones, up to the rounded length [1, heads, rounded length, hd]: a view, or padded with zeros at the
    /// end.
    fn rectangle(&self, t: &Tensor /* [T, heads, hd] */) -> Result<Tensor> {
        let (len, there) = (rounded(self.len), t.size()[0] - self.first);
        let rows = t.narrow(0, self.first, len.min(there));
        let rows = if len > there { rows.f_constant_pad_nd([0, 0, 0, 0, 0, len - there])? } else { rows };
        Ok(as_runs(&rows, len))
    }

    /// The run's own rows [len, heads, hd] of a rectangle.
    fn rows(&self, rectangle: &Tensor /* [1, heads, rounded length, hd] */) -> Tensor {
        rectangle.select(0, 0).transpose(0, 1).narrow(0, 0, self.len)
    }
}

fn rounded(len: i64) -> i64 {
    (len + LEN_STEP - 1) / LEN_STEP * LEN_STEP
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::runs::Sees;
    use super::*;

    #[test]
    fn long_sequences_get_their_own_call_and_short_ones_share_one() {
        let bounds = [0, 5, 9, 700, 1200, 1200, 1207];
        let runs = |sees| Runs::new(&bounds, &bounds, sees, 2, Device::Cpu);
        let mixed = Mixed::new(&runs(Sees::Before { window: None }), |len| len > 256).unwrap();
        let parts: Vec<_> = mixed.parts.iter().map(|part| (part.first, part.len, part.short.is_some())).collect();
        assert_eq!(parts, [(0, 9, true), (9, 691, false), (700, 500, false), (1200, 7, true)]);
        assert!(Mixed::new(&runs(Sees::Before { window: Some(600) }), |len| len > 256).is_none());
        assert!(Mixed::new(&runs(Sees::Before { window: None }), |_| false).is_none());
        let long = &mixed.parts[1];
        let t = Tensor::arange(1207 * 3, (Kind::Float, Device::Cpu)).view([1207, 3, 1]);
        assert_eq!(long.rectangle(&t).unwrap().size(), [1, 3, 768, 1]);
        assert!(long.rows(&long.rectangle(&t).unwrap()).equal(&t.narrow(0, 9, 691)));
        let last = Part { first: 1190, len: 17, short: None };
        let rectangle = last.rectangle(&t).unwrap();
        assert!(last.rows(&rectangle).equal(&t.narrow(0, 1190, 17)) && rectangle.size()[2] == 256);
        assert_eq!(rectangle.narrow(2, 17, 239).abs().max().double_value(&[]), 0.0);
    }
}
