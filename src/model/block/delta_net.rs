//! A gated delta net: O(gated_norm(delta_rule(conv(Q x, K x, V x), a x, b x), z x)). Each sequence has a state in place of keys and values.
//!
//! T tokens, D hidden, Hk key heads, H value heads, dk and dv widths of a head, C = 2 Hk dk + H dv channels. With sequence parallelism T counts this
//! rank's tokens before and after the convolution and the delta rule, and all tokens in between.

use tch::{Kind, Tensor};

use super::context::BlockContext;
use super::exchange::TokenExchange;
use super::linear::{part, sections};
use super::packed::{PackedMixer, SequenceMixer};
use super::params::BlockParams;
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};
use crate::model::spec::{DeltaNetSpec, MIXER_NORMS as NORMS, Matrix, ParamName, SharedHeads};
use crate::ops::delta_net::{DeltaHeads, DeltaOptions, DeltaRows, DeltaWeights, PackedChunks};
use crate::ops::try_map;

/// Activations of a gated delta net's forward that its backward reads.
#[derive(Debug)]
pub(super) struct DeltaOutput {
    /// The projected rows; with sequence parallelism all rows of this rank's heads.
    rows: DeltaRows,
    /// Intermediate results per chunk; `None` if backward recomputes them.
    chunks: Option<PackedChunks>,
    o: Tensor, // [T, H dv]
    /// The output before the norm that follows it, if there is one.
    output: Option<Tensor>, // [T, D]
}

impl DeltaNetSpec {
    /// A tensor-parallel rank's slice of a parameter that is not a matrix. The convolution's channels are copied, as those of queries, keys and
    /// values are not adjacent.
    pub(super) fn own_part(self, name: ParamName, weight: &Tensor, tp_rank: usize, tp_size: usize) -> Result<Tensor> {
        Ok(match name {
            ParamName::DeltaALog | ParamName::DeltaDtBias => part(weight, 0, tp_rank, tp_size),
            ParamName::DeltaConv if tp_size > 1 => {
                Tensor::f_cat(&sections(self.keys(), weight).map(|section| part(&section, 0, tp_rank, tp_size)), 0)?
            }
            _ => weight.shallow_clone(),
        })
    }

    /// Returns the residual stream after the delta net [T, D], and the activations that backward needs.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        x: &Tensor, // [T, D]
        mixer: &dyn SequenceMixer,
        keeps_chunks: bool,
    ) -> Result<(Tensor, DeltaOutput)> {
        let [reads @ .., _] = self.linears().map(|linear| linear.matrix);
        let normed = ctx.enter_rows(w, NORMS, x, &reads)?;
        let project = |matrix| w.linear(matrix).forward(&normed);
        let rows = DeltaRows {
            qkv: project(Matrix::DeltaQkv)?,
            z: project(Matrix::DeltaZ)?,
            b: project(Matrix::DeltaB)?,
            a: project(Matrix::DeltaA)?,
        };
        let exchange = mixer.exchange().map(|ranks| DeltaExchange::new(self, ranks));
        let rows = match &exchange {
            Some(exchange) => exchange.split(rows)?,
            None => rows,
        };
        let (weights, options) = (own_weights(w, exchange.as_ref())?, self.options(ctx, exchange.as_ref()));
        let (o, chunks) = mixer.delta_net(layer, &rows, &weights, options, keeps_chunks)?;
        let o = match &exchange {
            Some(exchange) => exchange.join_outputs(o)?,
            None => o,
        };
        let (h, output) = ctx.leave(w, NORMS, w.linear(Matrix::DeltaOut), &o.shallow_clone().into(), x)?;
        Ok((h, DeltaOutput { rows, chunks, o, output }))
    }

    /// Returns dx, given the gradient of the residual stream after the delta net.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        (x, dh): (&Tensor, &Tensor), // [T, D]
        saved: DeltaOutput,
        packed: &PackedMixer,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        let DeltaOutput { rows, chunks, o, output } = saved;
        let d_output = ctx.leave_backward(w, NORMS, dh, output.as_ref(), grads)?;
        let d_o = w.linear(Matrix::DeltaOut).backward(&d_output, &o, grads.linear_mut(Matrix::DeltaOut))?;
        drop((d_output, output, o));
        let exchange = packed.exchange().map(|ranks| DeltaExchange::new(self, ranks));
        let (kind, options) = (rows.qkv.kind(), self.options(ctx, exchange.as_ref()));
        let values = own_weights(w, exchange.as_ref())?;
        let mut sums = Vec::new();
        for name in OWN {
            sums.push(grads.gradient_of(w, name)?);
        }
        let mut sums = sums.into_iter();
        let mut sums = weights(|_| sums.next().expect("as many as names"));
        let mut own = exchange.as_ref().map(|exchange| exchange.zeros(&sums)).transpose()?;
        let d_o = match &exchange {
            Some(exchange) => exchange.split_outputs(d_o)?,
            None => d_o,
        };
        let into = own.as_mut().unwrap_or(&mut sums);
        let backward = || packed.sequences().backward(&d_o, &rows, &values, options, chunks, into);
        let d_rows = timed("gated delta net, backward", OpCost::default, backward)?;
        drop((d_o, rows));
        let DeltaRows { qkv, z, b, a } = match exchange.as_ref().zip(own) {
            Some((exchange, own)) => {
                exchange.add(&own, &sums)?;
                exchange.join(d_rows, kind)?
            }
            None => d_rows,
        };
        let (normed, rstd) = ctx.enter(w, NORMS, x)?;
        let mut d_normed = None;
        let gradients = [(Matrix::DeltaQkv, qkv), (Matrix::DeltaZ, z), (Matrix::DeltaB, b), (Matrix::DeltaA, a)];
        for (matrix, d) in gradients {
            let into = grads.linear_mut(matrix);
            d_normed = Some(w.linear(matrix).backward_onto(d_normed, &d.f_to_kind(kind)?, &normed, into)?);
        }
        let d_normed = d_normed.expect("four projections");
        ctx.enter_backward(w, NORMS, &d_normed, (x, dh), rstd.as_ref(), grads)
    }

    fn options(self, ctx: &BlockContext<'_>, exchange: Option<&DeltaExchange<'_>>) -> DeltaOptions {
        let tp_size = ctx.tp.map_or(1, |tp| tp.size());
        let heads = exchange.map_or_else(|| self.tp_slice(tp_size).heads, |exchange| exchange.own(self.heads));
        DeltaOptions { heads, eps: ctx.spec.rms_norm_eps }
    }
}

/// How sequence-parallel ranks split a gated delta net's heads. A rank holds the key heads that its value heads read. An exchange takes its
/// input, which is then freed.
struct DeltaExchange<'a> {
    ranks: &'a TokenExchange,
    keys: SharedHeads,
    values: SharedHeads,
    /// The split of tensors with one number per value head.
    gates: SharedHeads,
}

impl<'a> DeltaExchange<'a> {
    fn new(spec: DeltaNetSpec, ranks: &'a TokenExchange) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, .. } = spec.heads;
        let shared = |total, width| SharedHeads::new(total, width, num_value_heads, ranks.size());
        let (keys, values) = (shared(num_key_heads, key_dim), shared(num_value_heads, value_dim));
        Self { ranks, keys, values, gates: shared(num_value_heads, 1) }
    }

    fn own(&self, heads: DeltaHeads) -> DeltaHeads {
        DeltaHeads { num_key_heads: self.keys.own, num_value_heads: self.values.own, ..heads }
    }

    fn channels(&self) -> [SharedHeads; 3] {
        [self.keys, self.keys, self.values]
    }

    fn split(&self, rows: DeltaRows) -> Result<DeltaRows> {
        let DeltaRows { qkv, z, b, a } = &rows;
        let (channels, values, gates) = (self.channels(), [self.values], [self.gates]);
        let parts = [(qkv, &channels[..]), (z, &values), (b, &gates), (a, &gates)];
        let [qkv, z, b, a] = self.ranks.to_heads(parts)?.finish()?;
        Ok(DeltaRows { qkv, z, b, a })
    }

    /// Sends gradients back to the ranks that own the rows, in the type `kind`.
    fn join(&self, DeltaRows { qkv, z, b, a }: DeltaRows, kind: Kind) -> Result<DeltaRows> {
        let [qkv, z, b, a] = try_map([qkv, z, b, a], |d| Ok::<_, Error>(d.f_to_kind(kind)?))?;
        let (channels, values, gates) = (self.channels(), [self.values], [self.gates]);
        let parts = [(&qkv, &channels[..]), (&z, &values), (&b, &gates), (&a, &gates)];
        let [qkv, z, b, a] = self.ranks.to_rows(parts, None)?.finish()?;
        Ok(DeltaRows { qkv, z, b, a })
    }

    fn split_outputs(&self, rows: Tensor /* [T / n, H dv] */) -> Result<Tensor> {
        let [own] = self.ranks.to_heads([(&rows, &[self.values])])?.finish()?;
        Ok(own)
    }

    fn join_outputs(&self, own: Tensor /* [T, own H dv] */) -> Result<Tensor> {
        let [rows] = self.ranks.to_rows([(&own, &[self.values])], None)?.finish()?;
        Ok(rows)
    }

    fn own_weights(&self, whole: &DeltaWeights) -> Result<DeltaWeights> {
        Ok(DeltaWeights {
            conv: self.ranks.own_rows(&whole.conv, &self.channels())?,
            a_log: self.ranks.own_rows(&whole.a_log, &[self.gates])?,
            dt_bias: self.ranks.own_rows(&whole.dt_bias, &[self.gates])?,
            norm: whole.norm.shallow_clone(),
        })
    }

    /// Zeroed gradients for this rank's slice of the weights.
    fn zeros(&self, sums: &DeltaWeights) -> Result<DeltaWeights> {
        let DeltaWeights { conv, a_log, dt_bias, norm } = self.own_weights(sums)?;
        let [conv, a_log, dt_bias] = try_map([conv, a_log, dt_bias], |sum| Ok::<_, Error>(sum.f_zeros_like()?))?;
        Ok(DeltaWeights { conv, a_log, dt_bias, norm })
    }

    fn add(&self, own: &DeltaWeights, sums: &DeltaWeights) -> Result<()> {
        self.ranks.add_own_rows(&own.conv, &self.channels(), &sums.conv)?;
        self.ranks.add_own_rows(&own.a_log, &[self.gates], &sums.a_log)?;
        self.ranks.add_own_rows(&own.dt_bias, &[self.gates], &sums.dt_bias)
    }
}

/// The parameters other than matrices, for this rank's heads.
fn own_weights(w: &BlockParams, exchange: Option<&DeltaExchange<'_>>) -> Result<DeltaWeights> {
    let whole = w.delta_weights();
    match exchange {
        Some(exchange) => exchange.own_weights(&whole),
        None => Ok(whole),
    }
}

/// Parameters of a delta net other than matrices, in the order that [`weights`] uses.
const OWN: [ParamName; 4] = [ParamName::DeltaConv, ParamName::DeltaALog, ParamName::DeltaDtBias, ParamName::DeltaNorm];

impl BlockParams {
    /// The parameters of a gated delta net other than matrices.
    ///
    /// # Panics
    /// If the block has no gated delta net.
    pub(crate) fn delta_weights(&self) -> DeltaWeights {
        weights(|name| self.norm(name).expect("a parameter of the block").shallow_clone())
    }
}

fn weights(mut of: impl FnMut(ParamName) -> Tensor) -> DeltaWeights {
    let [conv, a_log, dt_bias, norm] = OWN.map(&mut of);
    DeltaWeights { conv, a_log, dt_bias, norm }
}
