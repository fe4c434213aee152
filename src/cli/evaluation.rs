//! Settings of `eval`, from its options or from a run's configuration.

use serde_json::{Map, Value};

use super::args::EvalArgs;
use super::fetch;
use crate::config::{self, Config, RewardConfig};
use crate::data::{DatasetOptions, RowSources, ToolSchemas};
use crate::error::{Error, Result};
use crate::eval;
use crate::reward::{self, RewardPool};
use crate::serve::SamplingDefaults;
use crate::tools::{MadeRows, ToolProcess};
use crate::types::SamplingParams;

/// A prepared evaluation: its rewards' processes run, but the model is not loaded yet.
pub(super) struct Evaluation {
    pub rewards: RewardPool,
    /// Indices of the rewards that decide whether a sample is solved.
    pub solved_by: Vec<usize>,
    pub rows: RowFiles,
    pub dataset: DatasetOptions,
    pub params: SamplingParams,
    pub max_model_length: Option<usize>,
    /// Variables of the chat template.
    pub variables: Map<String, Value>,
    /// The configuration and the tools of a run with tools.
    pub tools: Option<(Config, ToolProcess)>,
    settings: RewardConfig,
}

/// Files with rows. Files made by an environment are removed when this is dropped.
pub(super) struct RowFiles {
    pub sources: RowSources,
    _made: Option<MadeRows>,
}

/// The rows of an evaluation, and the configuration of the run that it repeats, if given.
pub(super) struct EvalRows {
    rows: RowFiles,
    config: Option<Config>,
}

impl EvalRows {
    /// Loads the configuration, if given, and finds the rows. A launcher downloads what its processes read later.
    ///
    /// # Errors
    /// The errors of [`Config::load`] and of [`RowSources::held_out`].
    pub fn find(args: &EvalArgs) -> Result<Self> {
        let Some(file) = &args.config else {
            let sources = fetch::rows("--data", args.data.as_deref().unwrap_or_default())?;
            return Ok(Self { rows: RowFiles { sources, _made: None }, config: None });
        };
        let config = Config::load(Some(file), &args.overrides)?;
        check_overrides(&args.overrides)?;
        let expected = "a configuration that names evaluation rows: eval_file, dataset_name with dataset_test_split, \
                        or environment; eval_file=FILE on the command line also works";
        let none = || Error::invalid_value("--config", file.display(), expected);
        let made = MadeRows::of(&config)?;
        let of_environment = made.as_ref().map(|made| made.held_out.clone());
        let sources = fetch::held_out(&config.data)?.or(of_environment).ok_or_else(none)?;
        Ok(Self { rows: RowFiles { sources, _made: made }, config: Some(config) })
    }

    /// The configuration of the run that the evaluation repeats.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }
}

impl Evaluation {
    /// Starts the rewards of an evaluation.
    ///
    /// # Errors
    /// The errors of [`RewardPool::start`], and those of a run's tools.
    pub fn new(args: &EvalArgs, found: EvalRows) -> Result<Self> {
        let evaluation = match found.config {
            Some(config) => Self::of_run(config, found.rows, args.n)?,
            None => Self::of_options(args, found.rows)?,
        };
        evaluation.rewards.start()?;
        Ok(evaluation)
    }

    fn of_options(args: &EvalArgs, rows: RowFiles) -> Result<Self> {
        let settings = args.reward_config()?;
        let rewards = RewardPool::single("--reward", &args.reward, &settings)?;
        let dataset = DatasetOptions {
            required_columns: rewards.required_columns(),
            max_completion_length: 1, // shorter ones are cut by the context and count as they are
            system_prompt: args.system_prompt.clone(),
            prompt_format: args.prompt_format,
            ..DatasetOptions::default()
        };
        Ok(Self {
            rewards,
            solved_by: vec![0], // the only one
            rows,
            dataset,
            // As a run evaluates: the model's own values of sampling are not read.
            params: SamplingParams {
                step: eval::SAMPLING_STEP,
                ..args.sampling.params(args.n.unwrap_or(1), &SamplingDefaults::default())
            },
            max_model_length: args.sampling.max_model_length,
            variables: Map::new(),
            tools: None,
            settings,
        })
    }

    /// The evaluation as the run itself does it.
    fn of_run(config: Config, rows: RowFiles, n: Option<usize>) -> Result<Self> {
        let process = ToolProcess::start(&config)?;
        let classes = process.as_ref().map(ToolProcess::rewarding_classes).unwrap_or_default();
        let config = config.with_environment_rewards(&classes)?;
        let tools = process.map(|process| (config.clone(), process));
        let schemas = tools.as_ref().map_or_else(ToolSchemas::default, |(_, process)| process.schemas().clone());
        let rewards = RewardPool::new(&config)?;
        let solved_by = config.deciding_rewards(rewards.judges());
        Ok(Self {
            solved_by,
            rows,
            dataset: DatasetOptions {
                max_prompt_length: config.max_prompt_length,
                max_completion_length: config.max_completion_length,
                tools: schemas,
                ..DatasetOptions::of(&config.data, config.seed, rewards.required_columns())
            },
            params: SamplingParams {
                num_generations: n.unwrap_or(config.eval_num_generations),
                temperature: config.eval_temperature(),
                top_p: config.top_p,
                top_k: config.top_k,
                min_p: config.min_p,
                repetition_penalty: config.repetition_penalty,
                max_completion_length: config.max_completion_length,
                stop: config.stop.clone(),
                seed: config.seed,
                step: eval::SAMPLING_STEP,
                ..SamplingParams::default()
            },
            max_model_length: config.max_model_length,
            variables: config.data.chat_template_kwargs.0,
            tools,
            settings: config.reward,
            rewards,
        })
    }

    /// The function that extracts a completion's answer for maj@n, if a deciding reward compares answers.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an invalid pattern.
    pub fn answer_reader(&self) -> Result<Option<impl Fn(&str) -> Option<String> + use<>>> {
        let names = self.rewards.names();
        let readers = self.solved_by.iter().map(|&index| reward::answer_reader(&names[index], &self.settings));
        Ok(readers.collect::<Result<Vec<_>>>()?.into_iter().flatten().next())
    }
}

/// Configuration keys, and prefixes of keys, that an evaluation uses. The last two are required.
const READ: &[&str] = &[
    "eval_file",
    "dataset_*",
    "max_eval_samples",
    "prompt_format",
    "system_prompt",
    "chat_template_kwargs.*",
    "max_prompt_length",
    "max_completion_length",
    "max_model_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
    "eval_num_generations",
    "eval_temperature",
    "eval_solved_by",
    "reward*",
    "tool*",
    "environment*",
    "max_train_samples",
    "max_tool_*",
    "agent*",
    "train_file*",
    "model_name_or_path",
];

/// Keys of a run that are options of `eval`, as they say how it is computed.
const OPTIONS: &[&str] = &[
    "device",
    "dtype",
    "residual_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_partition",
    "enable_expert_parallel",
    "speculation",
    "num_speculative_tokens",
];

/// Refuses keys that an evaluation does not use, as setting them would silently change nothing.
fn check_overrides(overrides: &[String]) -> Result<()> {
    let is_meant = |name: &str, key: &str| name.strip_suffix('*').map_or(name == key, |start| key.starts_with(start));
    let unread = |(key, value, _): config::ForeignEntry| {
        if READ.iter().any(|name| is_meant(name, &key)) {
            return None;
        }
        let expected = match key.as_str() {
            option if OPTIONS.contains(&option) => format!("no such key here: use the option --{key} of eval instead"),
            "num_generations" => "no such key here: for an evaluation set eval_num_generations, or -n".to_owned(),
            _ => "no such key here: an evaluation only reads keys about rows, prompts, sampling, rewards and tools"
                .to_owned(),
        };
        Some(Error::invalid_value(&key, value, expected))
    };
    let errors: Vec<Error> = config::foreign_entries(None, overrides)?.into_iter().filter_map(unread).collect();
    Error::of_all(errors).map_or(Ok(()), Err)
}
