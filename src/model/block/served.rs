//! Whether the kernels of a GPU serve a block: one answer, with its reason.

use tch::Kind;

use super::{BlockSpec, DeltaNetSpec, DenseSpec, ExpertsSpec, Mixer, Mlp};
use crate::cuda::kernels::{
    DecoderSizes, MOST_EXPERT_GROUPS, MOST_EXPERTS, MOST_EXPERTS_PER_TOKEN, Unserved, delta_step_serves,
    served_delta_sizes, unserved,
};
use crate::ops::router::RouterScores;
use crate::ops::swiglu::Activation;

impl BlockSpec {
    /// Why no kernel serves the block with weights of `kind`, in training or, where an engine's tensor-parallel size is given, in that engine;
    /// `None` where all do.
    pub fn unserved(self, kind: Kind, engine: Option<usize>) -> Option<String> {
        let head_dim = match self.mixer {
            Mixer::Attention(attention) => Some(attention.head_dim),
            Mixer::DeltaNet(_) => None,
        };
        let sizes = DecoderSizes { head_dim, hidden_size: self.hidden };
        if let Some(Unserved { name, got, served }) = unserved(sizes, kind) {
            return Some(format!(
                "{name} = {got} is not served on a GPU with weights of {kind:?}, but {served} are; device=cpu computes with any, and \
                 dtype=float32 on a GPU with other ones than dtype=bfloat16"
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
                "gated delta nets of {heads:?} are not served by the engine on a GPU: expected {}; device=cpu samples from any",
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
                "experts with {activation:?}, {biases} biases, are not served by the engine on a GPU: expected Silu without, or ClampedSwiglu with \
                 biases; device=cpu samples from any"
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
            "{name} = {got} is not served by the engine on a GPU with weights of {kind:?}: expected {served}; device=cpu samples \
             from any model with experts"
        ))
    }
}
