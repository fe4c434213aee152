//! Keys for on-policy distillation from a teacher.

use std::path::PathBuf;

use super::check::check;
use super::field::keys;
use super::range::{ANY, COUNT, MAX_COUNT, above, from_to};
use super::{Config, DistillationMode, SelfDistillation};
use crate::error::Result;

keys! {
    /// Keys for on-policy distillation, at the top level.
    ///
    /// Half of the loss is the divergence from a larger model over its 32 most probable tokens:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{DistillationConfig, DistillationMode, SelfDistillation};
    ///
    /// let words = [
    ///     "teacher_model_name_or_path=Qwen/Qwen3-8B",
    ///     "distillation_weight=0.5",
    ///     "distillation_mode=topk_logits",
    ///     "distillation_topk=32",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let distillation: &DistillationConfig = &config.distillation;
    /// assert_eq!((distillation.distillation_mode, distillation.num_top()), (DistillationMode::TopkLogits, Some(32)));
    /// assert_eq!(distillation.self_distillation, SelfDistillation::None); // `sdpo`: the policy behind a longer prompt
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct DistillationConfig: flat {
        /// Teacher model that scores the policy's samples and has the policy's tokenizer: a folder or a name on the Hugging Face Hub. The loss then
        /// includes the reverse KL divergence from the policy to the teacher, estimated on the sampled tokens (on-policy distillation, arXiv
        /// 2306.13649). The teacher is sharded over the training ranks and stored as `residency.reference` says.
        pub teacher_model_name_or_path: Option<PathBuf> = None,
        /// Branch, tag or commit of a teacher from the Hub; `none` is `main`.
        pub teacher_model_revision: Option<String> = None,
        /// Weight of the distillation divergence in the loss; the policy term and the KL term get the rest. With 1 only the teacher trains the
        /// policy, and rewards are just metrics.
        pub distillation_weight: f64 = 1.0 => from_to(0.0, 1.0),
        /// Tokens over which the divergence is computed: `sampled_token`, or `topk_logits` for the teacher's `distillation_topk` most probable tokens
        /// at each position.
        pub distillation_mode: DistillationMode = DistillationMode::SampledToken,
        /// Number of tokens per position with `topk_logits`.
        pub distillation_topk: Option<usize> = None => COUNT,
        /// The divergence used with `topk_logits`: 1 is the reverse KL divergence (policy from teacher), 0 the forward one, values in between are the
        /// generalized Jensen-Shannon divergence.
        pub distillation_alpha: f64 = 1.0 => from_to(0.0, 1.0),
        /// With `topk_logits`, include all other tokens as one extra outcome instead of ignoring them.
        pub distillation_add_tail: bool = false,
        /// Upper bound of the policy ratio that multiplies the divergence when a generation batch is used for several updates; `none` uses no ratio.
        pub distillation_is_clip: Option<f64> = Some(2.0) => above(0.0),
        /// Use the policy with a longer prompt as its own teacher instead of another model: `sdft` adds the row's column `privileged_context`, `sdpo`
        /// a successful completion of the group or the row's feedback. The teacher has the policy's weights before the update (TRL's
        /// `teacher_model_kind = "live"`).
        pub self_distillation: SelfDistillation = SelfDistillation::None,
        /// `sdft`: template for the last message of the teacher's prompt, from the last message of the prompt and the column `privileged_context`.
        pub teacher_prompt_template: String = "{prompt}\n\n{privileged_context}".into(),
        /// `sdft`: number of sampled tokens at the start of each completion that the divergence skips.
        pub num_loss_tokens_to_skip: usize = 0 => from_to(0.0, MAX_COUNT as f64),
        /// `sdpo`: template for the last message of the teacher's prompt.
        pub reprompt_template: String = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n".into(),
        /// `sdpo`: template for `{solution}`, used if there is a successful completion.
        pub solution_template: String = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n".into(),
        /// `sdpo`: template for `{feedback}`, used if the row's column `privileged_context` is not empty.
        pub feedback_template: String =
            "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n".into(),
        /// `sdpo`: whether successful completions are added to the teacher's prompt.
        pub use_successful_as_teacher: bool = true,
        /// `sdpo`: minimum reward of a successful completion.
        pub success_reward_threshold: f64 = 1.0 => ANY,
        /// `sdpo`: whether a completion is never added to its own teacher's prompt.
        pub dont_reprompt_on_self_success: bool = true,
        /// `sdpo`: whether the row's feedback is added to the teacher's prompt.
        pub include_environment_feedback: bool = false,
        /// `sdpo`: whether feedback is added only if there is no successful completion.
        pub environment_feedback_only_without_solution: bool = false,
        /// `sdpo`: whether `<think>..</think>` is removed from a completion before it is added to the teacher's prompt.
        pub remove_thinking_from_demonstration: bool = false,
        /// Maximum length in tokens of a teacher's prompt; a longer prompt keeps its last tokens.
        pub max_reprompt_len: usize = 10240 => COUNT,
    }
}

/// The placeholders that each template must contain.
const PLACES: [(&str, &[&str]); 4] = [
    ("teacher_prompt_template", &["{prompt}", "{privileged_context}"]),
    ("reprompt_template", &["{prompt}"]),
    ("solution_template", &["{successful_previous_attempt}"]),
    ("feedback_template", &["{feedback_raw}"]),
];

impl Config {
    /// Whether a teacher scores the samples, another model or the policy itself.
    pub fn has_teacher(&self) -> bool {
        self.distillation.teacher_model_name_or_path.is_some() || self.teaches_itself()
    }

    /// Whether the teacher is the policy itself.
    pub fn teaches_itself(&self) -> bool {
        self.distillation.self_distillation != SelfDistillation::None
    }

    pub(super) fn check_distillation(&self) -> Result<()> {
        let own = &self.distillation;
        let templates =
            [&own.teacher_prompt_template, &own.reprompt_template, &own.solution_template, &own.feedback_template];
        for ((key, places), template) in PLACES.iter().zip(templates) {
            let has_all = places.iter().all(|place| template.contains(place));
            check(key, template, has_all, format!("a text that contains {}", places.join(" and ")))?;
        }
        Ok(())
    }
}

impl DistillationConfig {
    /// Number of top tokens per position for the divergence, with `topk_logits`; else `None`.
    pub fn num_top(&self) -> Option<usize> {
        self.distillation_topk.filter(|_| self.distillation_mode == DistillationMode::TopkLogits)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn distillation_keys_need_a_teacher_and_valid_templates() {
        let given = config(&["teacher_model_name_or_path=t", "distillation_weight=0.5", "distillation_is_clip=none"]);
        assert!(given.has_teacher() && given.distillation.distillation_is_clip.is_none());
        assert!(message(&["teacher_model_name_or_path=t", "distillation_weight=2"]).contains("from 0 to 1"));
        let own = config(&["self_distillation=sdpo", "distillation_weight=0.5"]);
        assert!(own.has_teacher() && own.teaches_itself());
        assert_eq!(super::super::Config::from_toml(&own.to_toml()).unwrap(), own);
        for (keys, part) in [
            (
                &["self_distillation=sdft", "teacher_prompt_template={prompt}"][..],
                "a text that contains {prompt} and {privileged_context}",
            ),
            (&["self_distillation=sdpo", "teacher_model_name_or_path=t"], "a run has only one teacher"),
            (
                &["self_distillation=sdft", "success_reward_threshold=0.5"],
                "no success_reward_threshold, or self_distillation = sdpo:",
            ),
            (
                &["self_distillation=sdpo", "num_loss_tokens_to_skip=2"],
                "no num_loss_tokens_to_skip, or self_distillation = sdft:",
            ),
            (&["distillation_weight=0.5"], "the key only applies to distillation from a teacher"),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }
}
