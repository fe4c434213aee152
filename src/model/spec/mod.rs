//! The shape of a model: everything except the weights, and the bytes and operations that follow from it.
//!
//! | file | content |
//! |---|---|
//! | `family` | names of model families |
//! | `param_name`, `linear` | names and shapes of parameters and matrices |
//! | `attention`, `delta_net`, `mixer` | the first sublayer of a block |
//! | `dense`, `experts`, `mlp` | the second sublayer |
//! | `block` | both sublayers, with their norms |
//! | `bytes`, `heads` | bytes per element; heads that ranks split |
//! | `served` | which sizes ranks and GPUs support |

mod attention;
mod block;
mod bytes;
mod delta_net;
mod dense;
mod experts;
mod family;
mod heads;
mod linear;
mod mixer;
mod mlp;
mod param_name;
mod served;

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ops::rms_norm::NormOptions;

pub use attention::{AttentionSpec, QkNorm, RopeSpec, Sight};
pub use block::{BlockSpec, MIXER_NORMS, MLP_NORMS, NormNames, NormPlaces};
pub use bytes::{ElementBytes, RowsShape};
pub use delta_net::DeltaNetSpec;
pub use dense::DenseSpec;
pub use experts::{ExpertsSpec, SharedExpertSpec};
pub use family::Family;
pub(super) use family::families;
pub(super) use heads::{HeadRun, SharedHeads};
pub use linear::{LinearSpec, Matrix, Projection, TpSplit};
pub(super) use linear::{MLP, room};
pub use mixer::Mixer;
pub use mlp::Mlp;
pub use param_name::{ParamName, Unit};
pub(super) use param_name::{Shapes, product};

/// Norms of the draft head, before its projection.
pub(crate) const DRAFT_NORMS: [ParamName; 2] = [ParamName::DraftEmbeddingNorm, ParamName::DraftHiddenNorm];

/// A decoder-only transformer: its layers one by one, and what stands before and behind them. Field names are those of `config.json` where
/// one exists.
///
/// Layers may differ in all but three things, each of which the engine has one memory for: heads of attention (blocks of the cache), heads of
/// gated delta nets (pages of states), and experts (records of routing).
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Architecture, for `config.json`.
    pub family: Family,
    /// Rows of the embedding and of the head; at least the tokenizer's size.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Blocks, first to last.
    pub layers: Vec<BlockSpec>,
    /// The block of the head that drafts tokens, where that is served ([`ModelSpec::with_draft_head`]).
    pub draft_head: Option<BlockSpec>,
    /// Factor of the embedding's rows.
    pub embedding_multiplier: f64,
    /// That factor is rounded to the type of the table.
    pub rounds_embedding_multiplier: bool,
    /// Divisor of the logits.
    pub logits_scaling: f64,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Norms multiply by 1 + weight, except those within gated delta nets.
    pub zero_centred_norms: bool,
    /// Weight of the loss that balances the experts' load.
    pub router_aux_loss_coef: f64,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Beginning of sequence.
    pub bos_token_id: Option<u32>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Type of the weights on disk.
    pub dtype: Kind,
    /// The checkpoint also has a vision tower, which stays unchanged. This spec describes the checkpoint's `text_config`.
    pub is_text_part: bool,
}

impl ModelSpec {
    /// Number of weights; a tied head counts once. Saturates at `usize::MAX`.
    pub fn num_params(&self) -> usize {
        let numels = self.units().flat_map(|unit| self.shapes(unit)).map(|(_, shape)| product(&shape));
        numels.fold(0, usize::saturating_add)
    }

    /// Number of weights that compute one token: of the experts, only those that a router chooses for it.
    pub fn num_active_params(&self) -> usize {
        let idle = |block: &BlockSpec| match block.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(experts) => experts.num_idle_params(),
        };
        self.num_params() - self.layers.iter().map(idle).sum::<usize>()
    }

    /// Expected number of weights that compute a batch of `tokens` tokens, if routers choose experts uniformly.
    pub fn num_params_hit(&self, tokens: f64) -> f64 {
        let idle = |block: &BlockSpec| match block.mlp {
            Mlp::Dense(_) => 0.0,
            Mlp::Experts(experts) => {
                let missed = 1.0 - experts.router.num_experts_per_tok as f64 / experts.num_experts as f64;
                experts.num_idle_params() as f64 * missed.powf(tokens - 1.0)
            }
        };
        self.num_params() as f64 - self.layers.iter().map(idle).sum::<f64>()
    }

    /// For each layer, the number of layers with experts before it.
    pub fn places_among_expert_layers(&self) -> Vec<i64> {
        let before = |layer| self.layers[..layer].iter().filter(|block| block.has_experts()).count() as i64;
        (0..self.num_layers()).map(before).collect()
    }

    /// Number of experts that one token is routed to, summed over all layers.
    pub fn routed_experts_per_token(&self) -> usize {
        self.num_expert_layers() * self.experts().map_or(0, |experts| experts.router.num_experts_per_tok)
    }

    /// Number of layers that have experts.
    pub fn num_expert_layers(&self) -> usize {
        self.layers.iter().filter(|block| block.has_experts()).count()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The attention of the first layer that has one. All attention layers have the same number and width of heads.
    ///
    /// # Panics
    /// If the model has no attention layer; every supported family has one.
    pub fn attention(&self) -> AttentionSpec {
        self.attention_specs().next().expect("every family has layers with attention")
    }

    /// The first layer's gated delta net, if any layer has one. All of them have the same shape.
    pub fn delta_net(&self) -> Option<DeltaNetSpec> {
        self.layers.iter().find_map(|block| match block.mixer {
            Mixer::Attention(_) => None,
            Mixer::DeltaNet(delta_net) => Some(delta_net),
        })
    }

    /// The first layer's experts, if any layer has experts. All of them have the same shape.
    pub fn experts(&self) -> Option<ExpertsSpec> {
        self.layers.iter().find_map(|block| match block.mlp {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(experts),
        })
    }

    /// The MLP of the first layer without experts, if there is one.
    pub fn dense(&self) -> Option<DenseSpec> {
        self.layers.iter().find_map(|block| match block.mlp {
            Mlp::Dense(dense) => Some(dense),
            Mlp::Experts(_) => None,
        })
    }

    /// Returns this spec with `num_layers` layers: the first ones, repeated from the start if there are fewer.
    #[must_use]
    pub fn with_num_layers(self, num_layers: usize) -> Self {
        let layers = self.layers.iter().copied().cycle().take(num_layers).collect();
        Self { layers, ..self }
    }

    /// Returns this spec with `change(layer, block)` applied to every block.
    #[must_use]
    pub fn map_blocks(mut self, mut change: impl FnMut(usize, &mut BlockSpec)) -> Self {
        self.layers.iter_mut().enumerate().for_each(|(layer, block)| change(layer, block));
        self
    }

    /// Returns this spec with `change(layer, attention)` applied to every attention sublayer.
    #[must_use]
    pub fn map_attention(self, mut change: impl FnMut(usize, &mut AttentionSpec)) -> Self {
        self.map_blocks(|layer, block| {
            if let Mixer::Attention(attention) = &mut block.mixer {
                change(layer, attention);
            }
        })
    }

    /// Returns this spec with `change` applied to the experts of every layer.
    #[must_use]
    pub fn map_experts(self, mut change: impl FnMut(&mut ExpertsSpec)) -> Self {
        self.map_blocks(|_, block| {
            if let Mlp::Experts(experts) = &mut block.mlp {
                change(experts);
            }
        })
    }

    /// Returns this spec with the given widths of the residual stream and of dense MLPs.
    #[must_use]
    pub fn with_widths(self, hidden: usize, intermediate: usize) -> Self {
        let spec = self.map_blocks(|_, block| {
            block.hidden = hidden;
            match &mut block.mixer {
                Mixer::Attention(attention) => attention.hidden = hidden,
                Mixer::DeltaNet(delta_net) => delta_net.hidden = hidden,
            }
            match &mut block.mlp {
                Mlp::Dense(dense) => (dense.hidden, dense.intermediate) = (hidden, intermediate),
                Mlp::Experts(experts) => {
                    experts.expert.hidden = hidden;
                    experts.shared.iter_mut().for_each(|SharedExpertSpec(shared)| shared.hidden = hidden);
                }
            }
        });
        Self { hidden_size: hidden, ..spec }
    }

    /// Groups layers with equal blocks; each group names its first layer and its number of layers.
    pub fn kinds_of_blocks(&self) -> Vec<KindOfBlock> {
        let mut kinds: Vec<KindOfBlock> = Vec::new();
        for (layer, block) in self.layers.iter().enumerate() {
            match kinds.iter_mut().find(|kind| self.layers[kind.layer] == *block) {
                Some(kind) => kind.count += 1,
                None => kinds.push(KindOfBlock { layer, count: 1 }),
            }
        }
        kinds
    }

    /// The distinct rotary embeddings of attention layers; `None` is a layer without one.
    pub fn rotations(&self) -> Vec<Option<RopeSpec>> {
        self.distinct(|attention| attention.rope)
    }

    /// The distinct sliding windows of attention layers; `None` is full attention.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.distinct(|attention| attention.window)
    }

    /// Whether completions may share the computation of their prompt. A sliding window could hide a prompt from the end of a completion, so models
    /// with one process every sequence whole.
    pub fn can_share_prompts(&self) -> bool {
        self.windows().iter().all(Option::is_none)
    }

    /// The distinct windows and scales ([`AttentionSpec::sight`]) of attention layers.
    pub fn sights(&self) -> Vec<Sight> {
        self.distinct(AttentionSpec::sight)
    }

    fn distinct<T: PartialEq>(&self, of: impl Fn(AttentionSpec) -> T) -> Vec<T> {
        let mut all = Vec::new();
        for attention in self.attention_specs() {
            let value = of(attention);
            if !all.contains(&value) {
                all.push(value);
            }
        }
        all
    }

    /// The multiplier of embedding rows, rounded to `kind` if the family does so.
    pub fn embedding_multiplier_in(&self, kind: Kind) -> f64 {
        match self.rounds_embedding_multiplier {
            true => Tensor::from(self.embedding_multiplier).to_kind(kind).double_value(&[]),
            false => self.embedding_multiplier,
        }
    }

    /// Multiplies embedding rows, or their gradient, by the model's embedding multiplier. `kind` is the type of the table. [T, D]
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn scale_embedding(&self, rows: Tensor, kind: Kind) -> Result<Tensor> {
        let factor = self.embedding_multiplier_in(kind);
        if factor == 1.0 { Ok(rows) } else { Ok(rows.f_mul_scalar(factor)?) }
    }

    /// Divides logits by `logits_scaling`. [C, V]
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn scale_logits(&self, logits: Tensor) -> Result<Tensor> {
        if self.logits_scaling == 1.0 { Ok(logits) } else { Ok(logits.f_div_scalar(self.logits_scaling)?) }
    }

    /// The epsilon and weight convention of the RMS norms of the residual stream and of heads.
    pub fn norm(&self) -> NormOptions {
        NormOptions { eps: self.rms_norm_eps, zero_centred: self.zero_centred_norms }
    }

    /// The attention sublayers, in layer order.
    pub fn attention_specs(&self) -> impl Iterator<Item = AttentionSpec> + '_ {
        self.layers.iter().filter_map(|block| match block.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::DeltaNet(_) => None,
        })
    }

    /// Indices of the layers with attention, in order.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_layers()).filter(|&layer| matches!(self.layers[layer].mixer, Mixer::Attention(_)))
    }

    /// Floating-point operations of training for every (query, key) pair, summed over all layers: forward, plus twice as many for gradients.
    pub fn training_flop_per_pair(&self) -> usize {
        self.layers.iter().map(|block| 3 * block.mixer.flop_per_pair()).sum()
    }

    /// Floating-point operations of training per token outside GEMMs, summed over all layers: the gated delta rule's forward, plus twice as many for
    /// gradients.
    pub fn training_flop_per_token(&self) -> usize {
        self.layers.iter().map(|block| 3 * block.mixer.flop_per_token()).sum()
    }

    /// Elements per token in the KV cache, over all layers and the draft head, on one tensor-parallel rank.
    pub fn cached_elements(&self, tp_size: usize) -> usize {
        let blocks = self.layers.iter().chain(&self.draft_head);
        blocks.map(|block| block.tp_slice(tp_size).mixer.cached_elements()).sum()
    }

    /// The rows of the vocabulary on rank `tp_rank`: contiguous, in rank order, with sizes that differ by at most one.
    pub fn vocab_range(&self, tp_rank: usize, tp_size: usize) -> Range<usize> {
        self.vocab_size * tp_rank / tp_size..self.vocab_size * (tp_rank + 1) / tp_size
    }

    /// All units of the model, in order.
    pub(in crate::model) fn units(&self) -> impl Iterator<Item = Unit> + use<> {
        let blocks = (0..self.num_layers()).map(Unit::Block);
        let draft_head = self.draft_head.map(|_| Unit::DraftHead);
        std::iter::once(Unit::Embedding).chain(blocks).chain(draft_head).chain([Unit::Head])
    }

    /// Names and shapes of a unit's parameters.
    pub(in crate::model) fn shapes(&self, unit: Unit) -> Shapes {
        let [vocab, hidden] = [self.vocab_size, self.hidden_size].map(|size| size as i64);
        match unit {
            Unit::Embedding => vec![(ParamName::Embedding, vec![vocab, hidden])],
            Unit::Block(layer) => self.layers[layer].shapes(),
            Unit::DraftHead => self.draft_shapes(),
            Unit::Head => {
                let own = (!self.tie_word_embeddings).then(|| (ParamName::LmHead, vec![vocab, hidden]));
                std::iter::once((ParamName::FinalNorm, vec![hidden])).chain(own).collect()
            }
        }
    }

    /// Returns this spec with a head that drafts tokens, if checkpoints of the family contain one. Its block has the shape of the first attention
    /// layer.
    #[must_use]
    pub fn with_draft_head(self) -> Self {
        let layer = self.delta_net().and_then(|_| self.attention_layers().next());
        Self { draft_head: layer.map(|layer| self.layers[layer]), ..self }
    }

    /// The draft head's block as a model with one layer, if there is a draft head.
    pub fn draft_spec(&self) -> Option<Self> {
        self.draft_head.map(|block| Self { layers: vec![block], draft_head: None, ..self.clone() })
    }

    /// Names and shapes of the draft head's parameters, in the order in which the layout stores them; empty without a draft head.
    fn draft_shapes(&self) -> Shapes {
        let hidden = self.hidden_size as i64;
        let block = self.draft_head.map_or_else(Vec::new, |block| block.shapes());
        let [embedding, before] = DRAFT_NORMS.map(|name| (name, vec![hidden]));
        let own = [embedding, before, (ParamName::DraftProjection, vec![hidden, 2 * hidden])];
        own.into_iter().chain(block).chain([(ParamName::FinalNorm, vec![hidden])]).collect()
    }
}

/// A group of layers whose blocks have the same shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindOfBlock {
    /// Index of the first layer in the group.
    pub layer: usize,
    /// Number of layers in the group.
    pub count: usize,
}
