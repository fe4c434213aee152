//! The model's own draft head (MTP) on a GPU. It computes the draft tokens that `rollout::draft_head` computes on a CPU.

use std::marker::PhantomData;

use tch::{Kind, Tensor};

use super::inputs::Packing;
use super::network::{Attend, DecoderNetwork, StepTokens};
use super::op::DecoderOp;
use super::prefill::PrefillAttention;
use crate::cuda::kernels::{self, DraftInputs};
use crate::error::{Error, Result};
use crate::model::{DRAFT_NORMS, ModelSpec, OwnProducts, ParamName, Stage};
use crate::rollout::draft_rows::HeadWork;
use crate::rollout::weights::EngineWeights;
use crate::torch;

/// The draft head, viewed as a model of one layer.
#[derive(Debug)]
pub(super) struct DraftHead<'a> {
    spec: ModelSpec,
    weights: EngineWeights<'a>,
    stage: Stage,
}

impl<'a> DraftHead<'a> {
    /// Views the weights of the draft head as a model of one layer. Returns `None` if the model has no draft head.
    pub(super) fn new(spec: &ModelSpec, weights: &EngineWeights<'a>) -> Result<Option<Self>> {
        let (Some(draft), Some(own)) = (spec.draft_spec(), &weights.draft_head) else { return Ok(None) };
        let head = EngineWeights {
            embedding: weights.embedding.shallow_clone(),
            blocks: vec![own.try_map(&mut |tensor| Ok(tensor.shallow_clone()))?],
            draft_head: None,
            final_norm: own.norm(ParamName::FinalNorm).expect("the norm of the draft head").shallow_clone(),
            lm_head: weights.lm_head.shallow_clone(),
            stored: None,
            num_adapters: 0,
            version: weights.version,
            policy: PhantomData,
        };
        // The head is the last of two stages, so the network does not embed its tokens again, and applies the final norm.
        let stage = Stage { index: 1, num_stages: 2, layers: 0..1 };
        Ok(Some(Self { spec: draft, weights: head, stage }))
    }

    /// Returns a network of the draft head that uses the buffers and the KV cache of the network `model`.
    pub(super) fn network<'n>(&'n self, model: DecoderNetwork<'n>) -> DecoderNetwork<'n> {
        DecoderNetwork {
            spec: &self.spec,
            weights: &self.weights,
            stage: &self.stage,
            first_cache_layer: model.spec.num_layers(),
            records_experts: false,
            own_products: OwnProducts::None,
            ..model
        }
    }

    /// Runs the draft head on the prompts of a prefill step, which writes its keys and values to the KV cache. Also stores the model's newest hidden
    /// states in the state pages: the draft head reads them at the next tokens.
    pub(super) fn follow_prompts(
        &self,
        model: DecoderNetwork<'_>,
        packing: &Packing,
        hidden: &Tensor, // [T, D]
    ) -> Result<()> {
        let states = model.memory.states.expect("a model with a draft head has states");
        let Packing { step, sequences, block_size, .. } = *packing;
        let HeadWork { rows, before, kept } = HeadWork::new(step, sequences, states.num_kept_rows(), block_size);
        let (device, num_tokens) = (hidden.device(), step.num_tokens() as i64);
        let (own, places): (Vec<i64>, Vec<i64>) = kept.into_iter().unzip();
        let newest = hidden.f_index_select(0, &torch::tensor_on(&own, device)?)?;
        if !rows.token_ids.is_empty() {
            let ints = |values: &[i64]| Ok::<_, Error>(torch::tensor_on(values, device)?.f_to_kind(Kind::Int)?);
            let before: Vec<i64> =
                before.iter().map(|&place| if place < num_tokens { !place } else { place - num_tokens }).collect();
            let [ids, positions, slots] = [&rows.token_ids, &rows.positions, &rows.slots].map(|values| ints(values));
            let (ids, positions, slots) = (ids?, positions?, slots?);
            let tokens = head_tokens(&ids, &positions, &slots);
            let attention = PrefillAttention::of_head(packing, model.memory.kv_cache, device)?;
            let network = self.network(model);
            let layer = network.first_cache_layer;
            let _ = network.draft_hidden(&tokens, (&ints(&before)?, hidden), &mut |_, spec, heads| {
                attention.attend(layer, spec, heads)
            })?;
        }
        let places = torch::tensor_on(&places, device)?;
        let _ = states.hidden_rows().f_index_copy_(0, &places, &newest)?;
        Ok(())
    }
}

/// Describes input tokens of the draft head, which has no recurrent states.
pub(super) fn head_tokens<'t>(ids: &'t Tensor, positions: &'t Tensor, slots: &'t Tensor) -> StepTokens<'t> {
    StepTokens { ids, positions, slots, recorded: None, state_pages: slots, bounds: None, drafts: None }
}

impl DecoderNetwork<'_> {
    /// Computes the draft head's hidden states. Each row's inputs are the embedding of its token and the hidden state at the token before it.
    /// `before` says where that hidden state is stored: in the state pages or in `own`. [R, D]
    pub(super) fn draft_hidden(
        &self,
        tokens: &StepTokens,
        (before, own): (&Tensor, &Tensor), // [R] i32, [.., D]
        attend: &mut Attend,
    ) -> Result<Tensor> {
        let (rows, w) = (tokens.ids.size()[0], &self.weights.blocks[0]);
        let first = |buffer: &Tensor| buffer.narrow(0, 0, rows);
        let (mut x, mut joined, out) =
            (first(&self.buffers.x), first(&self.buffers.joined), first(&self.buffers.delta));
        self.embed_scaled(tokens.ids, &mut x)?;
        let states = self.memory.states.expect("a model with a draft head has states");
        let kept = states.hidden_rows();
        let norms = DRAFT_NORMS.map(|name| w.norm(name).expect("a norm of the draft head"));
        DecoderOp::Norm.run(|| {
            let inputs = DraftInputs { embedded: &x, kept: &kept, own, before };
            kernels::draft_input(inputs, norms, self.spec.norm(), &mut joined)
        })?;
        let projection = w.norm(ParamName::DraftProjection).expect("the projection of the draft head");
        self.product(DecoderOp::Qkv, &joined, projection, None, &out)?;
        DecoderOp::Norm.run(|| Ok(x.f_copy_(&out)?))?;
        self.hidden(tokens, attend)
    }

    /// Stores the hidden states of a decode step's rows in the state pages, for the draft head. Does nothing if the model has no draft head.
    pub(super) fn keep_hidden(
        &self,
        hidden: &Tensor,         /* [S, D] */
        places: Option<&Tensor>, /* [S] */
    ) -> Result<()> {
        let (Some(places), Some(states)) = (places, self.memory.states) else { return Ok(()) };
        kernels::keep_rows(hidden, places, &states.hidden_rows())
    }
}
