//! Grouped GEMMs, in which every row is multiplied with one of several matrices. Rows are sorted by matrix; the rows of one matrix are a group.
//!
//! On a GPU, bfloat16 uses GEMMs that read the groups' ends on the device: libtorch's and, for weight gradients on Hopper, this crate's with float32
//! sums. libtorch's gradients are rounded to bfloat16 first. All other cases run one GEMM per group, for which the host waits to learn their sizes.
//!
//! R rows, E matrices [N, K].

mod scaled;

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::linear::{self, Onto};
use super::swiglu::{GateUp, halves};
use super::try_map;
use crate::cuda::{OpCost, kernels, timed};
use crate::error::Result;
use crate::torch;

/// How tokens are dispatched to experts: K rows per token, sorted by expert.
#[derive(Debug)]
pub struct Dispatch {
    /// The token of each row.
    tokens: Tensor, // [R]
    /// The choice (token x K + rank) that each row belongs to.
    choices: Tensor, // [R]
    /// The row of each choice.
    rows: Tensor, // [T, K]
    groups: Groups,
}

/// The rows of each matrix.
#[derive(Debug)]
enum Groups {
    /// Index of the row after each group, on the device.
    Ends(Tensor), // [E] int32
    /// Number of rows per group, and number of rows before the first group. Rows without a matrix on this rank give zeros.
    Sizes { before: i64, sizes: Vec<i64> }, // [own]
}

impl Dispatch {
    /// Sorts the choices of all tokens by expert, and by token within an expert, for GEMMs of `kind` with the matrices of the experts in `own`.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(
        experts: &Tensor, // [T, K] int64
        num_experts: usize,
        own: Range<usize>,
        kind: Kind,
    ) -> Result<Self> {
        let [_, k] = experts.size()[..] else { panic!("experts [T, K]") };
        let flat = experts.f_reshape([-1])?;
        let (sorted, choices) = timed("choices sorted", OpCost::default, || flat.f_sort_stable(true, 0, false))?;
        let rows = timed("choices sorted", OpCost::default, || choices.f_argsort(0, false))?;
        let rows = rows.f_view(experts.size().as_slice())?;
        let expert_ids = torch::arange(num_experts as i64, experts.device())?;
        let ends = expert_ids.f_searchsorted(&sorted, true, true, "right", None::<&Tensor>)?;
        let groups = match has_kernel(kind, experts.device()) && own.len() == num_experts {
            true => Groups::Ends(ends),
            false => {
                let ends = torch::i64_vec(&ends.f_to_kind(Kind::Int64)?)?;
                let starts = [&[0], &ends[..]].concat();
                let sizes = own.clone().map(|expert| ends[expert] - starts[expert]).collect();
                Groups::Sizes { before: starts[own.start], sizes }
            }
        };
        Ok(Self { tokens: choices.f_floor_divide(&torch::scalar(k))?, choices, rows, groups })
    }

    /// Copies each token's values to its rows. [R, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn scatter(&self, x: &Tensor /* [T, N] */) -> Result<Tensor> {
        let bytes = (self.tokens.size()[0] * x.size()[1]) as f64 * 2.0 * x.kind().elt_size_in_bytes() as f64;
        let work = || OpCost { bytes, flop: 0.0 };
        Ok(timed("rows of experts", work, || x.f_index_select(0, &self.tokens))?)
    }

    /// Reorders one value per choice into one value per row. [R, 1]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn of_rows(&self, choices: &Tensor /* [T, K] */) -> Result<Tensor> {
        Ok(choices.f_reshape([-1])?.f_index_select(0, &self.choices)?.f_unsqueeze(1)?)
    }

    /// Reorders one value per row into one value per choice. [T, K]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn of_choices(&self, rows: &Tensor /* [R] */) -> Result<Tensor> {
        Ok(rows.f_take(&self.rows)?)
    }

    /// Sums each token's rows, multiplied by `weights` if given, in the order of its choices and in the accumulation type. [T, N]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gather(
        &self,
        rows: &Tensor,            // [R, N]
        weights: Option<&Tensor>, // [T, K]
    ) -> Result<Tensor> {
        if kernels::serve(rows) {
            let bytes = (rows.numel() * rows.kind().elt_size_in_bytes()) as f64;
            let work = || OpCost { bytes, flop: 0.0 };
            return timed("sum of experts", work, || kernels::experts_gather(rows, &self.rows, weights));
        }
        let part = |choice: i64| -> Result<Tensor> {
            let part = rows.f_index_select(0, &self.rows.f_select(1, choice)?)?;
            let part = part.f_to_kind(torch::accumulation_kind(rows.kind()))?;
            Ok(match weights {
                Some(weights) => part.f_mul(&weights.f_select(1, choice)?.f_unsqueeze(1)?)?,
                None => part,
            })
        };
        let mut sum = part(0)?;
        for choice in 1..self.rows.size()[1] {
            sum = sum.f_add_(&part(choice)?)?;
        }
        Ok(sum)
    }

    /// Computes y = x w^T, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn forward(
        &self,
        x: &Tensor, // [R, K]
        w: &Tensor, // [E, N, K]
    ) -> Result<Tensor> {
        self.product(x, &w.f_transpose(1, 2)?) // [R, N]
    }

    /// Computes y += x w^T, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn accumulate(
        &self,
        x: &Tensor,     // [R, K]
        w: &Tensor,     // [E, N, K]
        y: &mut Tensor, // [R, N]
    ) -> Result<()> {
        self.accumulate_product(x, &w.f_transpose(1, 2)?, y)
    }

    /// Computes dx = dy w, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn backward_input(
        &self,
        dy: &Tensor, // [R, N]
        w: &Tensor,  // [E, N, K]
    ) -> Result<Tensor> {
        self.product(dy, w) // [R, K]
    }

    /// Computes dx += dy w, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn accumulate_input(
        &self,
        dy: &Tensor,     // [R, N]
        w: &Tensor,      // [E, N, K]
        dx: &mut Tensor, // [R, K]
    ) -> Result<()> {
        self.accumulate_product(dy, w, dx)
    }

    /// Computes dw = dy^T x or dw += dy^T x, each matrix with the rows of its group.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn weight_gradient(
        &self,
        dy: &Tensor,     // [R, N]
        x: &Tensor,      // [R, K]
        dw: &mut Tensor, // [E, N, K]
        onto: Onto,
    ) -> Result<()> {
        let work = || OpCost::product(dy.size()[1], x.size()[1], x.size()[0]);
        match &self.groups {
            Groups::Ends(ends) if kernels::grouped_weight_serves(dy, x, dw)? => {
                let run = || kernels::grouped_weight(dy, x, ends, dw, onto == Onto::Sum);
                timed("grouped product, gradient of its weight", work, run)
            }
            Groups::Ends(ends) => {
                let run = || dy.tr().f_internal_grouped_mm(x, Some(ends), None, None);
                let gradient = timed("grouped product, gradient of its weight", work, run)?;
                let bytes = (gradient.numel()
                    * (2 * dw.kind().elt_size_in_bytes() + gradient.kind().elt_size_in_bytes()))
                    as f64;
                let write = || match onto {
                    Onto::Nothing => dw.f_copy_(&gradient),
                    Onto::Sum => dw.f_add_(&gradient).map(drop),
                };
                Ok(timed("gradients of experts added", || OpCost { bytes, flop: 0.0 }, write)?)
            }
            Groups::Sizes { before, sizes } => {
                let empty = (0i64..).zip(sizes).filter(|(_, size)| onto == Onto::Nothing && **size == 0);
                for (expert, _) in empty {
                    let _ = dw.f_select(0, expert)?.f_zero_()?;
                }
                each(*before, sizes, |expert, start, size| {
                    let rows = |t: &Tensor| t.f_narrow(0, start, size);
                    linear::weight_gradient(&rows(dy)?, &rows(x)?, &mut dw.f_select(0, expert)?, onto)
                })
            }
        }
    }

    /// Computes gate and up of x, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gate_up(
        &self,
        x: &Tensor, // [R, D]
        w: &Tensor, // [E, 2 I, D]
    ) -> Result<GateUp> {
        if kernels::serve(x) {
            return Ok(GateUp::Interleaved(self.forward(x, w)?));
        }
        let [gate, up] = try_map(halves(w), |w| self.forward(x, &w))?;
        Ok(GateUp::Split { gate, up })
    }

    /// Adds x w^T to gate and up, each row with its own matrix.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn accumulate_into_gate_up(
        &self,
        x: &Tensor, // [R, D]
        w: &Tensor, // [E, 2 I, D]
        gate_up: &mut GateUp,
    ) -> Result<()> {
        match gate_up {
            GateUp::Interleaved(pairs) => self.accumulate(x, w, pairs),
            GateUp::Split { gate, up } => {
                let [w_gate, w_up] = halves(w);
                self.accumulate(x, &w_gate, gate)?;
                self.accumulate(x, &w_up, up)
            }
        }
    }

    /// Computes dx of [`Dispatch::gate_up`]. [R, D]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gate_up_backward_input(&self, d: &GateUp, w: &Tensor /* [E, 2 I, D] */) -> Result<Tensor> {
        match d {
            GateUp::Interleaved(d) => self.backward_input(d, w),
            GateUp::Split { gate, up } => {
                let [w_gate, w_up] = halves(w);
                let mut dx = self.backward_input(gate, &w_gate)?;
                Ok(dx.f_add_(&self.backward_input(up, &w_up)?)?)
            }
        }
    }

    /// Computes the weight gradient of [`Dispatch::gate_up`], like [`Dispatch::weight_gradient`].
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gate_up_weight_gradient(
        &self,
        d: &GateUp,
        x: &Tensor,      // [R, D]
        dw: &mut Tensor, // [E, 2 I, D]
        onto: Onto,
    ) -> Result<()> {
        match d {
            GateUp::Interleaved(d) => self.weight_gradient(d, x, dw, onto),
            GateUp::Split { gate, up } => {
                let [mut d_gate, mut d_up] = halves(dw);
                self.weight_gradient(gate, x, &mut d_gate, onto)?;
                self.weight_gradient(up, x, &mut d_up, onto)
            }
        }
    }

    /// Adds each row of `a` times its group's matrix to `sum`.
    fn accumulate_product(
        &self,
        a: &Tensor,       // [R, K]
        b: &Tensor,       // [E, K, N]
        sum: &mut Tensor, // [R, N]
    ) -> Result<()> {
        match &self.groups {
            Groups::Ends(_) => {
                let _ = sum.f_add_(&self.product(a, b)?)?;
                Ok(())
            }
            Groups::Sizes { before, sizes } => each(*before, sizes, |expert, start, size| {
                let rows = |t: &Tensor| t.f_narrow(0, start, size);
                linear::accumulate_input(&rows(a)?, &b.f_select(0, expert)?, &mut rows(sum)?)
            }),
        }
    }

    /// Multiplies each row of `a` with its group's matrix.
    fn product(
        &self,
        a: &Tensor, // [R, K]
        b: &Tensor, // [E, K, N]
    ) -> Result<Tensor> {
        match &self.groups {
            Groups::Ends(ends) => {
                let work = || OpCost::product(a.size()[0], b.size()[2], a.size()[1]);
                Ok(timed("grouped product", work, || a.f_internal_grouped_mm(b, Some(ends), None, None))?)
            }
            Groups::Sizes { before, sizes } => {
                let is_partial = sizes.iter().sum::<i64>() < a.size()[0];
                let make = if is_partial { Tensor::f_zeros } else { Tensor::f_empty };
                let y = make([a.size()[0], b.size()[2]], (a.kind(), a.device()))?;
                each(*before, sizes, |expert, start, size| {
                    let rows = |t: &Tensor| t.f_narrow(0, start, size);
                    linear::backward_input_into(&rows(a)?, &b.f_select(0, expert)?, &rows(&y)?)
                })?;
                Ok(y) // [R, N]
            }
        }
    }
}

/// Calls `f(matrix, first row, number of rows)` for every matrix that has rows.
fn each(before: i64, sizes: &[i64], mut f: impl FnMut(i64, i64, i64) -> Result<()>) -> Result<()> {
    let mut start = before;
    for (expert, &size) in sizes.iter().enumerate().filter(|(_, size)| **size > 0) {
        f(expert as i64, start, size)?;
        start += size;
    }
    Ok(())
}

/// Whether libtorch has a grouped GEMM kernel for this type and device.
fn has_kernel(kind: Kind, device: Device) -> bool {
    device.is_cuda() && kind == Kind::BFloat16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    /// In this test, expert 2 has no rows.
    #[test]
    fn grouped_gemm_matches_autograd_row_by_row() {
        let experts = Tensor::from_slice(&[3i64, 0, 1, 3, 0, 1, 3, 1]).view([4, 2]);
        let (x, w, weights, dy) = (leaf(&rand(&[4, 3])), leaf(&rand(&[4, 5, 3])), rand(&[4, 2]), rand(&[4, 5]));
        let row = |token: i64, choice: i64| {
            let expert = experts.int64_value(&[token, choice]);
            w.get(expert).matmul(&x.get(token)) * weights.double_value(&[token, choice])
        };
        let rows: Vec<Tensor> = (0..4).map(|token| row(token, 0) + row(token, 1)).collect();
        let expected = Tensor::stack(&rows, 0);
        let grads = Tensor::run_backward(&[(&expected * &dy).sum(None)], &[&x, &w], false, false);

        let (x, w) = (x.detach(), w.detach());
        let dispatch = Dispatch::new(&experts, 4, 0..4, Kind::Double).unwrap();
        let rows = dispatch.scatter(&x).unwrap();
        let products = dispatch.forward(&rows, &w).unwrap();
        assert_close(&dispatch.gather(&products, Some(&weights)).unwrap(), &expected);
        let d_rows = dispatch.scatter(&dy).unwrap() * dispatch.of_rows(&weights).unwrap();
        let d_x = dispatch.backward_input(&d_rows, &w).unwrap();
        assert_close(&dispatch.gather(&d_x, None).unwrap(), &grads[0]);
        let mut d_w = rand(&[4, 5, 3]);
        let before = d_w.copy();
        dispatch.weight_gradient(&d_rows, &rows, &mut d_w, Onto::Sum).unwrap();
        assert_close(&d_w, &(before + &grads[1]));
        let mut written = d_w.full_like(f64::NAN);
        dispatch.weight_gradient(&d_rows, &rows, &mut written, Onto::Nothing).unwrap();
        assert_close(&written, &grads[1]);
        let of_rows = dispatch.of_rows(&weights).unwrap().squeeze_dim(1);
        assert!(dispatch.of_choices(&of_rows).unwrap().equal(&weights));
    }
}
