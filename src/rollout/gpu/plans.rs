//! Attention plans of a step, one for each distinct combination of window and score scale.

use tch::{Device, Tensor};

use crate::cuda::kernels::{AttentionBlocks, AttentionPlan, AttentionShape, SharedPrefixes};
use crate::error::Result;
use crate::model::{AttentionSpec, Distinct, ModelSpec, Sight};
use crate::ops::exact::SPLIT_TOKENS;
use crate::rollout::options::EngineOptions;

/// The attention plans of a rank's layers, by window and scale of scores.
#[derive(Debug)]
pub(super) struct AttentionPlans {
    of_sights: Distinct<Sight, AttentionPlan>,
    /// Whether shared prefixes are read once. A strict engine with an 8-bit cache or attention sinks does not, because it would change the bits.
    shares_prefixes: bool,
}

impl AttentionPlans {
    /// Creates plans for up to `max_rows` rows with block tables of `max_blocks`.
    pub(super) fn new(
        spec: &ModelSpec,
        options: &EngineOptions,
        (tp_size, device): (usize, Device),
        [max_rows, max_blocks]: [usize; 2],
    ) -> Result<Self> {
        let shares_prefixes = !options.strict
            || options.cache_kind() == options.kind && spec.attention_specs().all(|attention| !attention.sinks);
        let has_experts = spec.layers.iter().any(|block| block.has_experts());
        let plan = |sight| {
            let (shape, split) = (shape(spec, options, tp_size, sight), split_tokens(options));
            let plan = AttentionPlan::new(shape, (options.kind, device), max_rows, max_blocks, split)?;
            let plan = if shares_prefixes { plan.joining() } else { plan };
            Ok(if has_experts { plan.through_rings() } else { plan })
        };
        Ok(Self { of_sights: Distinct::try_new(spec.sights(), plan)?, shares_prefixes })
    }

    /// The plan of a draft head, whose rows do not see the first token of their sequence: the head has no keys of it.
    pub(super) fn of_head(
        draft: &ModelSpec,
        options: &EngineOptions,
        (tp_size, device): (usize, Device),
        [max_rows, max_blocks]: [usize; 2],
    ) -> Result<AttentionPlan> {
        let shape = shape(draft, options, tp_size, draft.attention().sight());
        let plan = AttentionPlan::new(shape, (options.kind, device), max_rows, max_blocks, split_tokens(options))?;
        Ok(plan.hiding(1))
    }

    /// The plan of the layers with this attention.
    pub(super) fn of(&self, attention: AttentionSpec) -> &AttentionPlan {
        self.of_sights.of(attention.sight())
    }

    /// Maximum number of rows of a step.
    pub(super) fn max_rows(&self) -> usize {
        self.of_sights.iter().map(AttentionPlan::max_rows).min().unwrap_or(0)
    }

    /// [`AttentionPlan::blocks`], which is equal for all plans.
    pub(super) fn blocks(&self) -> Option<AttentionBlocks> {
        self.of_sights.iter().next().and_then(AttentionPlan::blocks)
    }

    /// [`AttentionPlan::least_shared_tokens`], which is equal for all plans; `usize::MAX` if prefixes are not shared.
    pub(super) fn least_shared_tokens(&self, rows: usize) -> usize {
        let least = self.of_sights.iter().map(|plan| plan.least_shared_tokens(rows)).max();
        least.filter(|_| self.shares_prefixes).unwrap_or(usize::MAX)
    }

    /// Calls [`AttentionPlan::update`] on each plan. Prefixes count only if this number of rows may share any.
    pub(super) fn update(&self, context_lens: &Tensor, prefixes: SharedPrefixes) -> Result<()> {
        let may_share = self.least_shared_tokens(context_lens.numel()) < usize::MAX;
        let prefixes = may_share.then_some(prefixes);
        self.of_sights.iter().try_for_each(|plan| plan.update(context_lens, prefixes))
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        self.of_sights.iter().map(AttentionPlan::bytes).sum()
    }

    /// Bytes of the partial results of all plans, which are nearly all of their memory.
    pub(super) fn partial_bytes(
        spec: &ModelSpec,
        options: &EngineOptions,
        tp_size: usize,
        [max_rows, max_blocks]: [usize; 2],
    ) -> usize {
        let shapes = spec.sights().into_iter().map(|sight| shape(spec, options, tp_size, sight));
        let split = split_tokens(options);
        shapes.map(|shape| AttentionPlan::partial_bytes(&shape, max_rows, max_blocks, split)).sum()
    }
}

fn shape(
    spec: &ModelSpec,
    options: &EngineOptions,
    tp_size: usize,
    Sight { window: sliding_window, scale }: Sight,
) -> AttentionShape {
    let AttentionSpec { num_heads, num_kv_heads, head_dim, .. } = spec.attention().tp_slice(tp_size);
    AttentionShape { num_heads, num_kv_heads, head_dim, block_size: options.block_size, sliding_window, scale }
}

fn split_tokens(options: &EngineOptions) -> Option<usize> {
    options.strict.then_some(SPLIT_TOKENS)
}
