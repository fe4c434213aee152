//! Keys for where metrics go besides metrics.jsonl, named as in transformers' `TrainingArguments`.

use serde_json::Value;

use super::ReportService;
use super::field::{FromValue, keys};
use super::range::NumberRange;

keys! {
    /// Keys for where metrics go, at the top level.
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{ReportConfig, ReportService, ReportTo};
    ///
    /// let words = ["report_to=[wandb, tensorboard]", "run_name=sums"].map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let ReportConfig { report_to, run_name } = &config.report;
    /// assert_eq!(*report_to, ReportTo(vec![ReportService::Wandb, ReportService::TensorBoard]));
    /// assert_eq!(run_name.as_deref(), Some("sums"));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ReportConfig: flat {
        /// Where metrics go besides metrics.jsonl and the report: `tensorboard` (event files), `wandb` and `trackio` (a Python process with
        /// `reward.python`, whose failure does not stop the run), a list of these, `all` or `none`.
        pub report_to: ReportTo = ReportTo(vec![ReportService::TensorBoard]),
        /// Name of the run at W&B and trackio; `none` is the name of the output folder.
        pub run_name: Option<String> = None,
    }
}

/// The reporting services, each at most once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportTo(pub Vec<ReportService>);

impl serde::Serialize for ReportTo {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_value().serialize(serializer)
    }
}

impl FromValue for ReportTo {
    fn expected(_: &NumberRange) -> String {
        format!("a list [..] of {}; or all, or none", ReportService::NAMES.join(", "))
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        match value {
            Value::Null => Some(Self(Vec::new())),
            Value::String(word) if word == "none" => Some(Self(Vec::new())),
            Value::String(word) if word == "all" => Some(Self(ReportService::ALL.to_vec())),
            Value::Array(list) => {
                let services: Vec<_> =
                    list.iter().map(|value| ReportService::from_value(value, range)).collect::<Option<_>>()?;
                let is_once = services.iter().enumerate().all(|(index, service)| !services[..index].contains(service));
                is_once.then_some(Self(services))
            }
            word => ReportService::from_value(word, range).map(|service| Self(vec![service])),
        }
    }

    fn to_value(&self) -> Value {
        match &self.0[..] {
            [] => "none".into(),
            services => services.iter().map(|service| service.to_value()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};
    use super::super::{Config, ReportService};

    #[test]
    fn report_to_accepts_words_and_lists_as_in_transformers() {
        for (value, names) in [
            ("none", &[][..]),
            ("wandb", &["wandb"]),
            ("[\"wandb\", \"trackio\"]", &["wandb", "trackio"]),
            ("all", ReportService::NAMES),
        ] {
            let config = config(&[&format!("report_to={value}")]);
            let found: Vec<_> = config.report.report_to.0.iter().map(|service| service.name()).collect();
            assert_eq!(found, names, "{value}");
            assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config);
        }
        for wrong in ["report_to=mlflow", "report_to=[\"wandb\", \"wandb\"]"] {
            assert!(message(&[wrong]).contains("a list [..] of tensorboard, wandb, trackio"), "{}", message(&[wrong]));
        }
    }
}
