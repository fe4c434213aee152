//! The shape of a network: everything about a model that is not a weight.

use std::ops::Range;
use std::path::Path;

use tch::Kind;

use super::block::{
    AttentionSpec, BlockSpec, DeltaNetSpec, DenseSpec, ExpertsSpec, Mixer, Mlp, NormPlaces, QkNorm, SharedExpertSpec,
};
use super::families::Family;
use super::params::{shapes, units};
use crate::cuda::kernels::{
    DecoderSizes, MOST_EXPERTS, MOST_EXPERTS_PER_TOKEN, Unserved, delta_step_serves, served_delta_sizes, unserved,
};
use crate::error::{Error, Result};
use crate::ops::delta_net::DeltaHeads;
use crate::ops::rms_norm::NormOptions;
use crate::ops::rope::{Rope, RopeScaling};
use crate::ops::router::RouterOptions;

/// A decoder-only transformer. Field names are those of `config.json` where one exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Architecture, for `config.json`.
    pub family: Family,
    /// Rows of the embedding and of the head; at least the tokenizer's size.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP, in layers without experts.
    pub intermediate_size: usize,
    /// Experts in place of the MLP.
    pub experts: Option<ExpertLayers>,
    /// Gated delta nets in place of attention.
    pub delta_net: Option<DeltaLayers>,
    /// Blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Share of a head, its first columns, that is turned.
    pub partial_rotary_factor: f64,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// Norms of queries and keys before rope.
    pub qk_norm: Option<QkNorm>,
    /// Every query has a gate beside it, whose sigmoid attention's output is multiplied by.
    pub output_gate: bool,
    /// Norms of the sublayers.
    pub norms: NormPlaces,
    /// Norms scale by 1 + weight, but for those within gated delta nets.
    pub zero_centred_norms: bool,
    /// A token sees itself and the `sliding_window - 1` before it; `None` sees all.
    pub sliding_window: Option<usize>,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Beginning of sequence.
    pub bos_token_id: Option<u32>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Type of the weights on disk.
    pub dtype: Kind,
    /// Files of the model have a vision tower, too, which is kept as it is: the model is what their `text_config` describes.
    pub is_text_part: bool,
}

/// The experts of a model, and which of its layers have them. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLayers {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width of an expert that every token goes to, where there is one.
    pub shared_expert_intermediate_size: Option<usize>,
    /// The weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Weight of the loss that balances the experts' load.
    pub router_aux_loss_coef: f64,
    /// Every so many-th layer has experts.
    pub decoder_sparse_step: usize,
    /// Layers that have none all the same.
    pub mlp_only_layers: Vec<usize>,
    /// Ranks of one engine each have some experts whole, in place of a part of every expert.
    pub is_parallel: bool,
}

/// The gated delta nets of a model, and which of its layers have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaLayers {
    /// Heads and the convolution.
    pub heads: DeltaHeads,
    /// Layers with full attention instead, in order.
    pub full_attention: Vec<usize>,
}

impl ExpertLayers {
    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&layer)
    }

    /// Whether so many ranks can have equal shares.
    fn can_share(&self, tp_size: usize) -> bool {
        let shared = if self.is_parallel { self.num_experts } else { self.moe_intermediate_size };
        shared.is_multiple_of(tp_size)
            && self.shared_expert_intermediate_size.is_none_or(|width| width.is_multiple_of(tp_size))
    }
}

impl ModelSpec {
    /// Number of weights; a tied head counts once. The largest number there is where there are more.
    pub fn num_params(&self) -> usize {
        let numels = units(self).flat_map(|unit| shapes(self, unit)).map(|(_, shape)| product(&shape));
        numels.fold(0, usize::saturating_add)
    }

    /// Number of weights that one token is computed with: of experts, those of one choice.
    pub fn num_active_params(&self) -> usize {
        let idle = |layer| match self.block(layer).mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(experts) => experts.num_idle_params(),
        };
        self.num_params() - (0..self.num_layers).map(idle).sum::<usize>()
    }

    /// Number of weights that so many tokens together are computed with, where routers choose evenly.
    pub fn num_params_hit(&self, tokens: f64) -> f64 {
        let idle = |layer| match self.block(layer).mlp {
            Mlp::Dense(_) => 0.0,
            Mlp::Experts(experts) => {
                let missed = 1.0 - experts.router.num_experts_per_tok as f64 / experts.num_experts as f64;
                experts.num_idle_params() as f64 * missed.powf(tokens - 1.0)
            }
        };
        self.num_params() as f64 - (0..self.num_layers).map(idle).sum::<f64>()
    }

    /// Weight of the loss that keeps experts equally busy: as configured, or the model's own.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `router_aux_loss_coef` where there are no experts.
    pub fn router_aux_loss_coef(&self, configured: Option<f64>) -> Result<f64> {
        match (&self.experts, configured) {
            (Some(experts), _) => Ok(configured.unwrap_or(experts.router_aux_loss_coef)),
            (None, None) => Ok(0.0),
            (None, Some(coef)) => {
                let expected = "none, or a model with experts: this one's config.json describes none";
                Err(Error::invalid_value("router_aux_loss_coef", coef, expected))
            }
        }
    }

    /// With whole experts on each rank of an engine, if that is asked for.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `enable_expert_parallel` where there are no experts.
    pub fn with_expert_parallel(mut self, is_parallel: bool) -> Result<Self> {
        match &mut self.experts {
            Some(experts) => experts.is_parallel = is_parallel,
            None if is_parallel => {
                let expected = "false, or a model with experts: this one's config.json describes none";
                return Err(Error::invalid_value("enable_expert_parallel", true, expected));
            }
            None => {}
        }
        Ok(self)
    }

    /// The number of layers with experts before each layer.
    pub fn places_among_expert_layers(&self) -> Vec<i64> {
        let experts = self.experts.as_ref();
        let mut place = 0;
        let mut next = |layer| {
            place += i64::from(experts.is_some_and(|experts| experts.are_in(layer)));
            place
        };
        std::iter::once(0).chain((0..self.num_layers).map(&mut next)).take(self.num_layers).collect()
    }

    /// Experts that one token has in all layers.
    pub fn routed_experts_per_token(&self) -> usize {
        self.num_expert_layers() * self.experts.as_ref().map_or(0, |experts| experts.num_experts_per_tok)
    }

    /// Layers that have experts.
    pub fn num_expert_layers(&self) -> usize {
        let experts = self.experts.as_ref();
        (0..self.num_layers).filter(|&layer| experts.is_some_and(|experts| experts.are_in(layer))).count()
    }

    /// The attention of layers that have one.
    pub fn attention(&self) -> AttentionSpec {
        AttentionSpec {
            hidden: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
            output_gate: self.output_gate,
        }
    }

    /// The description of a layer's block.
    pub fn block(&self, layer: usize) -> BlockSpec {
        let hidden = self.hidden_size;
        let mixer = match &self.delta_net {
            Some(delta_net) if !delta_net.full_attention.contains(&layer) => {
                Mixer::DeltaNet(DeltaNetSpec { hidden, heads: delta_net.heads })
            }
            _ => Mixer::Attention(self.attention()),
        };
        let mlp = match &self.experts {
            Some(experts) if experts.are_in(layer) => Mlp::Experts(ExpertsSpec {
                expert: DenseSpec { hidden, intermediate: experts.moe_intermediate_size },
                num_experts: experts.num_experts,
                own: experts.num_experts,
                is_parallel: experts.is_parallel,
                router: RouterOptions {
                    num_experts_per_tok: experts.num_experts_per_tok,
                    norm_topk_prob: experts.norm_topk_prob,
                },
                shared: experts
                    .shared_expert_intermediate_size
                    .map(|intermediate| SharedExpertSpec(DenseSpec { hidden, intermediate })),
            }),
            _ => Mlp::Dense(DenseSpec { hidden, intermediate: self.intermediate_size }),
        };
        BlockSpec { hidden, mixer, mlp, norms: self.norms }
    }

    /// The first layer of each kind of block, and how many layers have such a block.
    pub fn kinds_of_blocks(&self) -> Vec<(usize, usize)> {
        let mut kinds: Vec<(usize, usize)> = Vec::new();
        for layer in 0..self.num_layers {
            match kinds.iter_mut().find(|(first, _)| self.block(*first) == self.block(layer)) {
                Some((_, count)) => *count += 1,
                None => kinds.push((layer, 1)),
            }
        }
        kinds
    }

    /// Rotary frequencies of the model.
    pub fn rope(&self) -> Rope {
        Rope::new(self.rotary_dim(), self.rope_theta, self.rope_scaling.as_ref())
    }

    /// Columns of a head that are turned.
    pub fn rotary_dim(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// How norms of the residual stream and of heads scale.
    pub fn norm(&self) -> NormOptions {
        NormOptions { eps: self.rms_norm_eps, zero_centred: self.zero_centred_norms }
    }

    /// Layers with attention, in order.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_layers).filter(|&layer| matches!(self.block(layer).mixer, Mixer::Attention(_)))
    }

    /// Floating-point operations of training for every pair of a query and a key that it sees, in all layers: a forward and twice
    /// that for the gradients.
    pub fn training_flop_per_pair(&self) -> usize {
        (0..self.num_layers).map(|layer| 3 * self.block(layer).mixer.flop_per_pair()).sum()
    }

    /// Floating-point operations of training for every token beside those of products, in all layers: a forward of the gated delta rule
    /// and twice that for the gradients.
    pub fn training_flop_per_token(&self) -> usize {
        (0..self.num_layers).map(|layer| 3 * self.block(layer).mixer.flop_per_token()).sum()
    }

    /// Elements that the cache has of a token in all layers, on one rank of a tensor-parallel group.
    pub fn cached_elements(&self, tp_size: usize) -> usize {
        (0..self.num_layers).map(|layer| self.block(layer).tp_slice(tp_size).mixer.cached_elements()).sum()
    }

    /// Query heads that share one key and value head.
    pub fn heads_per_group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Query heads and key/value heads that one rank of a tensor-parallel group computes. Key/value heads are shared by
    /// several ranks when there are fewer heads than ranks.
    pub fn tp_heads(&self, tp_size: usize) -> (usize, usize) {
        (self.num_heads / tp_size, (self.num_kv_heads / tp_size).max(1))
    }

    /// Whether a rank is the first of those that share its key/value heads.
    pub fn has_first_of_key(&self, tp_rank: usize, tp_size: usize) -> bool {
        tp_rank.is_multiple_of((tp_size / self.num_kv_heads).max(1))
    }

    /// Rows of the vocabulary that belong to a rank: contiguous, in rank order, sizes at most one apart.
    pub fn vocab_range(&self, tp_rank: usize, tp_size: usize) -> Range<usize> {
        self.vocab_size * tp_rank / tp_size..self.vocab_size * (tp_rank + 1) / tp_size
    }

    /// Whether weights can be sliced for `tp_size` ranks without copies: `tp_size` divides the query heads and the MLP,
    /// and divides, or is a multiple of, the key/value heads.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `tensor_parallel_size`, with the values that this model can take.
    pub fn validate_tp(&self, tp_size: usize) -> Result<()> {
        if self.can_slice(tp_size) {
            return Ok(());
        }
        let valid: Vec<_> = (1..=self.num_heads).filter(|&t| self.can_slice(t)).map(|t| t.to_string()).collect();
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads);
        let mlp = match &self.experts {
            None => format!("intermediate size {}", self.intermediate_size),
            Some(experts) if experts.is_parallel => format!("{} experts", experts.num_experts),
            Some(experts) => format!("experts of intermediate size {}", experts.moe_intermediate_size),
        };
        let mlp = match self.experts.as_ref().and_then(|experts| experts.shared_expert_intermediate_size) {
            Some(width) => format!("{mlp}, a shared expert of intermediate size {width}"),
            None => mlp,
        };
        let mlp = match &self.delta_net {
            None => mlp,
            Some(DeltaLayers { heads, .. }) => {
                let (keys, values) = (heads.num_key_heads, heads.num_value_heads);
                format!("{mlp}, {keys} key heads and {values} value heads of gated delta nets")
            }
        };
        let expected = format!(
            "one of {} (the model has {heads} query heads, {kv_heads} key/value heads, {mlp})",
            valid.join(", ")
        );
        Err(Error::invalid_value("tensor_parallel_size", tp_size, expected))
    }

    /// Whether the kernels of a GPU serve this shape with weights of `kind`.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the model's `config.json`, with the sizes that are served.
    pub fn validate_gpu(&self, kind: Kind, folder: &Path) -> Result<()> {
        let sizes = DecoderSizes { head_dim: self.head_dim, hidden_size: self.hidden_size };
        let Some(Unserved { name, got, served }) = unserved(sizes, kind) else { return Ok(()) };
        let message = format!(
            "{name} = {got} is not served on a GPU with weights of {kind:?}, but {served} are; device=cpu computes with any, and \
             dtype=float32 on a GPU with other ones than dtype=bfloat16"
        );
        Err(Error::bad_file(folder.join("config.json"), message))
    }

    /// Whether the engine's kernels serve this model's gated delta nets and experts on a GPU, each divided among `tp_size` ranks.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the model's `config.json`, with the numbers that are served.
    pub fn validate_gpu_engine(&self, kind: Kind, tp_size: usize, folder: &Path) -> Result<()> {
        if let Some(DeltaLayers { heads, .. }) = &self.delta_net
            && !delta_step_serves(*heads)
        {
            let message = format!(
                "gated delta nets of {heads:?} are not served by the engine on a GPU: expected {}; device=cpu samples from any",
                served_delta_sizes()
            );
            return Err(Error::bad_file(folder.join("config.json"), message));
        }
        let Some(experts) = self.experts.as_ref().filter(|_| self.num_expert_layers() > 0) else { return Ok(()) };
        let ExpertLayers { num_experts, num_experts_per_tok, moe_intermediate_size, .. } = experts;
        let tp_size = if experts.is_parallel { 1 } else { tp_size };
        let (columns, unit) = (moe_intermediate_size / tp_size, if kind == Kind::BFloat16 { 8 } else { 1 });
        let unserved = [
            ("num_experts", *num_experts, num_experts <= &MOST_EXPERTS, format!("at most {MOST_EXPERTS}")),
            (
                "num_experts_per_tok",
                *num_experts_per_tok,
                num_experts_per_tok <= &MOST_EXPERTS_PER_TOKEN,
                format!("at most {MOST_EXPERTS_PER_TOKEN}"),
            ),
            ("hidden_size", self.hidden_size, self.hidden_size.is_multiple_of(8), "a multiple of 8".to_owned()),
            (
                "moe_intermediate_size",
                *moe_intermediate_size,
                columns.is_multiple_of(unit),
                format!("a multiple of {} (tensor_parallel_size {tp_size} x {unit})", tp_size * unit),
            ),
        ];
        let Some((name, got, _, served)) = unserved.into_iter().find(|(_, _, is_served, _)| !is_served) else {
            return Ok(());
        };
        let message = format!(
            "{name} = {got} is not served by the engine on a GPU with weights of {kind:?}: expected {served}; device=cpu samples \
             from any model with experts"
        );
        Err(Error::bad_file(folder.join("config.json"), message))
    }

    fn can_slice(&self, tp_size: usize) -> bool {
        tp_size > 0
            && self.num_heads.is_multiple_of(tp_size)
            && self.intermediate_size.is_multiple_of(tp_size)
            && self.experts.as_ref().is_none_or(|experts| experts.can_share(tp_size))
            && self.delta_net.as_ref().is_none_or(|delta_net| delta_net.heads.num_key_heads.is_multiple_of(tp_size))
            && (self.num_kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(self.num_kv_heads))
    }
}

/// Elements of a shape.
pub(super) fn product(shape: &[i64]) -> usize {
    shape.iter().fold(1, |product: usize, &size| product.saturating_mul(size as usize))
}
