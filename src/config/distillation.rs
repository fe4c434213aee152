//! On-policy distillation from a teacher.

use std::path::PathBuf;

use super::check::check;
use super::field::keys;
use super::range::{ANY, COUNT, MAX_COUNT, above, from_to};
use super::{Config, DistillationMode, SelfDistillation};
use crate::error::Result;

keys! {
    /// On-policy distillation; keys of the top.
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
        /// The policy as its own teacher, behind a longer prompt, in place of another model: `sdft` adds the row's column
        /// `privileged_context`, `sdpo` a successful completion of the group or the row's feedback. Its weights are those of the
        /// policy before the update (TRL's `teacher_model_kind = "live"`).
        pub self_distillation: SelfDistillation = SelfDistillation::None,
        /// `sdft`: the last message of the teacher's prompt, made of that of the prompt and of the column `privileged_context`.
        pub teacher_prompt_template: String = "{prompt}\n\n{privileged_context}".into(),
        /// `sdft`: sampled tokens at the beginning of each completion that are left out of the divergence.
        pub num_loss_tokens_to_skip: usize = 0 => from_to(0.0, MAX_COUNT as f64),
        /// `sdpo`: the last message of the teacher's prompt.
        pub reprompt_template: String = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n".into(),
        /// `sdpo`: `{solution}` of it, where there is a successful completion.
        pub solution_template: String = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n".into(),
        /// `sdpo`: `{feedback}` of it, where the row's column `privileged_context` has some.
        pub feedback_template: String =
            "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n".into(),
        /// `sdpo`: whether successful completions become part of prompts.
        pub use_successful_as_teacher: bool = true,
        /// `sdpo`: the least reward of a successful completion.
        pub success_reward_threshold: f64 = 1.0 => ANY,
        /// `sdpo`: whether a completion is never shown to itself.
        pub dont_reprompt_on_self_success: bool = true,
        /// `sdpo`: whether the row's feedback becomes part of prompts.
        pub include_environment_feedback: bool = false,
        /// `sdpo`: whether it does only where there is no successful completion.
        pub environment_feedback_only_without_solution: bool = false,
        /// `sdpo`: whether `<think>..</think>` is left out of a completion that is shown.
        pub remove_thinking_from_demonstration: bool = false,
        /// Most tokens of a teacher's prompt; of a longer one the last are kept.
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
    /// Whether a teacher scores the samples.
    pub fn has_teacher(&self) -> bool {
        self.distillation.teacher_model_name_or_path.is_some() || self.teaches_itself()
    }

    /// Whether that teacher is the policy.
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
    /// The teacher's tokens of each distribution that the divergence is over, if it is over these.
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
