//! The shape of a network: everything about a model that is not a weight.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use tch::{Kind, Tensor};

use super::block::{AttentionSpec, BlockSpec, DeltaNetSpec, DenseSpec, ExpertsSpec, Mixer, Mlp, SharedExpertSpec};
use super::distinct::{KindOfBlock, RopeSpec, Ropes};
use super::families::Family;
use super::params::{shapes, units};
use crate::config::{Circumstance, Combination};
use crate::error::{Error, Result};
use crate::ops::rms_norm::NormOptions;

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
    /// Norms scale by 1 + weight, but for those within gated delta nets.
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
    /// Files of the model have a vision tower, too, which is kept as it is: the model is what their `text_config` describes.
    pub is_text_part: bool,
}

impl ModelSpec {
    /// Number of weights; a tied head counts once. The largest number there is where there are more.
    pub fn num_params(&self) -> usize {
        let numels = units(self).flat_map(|unit| shapes(self, unit)).map(|(_, shape)| product(&shape));
        numels.fold(0, usize::saturating_add)
    }

    /// Number of weights that one token is computed with: of experts, those of one choice.
    pub fn num_active_params(&self) -> usize {
        let idle = |block: &BlockSpec| match block.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(experts) => experts.num_idle_params(),
        };
        self.num_params() - self.layers.iter().map(idle).sum::<usize>()
    }

    /// Number of weights that so many tokens together are computed with, where routers choose evenly.
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

    /// Weight of the loss that keeps experts equally busy: as configured, or the model's own.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `router_aux_loss_coef` where there are no experts.
    pub fn router_aux_loss_coef(&self, configured: Option<f64>) -> Result<f64> {
        let settings = configured.map(|coef| ("router_aux_loss_coef", coef.into()));
        self.check_with(settings)?;
        let own = if self.experts().is_some() { self.router_aux_loss_coef } else { 0.0 };
        Ok(configured.unwrap_or(own))
    }

    /// The kind of model that it is, to the table of what goes together.
    pub(crate) fn circumstances(&self) -> impl Iterator<Item = Circumstance> + use<> {
        let (num_experts, has_nets) = (self.num_expert_layers(), self.delta_net().is_some());
        let is_fused = has_nets && self.family.traits().interleaves_delta_nets;
        let experts = if num_experts > 0 { Circumstance::Experts } else { Circumstance::NoExperts };
        let nets = if has_nets { Circumstance::DeltaNets } else { Circumstance::NoDeltaNets };
        let some = (1..self.num_layers()).contains(&num_experts).then_some(Circumstance::SomeExperts);
        let fused = [
            (is_fused, Circumstance::FusedDeltaNets),
            (self.family.traits().stacks_experts, Circumstance::StackedExperts),
        ];
        let fused = fused.into_iter().filter_map(|(is_so, fused)| is_so.then_some(fused));
        let headless = self.draft_head.is_none().then_some(Circumstance::NoDraftHead);
        [experts, nets].into_iter().chain(headless).chain(some).chain(fused)
    }

    /// Refuses settings that do not go together, or not with this kind of model.
    ///
    /// # Errors
    /// The errors of [`Combination::check`].
    pub(crate) fn check_with<'a>(&self, settings: impl IntoIterator<Item = (&'a str, Value)>) -> Result<()> {
        Combination::of(settings).in_circumstances(self.circumstances()).check()
    }

    /// With whole experts on each rank of an engine, if that is asked for.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `enable_expert_parallel` where there are no experts.
    pub fn with_expert_parallel(self, is_parallel: bool) -> Result<Self> {
        self.check_with([("enable_expert_parallel", is_parallel.into())])?;
        Ok(self.map_experts(|experts| experts.is_parallel = is_parallel))
    }

    /// The number of layers with experts before each layer.
    pub fn places_among_expert_layers(&self) -> Vec<i64> {
        let before = |layer| self.layers[..layer].iter().filter(|block| block.has_experts()).count() as i64;
        (0..self.num_layers()).map(before).collect()
    }

    /// Experts that one token has in all layers.
    pub fn routed_experts_per_token(&self) -> usize {
        self.num_expert_layers() * self.experts().map_or(0, |experts| experts.router.num_experts_per_tok)
    }

    /// Layers that have experts.
    pub fn num_expert_layers(&self) -> usize {
        self.layers.iter().filter(|block| block.has_experts()).count()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The attention of the first layer that has one: all layers with attention have as many heads, as wide.
    ///
    /// # Panics
    /// For a model without attention, which no family describes.
    pub fn attention(&self) -> AttentionSpec {
        self.attention_specs().next().expect("every family has layers with attention")
    }

    /// The gated delta net of the first layer that has one: all are alike.
    pub fn delta_net(&self) -> Option<DeltaNetSpec> {
        self.layers.iter().find_map(|block| match block.mixer {
            Mixer::Attention(_) => None,
            Mixer::DeltaNet(delta_net) => Some(delta_net),
        })
    }

    /// The experts of the first layer that has some: all are alike.
    pub fn experts(&self) -> Option<ExpertsSpec> {
        self.layers.iter().find_map(|block| match block.mlp {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(experts),
        })
    }

    /// The MLP of the first layer without experts.
    pub fn dense(&self) -> Option<DenseSpec> {
        self.layers.iter().find_map(|block| match block.mlp {
            Mlp::Dense(dense) => Some(dense),
            Mlp::Experts(_) => None,
        })
    }

    /// With so many layers: the first ones, and from the first on again where there are fewer.
    #[must_use]
    pub fn with_num_layers(self, num_layers: usize) -> Self {
        let layers = self.layers.iter().copied().cycle().take(num_layers).collect();
        Self { layers, ..self }
    }

    /// With every block as `change` leaves it.
    #[must_use]
    pub fn map_blocks(mut self, mut change: impl FnMut(usize, &mut BlockSpec)) -> Self {
        self.layers.iter_mut().enumerate().for_each(|(layer, block)| change(layer, block));
        self
    }

    /// With every attention as `change` leaves it.
    #[must_use]
    pub fn map_attention(self, mut change: impl FnMut(usize, &mut AttentionSpec)) -> Self {
        self.map_blocks(|layer, block| {
            if let Mixer::Attention(attention) = &mut block.mixer {
                change(layer, attention);
            }
        })
    }

    /// With all experts as `change` leaves them.
    #[must_use]
    pub fn map_experts(self, mut change: impl FnMut(&mut ExpertsSpec)) -> Self {
        self.map_blocks(|_, block| {
            if let Mlp::Experts(experts) = &mut block.mlp {
                change(experts);
            }
        })
    }

    /// With a residual stream and dense MLPs of these widths.
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

    /// Kinds of blocks, by their first layers.
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

    /// The rotations of the model's layers, each once.
    pub fn ropes(&self) -> Ropes {
        Ropes::of_layers(self)
    }

    /// The distinct rotations of layers with attention.
    pub fn rotations(&self) -> Vec<Option<RopeSpec>> {
        self.distinct(|attention| attention.rope)
    }

    /// The distinct windows of layers with attention.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.distinct(|attention| attention.window)
    }

    /// The distinct [`AttentionSpec::sight`]s of layers with attention.
    pub fn sights(&self) -> Vec<(Option<usize>, f64)> {
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

    /// The factor of rows of a table of `kind`.
    pub fn embedding_multiplier_in(&self, kind: Kind) -> f64 {
        match self.rounds_embedding_multiplier {
            true => Tensor::from(self.embedding_multiplier).to_kind(kind).double_value(&[]),
            false => self.embedding_multiplier,
        }
    }

    /// Rows of an embedding whose table is of `kind`, or their gradient, times the model's factor. [T, D]
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn scale_embedding(&self, rows: Tensor, kind: Kind) -> Result<Tensor> {
        let factor = self.embedding_multiplier_in(kind);
        if factor == 1.0 { Ok(rows) } else { Ok(rows.f_mul_scalar(factor)?) }
    }

    /// Logits over the model's divisor. [C, V]
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn scale_logits(&self, logits: Tensor) -> Result<Tensor> {
        if self.logits_scaling == 1.0 { Ok(logits) } else { Ok(logits.f_div_scalar(self.logits_scaling)?) }
    }

    /// How norms of the residual stream and of heads scale.
    pub fn norm(&self) -> NormOptions {
        NormOptions { eps: self.rms_norm_eps, zero_centred: self.zero_centred_norms }
    }

    /// The attention of every layer that has one, in order.
    pub fn attention_specs(&self) -> impl Iterator<Item = AttentionSpec> + '_ {
        self.layers.iter().filter_map(|block| match block.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::DeltaNet(_) => None,
        })
    }

    /// Whether files of the model may have further layers, which are kept as they are.
    pub(super) fn keeps_further_layers(&self) -> bool {
        self.family.traits().keeps_further_layers
    }

    /// Layers with attention, in order.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_layers()).filter(|&layer| matches!(self.layers[layer].mixer, Mixer::Attention(_)))
    }

    /// Floating-point operations of training for every pair of a query and a key that it sees, in all layers: a forward and twice
    /// that for the gradients.
    pub fn training_flop_per_pair(&self) -> usize {
        self.layers.iter().map(|block| 3 * block.mixer.flop_per_pair()).sum()
    }

    /// Floating-point operations of training for every token beside those of products, in all layers: a forward of the gated delta rule
    /// and twice that for the gradients.
    pub fn training_flop_per_token(&self) -> usize {
        self.layers.iter().map(|block| 3 * block.mixer.flop_per_token()).sum()
    }

    /// Elements that the cache has of a token in all layers, on one rank of a tensor-parallel group.
    pub fn cached_elements(&self, tp_size: usize) -> usize {
        let blocks = self.layers.iter().chain(&self.draft_head);
        blocks.map(|block| block.tp_slice(tp_size).mixer.cached_elements()).sum()
    }

    /// Rows of the vocabulary that belong to a rank: contiguous, in rank order, sizes at most one apart.
    pub fn vocab_range(&self, tp_rank: usize, tp_size: usize) -> Range<usize> {
        self.vocab_size * tp_rank / tp_size..self.vocab_size * (tp_rank + 1) / tp_size
    }

    /// Whether all layers can be sliced for `tp_size` ranks without copies.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `tensor_parallel_size`, with the values that this model can take.
    pub fn validate_tp(&self, tp_size: usize) -> Result<()> {
        let can_slice = |tp_size| self.layers.iter().all(|block| block.can_slice(tp_size));
        if can_slice(tp_size) {
            return Ok(());
        }
        let valid = (1..=self.attention().num_heads).filter(|&tp_size| can_slice(tp_size));
        let valid: Vec<_> = valid.map(|tp_size| tp_size.to_string()).collect();
        let mut sizes = vec![Mixer::Attention(self.attention()).sizes()];
        for KindOfBlock { layer, .. } in self.kinds_of_blocks() {
            let BlockSpec { mixer, mlp, .. } = self.layers[layer];
            for size in [mlp.sizes(), mixer.sizes()] {
                if !sizes.contains(&size) {
                    sizes.push(size);
                }
            }
        }
        let expected = format!("one of {} (the model has {})", valid.join(", "), sizes.join(", "));
        Err(Error::invalid_value("tensor_parallel_size", tp_size, expected))
    }

    /// Whether the kernels of a GPU serve all layers with weights of `kind`: those of training, or with the number of its tensor-parallel ranks
    /// those of an engine.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the model's `config.json`, with the sizes that are served.
    pub fn validate_gpu(&self, kind: Kind, engine: Option<usize>, folder: &Path) -> Result<()> {
        let kinds = self.kinds_of_blocks();
        match kinds.iter().find_map(|one| self.layers[one.layer].unserved(kind, engine)) {
            None => Ok(()),
            Some(reason) => Err(Error::bad_file(folder.join("config.json"), reason)),
        }
    }
}

/// Elements of a shape.
pub(super) fn product(shape: &[i64]) -> usize {
    shape.iter().fold(1, |product: usize, &size| product.saturating_mul(size as usize))
}
