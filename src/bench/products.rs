//! The GEMMs of a block by every implementation that supports them: cuBLASLt's and this crate's, in bfloat16, FP8 and int8, single and in sustained
//! operation.
#![allow(unsafe_code)]

use serde_json::json;
use tch::{Kind, Tensor};

use super::kernels::DecodeStep;
use super::median;
use crate::cuda::kernels::{self, ScaledRows};
use crate::cuda::{Capability, EnergyMeter, Products, Sustained, Tuning};
use crate::error::Result;
use crate::model::{LinearSpec, Matrix};
use crate::ops::{fp8, int8};

/// Bytes of the weight copies that a graph multiplies with in turn: far more than the GPU's caches hold.
const COPIES_BYTES: usize = 800 << 20;
const REPLAYS: usize = 7;

/// One GEMM, with the operands of all its implementations.
struct Operands {
    x: Tensor,            // [R, K] bf16
    weights: Vec<Tensor>, // [N, K] bf16 each
    out: Tensor,          // [R, N] bf16
    act: Tensor,          // [R, N / 2] bf16
    fp8: Option<(ScaledRows, Vec<ScaledRows>)>,
}

impl DecodeStep<'_> {
    /// Times every matrix of a block, for the rows of the step.
    pub(super) fn products(&mut self, meter: &EnergyMeter) -> Result<()> {
        if self.bench.kind != Kind::BFloat16 {
            return Ok(());
        }
        let products = Products::new(&self.stream)?;
        for linear in self.bench.spec.layers[0].linears().into_iter().filter(|linear| linear.experts.is_none()) {
            self.product(meter, &products, &linear)?;
        }
        Ok(())
    }

    fn product(&mut self, meter: &EnergyMeter, products: &Products, linear: &LinearSpec) -> Result<()> {
        let operands = self.operands(linear)?;
        let Operands { x, weights, out, act, fp8 } = &operands;
        let (rows, is_gate_up) = (self.bench.rows, linear.matrix == Matrix::GateUp);
        self.way(meter, linear, ("bfloat16", "cuBLASLt"), weights.len(), |copy| {
            products.run(x, &weights[copy].tr(), None, out, 0.0, Tuning::Timed)
        })?;
        if self.stream.context().compute_capability()? == Capability::HOPPER {
            self.way(meter, linear, ("bfloat16", "cuBLASLt, exact"), weights.len(), |copy| {
                products.run(x, &weights[copy].tr(), None, out, 0.0, Tuning::Exact)
            })?;
        }
        if kernels::product_serves(rows, &weights[0], None)? {
            self.way(meter, linear, ("bfloat16", "product"), weights.len(), |copy| {
                kernels::product(x, &weights[copy], None, out)
            })?;
        }
        if is_gate_up && kernels::gate_up_serves(rows, &weights[0])? {
            self.way(meter, linear, ("bfloat16", "gate_up"), weights.len(), |copy| {
                kernels::gate_up(x, &weights[copy], act)
            })?;
        }
        let Some((x8, rounded)) = fp8 else { return Ok(()) };
        self.way(meter, linear, ("rounding", "fp8_rows"), weights.len(), |copy| {
            kernels::quantize_rows(&weights[copy], &rounded[copy])
        })?;
        self.way(meter, linear, ("fp8", "cuBLASLt"), weights.len(), |copy| {
            products.run_fp8(x8, &rounded[copy], None, out, Tuning::Timed)
        })?;
        if kernels::product_serves(rows, &rounded[0].values, None)? {
            self.way(meter, linear, ("fp8", "product"), weights.len(), |copy| {
                kernels::product_8bit(x8, &rounded[copy], None, out)
            })?;
        }
        if is_gate_up && kernels::gate_up_serves(rows, &rounded[0].values)? {
            self.way(meter, linear, ("fp8", "gate_up"), weights.len(), |copy| {
                kernels::gate_up_8bit(x8, &rounded[copy], act)
            })?;
        }
        if kernels::wide_product_serves(rows, &rounded[0].values, None)? {
            self.way(meter, linear, ("fp8", "wide_product"), weights.len(), |copy| {
                kernels::wide_product_8bit(x8, &rounded[copy], None, out)
            })?;
        }
        self.int8_product(meter, linear, &operands)
    }

    /// Times one GEMM in int8, and the rounding of its weight.
    fn int8_product(&mut self, meter: &EnergyMeter, linear: &LinearSpec, operands: &Operands) -> Result<()> {
        let Operands { x, weights, out, act, .. } = operands;
        let (x8, rounded) = {
            let _current = self.stream.make_current()?;
            let rounded: Vec<ScaledRows> = weights.iter().map(int8::rotated_rows).collect::<Result<_>>()?;
            (int8::rotated_rows(x)?, rounded)
        };
        self.way(meter, linear, ("rounding", "int8_rows"), weights.len(), |copy| {
            kernels::quantize_rows(&weights[copy], &rounded[copy])
        })?;
        self.way(meter, linear, ("int8", "int8_product"), weights.len(), |copy| {
            kernels::int8_product(&x8, &rounded[copy], None, out)
        })?;
        if linear.matrix == Matrix::GateUp {
            self.way(meter, linear, ("int8", "int8_silu_mul"), weights.len(), |copy| {
                kernels::int8_silu_mul(&x8, &rounded[copy], act)
            })?;
        }
        Ok(())
    }

    fn operands(&self, linear: &LinearSpec) -> Result<Operands> {
        let _current = self.stream.make_current()?;
        let (rows, features, k) = (self.bench.rows as i64, linear.rows() as i64, linear.columns as i64);
        let options = (Kind::BFloat16, self.device);
        let copies = COPIES_BYTES.div_ceil(2 * linear.rows() * linear.columns);
        let weights = (0..copies).map(|_| Ok(Tensor::f_randn([features, k], options)?)).collect::<Result<Vec<_>>>()?;
        let x = Tensor::f_randn([rows, k], options)?;
        let round = |matrix: &Tensor| -> Result<ScaledRows> {
            let to = fp8::empty([matrix.size()[0], k], self.device)?;
            kernels::quantize_rows(matrix, &to)?;
            Ok(to)
        };
        let serves =
            kernels::fp8_serves([linear.rows(), linear.columns]) && self.stream.context().has_fp8_products()?;
        let fp8 = match serves {
            true => Some((round(&x)?, weights.iter().map(round).collect::<Result<_>>()?)),
            false => None,
        };
        let [out, act] = [features, features / 2].map(|columns| Tensor::f_empty([rows, columns], options));
        Ok(Operands { x, weights, out: out?, act: act?, fp8 })
    }

    /// Records the time of one launch of `work` in a graph over all copies, and time and energy when that graph is repeated.
    fn way(
        &mut self,
        meter: &EnergyMeter,
        linear: &LinearSpec,
        (kind, way): (&str, &str),
        copies: usize,
        work: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let mut graph = self.record(copies, work)?;
        // SAFETY: the operands, that `work` names, outlive this call, at whose end the stream has passed the graph.
        let mut replay = || unsafe { graph.replay(&self.stream) };
        let mut times = Vec::with_capacity(REPLAYS);
        for index in 0..=REPLAYS {
            let start = self.stream.record_timed()?;
            replay()?;
            let us = start.time_until(&self.stream.record_timed()?)?.as_secs_f64() * 1e6;
            if index > 0 {
                times.push(us);
            }
        }
        let us = median(times);
        let sustained = Sustained::measure(meter, &self.stream, us, replay)?;
        let of_one = |whole: f64| whole / copies as f64;
        self.results.push(json!({
            "benchmark": "product",
            "matrix": format!("{:?}", linear.matrix),
            "model": self.bench.model,
            "rows": self.bench.rows,
            "n_and_k": [linear.rows(), linear.columns],
            "kind": kind,
            "by": way,
            "us": of_one(us),
            "sustained_us": of_one(sustained.us),
            "millijoules": of_one(1e3 * sustained.joules),
        }));
        Ok(())
    }
}
