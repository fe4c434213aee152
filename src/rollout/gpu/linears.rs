//! The products of a block: by cuBLASLt or by this crate's kernels, in the weights' kind or in FP8, with adapters.

use tch::Tensor;

use super::network::{DecoderNetwork, DecoderOp, OwnProducts};
use crate::cuda::Tuning;
use crate::cuda::kernels::{self, Fp8Rows, QkvViews};
use crate::error::Result;
use crate::model::{AttentionSpec, Linear, Lora, Matrix, Piece};

impl DecoderNetwork<'_> {
    /// The products for which there are own kernels in all blocks. In bfloat16 they have been found to pay with one rank an engine only.
    pub(super) fn may_own_products(&self, rows: usize) -> Result<Vec<OwnProducts>> {
        let is_tried = self.tp.size() == 1 || self.weights.are_fp8();
        if self.tuning != Tuning::Timed || !is_tried || self.spec.num_expert_layers() > 0 {
            return Ok(Vec::new());
        }
        let (mut all, mut gate_up, mut wide) = (true, true, true);
        for w in &self.weights.blocks {
            let is_adapted = w.linears().any(|(_, linear)| linear.lora.is_some());
            all &= !is_adapted
                && self.spec.delta_net().is_none()
                && match &w.linear(Matrix::Qkv).pieces[..] {
                    [Piece { bias, .. }] => {
                        let matrices = [Matrix::Qkv, Matrix::O, Matrix::GateUp, Matrix::Down];
                        let weights = matrices.map(|matrix| multiplied(w.linear(matrix)));
                        kernels::product_serves(rows, &weights, bias.as_ref())?
                    }
                    _ => false,
                };
            let linear = w.linear(Matrix::GateUp);
            let w_gate_up = multiplied(linear);
            gate_up &= linear.lora.is_none()
                && (kernels::gate_up_serves(rows, w_gate_up)?
                    || kernels::wide_product_silu_mul_serves(rows, w_gate_up)?);
            wide &= kernels::wide_product_serves(rows, multiplied(w.linear(Matrix::Down)), None)?;
        }
        Ok(match (all, gate_up, wide) {
            (true, ..) => vec![OwnProducts::All],
            (_, true, true) => vec![OwnProducts::Wide, OwnProducts::WideAndGateUp],
            (_, true, _) => vec![OwnProducts::GateUp],
            (.., true) => vec![OwnProducts::Wide],
            _ => Vec::new(),
        })
    }

    /// act = silu(gate) * up
    pub(super) fn gate_up(
        &self,
        w: &Linear,
        normed: &Tensor,  // [T, D]
        gate_up: &Tensor, // [T, 2 F]
        act: &mut Tensor, // [T, F]
    ) -> Result<()> {
        let fp8 = match &w.pieces[..] {
            [Piece { fp8: Some(fp8), .. }] => Some(fp8),
            _ => None,
        };
        match (self.own_products, fp8) {
            (OwnProducts::None | OwnProducts::Wide, _) => {
                self.linear(DecoderOp::GateUp, normed, w, gate_up)?;
                let rounded = fp8.map(|_| self.rounded(act)).transpose()?;
                return self.op(DecoderOp::SiluMul, || match &rounded {
                    Some(rounded) => kernels::silu_mul_fp8(gate_up, self.plain(act), rounded),
                    None => kernels::silu_mul(gate_up, act),
                });
            }
            (OwnProducts::All, None) => {
                self.op(DecoderOp::GateUp, || kernels::product_silu_mul(normed, w.weight(), act))?
            }
            (OwnProducts::All, Some(fp8)) => {
                self.op(DecoderOp::GateUp, || kernels::product_silu_mul_fp8(&self.rounded(normed)?, fp8, act))?
            }
            (OwnProducts::GateUp | OwnProducts::WideAndGateUp, None) => {
                self.op(DecoderOp::GateUp, || kernels::gate_up(normed, w.weight(), act))?
            }
            (OwnProducts::GateUp | OwnProducts::WideAndGateUp, Some(fp8)) => {
                self.op(DecoderOp::GateUp, || match kernels::gate_up_serves(normed.size()[0] as usize, &fp8.values)? {
                    true => kernels::gate_up_fp8(&self.rounded(normed)?, fp8, act),
                    false => kernels::wide_product_silu_mul_fp8(&self.rounded(normed)?, fp8, act),
                })?
            }
        }
        self.round(act, fp8.is_some())
    }

    /// Queries, keys and values with their biases, as views of the buffer that the products fill.
    pub(super) fn project(&self, attention: AttentionSpec, w: &Linear, normed: &Tensor) -> Result<QkvViews> {
        let columns = w.pieces.iter().map(|piece| piece.weight.size()[0]).sum();
        let out = self.buffers.projected([normed.size()[0], columns]); // [T, (H + 2 Hkv) hd], (2 H + 2 Hkv) hd with gates
        let AttentionSpec { num_heads, num_kv_heads, output_gate, .. } = attention.tp_slice(self.tp.size());
        let views = match &w.pieces[..] {
            [whole] => {
                self.multiply(DecoderOp::Qkv, normed, whole, &out)?;
                QkvViews::grouped(&out, num_kv_heads, attention.heads_per_group(), output_gate)
            }
            pieces => {
                let columns: Vec<i64> = pieces.iter().map(|piece| piece.weight.size()[0]).collect();
                let parts = out.split_with_sizes(columns.as_slice(), 1);
                for (piece, part) in pieces.iter().zip(&parts) {
                    self.multiply(DecoderOp::Qkv, normed, piece, part)?;
                }
                QkvViews::split(&parts[0], &parts[1], num_heads, output_gate)
            }
        };
        self.adapt(normed, w.lora.as_ref(), &out)?;
        Ok(views)
    }

    /// Rounds rows [T, K] for the product in FP8 that reads them next.
    pub(super) fn round(&self, x: &Tensor, rounds: bool) -> Result<()> {
        if !rounds {
            return Ok(());
        }
        self.op(DecoderOp::Round, || kernels::fp8_rows_of_step(x, &self.rounded(x)?))
    }

    /// Where the rows [T, K] of the next product in FP8 are: norms that the group sums leave stand in its memory.
    pub(super) fn rounded(&self, x: &Tensor) -> Result<Fp8Rows> {
        let size = x.size();
        if let Some(sums) = self.sums.filter(|sums| sums.are_normed(x)) {
            let Fp8Rows { values, scales } = sums.rounded()?;
            return Ok(Fp8Rows { values: values.narrow(0, 0, size[0]), scales: scales.narrow(0, 0, size[0]) });
        }
        Ok(self.buffers.rounded([size[0], size[1]]))
    }

    /// What is rounded is written as it is, too, where adapters read it.
    pub(super) fn plain<'a>(&self, x: &'a mut Tensor) -> Option<&'a mut Tensor> {
        self.low.is_some().then_some(x)
    }

    /// out = x w^T, with the adapter's part.
    pub(super) fn linear(&self, op: DecoderOp, x: &Tensor, w: &Linear, out: &Tensor) -> Result<()> {
        let columns: Vec<i64> = w.pieces.iter().map(|piece| piece.weight.size()[0]).collect();
        for (piece, part) in w.pieces.iter().zip(&out.split_with_sizes(columns.as_slice(), 1)) {
            self.multiply(op, x, piece, part)?;
        }
        self.adapt(x, w.lora.as_ref(), out)
    }

    /// out = x w^T + bias; in FP8 of the rows of x as they are rounded by now.
    fn multiply(
        &self,
        op: DecoderOp,
        x: &Tensor, // [T, K]
        Piece { weight, bias, fp8 }: &Piece,
        out: &Tensor, // [T, N]
    ) -> Result<()> {
        let Some(w) = fp8 else { return self.product(op, x, weight, bias.as_ref(), out) };
        let x = self.rounded(x)?;
        self.op(op, || match self.own_products {
            OwnProducts::All => kernels::product_fp8(&x, w, bias.as_ref(), out),
            OwnProducts::Wide | OwnProducts::WideAndGateUp
                if kernels::wide_product_serves(x.values.size()[0] as usize, &w.values, bias.as_ref())? =>
            {
                kernels::wide_product_fp8(&x, w, bias.as_ref(), out)
            }
            _ => self.products.run_fp8(&x, w, bias.as_ref(), out, self.tuning),
        })
    }

    /// out = x w^T + bias
    pub(super) fn product(
        &self,
        op: DecoderOp,
        x: &Tensor,            // [T, K]
        w: &Tensor,            // [N, K]
        bias: Option<&Tensor>, // [N]
        out: &Tensor,          // [T, N]
    ) -> Result<()> {
        self.op(op, || match self.own_products {
            OwnProducts::All => kernels::product(x, w, bias, out),
            _ => self.products.run(x, &w.tr(), bias, out, 0.0, self.tuning),
        })
    }

    /// out += (x A^T) B^T, where x A^T is zero beside adapters that are not the row's.
    fn adapt(&self, x: &Tensor, lora: Option<&Lora>, out: &Tensor) -> Result<()> {
        let (Some(Lora { a, b, owners, .. }), Some(low)) = (lora, self.low) else { return Ok(()) };
        let shape = [x.size()[0], a.size()[0]];
        let low = low.narrow(0, 0, shape[0] * shape[1]).view(shape); // [T, k]
        // Where a row's bits must not depend on the rows beside it, they come from one kernel for all numbers of rows.
        let is_own = owners.is_none() && (self.tuning == Tuning::Fixed || kernels::adapt_pays(x, out));
        self.op(DecoderOp::Adapters, || {
            if is_own && kernels::adapt_serves(x, a, b, out) {
                return kernels::adapt(x, a, b, &low, out);
            }
            self.products.run(x, &a.tr(), None, &low, 0.0, self.tuning)?;
            if let Some((owners, adapters)) = owners.as_ref().zip(self.adapters) {
                kernels::mask_low(&low, owners, adapters)?;
            }
            self.products.run(&low, &b.tr(), None, out, 1.0, self.tuning)
        })
    }
}

/// The weight that products read.
fn multiplied(linear: &Linear) -> &Tensor {
    match &linear.pieces[0] {
        Piece { fp8: Some(rounded), .. } => &rounded.values,
        Piece { weight, .. } => weight,
    }
}
