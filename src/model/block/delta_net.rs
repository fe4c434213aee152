//! A gated delta net: O(gated_norm(delta_rule(conv(Q x, K x, V x), a x, b x), z x)). A sequence has a state in place of keys and values.
//!
//! T tokens, D hidden, Hk key heads, H value heads, dk and dv widths of a head, C = 2 Hk dk + H dv channels. Where ranks share the rows, T
//! are a rank's before and behind the convolution and the rule, and all of them between.

use tch::{Kind, Tensor};

use super::exchange::{SharedHeads, TokenExchange};
use super::linear::{LinearSpec, Matrix, Projection, TpSplit, part, sections};
use super::{BlockContext, BlockParams, ElementBytes, MIXER_NORMS as NORMS, PackedMixer, SequenceMixer};
use crate::config::TargetModule::{InProjA, InProjB, InProjQkv, InProjZ, OutProj};
use crate::cuda::kernels::delta_fits;
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};
use crate::model::params::{ParamName, Shapes};
use crate::ops::delta_net::{DeltaHeads, DeltaOptions, DeltaRows, DeltaWeights, PackedChunks};
use crate::ops::try_map;

const MEAN_TOKENS: usize = DeltaHeads::MEAN_TOKENS;
/// Numbers that a chunk's kernels keep of a token and value head: decays and write strengths.
const KERNEL_DECAYS: usize = 5;

/// Bytes a token with the padding of last chunks.
fn padded(of_chunks: usize) -> usize {
    of_chunks * (MEAN_TOKENS + DeltaHeads::CHUNK / 2) / MEAN_TOKENS
}

/// The shape of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetSpec {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads and the convolution.
    pub heads: DeltaHeads,
}

/// Results of a gated delta net that its backward reads.
#[derive(Debug)]
pub(super) struct DeltaOutput {
    /// Where ranks share the rows, all of them, of this rank's heads.
    rows: DeltaRows,
    /// None where backward computes them again.
    chunks: Option<PackedChunks>,
    o: Tensor, // [T, H dv]
    /// Before the norm behind it, if there is one.
    output: Option<Tensor>, // [T, D]
}

impl DeltaNetSpec {
    /// The share of a rank: some key heads with their value heads.
    pub fn tp_slice(self, tp_size: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, .. } = self.heads;
        let (num_key_heads, num_value_heads) = (num_key_heads / tp_size, num_value_heads / tp_size);
        Self { heads: DeltaHeads { num_key_heads, num_value_heads, ..self.heads }, ..self }
    }

    /// With key heads as often as ranks that share rows have them.
    pub(super) fn with_shared_rows(self, num_ranks: usize) -> Self {
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, .. } = self.heads;
        let num_key_heads = num_ranks * SharedHeads::new(num_key_heads, key_dim, num_value_heads, num_ranks).own;
        Self { heads: DeltaHeads { num_key_heads, ..self.heads }, ..self }
    }

    /// Channels of queries, and of keys.
    fn keys(self) -> usize {
        self.heads.num_key_heads * self.heads.key_dim
    }

    /// A rank's part of a parameter that is no matrix. Channels of the convolution are copied: queries, keys and values lie apart.
    pub(super) fn own_part(self, name: ParamName, weight: &Tensor, tp_rank: usize, tp_size: usize) -> Result<Tensor> {
        Ok(match name {
            ParamName::DeltaALog | ParamName::DeltaDtBias => part(weight, 0, tp_rank, tp_size),
            ParamName::DeltaConv if tp_size > 1 => {
                Tensor::f_cat(&sections(self.keys(), weight).map(|section| part(&section, 0, tp_rank, tp_size)), 0)?
            }
            _ => weight.shallow_clone(),
        })
    }

    /// Projections that read the residual stream, and the one behind the gated norm.
    pub fn linears(self) -> [LinearSpec; 5] {
        let Self { hidden, heads } = self;
        let values = heads.num_value_heads * heads.value_dim;
        let linear = |matrix, module, (groups, inner), columns, split| LinearSpec {
            matrix,
            groups,
            inner,
            columns,
            projections: vec![(Projection::Module(module), 1)],
            split,
            bias: None,
            experts: None,
        };
        let (of_heads, rows) = (heads.num_value_heads, TpSplit::Rows);
        let sections = TpSplit::RowSections { keys: self.keys() };
        [
            linear(Matrix::DeltaQkv, InProjQkv, (1, heads.channels()), hidden, sections),
            linear(Matrix::DeltaZ, InProjZ, (of_heads, heads.value_dim), hidden, rows),
            linear(Matrix::DeltaB, InProjB, (of_heads, 1), hidden, rows),
            linear(Matrix::DeltaA, InProjA, (of_heads, 1), hidden, rows),
            linear(Matrix::DeltaOut, OutProj, (1, hidden), values, TpSplit::Columns),
        ]
    }

    /// Parameters with their shapes, in the layout's order.
    pub(super) fn shapes(self) -> Shapes {
        let [projections @ .., out] = self.linears();
        let heads = self.heads;
        let [channels, width, value_heads, value_dim] =
            [heads.channels(), heads.conv_width, heads.num_value_heads, heads.value_dim].map(|size| size as i64);
        let own = [
            (ParamName::DeltaConv, vec![channels, width]),
            (ParamName::DeltaALog, vec![value_heads]),
            (ParamName::DeltaDtBias, vec![value_heads]),
            (ParamName::DeltaNorm, vec![value_dim]),
        ];
        projections.iter().flat_map(LinearSpec::params).chain(own).chain(out.params()).collect()
    }

    /// Floating-point operations of the rule's forward for one token: reading the state for its key and for its query, decaying it and
    /// writing to it.
    pub fn flop_per_token(self) -> usize {
        7 * self.heads.num_value_heads * self.heads.key_dim * self.heads.value_dim
    }

    /// Bytes a token that backward reads of the forward: the projections, and what the gated norm gave.
    pub(super) fn kept_bytes(self, bytes: ElementBytes) -> usize {
        let DeltaHeads { num_value_heads, value_dim, .. } = self.heads;
        bytes.narrow * (self.heads.channels() + 2 * num_value_heads * value_dim + 2 * num_value_heads)
    }

    /// Bytes a token of the fullest moment of forward beside what is kept. By kernels: the sublayer's input, rounded, too, where products are
    /// rounded, what the convolution gives,
    /// chunks by themselves, and states of sequences. Composed of libtorch's operations, all of it in the accumulation kind: what the
    /// convolution gives, its heads, and of whole chunks keys and values in six and four forms, three tables of pairs, and a state.
    pub(super) fn forward_bytes(self, bytes: ElementBytes) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + pairs);
            let rounded = bytes.rounded * self.hidden;
            return bytes.narrow * (self.hidden + channels) + rounded + self.by_kernels(bytes, of_chunks);
        }
        bytes.wide * (2 * channels + 6 * keys + 4 * values + 3 * pairs + states)
    }

    /// Bytes a token of the fullest moment of backward, with chunks, whether they were kept or are computed again. By kernels that is when
    /// the gradients of queries, keys and values are made: beside them and what they belong to there are those of the rule's result and of
    /// the gate, and of chunks the system's results, what was written, its gradient, and two states. Composed, they are the forward's
    /// tensors and their gradients, and beside them the gradients of the projections.
    pub(super) fn backward_bytes(self, bytes: ElementBytes) -> usize {
        let ([keys, values, pairs, states], channels) = (self.elements(), self.heads.channels());
        let streams = 2 * bytes.narrow * self.hidden;
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + 2 * values + 2 * pairs + 2 * states);
            let gradients = bytes.narrow * (2 * channels + 2 * values) + 2 * bytes.narrow * self.heads.num_value_heads;
            return streams + gradients + self.by_kernels(bytes, of_chunks);
        }
        let rule = 14 * keys + 12 * values + 6 * pairs + 2 * states;
        streams + bytes.wide * (3 * channels + rule)
    }

    /// Bytes a token of chunks that a forward keeps, and of the rule's outputs. By kernels chunks have keys, values, two tables of pairs, and
    /// a state. Composed, they have five forms of keys, three of values, three tables of pairs, and a state.
    pub(super) fn chunk_bytes(self, bytes: ElementBytes) -> usize {
        let [keys, values, pairs, states] = self.elements();
        if self.has_kernels(bytes) {
            let of_chunks = bytes.narrow * (keys + values + 2 * pairs + states) + self.decay_bytes(bytes);
            return bytes.narrow * values + padded(of_chunks);
        }
        bytes.wide * values + padded(bytes.wide * (5 * keys + 3 * values + 3 * pairs + states))
    }

    /// Bytes a token of chunks as kernels have them, with the padding of last chunks and decays beside them, and of the states that
    /// prompts end with, completions begin with and either has as a result.
    fn by_kernels(self, bytes: ElementBytes, of_chunks: usize) -> usize {
        let [.., states] = self.elements();
        padded(of_chunks + self.decay_bytes(bytes)) + 3 * bytes.wide * states * DeltaHeads::CHUNK / MEAN_TOKENS
    }

    fn decay_bytes(self, bytes: ElementBytes) -> usize {
        KERNEL_DECAYS * bytes.wide * self.heads.num_value_heads
    }

    /// Whether a GPU has kernels for heads and weights of this kind; a chip without them needs what composed operations do.
    fn has_kernels(self, bytes: ElementBytes) -> bool {
        let DeltaHeads { key_dim, value_dim, conv_width, .. } = self.heads;
        bytes.narrow < bytes.wide && delta_fits([key_dim, value_dim, conv_width])
    }

    /// Elements a token of the keys and values of all value heads, of pairs within a chunk, and of a chunk's state.
    fn elements(self) -> [usize; 4] {
        let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = self.heads;
        let states = (num_value_heads * key_dim * value_dim).div_ceil(DeltaHeads::CHUNK);
        [num_value_heads * key_dim, num_value_heads * value_dim, num_value_heads * DeltaHeads::CHUNK, states]
    }

    /// The residual stream after it [T, D], and what a backward needs.
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
            Some(exchange) => exchange.ranks.to_rows(&o, &[exchange.values])?,
            None => o,
        };
        let (h, output) = ctx.leave(w, NORMS, w.linear(Matrix::DeltaOut), &o.shallow_clone().into(), x)?;
        Ok((h, DeltaOutput { rows, chunks, o, output }))
    }

    /// dx, from the gradient of the residual stream after it.
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
        let run = |d_o: &Tensor, into: &mut DeltaWeights| {
            let backward = || packed.sequences().backward(d_o, &rows, &values, options, chunks, into);
            timed("gated delta net, backward", OpCost::default, backward)
        };
        let DeltaRows { qkv, z, b, a } = match &exchange {
            None => run(&d_o, &mut sums)?,
            Some(exchange) => {
                let mut own = exchange.zeros(&sums)?;
                let d_rows = run(&exchange.ranks.to_heads(&d_o, &[exchange.values])?, &mut own)?;
                exchange.add(&own, &sums)?;
                exchange.join(&d_rows, kind)?
            }
        };
        drop((d_o, rows));
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

/// How ranks that share rows share a gated delta net's heads: key heads as its value heads read them.
struct DeltaExchange<'a> {
    ranks: &'a TokenExchange,
    keys: SharedHeads,
    values: SharedHeads,
    /// A number for each value head.
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

    fn split(&self, mut rows: DeltaRows) -> Result<DeltaRows> {
        rows.qkv = self.ranks.to_heads(&rows.qkv, &self.channels())?;
        rows.z = self.ranks.to_heads(&rows.z, &[self.values])?;
        rows.b = self.ranks.to_heads(&rows.b, &[self.gates])?;
        rows.a = self.ranks.to_heads(&rows.a, &[self.gates])?;
        Ok(rows)
    }

    /// Gradients of the rows, in the kind of these.
    fn join(&self, d: &DeltaRows, kind: Kind) -> Result<DeltaRows> {
        let join = |t: &Tensor, sections: &[SharedHeads]| self.ranks.to_rows(&t.f_to_kind(kind)?, sections);
        Ok(DeltaRows {
            qkv: join(&d.qkv, &self.channels())?,
            z: join(&d.z, &[self.values])?,
            b: join(&d.b, &[self.gates])?,
            a: join(&d.a, &[self.gates])?,
        })
    }

    fn own_weights(&self, whole: &DeltaWeights) -> Result<DeltaWeights> {
        Ok(DeltaWeights {
            conv: self.ranks.own_rows(&whole.conv, &self.channels())?,
            a_log: self.ranks.own_rows(&whole.a_log, &[self.gates])?,
            dt_bias: self.ranks.own_rows(&whole.dt_bias, &[self.gates])?,
            norm: whole.norm.shallow_clone(),
        })
    }

    /// Gradients of this rank's part of the weights, before any is added.
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

/// The weights that are no matrices, of this rank's heads.
fn own_weights(w: &BlockParams, exchange: Option<&DeltaExchange<'_>>) -> Result<DeltaWeights> {
    let whole = w.delta_weights();
    match exchange {
        Some(exchange) => exchange.own_weights(&whole),
        None => Ok(whole),
    }
}

/// Parameters that are no matrices, in the order of [`weights`].
const OWN: [ParamName; 4] = [ParamName::DeltaConv, ParamName::DeltaALog, ParamName::DeltaDtBias, ParamName::DeltaNorm];

impl BlockParams {
    /// Parameters of a gated delta net that are no matrices.
    ///
    /// # Panics
    /// If the block has none.
    pub(crate) fn delta_weights(&self) -> DeltaWeights {
        weights(|name| self.norm(name).expect("a parameter of the block").shallow_clone())
    }
}

fn weights(mut of: impl FnMut(ParamName) -> Tensor) -> DeltaWeights {
    let [conv, a_log, dt_bias, norm] = OWN.map(&mut of);
    DeltaWeights { conv, a_log, dt_bias, norm }
}
