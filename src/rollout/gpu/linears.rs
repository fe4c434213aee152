//! The GEMMs of a block, by cuBLASLt or this crate's kernels, in the format of the weights, with LoRA adapters.

use tch::Tensor;

use super::network::DecoderNetwork;
use super::op::DecoderOp;
use crate::cuda::Tuning;
use crate::cuda::kernels::{self, QkvViews, ScaledRows};
use crate::error::Result;
use crate::model::{
    AttentionSpec, Format, Linear, Lora, Matrix, OwnProducts, Piece, StepOutput, StepProducts, StepRows,
};
use crate::ops::swiglu::Activation;

impl DecoderNetwork<'_> {
    /// The sets of GEMMs for which this crate has kernels that may be faster than cuBLASLt. With many unquantized rows they were measured to be faster
    /// only with one rank per engine.
    pub(super) fn may_own_products(&self, rows: usize) -> Result<Vec<OwnProducts>> {
        let is_tried = self.tp.size() == 1 || self.format().rounds() || rows <= kernels::FEW_ROWS;
        if self.tuning != Tuning::Timed || !is_tried || self.format().has_own_products() {
            return Ok(Vec::new());
        }
        // Not with weights that are dequantized in every step: nothing was timed with them.
        let serves_few = |piece: &Piece| kernels::product_serves(rows, piece.multiplied(), piece.bias.as_ref());
        if self.weights.stored.is_none() && self.any_piece(serves_few)? {
            return Ok(vec![OwnProducts::FewRows]);
        }
        if self.spec.num_expert_layers() > 0 {
            let serves = |piece: &Piece| kernels::wide_product_serves(rows, piece.multiplied(), piece.bias.as_ref());
            let is_wide = self.format().rounds() && self.any_piece(serves)?;
            return Ok(is_wide.then_some(OwnProducts::Wide).into_iter().collect());
        }
        let (mut gate_up, mut wide) = (self.has_silu(), self.has_silu());
        for w in &self.weights.blocks {
            let linear = w.linear(Matrix::GateUp);
            let w_gate_up = linear.pieces[0].multiplied();
            gate_up &= linear.lora.is_none()
                && (kernels::gate_up_serves(rows, w_gate_up)?
                    || kernels::wide_product_silu_mul_serves(rows, w_gate_up)?);
            wide &= kernels::wide_product_serves(rows, w.linear(Matrix::Down).pieces[0].multiplied(), None)?;
        }
        Ok(match (gate_up, wide) {
            (true, true) => vec![OwnProducts::Wide, OwnProducts::WideAndGateUp],
            (true, false) => vec![OwnProducts::GateUp],
            (false, true) => vec![OwnProducts::Wide],
            (false, false) => Vec::new(),
        })
    }

    /// Whether a kernel serves any weight by itself, but those of experts, which have kernels of their own.
    fn any_piece(&self, serves: impl Fn(&Piece) -> Result<bool>) -> Result<bool> {
        let is_of_experts = |matrix| matches!(matrix, Matrix::GateUp | Matrix::Down);
        for (spec, block) in self.spec.layers.iter().zip(&self.weights.blocks) {
            let linears = block.linears().filter(|(matrix, _)| !(spec.has_experts() && is_of_experts(*matrix)));
            for piece in linears.flat_map(|(_, linear)| &linear.pieces) {
                if serves(piece)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn has_silu(&self) -> bool {
        self.spec.layers.iter().all(|block| block.mlp.activation() == Activation::Silu)
    }

    /// Computes act = activation(gate) * up.
    pub(super) fn gate_up(
        &self,
        activation: Activation,
        w: &Linear,
        normed: &Tensor,  // [T, D]
        gate_up: &Tensor, // [T, 2 F]
        act: &mut Tensor, // [T, F]
    ) -> Result<()> {
        match self.own_products_of_gate_up(activation, w, (normed, act))? {
            None => {
                self.base(DecoderOp::GateUp, normed, w, gate_up)?;
                if let Some((lora, low)) = self.lora_with_low(normed, w)
                    && self.adds_by_own(normed, lora, gate_up)
                    && activation == Activation::Silu
                    && !self.format().rounds()
                {
                    return DecoderOp::Adapters
                        .run(|| kernels::adapt_silu_mul(normed, &lora.a, &lora.b, &low, gate_up, act));
                }
                self.adapt(normed, w, gate_up)?;
                let out = self.output(act, self.format())?;
                DecoderOp::SiluMul.run(|| self.format().step_activate(activation, gate_up, out))
            }
            Some(own) => {
                let x = self.rows(normed)?;
                DecoderOp::GateUp.run(|| self.format().step_gate_up(own, x, w.piece(), act))?;
                self.round(act, self.format())
            }
        }
    }

    /// The kernels that fuse SwiGLU into the GEMM of gate and up, if they are used for this weight.
    fn own_products_of_gate_up(
        &self,
        activation: Activation,
        w: &Linear,
        (normed, act): (&Tensor, &Tensor),
    ) -> Result<Option<OwnProducts>> {
        let is_fused = match self.own_products {
            OwnProducts::None | OwnProducts::Wide => false,
            OwnProducts::GateUp | OwnProducts::WideAndGateUp => true,
            OwnProducts::FewRows => {
                let rows = self.rows(normed)?;
                let x = rows.rounded.as_ref().map_or(rows.plain, |rounded| &rounded.values);
                let takes = || kernels::product_takes(x, w.piece().multiplied(), None, act);
                activation == Activation::Silu && w.lora.is_none() && takes()?
            }
        };
        Ok(is_fused.then_some(self.own_products))
    }

    /// Projects to queries, keys and values, with biases. Returns views of the buffer that the GEMMs fill.
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
        self.adapt(normed, w, &out)?;
        Ok(views)
    }

    /// The format in which the blocks' GEMMs run.
    pub(super) fn format(&self) -> &'static dyn Format {
        self.weights.format()
    }

    /// Quantizes rows [T, K] for the GEMM that reads them next.
    pub(super) fn round(&self, x: &Tensor, format: &dyn Format) -> Result<()> {
        if !format.rounds() {
            return Ok(());
        }
        DecoderOp::Round.run(|| format.step_round(x, &self.rounded(x)?))
    }

    /// The buffer for the quantized rows [T, K] of the next GEMM. Rows that the all-reduce kernel has normed are in the memory of that kernel.
    fn rounded(&self, x: &Tensor) -> Result<ScaledRows> {
        let size = x.size();
        if let Some(sums) = self.sums.filter(|sums| sums.are_normed(x)) {
            let [(_, kind), _] = self.format().sections(&[size[0], size[1]]);
            let ScaledRows { values, scales } = sums.rounded(kind)?;
            return Ok(ScaledRows { values: values.narrow(0, 0, size[0]), scales: scales.narrow(0, 0, size[0]) });
        }
        Ok(self.buffers.rounded(self.format(), [size[0], size[1]]))
    }

    /// The input rows of the next GEMM, unquantized and, for a quantized format, quantized.
    pub(super) fn rows<'x>(&self, x: &'x Tensor /* [T, K] */) -> Result<StepRows<'x>> {
        let rounded = self.format().rounds().then(|| self.rounded(x)).transpose()?;
        Ok(StepRows { plain: x, rounded })
    }

    /// Whether any operation also reads unquantized rows: adapters, routers, and the narrow projections of gated delta nets.
    pub(super) fn reads_plain(&self) -> bool {
        self.low.is_some() || self.spec.num_expert_layers() > 0 || self.spec.delta_net().is_some()
    }

    /// The destination of the next GEMM's input rows in `format`. Quantized rows are also written unquantized if an operation reads them so.
    pub(super) fn output<'x>(
        &self,
        x: &'x mut Tensor, /* [T, K] */
        format: &dyn Format,
    ) -> Result<StepOutput<'x>> {
        let rounded = format.rounds().then(|| self.rounded(x)).transpose()?;
        Ok(StepOutput { plain: x, rounded, is_read: self.reads_plain() })
    }

    /// Computes out = x w^T and adds the LoRA adapter.
    pub(super) fn linear(&self, op: DecoderOp, x: &Tensor, w: &Linear, out: &Tensor) -> Result<()> {
        self.base(op, x, w, out)?;
        self.adapt(x, w, out)
    }

    /// Computes out = x w^T.
    fn base(&self, op: DecoderOp, x: &Tensor, w: &Linear, out: &Tensor) -> Result<()> {
        let columns: Vec<i64> = w.pieces.iter().map(|piece| piece.weight.size()[0]).collect();
        for (piece, part) in w.pieces.iter().zip(&out.split_with_sizes(columns.as_slice(), 1)) {
            match w.format.rounds() {
                true => self.multiply(op, x, piece, part)?,
                false => self.product(op, x, &piece.weight, piece.bias.as_ref(), part)?,
            }
        }
        Ok(())
    }

    /// Computes out = x w^T + bias, from the rows of x that are already quantized.
    fn multiply(
        &self,
        op: DecoderOp,
        x: &Tensor, /* [T, K] */
        w: &Piece,
        out: &Tensor, /* [T, N] */
    ) -> Result<()> {
        let x = self.rows(x)?;
        op.run(|| self.format().step_product(self.step_products(), x, w, out))
    }

    /// Computes out = x w^T + bias for a weight that is never quantized.
    pub(super) fn product(
        &self,
        op: DecoderOp,
        x: &Tensor,            // [T, K]
        w: &Tensor,            // [N, K]
        bias: Option<&Tensor>, // [N]
        out: &Tensor,          // [T, N]
    ) -> Result<()> {
        op.run(|| self.step_products().plain(x, w, bias, out))
    }

    fn step_products(&self) -> StepProducts<'_> {
        StepProducts { own: self.own_products, products: self.products, tuning: self.tuning }
    }

    /// Adds the LoRA adapter: out += (x A^T) B^T. With several adapters, x A^T is zero in the columns of adapters that the row does not use.
    fn adapt(&self, x: &Tensor, w: &Linear, out: &Tensor) -> Result<()> {
        let Some((lora, low)) = self.lora_with_low(x, w) else { return Ok(()) };
        let Lora { a, b, owners, .. } = lora;
        DecoderOp::Adapters.run(|| {
            if self.adds_by_own(x, lora, out) {
                return kernels::adapt(x, a, b, &low, out);
            }
            self.products.run(x, &a.tr(), None, &low, 0.0, self.tuning)?;
            if let Some((owners, adapters)) = owners.as_ref().zip(self.adapters) {
                kernels::mask_low(&low, owners, adapters)?;
            }
            self.products.run(&low, &b.tr(), None, out, 1.0, self.tuning)
        })
    }

    /// The LoRA adapter of a linear layer, and the buffer for its x A^T [T, r].
    fn lora_with_low<'w>(&self, x: &Tensor /* [T, K] */, w: &'w Linear) -> Option<(&'w Lora, Tensor)> {
        let lora = w.lora.as_ref()?;
        let shape = [x.size()[0], lora.a.size()[0]];
        Some((lora, self.low?.narrow(0, 0, shape[0] * shape[1]).view(shape)))
    }

    /// Whether this crate's kernels add the LoRA adapter. In strict mode they always do where they support the shapes, because one kernel then serves
    /// any number of rows and a row's bits do not depend on the rows beside it.
    fn adds_by_own(&self, x: &Tensor, Lora { a, b, owners, .. }: &Lora, out: &Tensor) -> bool {
        let is_strict = matches!(self.tuning, Tuning::Fixed | Tuning::Exact);
        owners.is_none() && (is_strict || kernels::adapt_pays(x, a, out)) && kernels::adapt_serves(x, a, b, out)
    }
}
