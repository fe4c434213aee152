//! Keys for the rows that a run reads and how a row becomes a prompt; named as in TRL's `ScriptArguments` and `GRPOConfig` where these have them.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::PromptFormat;
use super::check::check;
use super::field::{Field, FromValue, KeyDoc, keys};
use super::flat::join;
use super::range::{COUNT, NumberRange, from_to};
use super::raw::RawConfig;
use super::together::Combination;
use crate::error::{Error, Result};

/// Range of the weights of entries of `train_file`: a row is held in memory as often as it appears in an epoch.
const MOST_COPIES: NumberRange = from_to(0.0, 1000.0).without_low();

keys! {
    /// Keys for rows and prompts, at the top level.
    ///
    /// Two files, of which the second comes half as often, and a thinking model that is not to think:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{DataConfig, Files, PromptFormat, TemplateVariables};
    ///
    /// let words = [
    ///     "train_file=[\"sums.jsonl\", \"words.parquet\"]",
    ///     "train_file_weights=[1, 0.5]",
    ///     "prompt_format=chat",
    ///     "chat_template_kwargs.enable_thinking=false",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let data: &DataConfig = &config.data;
    /// let (files, variables): (&Files, &TemplateVariables) = (&data.train_file, &data.chat_template_kwargs);
    /// assert_eq!((files.0.len(), data.prompt_format), (2, PromptFormat::Chat));
    /// assert_eq!(variables.0["enable_thinking"], false);
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct DataConfig: flat {
        /// Training rows: files (JSONL, JSON, Parquet, CSV, TSV), patterns (`rows/*.parquet`), folders (their split `dataset_train_split` is read)
        /// and files of the Hub (`hf://datasets/USER/NAME/PATTERN`). Give either this or `dataset_name`.
        pub train_file: Files = Files::default(),
        /// How often the rows of each entry of `train_file` appear in an epoch: 2 is twice, 0.5 every other one. An empty list is 1 for each.
        pub train_file_weights: Vec<f64> = Vec::new() => MOST_COPIES,
        /// Evaluation rows, given like `train_file`; of a folder the split `dataset_test_split` is read.
        pub eval_file: Files = Files::default(),
        /// A data set of the Hugging Face Hub by name (`openai/gsm8k`, with a revision `openai/gsm8k@REVISION`), or a folder with
        /// the files of one.
        pub dataset_name: Option<String> = None,
        /// Configuration (subset) of `dataset_name`; `none` selects its only or its default one.
        pub dataset_config: Option<String> = None,
        /// Split of `dataset_name` with the training rows.
        pub dataset_train_split: String = "train".to_owned(),
        /// Split of `dataset_name` with the evaluation rows. It is used if `eval_steps` is set and `eval_file` is `none`.
        pub dataset_test_split: Option<String> = Some("test".to_owned()),
        /// Maximum number of training rows to read, from the first on.
        pub max_train_samples: Option<usize> = None => COUNT,
        /// Maximum number of evaluation rows to read, from the first on.
        pub max_eval_samples: Option<usize> = None => COUNT,
        /// Column that holds the prompt; `none` takes the first of `prompt`, `problem` and `question` that a row has.
        pub dataset_prompt_column: Option<String> = None,
        /// How a prompt that is plain text reaches the model. `chat`: as a user message, through the chat template. `text`: unchanged. `auto`: `chat`
        /// if the model has a chat template, else `text`.
        pub prompt_format: PromptFormat = PromptFormat::Auto,
        /// System message that is put before every conversation without one.
        pub system_prompt: Option<String> = None,
        /// Variables for the chat template, each as a key (`chat_template_kwargs.enable_thinking = false`).
        pub chat_template_kwargs: TemplateVariables = TemplateVariables::default(),
    }
}

impl DataConfig {
    pub(super) fn check(&self) -> Result<()> {
        let (num_weights, num_entries) = (self.train_file_weights.len(), self.train_file.0.len());
        let fits = num_weights == 0 || num_weights == num_entries;
        let expected = format!("one weight for each of the {num_entries} entries of train_file, or []");
        check("train_file_weights", format!("{:?}", self.train_file_weights), fits, expected)
    }

    /// Checks only the keys about rows in `raw`.
    pub(super) fn check_source(&self, raw: &RawConfig) -> Result<()> {
        let environment = raw.get("environment").map(|value| ("environment", value.clone()));
        Combination::of_keys(self).with(environment).check().and_then(|()| self.check())
    }

    /// Whether a run is evaluated on held-out rows: always on those of `eval_file`, on the data set's test split only if `eval_steps` is set.
    pub fn has_held_out(&self, eval_steps: Option<usize>) -> bool {
        !self.eval_file.0.is_empty() || (eval_steps.is_some() && self.test_split().is_some())
    }

    /// The data set and split of the held-out rows.
    pub(crate) fn test_split(&self) -> Option<NamedSplit<'_>> {
        Some(NamedSplit { dataset: self.dataset_name.as_deref()?, split: self.dataset_test_split.as_deref()? })
    }
}

/// A split of a data set given by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NamedSplit<'a> {
    /// Name of the data set, the value of [`DataConfig::dataset_name`].
    pub dataset: &'a str,
    /// Name of the split.
    pub split: &'a str,
}

/// Where the model and the rows of a run are.
///
/// Lists the model and rows to download before a run, even if other keys of its file are wrong:
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::Sources;
///
/// let words = ["model_name_or_path=Qwen/Qwen2.5-1.5B", "dataset_name=openai/gsm8k", "beta=many"].map(str::to_owned);
/// let Sources { model, data, .. } = Config::sources(None, &words).expect("both are named");
/// assert_eq!((model.to_str(), data.dataset_name.as_deref()), (Some("Qwen/Qwen2.5-1.5B"), Some("openai/gsm8k")));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Sources {
    /// Value of the key `model_name_or_path`.
    pub model: PathBuf,
    /// Value of the key `model_revision`.
    pub revision: Option<String>,
    /// Values of `teacher_model_name_or_path` and `teacher_model_revision`, if there is a teacher.
    pub teacher: Option<(PathBuf, Option<String>)>,
    /// Keys for rows and prompts.
    pub data: DataConfig,
    /// `eval_steps`; supervised training has no such key.
    pub eval_steps: Option<usize>,
}

/// File names: one or a list; `none` is no file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files(pub Vec<String>);

impl serde::Serialize for Files {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_value().serialize(serializer)
    }
}

impl FromValue for Files {
    fn expected(_: &NumberRange) -> String {
        "a path, or a list [..] of paths".into()
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        let is_none = value.is_null() || value == "none";
        let files = if is_none { Vec::new() } else { Vec::<String>::from_value(value, range)? };
        files.iter().all(|file| !file.is_empty()).then_some(Self(files))
    }

    fn to_value(&self) -> Value {
        match &self.0[..] {
            [] => "none".into(),
            [file] => file.as_str().into(),
            files => files.to_vec().to_value(),
        }
    }
}

/// `chat_template_kwargs.*`: chat template variables by name.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct TemplateVariables(pub Map<String, Value>);

impl Field for TemplateVariables {
    fn describe(key: &str, _: Option<Self>, _: &NumberRange, text: &str, out: &mut Vec<KeyDoc>) {
        let (key, expected, default) =
            (join(key, "*"), "true, false, a number, text or a list".to_owned(), Some("none".into()));
        out.push(KeyDoc { section: None, key, entries: Vec::new(), expected, default, text: text.to_owned() });
    }

    fn read(raw: &RawConfig, key: &str, _: Option<Self>, _: &NumberRange, _: &mut Vec<Error>) -> Option<Self> {
        let value = |name: &str| raw.get(&join(key, name)).cloned().unwrap_or(Value::Null);
        Some(Self(raw.names_in(key).into_iter().map(|name| (name.to_owned(), value(name))).collect()))
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        out.extend(self.0.iter().map(|(name, value)| (join(key, name), value.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{config, message};

    /// The configuration names a data set, the command line other rows.
    #[test]
    fn rows_given_on_the_command_line_replace_those_of_the_file() {
        let load = |text: &str, overrides: &[&str]| {
            let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            let own = ["model_name_or_path=model", "reward_funcs=[\"format\"]"];
            let overrides: Vec<String> = own.iter().chain(overrides).map(|text| text.to_string()).collect();
            let mut notices = Vec::new();
            let config = Config::load_noting(Some(file.path()), &overrides, &mut notices).unwrap();
            (config, notices.join("\n"))
        };
        let recipe =
            "dataset_name = \"openai/gsm8k\"\ndataset_config = \"main\"\neval_steps = 20\nmax_eval_samples = 9\n";
        let (config, said) = load(recipe, &["train_file=rows.jsonl"]);
        assert_eq!(config.data.train_file.0, ["rows.jsonl"]);
        assert_eq!((&config.data.dataset_name, &config.data.dataset_config, config.eval_steps), (&None, &None, None));
        for part in [
            ":1: dataset_name = \"openai/gsm8k\" is ignored: the command line names other training rows",
            ":3: eval_steps = 20 is ignored",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let (config, said) = load(recipe, &["train_file=rows.jsonl", "eval_file=held_out.jsonl"]);
        assert!(config.eval_steps == Some(20) && !said.contains("eval_steps"), "{said}");
        let of_file = "train_file = [\"a.jsonl\", \"b.jsonl\"]\ntrain_file_weights = [1, 2]\n";
        let (config, said) = load(of_file, &["dataset_name=openai/gsm8k", "dataset_config=main"]);
        assert!(
            config.data.train_file.0.is_empty() && said.contains("train_file_weights = [1,2] is ignored"),
            "{said}"
        );
        assert_eq!(load(recipe, &["train_file=none"]).1, "");
    }

    #[test]
    fn training_rows_are_files_or_a_data_set() {
        assert_eq!(config(&["train_file=[\"a.jsonl\", \"b/*.csv\"]"]).data.train_file.0, ["a.jsonl", "b/*.csv"]);
        assert_eq!(config(&["eval_file=none"]).data.eval_file.0, [""; 0]);
        let named = config(&["train_file=none", "dataset_name=openai/gsm8k", "dataset_config=main"]);
        assert!(
            !named.data.has_held_out(None) && named.data.has_held_out(Some(1)),
            "TRL evaluates where it is asked to"
        );
        assert!(!config(&[]).data.has_held_out(Some(1)) && config(&["eval_file=e.jsonl"]).data.has_held_out(None));
        assert_eq!(Config::from_toml(&named.to_toml()).unwrap(), named);
        for (keys, part) in [
            (&["train_file=none"][..], "train_file = none: expected a value, or a value for dataset_name"),
            (&["dataset_name=openai/gsm8k"], "train_file = train.jsonl: expected no train_file, or no dataset_name"),
            (&["train_file_weights=[1, 2]"], "one weight for each of the 1 entries"),
            (&["train_file_weights=[0]"], "a number in (0, 1000]"),
            (&["train_file_weights=[1e9]"], "a number in (0, 1000]"),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }

    #[test]
    fn chat_template_variables_are_keys_of_a_table() {
        let config = config(&["chat_template_kwargs={enable_thinking = false}", "chat_template_kwargs.level=2"]);
        let kwargs = &config.data.chat_template_kwargs.0;
        assert_eq!((kwargs["enable_thinking"].as_bool(), kwargs["level"].as_i64()), (Some(false), Some(2)));
        assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config);
    }
}
