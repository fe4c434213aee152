//! On-policy distillation from a teacher.

use std::path::PathBuf;

use super::field::keys;
use super::range::{above, from_to};
use super::validate::check;
use super::{Config, DynamicSampling};
use crate::error::Result;

const WEIGHT: f64 = 1.0;
const CLIP_MAX: f64 = 2.0;

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
            ("teacher_model_revision", format!("{teacher_model_revision:?}"), teacher_model_revision.is_none()),
            ("distillation_weight", distillation_weight.to_string(), *distillation_weight == WEIGHT),
            ("distillation_is_clip", format!("{distillation_is_clip:?}"), *distillation_is_clip == Some(CLIP_MAX)),
        ] {
            check(key, value, has_teacher || is_default, unread)?;
        }
        let keeps_all = !has_teacher || self.dynamic_sampling == DynamicSampling::None;
        let expected = "none: with teacher_model_name_or_path groups of equal rewards teach, too";
        check("dynamic_sampling", self.dynamic_sampling.name(), keeps_all, expected)
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
            (&["teacher_model_revision=main"], "or teacher_model_name_or_path, beside which alone"),
            (&["teacher_model_name_or_path=t", "distillation_weight=2"], "from 0 to 1"),
            (&["teacher_model_name_or_path=t", "dynamic_sampling=filter"], "groups of equal rewards teach, too"),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }
}
