//! MXFP4 for matrices of experts: 4 bits per weight, and a power of two for 32 weights of a row. Engines keep a quantized copy, made when they wake;
//! activations and all other matrices are plain. The arithmetic is in [`crate::ops::mxfp4`].

use tch::{Kind, Tensor};

use super::step::{ExpertStep, StepCost, StepExperts, StepRows};
use super::{Format, Piece, Plain, Rows, Section, Use};
use crate::cuda::kernels::{self, ExpertTile, ScaledRows};
use crate::error::Result;
use crate::model::spec::{LinearSpec, Matrix, ModelSpec};
use crate::ops::grouped::Dispatch;
use crate::ops::mxfp4;
use crate::ops::swiglu::GateUp;

/// Experts' GEMMs with weights in MXFP4, for engines.
#[derive(Debug)]
pub struct Mxfp4;

impl Mxfp4 {
    /// The matrices of experts, decoded. CPU only.
    fn decoded(w: &Piece /* [E, N, K] */) -> Result<Tensor> {
        let Some(copy) = &w.prepared else { return Ok(w.weight.shallow_clone()) };
        let &[experts, rows, columns] = &w.weight.size()[..] else { panic!("matrices of experts") };
        mxfp4::values(&copy.values, [experts, rows, columns], w.weight.kind())
    }
}

impl Format for Mxfp4 {
    fn name(&self) -> &'static str {
        "mxfp4"
    }

    /// Inputs of GEMMs are not quantized.
    fn rounds(&self) -> bool {
        false
    }

    fn copies(&self, _matrix: Matrix, of_experts: bool) -> bool {
        of_experts
    }

    fn adapts_experts(&self) -> bool {
        false
    }

    fn refusal(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Option<String> {
        let Use::Engine { tp_size } = of else { return Some("only engines compute in MXFP4".to_owned()) };
        let linears = spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).linears());
        let mut linears = linears.filter(|linear| linear.experts.is_some());
        let serves = |linear: &LinearSpec| {
            linear.columns.is_multiple_of(mxfp4::BLOCK) && (!on_gpu || linear.rows().is_multiple_of(2))
        };
        let linear = linears.find(|linear| !serves(linear))?;
        Some(format!(
            "rows of a rank's experts must be multiples of {} elements long, but {:?} is {:?}; use a smaller tensor_parallel_size, or \
             enable_expert_parallel = true, with which each rank has whole experts",
            mxfp4::BLOCK,
            linear.matrix,
            [linear.rows(), linear.columns]
        ))
    }

    fn sections(&self, size: &[i64]) -> [Section; 2] {
        let bytes = if let &[experts, rows, columns] = size { mxfp4::bytes([experts, rows, columns]) } else { 0 };
        [(vec![bytes], Kind::Uint8), (vec![0], Kind::Float)]
    }

    fn round(&self, x: &Tensor, to: &ScaledRows) -> Result<()> {
        mxfp4::round(x, &to.values)
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        Plain.forward(x, w)
    }

    fn forward_onto(&self, residual: &Tensor, x: &Rows, w: &Piece) -> Result<Tensor> {
        Plain.forward_onto(residual, x, w)
    }

    fn gate_up(&self, x: &Rows, w: &Piece) -> Result<GateUp> {
        Plain.gate_up(x, w)
    }

    fn experts_forward(&self, dispatch: &Dispatch, x: &Rows, w: &Piece) -> Result<Tensor> {
        dispatch.forward(x.plain(), &Self::decoded(w)?)
    }

    fn experts_gate_up(&self, dispatch: &Dispatch, x: &Rows, w: &Piece) -> Result<GateUp> {
        dispatch.gate_up(x.plain(), &Self::decoded(w)?)
    }

    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        Plain.backward_input(dy, w)
    }

    fn step_cost(&self, plain_bytes: f64, of_experts: bool) -> StepCost {
        let plain = Plain.step_cost(plain_bytes, of_experts);
        if of_experts { StepCost { weight_bytes: mxfp4::WEIGHT_BYTES, ..plain } } else { plain }
    }

    fn step_tiles(&self, sizes: ExpertStep) -> Result<[ExpertTile; 2]> {
        let ExpertStep { tokens, choices, experts, gpu, .. } = sizes;
        Ok([ExpertTile::of_mxfp4(tokens, choices, experts, gpu)?; 2])
    }

    fn step_experts_gate_up(&self, by: StepExperts<'_>, x: StepRows<'_>, w: &Piece, act: &Tensor) -> Result<()> {
        kernels::mxfp4_experts_gate_up(by.tile, x.plain, w.rounded(), w.bias.as_ref(), by.routed, act)
    }

    fn step_experts_down(&self, by: StepExperts<'_>, act: StepRows<'_>, w: &Piece, out: &Tensor) -> Result<()> {
        kernels::mxfp4_experts_down(by.tile, act.plain, w.rounded(), w.bias.as_ref(), by.routed, out)
    }
}
