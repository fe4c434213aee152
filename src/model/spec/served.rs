//! Which models are supported: how many ranks can split their heads or rows, and which sizes the GPU kernels support, with the reason if not.

use std::path::Path;

use tch::Kind;

use super::block::BlockSpec;
use super::delta_net::DeltaNetSpec;
use super::dense::DenseSpec;
use super::experts::ExpertsSpec;
use super::mixer::Mixer;
use super::mlp::Mlp;
use super::{KindOfBlock, ModelSpec};
use crate::cuda::kernels::{
    DecoderSizes, MOST_EXPERT_GROUPS, MOST_EXPERTS, MOST_EXPERTS_PER_TOKEN, Unserved, delta_step_serves,
    served_delta_sizes, unserved,
};
use crate::error::{Error, Result};
use crate::ops::router::RouterScores;
use crate::ops::swiglu::Activation;

impl ModelSpec {
    /// Checks that all layers can be sliced for `tp_size` tensor-parallel ranks without copying weights.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `tensor_parallel_size`, with the values that this model supports.
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

    /// Checks that `size` sequence-parallel ranks can split the rows of micro-batches.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `sequence_parallel_size`, with the values that this model supports.
    pub fn validate_sequence_parallel(&self, size: usize) -> Result<()> {
        let can_share = |size: usize| size > 0 && self.layers.iter().all(|block| block.mixer.can_share_rows(size));
        if can_share(size) {
            return Ok(());
        }
        let valid: Vec<_> = (1..=self.attention().num_heads).filter(|&size| can_share(size)).collect();
        let mut sizes: Vec<String> = self.layers.iter().map(|block| block.mixer.sizes()).collect();
        sizes.dedup();
        sizes.sort();
        sizes.dedup();
        let valid: Vec<_> = valid.iter().map(usize::to_string).collect();
        let expected = format!("one of {} (the model has {})", valid.join(", "), sizes.join(", "));
        Err(Error::invalid_value("sequence_parallel_size", size, expected))
    }

    /// Checks that the GPU kernels support all layers with weights of `kind`: the training kernels or, if `engine` holds the engine's tensor-parallel
    /// size, those of the engine too.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the model's `config.json`, with the supported sizes.
    pub fn validate_gpu(&self, kind: Kind, engine: Option<usize>, folder: &Path) -> Result<()> {
        let kinds = self.kinds_of_blocks();
        match kinds.iter().find_map(|one| self.layers[one.layer].unserved(kind, engine)) {
            None => Ok(()),
            Some(reason) => Err(Error::bad_file(folder.join("config.json"), reason)),
        }
    }
}

impl BlockSpec {
    /// The reason why GPU kernels do not support the block with weights of `kind`, in training or, if `engine` holds its tensor-parallel size, in the
    /// engine. `None` if they do.
    pub fn unserved(self, kind: Kind, engine: Option<usize>) -> Option<String> {
        let head_dim = match self.mixer {
            Mixer::Attention(attention) => Some(attention.head_dim),
            Mixer::DeltaNet(_) => None,
        };
        let sizes = DecoderSizes { head_dim, hidden_size: self.hidden };
        if let Some(Unserved { name, got, served }) = unserved(sizes, kind) {
            return Some(format!(
                "{name} = {got} is not supported on a GPU with weights of {kind:?}, expected {served}; device=cpu \
                 supports any, and dtype=float32 other values than dtype=bfloat16"
            ));
        }
        let tp_size = engine?;
        let of_mixer = match self.mixer {
            Mixer::Attention(_) => None,
            Mixer::DeltaNet(delta_net) => delta_net.unserved_by_engine(),
        };
        of_mixer.or_else(|| match self.mlp {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => experts.unserved_by_engine(kind, tp_size),
        })
    }
}

impl DeltaNetSpec {
    fn unserved_by_engine(self) -> Option<String> {
        let heads = self.heads;
        (!delta_step_serves(heads)).then(|| {
            format!(
                "the engine does not support gated delta nets of {heads:?} on a GPU: expected {}; device=cpu supports \
                 any",
                served_delta_sizes()
            )
        })
    }
}

impl ExpertsSpec {
    fn unserved_by_engine(self, kind: Kind, tp_size: usize) -> Option<String> {
        let ExpertsSpec { expert: DenseSpec { hidden, intermediate, activation }, num_experts, router, .. } = self;
        if ![(Activation::Silu, false), (Activation::ClampedSwiglu, true)].contains(&(activation, self.has_biases)) {
            let biases = if self.has_biases { "with" } else { "without" };
            return Some(format!(
                "the engine does not support experts with {activation:?}, {biases} biases, on a GPU: expected Silu \
                 without or ClampedSwiglu with biases; device=cpu supports any"
            ));
        }
        let num_groups = match router.scores {
            RouterScores::Softmax => 1,
            RouterScores::Sigmoid { num_groups, .. } => num_groups,
        };
        let per_token = router.num_experts_per_tok;
        let tp_size = if self.is_parallel { 1 } else { tp_size };
        let (columns, unit) = (intermediate / tp_size, if kind == Kind::BFloat16 { 8 } else { 1 });
        let sizes = [
            ("num_experts", num_experts, num_experts <= MOST_EXPERTS, format!("at most {MOST_EXPERTS}")),
            (
                "num_experts_per_tok",
                per_token,
                per_token <= MOST_EXPERTS_PER_TOKEN,
                format!("at most {MOST_EXPERTS_PER_TOKEN}"),
            ),
            ("n_group", num_groups, num_groups <= MOST_EXPERT_GROUPS, format!("at most {MOST_EXPERT_GROUPS}")),
            ("hidden_size", hidden, hidden.is_multiple_of(8), "a multiple of 8".to_owned()),
            (
                "moe_intermediate_size",
                intermediate,
                columns.is_multiple_of(unit),
                format!("a multiple of {} (tensor_parallel_size {tp_size} x {unit})", tp_size * unit),
            ),
        ];
        let (name, got, _, served) = sizes.into_iter().find(|(_, _, is_served, _)| !is_served)?;
        Some(format!(
            "the engine does not support {name} = {got} on a GPU with weights of {kind:?}: expected {served}; \
             device=cpu supports any model with experts"
        ))
    }
}
