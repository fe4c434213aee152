//! Forward and backward over all units: embedding, blocks, and head on the scored rows. Weights are read from and gradients written to their stores
//! unit by unit. The order depends only on the model, so all ranks make the same collectives.
//!
//! Shapes: T tokens, C scored tokens, D hidden, V vocabulary.

use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::adapters::{AdapterUse, Adapters};
use super::gradients::{Gradients, UnitSum};
use super::head::Head;
use super::micro_batch::MicroBatch;
use super::network_options::NetworkOptions;
use super::offload::ActivationOffload;
use super::pass::Pass;
use super::routes::PassRoutes;
use super::row_part::RowPart;
use super::scores::{Scores, TokenGradients};
use super::upcoming::upcoming;
use super::weights::Weights;
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::{
    BlockParams, EmbeddingParams, HeadSums, ModelSpec, ParamName, Ropes, SavedHead, TokenExchange, Unit, UnitLayout,
    Use, head_backward, head_forward, head_logits,
};
use crate::ops::embedding;
use crate::ops::head::TopTokens;
use crate::ops::linear::Onto;
use crate::ranks::Mesh;

/// The weights, and the passes over them.
#[derive(Debug)]
pub(crate) struct Network {
    pub weights: Weights,
    /// LoRA adapters that train instead of the weights.
    pub adapters: Option<Adapters>,
    pub(super) ropes: Ropes,
    pub(super) options: NetworkOptions,
    /// The ranks that share micro-batches with this one.
    pub(super) exchange: Option<TokenExchange>,
    /// Offloads tensors that blocks keep for backward to the host, if set.
    pub(super) offload: Option<ActivationOffload>,
    /// Number of most probable tokens that are scored in passes without gradients.
    pub num_top: usize,
    /// Whether passes without gradients compute the load-balancing loss of experts.
    pub balances: bool,
    /// The weight of each scored token in the draft head's loss.
    pub draft_weight: f64,
}

impl Network {
    /// # Errors
    /// [`Error::InvalidValue`] for a format that the GPU's GEMMs do not support, or if more ranks share micro-batches than can share heads.
    pub(crate) fn new(
        weights: Weights,
        adapters: Option<Adapters>,
        options: NetworkOptions,
        mesh: &Mesh,
    ) -> Result<Self> {
        options.format.check_device(Use::Training, options.device)?;
        weights.table().spec.validate_sequence_parallel(mesh.sequence.size())?;
        let ropes = weights.table().spec.ropes();
        let exchange = TokenExchange::of(&mesh.sequence, &mesh.lane);
        let (offload, num_top, balances, draft_weight) = (None, 0, false, 1.0);
        Ok(Self { weights, adapters, ropes, options, exchange, offload, num_top, balances, draft_weight })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.options.kind
    }

    pub(crate) fn device(&self) -> Device {
        self.options.device
    }

    /// Number of ranks that share each micro-batch.
    pub(crate) fn num_sharers(&self) -> usize {
        self.exchange.as_ref().map_or(1, TokenExchange::size)
    }

    /// How long computation waited for the exchange of heads since the last call; `None` unless ranks share micro-batches.
    pub(crate) fn take_exposed_exchange(&self) -> Result<Option<Duration>> {
        self.exchange.as_ref().map(TokenExchange::take_exposed).transpose()
    }

    /// The weights that the optimizer steps: the adapters, or all.
    pub(crate) fn trained(&self) -> &Weights {
        self.adapters.as_ref().map_or(&self.weights, |adapters| &adapters.weights)
    }

    /// Mutable access to [`Network::trained`].
    pub(crate) fn trained_mut(&mut self) -> &mut Weights {
        self.adapters.as_mut().map_or(&mut self.weights, |adapters| &mut adapters.weights)
    }

    /// Scores a micro-batch without gradients (collective if weights are sharded).
    pub(crate) fn score(
        &mut self,
        micro_batch: &MicroBatch,
        temperature: f64,
        adapter_use: AdapterUse,
    ) -> Result<Scores> {
        let part = RowPart::new(micro_batch, self.exchange.as_ref())?;
        let mut pass = self.pass((micro_batch, &part), temperature, adapter_use)?;
        if self.num_top > 0 {
            pass.scoring.top = TopTokens::MostProbable(self.num_top);
        }
        // A reference model does its own routing.
        let replays = matches!(adapter_use, AdapterUse::On | AdapterUse::Dropped(_));
        pass.routes = self.routes(&pass, replays, self.balances)?;
        let (hidden, _) = self.blocks_forward(&mut pass, None)?;
        let head = self.head(&[])?;
        let scored = head_forward(&head.params, &head.table, &part.to_head(&hidden)?, &pass.scoring, false)?;
        let (logprobs, entropy, top) = part.scores(&scored)?;
        let routes = pass.routes.as_ref().filter(|_| !micro_batch.is_empty());
        let aux_loss = routes.map_or(Ok(None), |routes| routes.aux_loss(&part))?;
        Ok(Scores { logprobs, entropy, top, aux_loss, differing_experts: None })
    }

    /// Logits that predict each scored token of a micro-batch (collective if weights are sharded). [C, V] f32
    pub(crate) fn logits(&mut self, micro_batch: &MicroBatch) -> Result<Tensor> {
        let part = RowPart::new(micro_batch, None)?;
        let mut pass = self.pass((micro_batch, &part), 1.0, AdapterUse::Off)?;
        let (hidden, _) = self.blocks_forward(&mut pass, None)?;
        let head = self.head(&[])?;
        let rows = part.to_head(&hidden)?;
        self.spec().scale_logits(head_logits(&head.params, &head.table, &rows, pass.scoring.norm)?)
    }

    /// Runs each block on a given input, and the head on the last one (collective if weights are sharded). `inputs` has the residual stream before
    /// every block and after the last. Returns the blocks' outputs, [T, D] each, and logits like [`Network::logits`].
    pub(super) fn block_outputs(
        &mut self,
        micro_batch: &MicroBatch,
        inputs: &[Tensor],
    ) -> Result<(Vec<Tensor>, Tensor)> {
        let part = RowPart::new(micro_batch, None)?;
        let pass = self.pass((micro_batch, &part), 1.0, AdapterUse::Off)?;
        let residual = self.options.residual;
        let mut outputs = Vec::new();
        for (layer, input) in inputs[..self.spec().num_layers()].iter().enumerate() {
            outputs.push(self.one_block_forward(&pass, layer, &input.f_to_kind(residual)?, None)?.0);
        }
        let head = self.head(&[])?;
        let rows = part.to_head(&inputs[outputs.len()].f_to_kind(residual)?)?;
        let logits = head_logits(&head.params, &head.table, &rows, pass.scoring.norm)?;
        Ok((outputs, self.spec().scale_logits(logits)?))
    }

    /// Scores a micro-batch, calls `loss` for the gradients of the scores, and adds the weights' gradients to `gradients` (collective if weights or
    /// gradients are sharded). `loss` is not called for an empty micro-batch, and must not be collective.
    pub(super) fn forward_backward(
        &mut self,
        micro_batch: &MicroBatch,
        (temperature, adapter_use): (f64, AdapterUse),
        recompute: GradientCheckpointing,
        gradients: &mut Gradients,
        loss: &mut dyn FnMut(&Scores) -> Result<TokenGradients>,
    ) -> Result<()> {
        let part = RowPart::new(micro_batch, self.exchange.as_ref())?;
        let mut pass = self.pass((micro_batch, &part), temperature, adapter_use)?;
        pass.routes = self.routes(&pass, true, true)?;
        pass.scoring.top = part.top_ids.as_ref().map_or(TopTokens::Nothing, TopTokens::At);
        let (hidden, saved) = self.blocks_forward(&mut pass, Some(recompute))?;
        if self.adapters.is_some() {
            let dhidden = self.head_backward(&pass, &hidden, None, loss)?;
            return self.blocks_backward(&pass, dhidden, saved, gradients).map(drop);
        }
        // A tied table also gets the head's gradient, so begin its unit before the head and end it last.
        let tied = self.spec().tie_word_embeddings;
        let open = if tied { Some(gradients.begin(Unit::Embedding)?) } else { None };
        let dhidden = self.head_backward(&pass, &hidden, Some((gradients, open.as_ref())), loss)?;
        self.train_draft_head(micro_batch, pass.scoring.temperature, &hidden, gradients)?;
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
        embedding::accumulate(&dx, &part.token_ids, &mut table)?;
        gradients.end(Unit::Embedding, flat)
    }

    /// Runs forward, loss and backward of the head. Returns the gradient of the last block's output [T, D]. Adds the weights' gradients to
    /// `gradients` and, if tied, to the embedding's. Without gradient buffers, neither the head nor its table trains.
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
                let sums = self.begin_head(&own, embedding, pass.part.is_empty())?;
                Some((own.flat, sums, gradients))
            }
            None => None,
        };
        let dhidden = if pass.micro_batch.is_empty() {
            self.no_gradient(hidden)?
        } else {
            let scored = head_forward(&head.params, &head.table, &pass.part.to_head(hidden)?, &pass.scoring, true)?;
            let (logprobs, entropy, top) = pass.part.scores(&scored)?;
            let aux_loss = pass.routes.as_ref().map_or(Ok(None), |routes| routes.aux_loss(pass.part))?;
            let differing_experts = pass.routes.as_ref().map_or(Ok(None), |routes| routes.differing(pass.part))?;
            let token_gradients = loss(&Scores { logprobs, entropy, top, aux_loss, differing_experts })?;
            if let Some(routes) = &pass.routes {
                routes.set_gradient(token_gradients.daux_loss)?;
            }
            let sums = open.as_mut().map(|(_, (head, onto), _)| (head, *onto));
            pass.part.return_gradient(self.head_gradients(pass, &head, scored.saved, token_gradients, sums)?)?
        };
        if let Some((flat, _, gradients)) = open {
            gradients.end(Unit::Head, flat)?;
        }
        Ok(dhidden)
    }

    /// The gradient of the head's input [C', D], from the gradients of this rank's part of the scores.
    fn head_gradients(
        &self,
        pass: &Pass<'_>,
        head: &Head,
        saved: SavedHead,
        TokenGradients { dlogprobs, dentropy, dtop, .. }: TokenGradients,
        sums: Option<(&mut Head, Onto)>,
    ) -> Result<Tensor> {
        let part = pass.part;
        if part.is_empty() {
            let size = [0, self.spec().hidden_size as i64];
            return Ok(Tensor::f_zeros(size, (self.options.kind, self.device()))?);
        }
        let [dentropy, dtop] = [dentropy, dtop].map(|d| d.map(|d| part.scored(&d)));
        let sums = sums.map(|(head, onto)| HeadSums {
            final_norm: &mut head.params.final_norm,
            table: Some(&mut head.table),
            onto,
        });
        head_backward(
            &head.params,
            &head.table,
            &pass.scoring,
            saved,
            &part.scored(&dlogprobs),
            dentropy.as_ref(),
            dtop.as_ref(),
            sums,
        )
    }

    /// Prepares one pass over this rank's part of a micro-batch.
    fn pass<'a>(
        &self,
        rows: (&'a MicroBatch, &'a RowPart),
        temperature: f64,
        adapter_use: AdapterUse,
    ) -> Result<Pass<'a>> {
        Pass::new((self.spec(), &self.ropes, self.options), rows, temperature, adapter_use)
    }

    fn routes(&self, pass: &Pass<'_>, replays: bool, balances: bool) -> Result<Option<PassRoutes>> {
        let place = (self.kind(), self.device());
        PassRoutes::new(self.spec(), (pass.micro_batch, pass.part), place, replays, balances)
    }

    /// The gradient of an empty micro-batch's last hidden state: zeros.
    fn no_gradient(&self, hidden: &Tensor /* [T, D] */) -> Result<Tensor> {
        Ok(Tensor::f_zeros(hidden.size(), (self.options.kind, hidden.device()))?) // [T, D]
    }

    /// The head's weights, with the embedding's if tied.
    pub(super) fn head(&mut self, upcoming: &[Unit]) -> Result<Head> {
        let tied = self.spec().tie_word_embeddings;
        let embedding =
            if tied { Some(self.weights.unit(Unit::Embedding, &[&[Unit::Head], upcoming].concat())?) } else { None };
        let flat = self.weights.unit(Unit::Head, upcoming)?;
        Ok(Head::view(self.weights.table(), &flat, embedding.as_ref()))
    }

    pub(super) fn block(&mut self, layer: usize, upcoming: &[Unit], adapter_use: AdapterUse) -> Result<BlockParams> {
        let flat = self.weights.unit(Unit::Block(layer), upcoming)?;
        let block = BlockParams::view(self.spec(), self.layout(Unit::Block(layer)), &flat);
        let block = block.training_in(self.options.format);
        Ok(match &mut self.adapters {
            Some(adapters) => block.with_adapters(adapters.block(layer, adapter_use)?),
            None => block,
        })
    }

    /// The gradient buffer of a block, and views of it for each parameter.
    pub(super) fn begin_block(&self, layer: usize, gradients: &mut Gradients) -> Result<(Tensor, BlockParams)> {
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

    /// Views of the head's gradient buffer; they are empty if nothing is scored.
    fn begin_head(&self, own: &UnitSum, embedding: Option<&UnitSum>, is_empty: bool) -> Result<(Head, Onto)> {
        let is_written = |name| !is_empty && matches!(name, ParamName::LmHead | ParamName::Embedding);
        let mut onto = own.zero_others(self.layout(Unit::Head), &is_written)?;
        if let Some(embedding) = embedding {
            onto = embedding.zero_others(self.layout(Unit::Embedding), &is_written)?;
        }
        Ok((Head::view(self.weights.table(), &own.flat, embedding.map(|sum| &sum.flat)), onto))
    }

    /// Looks up the embedding rows that start the residual stream. [T, D]
    pub(super) fn embed(&mut self, token_ids: &Tensor) -> Result<Tensor> {
        let upcoming = upcoming(self.spec(), Unit::Embedding, false);
        let flat = self.weights.unit(Unit::Embedding, &upcoming)?;
        let EmbeddingParams { table } = EmbeddingParams::view(self.layout(Unit::Embedding), &flat);
        let (rows, residual) = (embedding::forward(token_ids, &table)?, self.options.residual);
        if self.options.format.is_exact() {
            return self.spec().scale_embedding(rows.f_to_kind(residual)?, table.kind()); // in the same order of operations as the engine
        }
        Ok(self.spec().scale_embedding(rows, table.kind())?.f_to_kind(residual)?)
    }

    pub(super) fn layout(&self, unit: Unit) -> &UnitLayout {
        self.weights.table().unit(unit)
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        &self.weights.table().spec
    }
}
