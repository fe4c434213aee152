//! int8 with one float32 scale per row, for an engine's blocks. Rows of weights and of activations are first multiplied by Hadamard matrices, which
//! leaves their products as they are and spreads columns with large values (QuaRot, arXiv 2404.00456). The engine keeps a quantized copy of its weights,
//! made when it wakes. Integer sums are exact, so a row's bits do not depend on the rows beside it. The arithmetic is in [`crate::ops::int8`].

use tch::{Device, Kind, Tensor};

use super::step::{OwnProducts, StepCost, StepProducts, StepRows};
use super::{Format, Fp8, Piece, Plain, Rows, Section, Use};
use crate::cuda::kernels::{self, ScaledRows};
use crate::error::Result;
use crate::model::spec::ModelSpec;
use crate::ops::int8;

/// GEMMs with rotated int8 operands.
#[derive(Debug)]
pub struct Int8;

impl Int8 {
    fn rounded(x: &Rows) -> Result<ScaledRows> {
        match x {
            Rows::Plain(rows) => int8::rotated_rows(rows),
            Rows::Rounded { rows, .. } => Ok(rows.shallow_clone()),
        }
    }
}

impl Format for Int8 {
    fn name(&self) -> &'static str {
        "int8"
    }

    fn has_own_products(&self) -> bool {
        true
    }

    fn refusal(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Option<String> {
        if spec.num_expert_layers() > 0 {
            return Some("models with experts are not supported in int8; fp8 supports them".to_owned());
        }
        Fp8::ROWS.refusal(of, spec, on_gpu) // kernels have the same limits on shapes
    }

    fn device_refusal(&self, device: Device) -> Result<Option<String>> {
        Fp8::ROWS.device_refusal(device)
    }

    fn sections(&self, size: &[i64]) -> [Section; 2] {
        let &[rows, columns] = size else { panic!("a matrix, not {size:?}") };
        [(vec![rows, columns], Kind::Int8), (vec![rows], Kind::Float)]
    }

    fn round(&self, x: &Tensor, to: &ScaledRows) -> Result<()> {
        int8::rotate_rows(x, to)
    }

    fn rows(&self, x: &Rows) -> Result<Rows> {
        Ok(Rows::Rounded { rows: Self::rounded(x)?, plain: None })
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        let rounded =
            w.prepared.as_ref().map_or_else(|| int8::rotated_rows(&w.weight), |rows| Ok(rows.shallow_clone()));
        int8::forward(&Self::rounded(x)?, &rounded?, w.bias.as_ref(), w.weight.kind())
    }

    /// Training never has this format, so a gradient counts rounding as the identity.
    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        Plain.backward_input(dy, w)
    }

    fn step_cost(&self, _plain_bytes: f64, _of_experts: bool) -> StepCost {
        StepCost { weight_bytes: 1.0, row_bytes: 1.0, speedup: 2.0 }
    }

    fn step_gate_up(&self, _own: OwnProducts, x: StepRows<'_>, w: &Piece, act: &mut Tensor) -> Result<()> {
        kernels::int8_silu_mul(x.rounded(), w.rounded(), act)
    }

    fn step_product(&self, _by: StepProducts<'_>, x: StepRows<'_>, w: &Piece, out: &Tensor) -> Result<()> {
        kernels::int8_product(x.rounded(), w.rounded(), w.bias.as_ref(), out)
    }
}
