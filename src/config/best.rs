//! The keys that say which evaluation was the best and when a run ends before its time, named as in transformers'
//! `TrainingArguments` and `EarlyStoppingCallback`.

use super::field::keys;
use super::range::{COUNT, at_least};

keys! {
    /// Best evaluation and early stopping; keys of the top.
    ///
    /// The final model is that of the best evaluation, and a run ends after three that are no better:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::BestConfig;
    ///
    /// let words = ["load_best_model_at_end=true", "early_stopping_patience=3"].map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let best: &BestConfig = &config.best;
    /// assert_eq!((best.metric().as_str(), best.is_greater_better()), ("eval_reward", true));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct BestConfig: flat {
        /// Make the checkpoint of the best evaluation the final model. Every evaluation that is the best so far then saves a
        /// checkpoint, which `save_total_limit` spares.
        pub load_best_model_at_end: bool = false,
        /// Metric of the evaluations that decides, with or without `eval_`; `none` is `eval_reward`.
        pub metric_for_best_model: Option<String> = None,
        /// Whether more of it is better; `none` is yes, unless its name ends with `loss`.
        pub greater_is_better: Option<bool> = None,
        /// The run ends after this many evaluations in a row that are not better than the best before them; `none` goes on.
        pub early_stopping_patience: Option<usize> = None => COUNT,
        /// How much better an evaluation must be to count as better for `early_stopping_patience`.
        pub early_stopping_threshold: f64 = 0.0 => at_least(0.0),
    }
}

impl BestConfig {
    /// Name of the metric that decides.
    pub fn metric(&self) -> String {
        let name = self.metric_for_best_model.as_deref().unwrap_or("eval_reward");
        if name.starts_with("eval_") { name.to_owned() } else { format!("eval_{name}") }
    }

    /// Whether more of it is better.
    pub fn is_greater_better(&self) -> bool {
        self.greater_is_better.unwrap_or_else(|| !self.metric().ends_with("loss"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;

    #[test]
    fn names_and_directions_of_the_best_metric_match_transformers() {
        let best = |keys: &[&str]| config(&[&["eval_file=e.jsonl", "eval_steps=1"], keys].concat()).best;
        assert_eq!((best(&[]).metric(), best(&[]).is_greater_better()), ("eval_reward".to_owned(), true));
        let loss = best(&["metric_for_best_model=pass_loss"]);
        assert_eq!((loss.metric(), loss.is_greater_better()), ("eval_pass_loss".to_owned(), false));
        assert!(best(&["metric_for_best_model=eval_loss", "greater_is_better=true"]).is_greater_better());
    }
}
