//! FP8 (e4m3) with one float32 scale per row. An engine keeps a quantized copy of its weights, made when it wakes. Training quantizes both operands
//! of a GEMM on the fly, along the dimension that the GEMM sums over. The arithmetic and its kernels are in [`crate::ops::fp8`].

use tch::{Device, Kind, Tensor};

use super::step::{OwnProducts, StepCost, StepExperts, StepProducts, StepRows};
use super::{ActivationGradient, Format, Piece, Plain, Rows, Section, Use};
use crate::cuda::kernels::{self, NormOptions, ScaledRows};
use crate::cuda::{Context, OpCost, Products, timed};
use crate::error::Result;
use crate::model::spec::{ElementBytes, LinearSpec, ModelSpec};
use crate::ops::fp8;
use crate::ops::grouped::Dispatch;
use crate::ops::linear::{self, Onto};
use crate::ops::swiglu::{Activation, GateUp};

/// GEMMs with FP8 operands.
#[derive(Debug)]
pub struct Fp8 {
    /// Whether weight gradients are computed in FP8 too, except those of experts. Their operands are scaled by column, so a scale spans a micro-batch's
    /// tokens.
    rounds_columns: bool,
}

impl Fp8 {
    /// FP8 in the forward pass and for input gradients.
    pub const ROWS: Self = Self { rounds_columns: false };
    /// FP8 in the forward pass, for input gradients and for weight gradients.
    pub const ALL: Self = Self { rounds_columns: true };

    fn rounded(x: &Rows) -> Result<ScaledRows> {
        match x {
            Rows::Plain(rows) => fp8::rounded(rows),
            Rows::Rounded { rows, .. } => Ok(rows.shallow_clone()),
        }
    }

    /// The weight's prepared quantized copy, or else a new one.
    fn weight(w: &Piece) -> Result<ScaledRows> {
        w.prepared.as_ref().map_or_else(|| fp8::rounded(&w.weight), |prepared| Ok(prepared.shallow_clone()))
    }
}

/// The matrices that training quantizes; blocks of the same shape are listed once.
fn trained_linears(spec: &ModelSpec) -> impl Iterator<Item = LinearSpec> + '_ {
    let linears = spec.kinds_of_blocks().into_iter().flat_map(|kind| spec.layers[kind.layer].linears());
    linears.filter(|linear| linear.matrix.is_rounded())
}

impl Format for Fp8 {
    fn name(&self) -> &'static str {
        if self.rounds_columns { "fp8_all" } else { "fp8" }
    }

    fn refusal(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Option<String> {
        if !on_gpu {
            return None;
        }
        let (linears, sides): (Vec<LinearSpec>, _) = match of {
            Use::Training => {
                let sides = "on GPUs both dimensions of a matrix must be multiples of 16 and at most 65536";
                (trained_linears(spec).collect(), sides)
            }
            Use::Engine { tp_size } => {
                let sides = "both dimensions of a rank's matrices must be multiples of 16, and rows at most 32768 \
                             elements long";
                let linears = spec.layers.iter().flat_map(|block| block.tp_slice(tp_size).linears());
                (linears.filter(|linear| linear.matrix.is_rounded()).collect(), sides)
            }
        };
        if linears.iter().any(|linear| linear.experts.is_some() && linear.bias.is_some()) {
            return Some("on GPUs experts with biases are not supported in FP8".to_owned());
        }
        let serves = match of {
            Use::Training => kernels::fp8_trains,
            Use::Engine { .. } => kernels::fp8_serves,
        };
        let sizes = linears.iter().map(|linear| (linear.matrix, [linear.rows(), linear.columns]));
        let (matrix, size) = sizes.into_iter().find(|(_, size)| !serves(*size))?;
        Some(format!("{sides}; {matrix:?} is {size:?}"))
    }

    fn device_refusal(&self, device: Device) -> Result<Option<String>> {
        match device {
            Device::Cuda(ordinal) => Context::retain(ordinal)?.fp8_refusal(),
            _ => Ok(None),
        }
    }

    fn element_bytes(&self, plain: ElementBytes, adapts: bool) -> ElementBytes {
        let rounded = Kind::Float8e4m3fn.elt_size_in_bytes();
        ElementBytes { read: rounded + if adapts { plain.narrow } else { 0 }, rounded, ..plain }
    }

    /// Bytes of the quantized values, of their scales, and of the columns' largest absolute values from which scales are computed.
    fn matrix_bytes(&self, spec: &ModelSpec) -> usize {
        let scales = 2 * size_of::<f32>();
        let bytes = |linear: LinearSpec| {
            let one = linear.rows() * linear.columns + scales * linear.rows().max(linear.columns);
            linear.experts.unwrap_or(1) * one
        };
        trained_linears(spec).map(bytes).max().unwrap_or(0)
    }

    fn workspace_bytes(&self, _spec: &ModelSpec) -> usize {
        Products::BYTES
    }

    fn sections(&self, size: &[i64]) -> [Section; 2] {
        let (&columns, rows) = size.split_last().expect("a matrix");
        let rows = rows.iter().product();
        [(vec![rows, columns], Kind::Float8e4m3fn), (vec![rows], Kind::Float)]
    }

    /// All experts are quantized at once if their memory is contiguous.
    fn round(&self, x: &Tensor, to: &ScaledRows) -> Result<()> {
        let &[experts, rows, columns] = &x.size()[..] else { return fp8::round_rows(x, to) };
        if let Ok(all) = x.f_view([experts * rows, columns]) {
            return fp8::round_rows(&all, to);
        }
        (0..experts).try_for_each(|expert| {
            let own = |all: &Tensor| all.narrow(0, expert * rows, rows);
            fp8::round_rows(&x.get(expert), &ScaledRows { values: own(&to.values), scales: own(&to.scales) })
        })
    }

    fn rows(&self, x: &Rows) -> Result<Rows> {
        Ok(Rows::Rounded { rows: Self::rounded(x)?, plain: None })
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        fp8::forward(&Self::rounded(x)?, &Self::weight(w)?, w.bias.as_ref(), w.weight.kind())
    }

    fn forward_onto(&self, residual: &Tensor, x: &Rows, w: &Piece) -> Result<Tensor> {
        fp8::forward_onto(residual, &Self::rounded(x)?, &Self::weight(w)?, w.weight.kind())
    }

    fn experts_forward(&self, dispatch: &Dispatch, x: &Rows, w: &Piece) -> Result<Tensor> {
        let size = w.weight.size();
        let weights = match &w.prepared {
            Some(prepared) => prepared.shallow_clone(),
            None => fp8::rounded(&w.weight.f_reshape([size[0] * size[1], size[2]])?)?,
        };
        dispatch.forward_fp8(&Self::rounded(x)?, &weights, w.weight.kind())
    }

    fn experts_gate_up(&self, dispatch: &Dispatch, x: &Rows, w: &Piece) -> Result<GateUp> {
        GateUp::of_pairs(self.experts_forward(dispatch, x, w)?)
    }

    fn experts_rows(&self, dispatch: &Dispatch, x: &Tensor, is_read: bool) -> Result<Rows> {
        let rows = dispatch.scatter_fp8(&fp8::rounded(x)?)?;
        Ok(Rows::Rounded { rows, plain: is_read.then(|| dispatch.scatter(x)).transpose()? })
    }

    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        fp8::backward_input(&fp8::rounded(dy)?, &w.weight, dy.kind())
    }

    fn gate_up_backward(&self, d: &GateUp, rounded: Option<&ScaledRows>, w: &Piece) -> Result<Tensor> {
        match rounded {
            Some(rounded) => fp8::backward_input(rounded, &w.weight, w.weight.kind()),
            None => self.backward_input(&d.pairs()?, w),
        }
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        match self.rounds_columns {
            true => fp8::weight_gradient(dy, x, dw, onto),
            false => linear::weight_gradient(dy, x, dw, onto),
        }
    }

    fn gate_up_weight_gradient(&self, d: &GateUp, x: &Tensor, dw: &mut Tensor, onto: Onto) -> Result<()> {
        match self.rounds_columns {
            true => fp8::weight_gradient(&d.pairs()?, x, dw, onto),
            false => d.weight_gradient(x, dw, onto),
        }
    }

    /// Uses a kernel that normalizes and quantizes in one pass, if it supports the rows' shape.
    fn norm(&self, norm: NormOptions, x: &Tensor, weight: &Tensor, is_read: bool) -> Result<Rows> {
        if !kernels::fp8_norm_serves(x, weight) {
            return Ok(norm.forward(x, weight)?.0.into());
        }
        let rows = fp8::empty([x.size()[0], x.size()[1]], x.device())?;
        let plain = || Tensor::f_empty(x.size(), (weight.kind(), x.device()));
        let mut plain = is_read.then(plain).transpose()?;
        let of_plain = if is_read { OpCost::pass(&[&weight.expand_as(x)]).bytes } else { 0.0 };
        let work = || OpCost { bytes: OpCost::pass(&[x, &rows.values]).bytes + of_plain, flop: 0.0 };
        timed("norm", work, || kernels::rms_norm_8bit(x, weight, plain.as_mut(), &rows, norm))?;
        Ok(Rows::Rounded { rows, plain })
    }

    /// Uses a kernel that activates and quantizes in one pass, if it supports the rows' shape.
    fn activate(&self, activation: Activation, gate_up: &GateUp, is_read: bool) -> Result<Rows> {
        let pairs = match gate_up {
            GateUp::Interleaved(pairs) if kernels::fp8_swiglu_serves(pairs) => pairs,
            _ => return Ok(gate_up.activate(activation)?.into()),
        };
        let [tokens, columns] = [pairs.size()[0], pairs.size()[1] / 2];
        let rows = fp8::empty([tokens, columns], pairs.device())?;
        let plain = || Tensor::f_empty([tokens, columns], (pairs.kind(), pairs.device()));
        let mut plain = is_read.then(plain).transpose()?;
        let read = if is_read { 1.75 } else { 1.25 };
        let work = || OpCost { bytes: read * OpCost::pass(&[pairs]).bytes, flop: 0.0 };
        timed("activation", work, || kernels::silu_mul_8bit(activation, pairs, plain.as_mut(), &rows))?;
        Ok(Rows::Rounded { rows, plain })
    }

    /// Uses a kernel that computes gradients and quantizes in one pass, if it supports the rows' shape.
    fn activate_backward(&self, activation: Activation, gate_up: GateUp, d_act: &Tensor) -> Result<ActivationGradient> {
        match gate_up {
            GateUp::Interleaved(pairs) if kernels::fp8_swiglu_serves(&pairs) => {
                let rows = fp8::empty([pairs.size()[0], pairs.size()[1]], pairs.device())?;
                let work = || OpCost { bytes: 7.0 * OpCost::pass(&[d_act]).bytes, flop: 0.0 };
                let run = || kernels::swiglu_backward_fp8(activation, d_act, pairs, &rows);
                let [d_pairs, act] = timed("activation, backward", work, run)?;
                Ok(ActivationGradient { d_gate_up: GateUp::Interleaved(d_pairs), act, rounded: Some(rows) })
            }
            whole => Plain.activate_backward(activation, whole, d_act),
        }
    }

    fn step_cost(&self, _plain_bytes: f64, _of_experts: bool) -> StepCost {
        StepCost { weight_bytes: 1.0, row_bytes: 1.0, speedup: 2.0 }
    }

    fn step_gate_up(&self, own: OwnProducts, x: StepRows<'_>, w: &Piece, act: &mut Tensor) -> Result<()> {
        let (x, w) = (x.rounded(), w.rounded());
        match own {
            OwnProducts::FewRows => kernels::product_silu_mul_8bit(x, w, act),
            _ if kernels::gate_up_serves(x.values.size()[0] as usize, &w.values)? => kernels::gate_up_8bit(x, w, act),
            _ => kernels::wide_product_silu_mul_8bit(x, w, act),
        }
    }

    fn step_experts_gate_up(&self, by: StepExperts<'_>, x: StepRows<'_>, w: &Piece, act: &Tensor) -> Result<()> {
        let (x, w) = (x.rounded(), w.rounded());
        match by.adapter {
            None if kernels::streamed_gate_up_serves(by.tile, w, by.routed)? => {
                kernels::streamed_experts_gate_up(x, w, by.routed, act)
            }
            adapter => kernels::experts_gate_up_fp8(by.tile, x, w, adapter, by.routed, act),
        }
    }

    fn step_experts_down(&self, by: StepExperts<'_>, act: StepRows<'_>, w: &Piece, out: &Tensor) -> Result<()> {
        let w = w.rounded();
        if by.adapter.is_none() && kernels::streamed_down_serves(by.tile, w, by.routed)? {
            return kernels::streamed_experts_down(act.plain, w, by.routed, out);
        }
        kernels::quantize_rows_of_step(act.plain, act.rounded())?;
        kernels::experts_down_fp8(by.tile, act.rounded(), w, by.adapter, by.routed, out)
    }

    fn step_product(&self, by: StepProducts<'_>, x: StepRows<'_>, w: &Piece, out: &Tensor) -> Result<()> {
        let (x, bias, w) = (x.rounded(), w.bias.as_ref(), w.rounded());
        match by.own {
            OwnProducts::FewRows if kernels::product_takes(&x.values, &w.values, bias, out)? => {
                kernels::product_8bit(x, w, bias, out)
            }
            OwnProducts::Wide | OwnProducts::WideAndGateUp
                if kernels::wide_product_serves(x.values.size()[0] as usize, &w.values, bias)? =>
            {
                kernels::wide_product_8bit(x, w, bias, out)
            }
            _ => by.products.run_fp8(x, w, bias, out, by.tuning),
        }
    }
}
