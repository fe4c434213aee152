//! The loops over units: embedding, blocks, head on the scored rows; and back. Weights come from and gradients go to their
//! stores unit by unit, in an order that depends on the model alone, so that all ranks make the same collectives.
//!
//! Shapes: T tokens, C scored tokens, D hidden, V vocabulary.

use tch::{Device, Kind, Tensor};

use super::adapters::{AdapterUse, Adapters};
use super::gradients::{Gradients, UnitSum};
use super::head::Head;
use super::micro_batch::MicroBatch;
use super::routes::PassRoutes;
use super::scores::{Scores, TokenGradients};
use super::upcoming::upcoming;
use super::weights::Weights;
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::{
    BlockContext, BlockParams, ByRope, EmbeddingParams, Format, HeadSums, ModelSpec, PackedMixer, ParamName, Ropes,
    Routes, SavedBlock, ScoredTokens, Scoring, Unit, UnitLayout, Use, block_backward, block_forward, head_backward,
    head_forward, head_logits,
};
use crate::ops::embedding;
use crate::ops::head::TopTokens;
use crate::ops::linear::Onto;
use crate::ops::rope::RopeRows;

/// How a network computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkOptions {
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Kind of the residual stream.
    pub residual: Kind,
    /// Where they live.
    pub device: Device,
    /// The format that products of blocks are made in, as [`BlockParams::training_in`] describes.
    pub format: &'static dyn Format,
}

/// Weights and the loops over them.
#[derive(Debug)]
pub(crate) struct Network {
    pub weights: Weights,
    /// Trained in place of the weights.
    pub adapters: Option<Adapters>,
    ropes: Ropes,
    options: NetworkOptions,
    /// How many of the most probable tokens are scored where no gradients follow.
    pub num_top: usize,
}

impl Network {
    /// # Errors
    /// [`Error::InvalidValue`] for a format on a chip without such products.
    pub(crate) fn new(weights: Weights, adapters: Option<Adapters>, options: NetworkOptions) -> Result<Self> {
        options.format.check_device(Use::Training, options.device)?;
        let ropes = weights.table().spec.ropes();
        Ok(Self { weights, adapters, ropes, options, num_top: 0 })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.options.kind
    }

    pub(crate) fn device(&self) -> Device {
        self.options.device
    }

    /// The weights that the optimizer steps: the adapters, or all.
    pub(crate) fn trained(&self) -> &Weights {
        self.adapters.as_ref().map_or(&self.weights, |adapters| &adapters.weights)
    }

    /// [`Network::trained`], to be changed.
    pub(crate) fn trained_mut(&mut self) -> &mut Weights {
        self.adapters.as_mut().map_or(&mut self.weights, |adapters| &mut adapters.weights)
    }

    /// Scores without gradients (collective where weights are sharded).
    pub(crate) fn score(
        &mut self,
        micro_batch: &MicroBatch,
        temperature: f64,
        adapter_use: AdapterUse,
    ) -> Result<Scores> {
        let mut pass = Pass::new(self, micro_batch, temperature, adapter_use)?;
        if self.num_top > 0 {
            pass.scoring.top = TopTokens::MostProbable(self.num_top);
        }
        // A reference model routes by itself.
        let replays = matches!(adapter_use, AdapterUse::On | AdapterUse::Dropped(_));
        pass.routes = PassRoutes::new(self.spec(), micro_batch, (self.kind(), self.device()), replays, false)?;
        let (hidden, _) = self.blocks_forward(&mut pass, None)?;
        let head = self.head(&[])?;
        let scored = head_forward(&head.params, &head.table, &hidden, &pass.scoring, false)?;
        let ScoredTokens { logprobs, entropy, top, .. } = scored;
        Ok(Scores { logprobs, entropy, top, aux_loss: None, differing_experts: None })
    }

    /// Logits before each of a micro-batch's scored tokens (collective where weights are sharded). [C, V] f32
    pub(crate) fn logits(&mut self, micro_batch: &MicroBatch) -> Result<Tensor> {
        let mut pass = Pass::new(self, micro_batch, 1.0, AdapterUse::Off)?;
        let (hidden, _) = self.blocks_forward(&mut pass, None)?;
        let head = self.head(&[])?;
        let rows = pass.scoring.rows;
        self.spec().scale_logits(head_logits(&head.params, &head.table, &hidden, rows, pass.scoring.norm)?)
    }

    /// Computes each block on an input of its own, and the head on the last one (collective where weights are sharded): `inputs` has the
    /// residual stream before every block and behind the last. Returns the blocks' outputs, [T, D] each, and logits as
    /// [`Network::logits`] does.
    pub(crate) fn block_outputs(
        &mut self,
        micro_batch: &MicroBatch,
        inputs: &[Tensor],
    ) -> Result<(Vec<Tensor>, Tensor)> {
        let pass = Pass::new(self, micro_batch, 1.0, AdapterUse::Off)?;
        let residual = self.options.residual;
        let mut outputs = Vec::new();
        for (layer, input) in inputs[..self.spec().num_layers()].iter().enumerate() {
            outputs.push(self.one_block_forward(&pass, layer, &input.f_to_kind(residual)?, None)?.0);
        }
        let head = self.head(&[])?;
        let last = inputs[outputs.len()].f_to_kind(residual)?;
        let logits = head_logits(&head.params, &head.table, &last, pass.scoring.rows, pass.scoring.norm)?;
        Ok((outputs, self.spec().scale_logits(logits)?))
    }

    /// Scores, asks `loss` for their gradients and adds the weights' to `gradients` (collective where weights or gradients
    /// are sharded). `loss` is not called for an empty micro-batch, and must not be collective.
    pub(crate) fn forward_backward(
        &mut self,
        micro_batch: &MicroBatch,
        (temperature, adapter_use): (f64, AdapterUse),
        recompute: GradientCheckpointing,
        gradients: &mut Gradients,
        loss: &mut dyn FnMut(&Scores) -> Result<TokenGradients>,
    ) -> Result<()> {
        let mut pass = Pass::new(self, micro_batch, temperature, adapter_use)?;
        pass.routes = PassRoutes::new(self.spec(), micro_batch, (self.kind(), self.device()), true, true)?;
        pass.scoring.top = micro_batch.teacher_top.as_ref().map_or(TopTokens::Nothing, |top| TopTokens::At(&top.ids));
        let (hidden, saved) = self.blocks_forward(&mut pass, Some(recompute))?;
        if self.adapters.is_some() {
            let dhidden = self.head_backward(&pass, &hidden, None, loss)?;
            return self.blocks_backward(&pass, dhidden, saved, gradients).map(drop);
        }
        // A tied table also collects the head's gradient, so it is opened before the head and closed last.
        let tied = self.spec().tie_word_embeddings;
        let open = if tied { Some(gradients.begin(Unit::Embedding)?) } else { None };
        let dhidden = self.head_backward(&pass, &hidden, Some((gradients, open.as_ref())), loss)?;
        let dx = self.blocks_backward(&pass, dhidden, saved, gradients)?;
        let flat = match open {
            Some(sum) => sum.flat,
            None => {
                let sum = gradients.begin(Unit::Embedding)?;
                sum.zero_others(self.layout(Unit::Embedding), &|_| false)?;
                sum.flat
            }
        };
        let mut table = EmbeddingParams::view(self.layout(Unit::Embedding), &flat).table;
        let dx = self.spec().scale_embedding(dx, self.options.kind)?;
        embedding::accumulate(&dx, &micro_batch.token_ids, &mut table)?;
        gradients.end(Unit::Embedding, flat)
    }

    /// The residual stream after the last block [T, D], and what the blocks' backward needs if `recompute` is given.
    fn blocks_forward(
        &mut self,
        pass: &mut Pass<'_>,
        recompute: Option<GradientCheckpointing>,
    ) -> Result<(Tensor, Vec<SavedBlock>)> {
        let mut x = self.embed(&pass.micro_batch.token_ids)?;
        let mut saved = Vec::new();
        for layer in 0..self.spec().num_layers() {
            let (y, kept) = self.one_block_forward(pass, layer, &x, recompute)?;
            saved.extend(kept);
            x = y;
        }
        Ok((x, saved))
    }

    fn one_block_forward(
        &mut self,
        pass: &Pass<'_>,
        layer: usize,
        x: &Tensor, // [T, D]
        recompute: Option<GradientCheckpointing>,
    ) -> Result<(Tensor, Option<SavedBlock>)> {
        let upcoming = upcoming(self.spec(), Unit::Block(layer), false);
        let block = self.block(layer, &upcoming, pass.adapter_use)?;
        let context = pass.context(self.spec());
        block_forward(&context, layer, &block, x, &pass.mixer, recompute)
    }

    /// The gradient of the embedding's output [T, D] from that of the last block's.
    fn blocks_backward(
        &mut self,
        pass: &Pass<'_>,
        mut dx: Tensor,
        saved: Vec<SavedBlock>,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        for (layer, saved) in saved.into_iter().enumerate().rev() {
            let upcoming = upcoming(self.spec(), Unit::Block(layer), true);
            let block = self.block(layer, &upcoming, pass.adapter_use)?;
            let (flat, mut block_gradients) = self.begin_block(layer, gradients)?;
            let context = pass.context(self.spec());
            dx = block_backward(&context, &block, &dx, saved, &pass.mixer, &mut block_gradients)?;
            if let Some(adapters) = &self.adapters {
                adapters.end_gradients(layer, &block_gradients, &flat)?;
            }
            gradients.end(Unit::Block(layer), flat)?;
        }
        Ok(dx)
    }

    /// Forward, loss and backward of the head: the gradient of the last block's output [T, D]. The weights' is added to `gradients`,
    /// and, where they are tied, to the embedding's; without any, neither the head nor its table trains.
    fn head_backward(
        &mut self,
        pass: &Pass<'_>,
        hidden: &Tensor,
        gradients: Option<(&mut Gradients, Option<&UnitSum>)>,
        loss: &mut dyn FnMut(&Scores) -> Result<TokenGradients>,
    ) -> Result<Tensor> {
        let head = self.head(&upcoming(self.spec(), Unit::Head, true))?;
        let mut open = match gradients {
            Some((gradients, embedding)) => {
                let own = gradients.begin(Unit::Head)?;
                let sums = self.begin_head(&own, embedding, pass.micro_batch.is_empty())?;
                Some((own.flat, sums, gradients))
            }
            None => None,
        };
        let dhidden = if pass.micro_batch.is_empty() {
            self.no_gradient(hidden)?
        } else {
            let scored = head_forward(&head.params, &head.table, hidden, &pass.scoring, true)?;
            let aux_loss = pass.routes.as_ref().map_or(Ok(None), PassRoutes::aux_loss)?;
            let differing_experts = pass.routes.as_ref().and_then(PassRoutes::differing);
            let ScoredTokens { logprobs, entropy, top, saved } = scored;
            let token_gradients = loss(&Scores { logprobs, entropy, top, aux_loss, differing_experts })?;
            if let Some(routes) = &pass.routes {
                routes.set_gradient(token_gradients.daux_loss)?;
            }
            head_backward(
                &head.params,
                &head.table,
                &pass.scoring,
                hidden.size()[0],
                saved,
                &token_gradients.dlogprobs,
                token_gradients.dentropy.as_ref(),
                token_gradients.dtop.as_ref(),
                open.as_mut().map(|(_, (head, onto), _)| HeadSums {
                    final_norm: &mut head.params.final_norm,
                    table: &mut head.table,
                    onto: *onto,
                }),
            )?
        };
        if let Some((flat, _, gradients)) = open {
            gradients.end(Unit::Head, flat)?;
        }
        Ok(dhidden)
    }

    /// The gradient of an empty micro-batch: zeros where the head's gradient of its input would be.
    fn no_gradient(&self, hidden: &Tensor /* [T, D] */) -> Result<Tensor> {
        Ok(Tensor::f_zeros(hidden.size(), (self.options.kind, hidden.device()))?) // [T, D]
    }

    /// The head's weights, with the embedding's where they are tied.
    fn head(&mut self, upcoming: &[Unit]) -> Result<Head> {
        let tied = self.spec().tie_word_embeddings;
        let embedding =
            if tied { Some(self.weights.unit(Unit::Embedding, &[&[Unit::Head], upcoming].concat())?) } else { None };
        let flat = self.weights.unit(Unit::Head, upcoming)?;
        Ok(Head::view(self.weights.table(), &flat, embedding.as_ref()))
    }

    fn block(&mut self, layer: usize, upcoming: &[Unit], adapter_use: AdapterUse) -> Result<BlockParams> {
        let flat = self.weights.unit(Unit::Block(layer), upcoming)?;
        let block = BlockParams::view(self.spec(), self.layout(Unit::Block(layer)), &flat);
        let block = block.training_in(self.options.format);
        Ok(match &mut self.adapters {
            Some(adapters) => block.with_adapters(adapters.block(layer, adapter_use)?),
            None => block,
        })
    }

    /// The memory of a block's gradients, and where its backward puts each of them.
    fn begin_block(&self, layer: usize, gradients: &mut Gradients) -> Result<(Tensor, BlockParams)> {
        let open = gradients.begin(Unit::Block(layer))?;
        let own = match &self.adapters {
            Some(adapters) => adapters.gradients(layer, &open)?,
            None if open.is_new => {
                BlockParams::begin_gradients(self.spec(), self.layout(Unit::Block(layer)), &open.flat)?
            }
            None => BlockParams::view(self.spec(), self.layout(Unit::Block(layer)), &open.flat),
        };
        Ok((open.flat, own))
    }

    /// Where the head's gradients go; they are none where nothing is scored.
    fn begin_head(&self, own: &UnitSum, embedding: Option<&UnitSum>, is_empty: bool) -> Result<(Head, Onto)> {
        let is_written = |name| !is_empty && matches!(name, ParamName::LmHead | ParamName::Embedding);
        let mut onto = own.zero_others(self.layout(Unit::Head), &is_written)?;
        if let Some(embedding) = embedding {
            onto = embedding.zero_others(self.layout(Unit::Embedding), &is_written)?;
        }
        Ok((Head::view(self.weights.table(), &own.flat, embedding.map(|sum| &sum.flat)), onto))
    }

    /// Rows of the embedding, where the residual stream begins. [T, D]
    fn embed(&mut self, token_ids: &Tensor) -> Result<Tensor> {
        let upcoming = upcoming(self.spec(), Unit::Embedding, false);
        let flat = self.weights.unit(Unit::Embedding, &upcoming)?;
        let EmbeddingParams { table } = EmbeddingParams::view(self.layout(Unit::Embedding), &flat);
        let (rows, residual) = (embedding::forward(token_ids, &table)?, self.options.residual);
        if self.options.format.is_exact() {
            return self.spec().scale_embedding(rows.f_to_kind(residual)?, table.kind()); // in the order of the engine's steps
        }
        Ok(self.spec().scale_embedding(rows, table.kind())?.f_to_kind(residual)?)
    }

    fn layout(&self, unit: Unit) -> &UnitLayout {
        self.weights.table().unit(unit)
    }

    fn spec(&self) -> &ModelSpec {
        &self.weights.table().spec
    }
}

/// The parts of a micro-batch that all blocks and the head need, forward and backward.
struct Pass<'a> {
    micro_batch: &'a MicroBatch,
    ropes: ByRope<RopeRows>,
    mixer: PackedMixer,
    scoring: Scoring<'a>,
    adapter_use: AdapterUse,
    /// Whether tokens have the bits that the engine gives them.
    exact: bool,
    /// Routing, of a model with experts.
    routes: Option<PassRoutes>,
}

impl<'a> Pass<'a> {
    fn new(network: &Network, micro_batch: &'a MicroBatch, temperature: f64, adapter_use: AdapterUse) -> Result<Self> {
        let (spec, NetworkOptions { kind, device, format, .. }) = (network.spec(), network.options);
        let exact = format.is_exact();
        let MicroBatch { positions, bounds, scored_rows, targets, .. } = micro_batch;
        let temperature = temperature * spec.logits_scaling;
        Ok(Self {
            micro_batch,
            ropes: if exact {
                network.ropes.exact_rows(positions, kind)?
            } else {
                network.ropes.rows(positions, kind)?
            },
            mixer: match exact {
                true => PackedMixer::exact(spec, bounds, device)?,
                false => PackedMixer::of(spec, bounds, device),
            },
            scoring: Scoring {
                rows: scored_rows,
                targets,
                top: TopTokens::Nothing,
                temperature,
                norm: spec.norm(),
                exact: exact.then_some(spec.logits_scaling),
            },
            exact,
            adapter_use,
            routes: None,
        })
    }

    fn context<'p>(&'p self, spec: &'p ModelSpec) -> BlockContext<'p> {
        let routes = self.routes.as_ref().map(|routes| routes as &dyn Routes);
        BlockContext::new(spec, &self.ropes, None, routes).exactly(self.exact)
    }
}
