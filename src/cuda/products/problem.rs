//! The shape of a GEMM: everything that the choice of its algorithm depends on.

use tch::{Device, Kind, Tensor};

use crate::cuda::kernels::ScaledRows;
use crate::error::{Error, Result};

/// The memory layout of an operand: row-major with a leading dimension, or the transpose of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Factor {
    rows: i64,
    columns: i64,
    leading: i64,
    pub(super) is_transposed: bool,
}

/// A GEMM's operands and types: everything that the choice of its algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    pub(super) a: Factor,
    pub(super) b: Factor,
    pub(super) out: Factor,
    pub(super) kind: Kind,
    pub(super) out_kind: Kind,
    pub(super) has_bias: bool,
    accumulates: bool,
    pub(super) is_scaled: bool, // each sum is multiplied by a scale per row of a and per column of b
    pub(super) alignment: u32,  // in bytes, of all three
    pub(super) parts: i64,      // of a longer K, each with its own output, stored one after the other
}

impl Problem {
    pub(super) fn of(
        a: &Tensor,
        b: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
        beta: f32,
        ordinal: usize,
    ) -> Result<Self> {
        let [left, right, result] = [a, b, out].map(|tensor| Factor::of(tensor, ordinal));
        let (left, right, result) = (left?, right?, result?);
        let fits = left.columns == right.rows
            && (result.rows, result.columns) == (left.rows, right.columns)
            && !result.is_transposed
            && a.kind() == b.kind()
            && (a.kind() == Kind::Float8e4m3fn || is_plain(a))
            && is_plain(out)
            && bias.is_none_or(|bias| {
                bias.size() == [right.columns]
                    && bias.kind() == out.kind()
                    && bias.device() == out.device()
                    && bias.is_contiguous()
            });
        if !fits {
            let shape = |tensor: &Tensor| format!("{:?} {:?} {:?}", tensor.kind(), tensor.size(), tensor.stride());
            let got = format!("{} x {} -> {}, bias {:?}", shape(a), shape(b), shape(out), bias.map(shape));
            return Err(invalid("[M, K] x [K, N] + [N] -> [M, N] of f32 or bf16", got));
        }
        let addresses = [a, b, out].map(|tensor| tensor.data_ptr() as usize);
        let alignment = addresses.iter().map(|address| address.trailing_zeros()).min().unwrap_or(0);
        Ok(Self {
            a: left,
            b: right,
            out: result,
            kind: a.kind(),
            out_kind: out.kind(),
            has_bias: bias.is_some(),
            accumulates: beta != 0.0,
            is_scaled: false,
            alignment: 1 << alignment.min(8),
            parts: 1,
        })
    }

    /// Describes out = residual + a b^T + bias for FP8 rows with scales.
    pub(super) fn of_fp8(
        a: &ScaledRows,
        b: &ScaledRows,
        (bias, residual): (Option<&Tensor>, Option<&Tensor>),
        out: &Tensor,
        ordinal: usize,
    ) -> Result<Self> {
        let beta = f32::from(u8::from(residual.is_some()));
        let problem = Self::of(&a.values, &b.values.tr(), bias, out, beta, ordinal)?;
        let alike = |tensor: &Tensor| {
            tensor.size() == out.size()
                && tensor.stride() == out.stride()
                && (tensor.kind(), tensor.device()) == (out.kind(), out.device())
        };
        if let Some(residual) = residual.filter(|residual| !alike(residual)) {
            let shape = |tensor: &Tensor| format!("{:?} {:?} {:?}", tensor.kind(), tensor.size(), tensor.stride());
            return Err(invalid(
                "a residual of the result's shape and dtype",
                format!("{} beside {}", shape(residual), shape(out)),
            ));
        }
        let fits = |rows: &ScaledRows| {
            let scales = &rows.scales;
            rows.values.kind() == Kind::Float8e4m3fn
                && scales.kind() == Kind::Float
                && scales.size() == rows.values.size()[..1]
                && scales.is_contiguous()
                && scales.device() == rows.values.device()
        };
        let out_fits = out.kind() == Kind::BFloat16 || bias.is_none();
        if !out_fits || !fits(a) || !fits(b) {
            let got = format!("{:?} and {:?} scales, {:?}", a.scales.size(), b.scales.size(), out.kind());
            return Err(invalid("e4m3 with [M] and [N] float32 scales -> bf16, or f32 without a bias", got));
        }
        Ok(Self { is_scaled: true, ..problem })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.out.rows == 0 || self.out.columns == 0
    }

    pub(super) fn flop(&self) -> f64 {
        2.0 * self.a.rows as f64 * self.a.columns as f64 * self.b.columns as f64 * self.parts as f64
    }

    /// M, N and K as text, for file names and messages.
    pub(super) fn name(&self) -> String {
        let parts = if self.parts > 1 { format!("x{}", self.parts) } else { String::new() };
        format!("{}x{}x{}{parts}", self.a.rows, self.b.columns, self.a.columns)
    }

    /// This GEMM as the first of `parts` equal parts of a longer K.
    pub(super) fn in_parts(&self, parts: i64) -> Self {
        Self { parts, ..*self }
    }

    /// Distance in elements between consecutive parts of b, of a and of the output.
    pub(super) fn part_strides(&self) -> [i64; 3] {
        let along = |factor: &Factor, elements: i64, is_along: bool| {
            if is_along { elements } else { elements * factor.leading }
        };
        [
            along(&self.b, self.b.rows, self.b.is_transposed),
            along(&self.a, self.a.columns, !self.a.is_transposed),
            self.out.leading * self.out.rows,
        ]
    }

    /// Number of rows M of the output.
    pub(super) fn rows(&self) -> i64 {
        self.out.rows
    }

    /// This GEMM with another number of rows.
    pub(super) fn with_rows(&self, rows: i64) -> Self {
        let mut other = *self;
        (other.a.rows, other.out.rows) = (rows, rows);
        if other.a.is_transposed {
            other.a.leading = other.a.leading.max(rows);
        }
        other
    }

    /// This GEMM, with addresses assumed to be aligned to at most `bytes`.
    pub(super) fn aligned_to_at_most(&self, bytes: u32) -> Self {
        Self { alignment: self.alignment.min(bytes), ..*self }
    }

    /// Distance in elements between rows of the output.
    pub(super) fn row_len(&self) -> i64 {
        self.out.leading
    }

    /// Number of elements that operand a spans.
    pub(super) fn a_len(&self) -> i64 {
        self.a.leading * if self.a.is_transposed { self.a.columns } else { self.a.rows }
    }

    /// 1 if the GEMM adds to the output, else 0.
    pub(super) fn beta(&self) -> f32 {
        f32::from(u8::from(self.accumulates))
    }
}

fn is_plain(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), Kind::Float | Kind::BFloat16)
}

impl Factor {
    fn of(tensor: &Tensor, ordinal: usize) -> Result<Self> {
        let (size, stride) = (tensor.size(), tensor.stride());
        let (&[rows, columns], &[down, across]) = (size.as_slice(), stride.as_slice()) else {
            return Err(invalid("matrices", format!("{size:?}")));
        };
        if tensor.device() != Device::Cuda(ordinal) {
            return Err(invalid("matrices on the same GPU", format!("{:?}", tensor.device())));
        }
        let is_transposed = across != 1 && columns > 1; // the stride along a single column says nothing
        let (leading, unit, unit_len, others) =
            if is_transposed { (across, down, rows, columns) } else { (down, across, columns, rows) };
        if unit_len > 1 && unit != 1 {
            return Err(invalid("a matrix with one stride of 1", format!("strides {stride:?} of {size:?}")));
        }
        let leading = if others > 1 { leading } else { leading.max(unit_len) };
        Ok(Self { rows, columns, leading, is_transposed })
    }

    /// (rows, columns, leading dimension) of the column-major matrix at the same address.
    pub(super) fn column_major(&self) -> (u64, u64, i64) {
        let (rows, columns) = if self.is_transposed { (self.rows, self.columns) } else { (self.columns, self.rows) };
        (rows as u64, columns as u64, self.leading.max(rows))
    }
}

pub(super) fn invalid(expected: &str, got: String) -> Error {
    Error::InvalidArgument { op: "Products::run", expected: expected.to_owned(), got }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::products::fixed::bucket;

    /// A GEMM [rows, 72] x [72, 40].
    fn problem(rows: i64, alignment: u32) -> Problem {
        let factor = |rows, columns, is_transposed| Factor { rows, columns, leading: 72, is_transposed };
        Problem {
            a: factor(rows, 72, false),
            b: factor(72, 40, true),
            out: factor(rows, 40, false),
            kind: Kind::BFloat16,
            out_kind: Kind::Float,
            has_bias: true,
            accumulates: false,
            is_scaled: false,
            alignment,
            parts: 1,
        }
    }

    #[test]
    fn gemm_buckets_round_rows_to_powers_of_two() {
        assert_eq!(bucket(&problem(1, 16)), problem(1, 16));
        assert_eq!(bucket(&problem(33, 256)), problem(64, 16));
        assert_eq!(bucket(&problem(64, 32)), problem(64, 16));
        assert_eq!(bucket(&problem(65, 8)), problem(128, 8), "an algorithm for 16 bytes may not take 8");
    }
}
