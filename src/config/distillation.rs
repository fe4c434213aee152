//! On-policy distillation from a teacher.

use std::path::PathBuf;

use super::field::{FromValue, keys};
use super::range::{COUNT, above, from_to};
use super::validate::check;
use super::{Config, DistillationMode, DynamicSampling};
use crate::error::Result;
use crate::migration::word;

const WEIGHT: f64 = 1.0;
const CLIP_MAX: f64 = 2.0;
const ALPHA: f64 = 1.0;

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
        pub distillation_weight: f64 = WEIGHT => from_to(0.0, 1.0),
        /// Tokens that the divergence is over: `sampled_token`, or `topk_logits`, the teacher's `distillation_topk` most probable ones at
        /// each place.
        pub distillation_mode: DistillationMode = DistillationMode::SampledToken,
        /// Tokens of each distribution with `topk_logits`.
        pub distillation_topk: Option<usize> = None => COUNT,
        /// The divergence with `topk_logits`: 1 is the reverse KL divergence, policy from teacher, 0 the forward one, and between them lies
        /// the generalised Jensen-Shannon divergence.
        pub distillation_alpha: f64 = ALPHA => from_to(0.0, 1.0),
        /// With `topk_logits`, take all other tokens together as one more, in place of leaving them out.
        pub distillation_add_tail: bool = false,
        /// Upper bound of the policy ratio that the divergence is multiplied by where several updates are made of one generation
        /// batch; `none` is no ratio.
        pub distillation_is_clip: Option<f64> = Some(CLIP_MAX) => above(0.0),
    }
}

impl Config {
    /// Whether a teacher scores the samples.
    pub fn has_teacher(&self) -> bool {
        self.distillation.teacher_model_name_or_path.is_some()
    }

    pub(super) fn check_distillation(&self) -> Result<()> {
        let DistillationConfig { teacher_model_revision, distillation_weight, distillation_is_clip, .. } =
            &self.distillation;
        let has_teacher = self.has_teacher();
        let unread = "to be left out, or teacher_model_name_or_path, beside which alone it is read";
        for (key, value, is_default) in [
            ("teacher_model_revision", word(&teacher_model_revision.to_value()), teacher_model_revision.is_none()),
            ("distillation_weight", distillation_weight.to_string(), *distillation_weight == WEIGHT),
            ("distillation_is_clip", word(&distillation_is_clip.to_value()), *distillation_is_clip == Some(CLIP_MAX)),
        ] {
            check(key, value, has_teacher || is_default, unread)?;
        }
        self.distillation.check_mode(has_teacher)?;
        let keeps_all = !has_teacher || self.dynamic_sampling == DynamicSampling::None;
        let expected = "none: with teacher_model_name_or_path groups of equal rewards teach, too";
        check("dynamic_sampling", self.dynamic_sampling.name(), keeps_all, expected)
    }
}

impl DistillationConfig {
    /// The teacher's tokens of each distribution that the divergence is over, if it is over these.
    pub fn num_top(&self) -> Option<usize> {
        self.distillation_topk.filter(|_| self.distillation_mode == DistillationMode::TopkLogits)
    }

    /// Checks the keys of `topk_logits`.
    fn check_mode(&self, has_teacher: bool) -> Result<()> {
        let (mode, topk) = (self.distillation_mode, self.distillation_topk);
        let over_top = mode == DistillationMode::TopkLogits;
        let unread = "sampled_token, or teacher_model_name_or_path, beside which alone it is read";
        check("distillation_mode", mode.name(), has_teacher || !over_top, unread)?;
        let given = "the number of tokens that distillation_mode = topk_logits is over";
        check("distillation_topk", "none", topk.is_some() || !over_top, given)?;
        let left_out = "to be left out, or distillation_mode = topk_logits, which alone reads it";
        check("distillation_topk", topk.unwrap_or(0), topk.is_none() || over_top, left_out)?;
        check("distillation_alpha", self.distillation_alpha, over_top || self.distillation_alpha == ALPHA, left_out)?;
        check("distillation_add_tail", self.distillation_add_tail, over_top || !self.distillation_add_tail, left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn keys_without_a_teacher_are_refused() {
        let given = config(&["teacher_model_name_or_path=t", "distillation_weight=0.5", "distillation_is_clip=none"]);
        assert!(given.has_teacher() && given.distillation.distillation_is_clip.is_none());
        for (keys, part) in [
            (&["distillation_weight=0.5"][..], "or teacher_model_name_or_path, beside which alone"),
            (
                &["teacher_model_revision=main"],
                "teacher_model_revision = main: expected to be left out, or teacher_model_name",
            ),
            (&["distillation_is_clip=3.5"], "distillation_is_clip = 3.5: expected to be left out"),
            (&["teacher_model_name_or_path=t", "distillation_weight=2"], "from 0 to 1"),
            (&["distillation_mode=topk_logits"], "beside which alone it is read"),
            (&["teacher_model_name_or_path=t", "distillation_mode=topk_logits"], "the number of tokens"),
            (&["teacher_model_name_or_path=t", "distillation_topk=8"], "which alone reads it"),
            (&["teacher_model_name_or_path=t", "distillation_alpha=0.5"], "which alone reads it"),
            (&["teacher_model_name_or_path=t", "distillation_add_tail=true"], "which alone reads it"),
            (&["teacher_model_name_or_path=t", "dynamic_sampling=filter"], "groups of equal rewards teach, too"),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }
}
