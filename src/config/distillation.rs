//! On-policy distillation from a teacher.

use std::path::PathBuf;

use super::field::keys;
use super::range::{COUNT, above, from_to};
use super::{Config, DistillationMode};

keys! {
    /// On-policy distillation; keys of the top.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct DistillationConfig: flat {
        /// A model with the tokenizer of the policy that scores the policy's samples: a folder, or a name on the Hugging Face Hub. The
        /// loss then has the reverse KL divergence from the policy to it, estimated on the sampled tokens (on-policy distillation,
        /// arXiv 2306.13649). It is sharded over the ranks that train, and kept where `residency.reference` says.
        pub teacher_model_name_or_path: Option<PathBuf> = None,
        /// Branch, tag or commit of a teacher that is named; `none` is `main`.
        pub teacher_model_revision: Option<String> = None,
        /// Weight of the divergence in the loss; the policy term and the KL term have the rest. 1 learns from the teacher alone, and
        /// rewards are metrics.
        pub distillation_weight: f64 = 1.0 => from_to(0.0, 1.0),
        /// Tokens that the divergence is over: `sampled_token`, or `topk_logits`, the teacher's `distillation_topk` most probable ones at
        /// each place.
        pub distillation_mode: DistillationMode = DistillationMode::SampledToken,
        /// Tokens of each distribution with `topk_logits`.
        pub distillation_topk: Option<usize> = None => COUNT,
        /// The divergence with `topk_logits`: 1 is the reverse KL divergence, policy from teacher, 0 the forward one, and between them lies
        /// the generalised Jensen-Shannon divergence.
        pub distillation_alpha: f64 = 1.0 => from_to(0.0, 1.0),
        /// With `topk_logits`, take all other tokens together as one more, in place of leaving them out.
        pub distillation_add_tail: bool = false,
        /// Upper bound of the policy ratio that the divergence is multiplied by where several updates are made of one generation
        /// batch; `none` is no ratio.
        pub distillation_is_clip: Option<f64> = Some(2.0) => above(0.0),
    }
}

impl Config {
    /// Whether a teacher scores the samples.
    pub fn has_teacher(&self) -> bool {
        self.distillation.teacher_model_name_or_path.is_some()
    }
}

impl DistillationConfig {
    /// The teacher's tokens of each distribution that the divergence is over, if it is over these.
    pub fn num_top(&self) -> Option<usize> {
        self.distillation_topk.filter(|_| self.distillation_mode == DistillationMode::TopkLogits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn a_teacher_has_a_share_of_the_loss() {
        let given = config(&["teacher_model_name_or_path=t", "distillation_weight=0.5", "distillation_is_clip=none"]);
        assert!(given.has_teacher() && given.distillation.distillation_is_clip.is_none());
        assert!(message(&["teacher_model_name_or_path=t", "distillation_weight=2"]).contains("from 0 to 1"));
    }
}
