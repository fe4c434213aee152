//! Keys for rewards: built-in rewards and their settings, Python functions and commands in separate processes, and code written by the model.

use std::collections::BTreeMap;

use serde_json::Value;

use super::check::{check, compiles};
use super::field::{Field, KeyDoc, keys};
use super::flat::join;
use super::range::{ANY, COUNT, MAX_COUNT, NOT_POSITIVE, NumberRange, SECONDS, above, at_least, from_to};
use super::raw::RawConfig;
use super::{CodeConfig, CommandLine, Config, Environment, EnvironmentHub, RewardBatch};
use crate::error::{Error, Result};

/// Default pattern of the reward `format`, as in open-r1: reasoning and answer, each in its tags on separate lines; more lines may follow.
const DEFAULT_FORMAT_PATTERN: &str = r"(?s)<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>(?:\n.*)?";
/// Default pattern of a judge's score: `Score: 7` or `score is **7/10**`.
const DEFAULT_SCORE_PATTERN: &str = r"(?i)score\D{0,20}?([0-9]+(?:\.[0-9]+)?)";

keys! {
    /// Settings of rewards (`reward.*`).
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{RewardArguments, RewardConfig};
    ///
    /// let words = [
    ///     "reward.answer_pattern=ANSWER: ([0-9]+)",
    ///     "reward.answer_column=solution",
    ///     "reward.cosine_max_len=2000",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let reward: &RewardConfig = &config.reward;
    /// let arguments: &RewardArguments = &reward.arguments;
    /// assert_eq!((reward.answer_column.as_str(), arguments.cosine_max_len), ("solution", 2000));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct RewardConfig {
        /// `format`: a regular expression that the whole completion must match.
        pub format_pattern: String = DEFAULT_FORMAT_PATTERN.into(),
        /// `numeric_answer`, `exact_answer`: regular expression for the answer, which is the first group that took part in the last match. `none`
        /// takes the last of `<answer>..</answer>`, `\boxed{..}`, `\fbox{..}` (with balanced braces) and `#### ..`.
        pub answer_pattern: Option<String> = None,
        /// Column with the reference answer.
        pub answer_column: String = "answer".into(),
        /// Number of threads per rank that score completions with built-in functions.
        pub num_threads: usize = 2 => COUNT,
        /// Time limit in seconds for scoring one completion; after it the sample is masked.
        pub timeout_s: f64 = 10.0 => SECONDS,
        /// Python interpreter for rewards and tools that are Python functions.
        pub python: String = "python3".into(),
        /// Number of processes per rank for each reward that uses math-verify: `math`, `accuracy`, `cosine`, `length` and TRL's.
        pub math_workers: usize = 2 => COUNT,
        /// Number of consecutive failures of a reward's workers or service, without a score in between, after which the run ends.
        pub max_worker_failures: usize = 16 => COUNT,
        /// Arguments of built-in rewards, with open-r1's names.
        #[serde(flatten)]
        pub arguments: RewardArguments,
        /// `code`: the program in the completion is run against tests.
        pub code: CodeConfig,
    }
}

keys! {
    /// Arguments of rewards, with open-r1's names (`reward.*`).
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct RewardArguments: flat {
        /// `reasoning_accuracy_reward`: delimiters that end the reasoning. The answer is the text after the last occurrence of the first delimiter
        /// that is found.
        pub reasoning_delimiters: Vec<String> = vec!["</think>".into()],
        /// `cosine`, `get_cosine_scaled_reward`: reward of a wrong answer of length 0. `none` is the default of each: 0 in open-r1's `cosine`, -1 in
        /// TRL's.
        pub cosine_min_value_wrong: Option<f64> = None => ANY,
        /// `cosine`, `get_cosine_scaled_reward`: reward of a wrong answer of length `cosine_max_len`.
        pub cosine_max_value_wrong: f64 = -0.5 => ANY,
        /// `cosine`, `get_cosine_scaled_reward`: reward of a correct answer of length `cosine_max_len`.
        pub cosine_min_value_correct: f64 = 0.5 => ANY,
        /// `cosine`, `get_cosine_scaled_reward`: reward of a correct answer of length 0.
        pub cosine_max_value_correct: f64 = 1.0 => ANY,
        /// `cosine`, `get_cosine_scaled_reward`: maximum length; characters in open-r1's `cosine`, tokens in TRL's `get_cosine_scaled_reward`.
        pub cosine_max_len: usize = 1000 => COUNT,
        /// `repetition_penalty`, `get_repetition_penalty_reward`: n-gram size in words or tokens for counting repetitions.
        pub repetition_n_grams: usize = 3 => COUNT,
        /// `repetition_penalty`, `get_repetition_penalty_reward`: reward if every n-gram is a repetition.
        pub repetition_max_penalty: f64 = -1.0 => NOT_POSITIVE,
        /// `soft_overlong_punishment`, `get_soft_overlong_punishment`: length in tokens from which on the reward is -1.
        pub max_completion_len: usize = 16384 => COUNT,
        /// `soft_overlong_punishment`, `get_soft_overlong_punishment`: number of tokens before `max_completion_len` over which the reward decreases
        /// from 0 to -1.
        pub soft_punish_cache: usize = 4096 => from_to(0.0, MAX_COUNT as f64),
        /// `code_format`: language of the code block if the row has no column `language`.
        pub code_language: String = "python".into(),
    }
}

keys! {
    /// A reward that is computed outside of the program (`rewards.NAME.*`): by a function or a command in separate processes, or by an HTTP service.
    ///
    /// A Python function that is asked about whole groups, and a model that judges:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{ProcessReward, ProcessRewards, RewardBatch};
    ///
    /// let words = [
    ///     "reward_funcs=[\"spread\", \"judge\"]",
    ///     "reward_weights=[1, 1]",
    ///     "rewards.spread.function=rewards.py:spread",
    ///     "rewards.spread.batch=group",
    ///     "rewards.judge.url=http://localhost:8000/v1",
    ///     "rewards.judge.judge_model=Qwen/Qwen3-8B",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let rewards: &ProcessRewards = &config.rewards;
    /// let judge: &ProcessReward = rewards.get("judge").expect("it is given");
    /// assert_eq!(judge.judge_model.as_deref(), Some("Qwen/Qwen3-8B"));
    /// assert_eq!(rewards.get("spread").map(|spread| spread.batch), Some(RewardBatch::Group));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ProcessReward {
        /// Python function as `file.py:function`, `module:function` or `module.function`, with TRL's or verl's signature.
        pub function: Option<String> = None,
        /// Program with its arguments that answers requests on standard input and output (docs/rewards.md).
        pub command: CommandLine = CommandLine::default(),
        /// URL of an HTTP service: `POST {prompt, completion}`, answered by `{score}`; or, with `judge_model`, the base of an OpenAI-compatible API,
        /// such as `http://localhost:8000/v1`.
        pub url: Option<String> = None,
        /// Environment variable whose value is sent as bearer token to the service.
        pub api_key_env: Option<String> = None,
        /// Name of the model that judges, at the service: it gets a chat request and answers with a score.
        pub judge_model: Option<String> = None,
        /// Template of the request to the judge: Jinja with `prompt`, `completion`, `columns` and `max_score`. `none` asks how correct, complete and
        /// clear the answer is.
        pub judge_rubric: Option<String> = None,
        /// Regular expression for the score: the first group that took part in the last match in the judge's answer.
        pub judge_score_pattern: String = DEFAULT_SCORE_PATTERN.into(),
        /// The judge's highest score; the lowest is 0. The reward is the score divided by this.
        pub judge_max_score: f64 = 10.0 => above(0.0),
        /// Maximum length of the judge's answer in tokens.
        pub judge_max_tokens: usize = 1024 => COUNT,
        /// Sampling temperature of the judge.
        pub judge_temperature: f64 = 0.0 => at_least(0.0),
        /// Time limit in seconds for one request; for an HTTP service, for all its attempts together. `none` is `reward.timeout_s`.
        pub timeout_s: Option<f64> = None => SECONDS,
        /// Number of processes per rank.
        pub workers: usize = 1 => COUNT,
        /// Whether a request contains one completion or all completions of a group.
        pub batch: RewardBatch = RewardBatch::Completion,
        /// Number of concurrent requests: for an `async` function in each process, for an HTTP service on each rank. Other rewards handle one request
        /// at a time.
        pub concurrency: usize = 32 => COUNT,
    }
}

/// `rewards.*`: rewards with separate processes or services, by name.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct ProcessRewards(BTreeMap<String, ProcessReward>);

impl RewardConfig {
    /// Refuses patterns that do not compile or mark no answer, and a missing interpreter.
    pub(crate) fn check(&self) -> Result<()> {
        compiles("reward.format_pattern", &self.format_pattern)?;
        if let Some(pattern) = &self.answer_pattern {
            let has_group = compiles("reward.answer_pattern", pattern)?.captures_len() > 1;
            let group = "a regular expression with a group (..) around the answer";
            check("reward.answer_pattern", pattern, has_group, group)?;
        }
        check("reward.code.command", "[]", !self.code.command.0.is_empty(), "an interpreter and its arguments")
    }
}

impl ProcessReward {
    /// A Python function as reward, with all other settings at their defaults.
    pub fn python(function: &str) -> Self {
        Self { function: Some(function.to_owned()), ..Self::default() }
    }

    fn check(&self, name: &str) -> Result<()> {
        let key = |field: &str| format!("rewards.{name}.{field}");
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        check("rewards", name, name.chars().all(is_plain), "a name of letters, digits, _ and -")?;
        let num_places = [self.function.is_some(), !self.command.0.is_empty(), self.url.is_some()]
            .into_iter()
            .filter(|is| *is)
            .count();
        let got = self.function.as_deref().unwrap_or("none");
        let one = format!(
            "exactly one of: a function here, a program in {} or the address of none, or also the address of the \
             judge's service in {}",
            key("command"),
            key("url")
        );
        check(&key("function"), got, num_places == 1, one)?;
        let is_asked = self.judge_model.is_none() || self.url.is_some();
        check(
            &key("judge_model"),
            self.judge_model.as_deref().unwrap_or("none"),
            is_asked,
            format!("none, or also the address of the judge's service in {}", key("url")),
        )?;
        let is_single = self.url.is_none() || self.batch == RewardBatch::Completion;
        check(
            &key("batch"),
            "group",
            is_single,
            "completion, as a service over HTTP scores one completion per request",
        )?;
        let score = compiles(&key("judge_score_pattern"), &self.judge_score_pattern)?;
        let group = "a regular expression with a group (..) around the score";
        check(&key("judge_score_pattern"), &self.judge_score_pattern, score.captures_len() > 1, group)?;
        let shape = "file.py:function, module:function or module.function";
        check(&key("function"), got, self.function.as_deref().is_none_or(is_python), shape)
    }
}

impl ProcessRewards {
    /// The reward with this name.
    pub fn get(&self, name: &str) -> Option<&ProcessReward> {
        self.0.get(name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    pub(super) fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|(name, reward)| reward.check(name))
    }
}

impl Config {
    /// Adds the `get_reward` of environment classes as rewards with weight 1, as TRL does.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if there is no reward at all then.
    pub fn with_environment_rewards(mut self, classes: &[String]) -> Result<Self> {
        let scorer = self.environment_of(EnvironmentHub::ReasoningGym).map(Environment::to_string);
        for entry in classes.iter().map(|class| format!("{OF_ENVIRONMENT}{class}")).chain(scorer) {
            if !self.reward_funcs.contains(&entry) {
                self.reward_funcs.push(entry);
                self.reward_weights.extend((!self.reward_weights.is_empty()).then_some(1.0));
            }
        }
        check(
            "reward_funcs",
            "[]",
            !self.reward_funcs.is_empty(),
            "at least one reward, or an environment with get_reward",
        )?;
        check_names(&self).map(|()| self)
    }

    /// The names of `reward_funcs` in metrics and files; a Python function is named after the function.
    pub fn reward_names(&self) -> Vec<String> {
        self.reward_funcs.iter().map(|entry| reward_name(entry).to_owned()).collect()
    }

    /// Indices in `reward_funcs` of the rewards that decide whether an evaluation sample is solved: those in `eval_solved_by`, else the `judges`
    /// (built-in rewards that check an answer), else all.
    pub(crate) fn deciding_rewards(&self, judges: &[usize]) -> Vec<usize> {
        let names = self.reward_names();
        let all = 0..names.len();
        match (self.eval_solved_by.is_empty(), judges) {
            (false, _) => all.filter(|&index| self.eval_solved_by.contains(&names[index])).collect(),
            (true, []) => all.collect(),
            (true, _) => judges.to_vec(),
        }
    }
}

/// Prefix of an entry of `reward_funcs` that means the `get_reward` of an environment class.
const OF_ENVIRONMENT: &str = "environment:";

/// The environment class whose `get_reward` an entry of `reward_funcs` means.
pub(crate) fn environment_class(entry: &str) -> Option<&str> {
    entry.strip_prefix(OF_ENVIRONMENT)
}

/// The name of the reward of an entry of `reward_funcs`.
pub(crate) fn reward_name(entry: &str) -> &str {
    if is_python(entry) { entry.rsplit([':', '.']).next().unwrap_or(entry) } else { entry }
}

/// Whether an entry of `reward_funcs` is the path of a Python function.
pub(crate) fn is_python(entry: &str) -> bool {
    let separator = if entry.contains(':') { ':' } else { '.' };
    let is_file = entry.ends_with(".py"); // which names none of its functions
    !is_file && entry.rsplit_once(separator).is_some_and(|(place, name)| !place.is_empty() && !name.is_empty())
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self::read(&RawConfig::default(), "reward", None, &ANY, &mut Vec::new()).expect("every key has a default")
    }
}

impl Default for ProcessReward {
    fn default() -> Self {
        Self::read(&RawConfig::default(), "rewards.*", None, &ANY, &mut Vec::new()).expect("every key has a default")
    }
}

impl Field for ProcessRewards {
    fn describe(key: &str, _: Option<Self>, range: &NumberRange, _: &str, out: &mut Vec<KeyDoc>) {
        ProcessReward::describe(&join(key, "*"), None, range, "", out);
    }

    fn read(raw: &RawConfig, key: &str, _: Option<Self>, range: &NumberRange, wrong: &mut Vec<Error>) -> Option<Self> {
        let read = |name| (String::from(name), ProcessReward::read(raw, &join(key, name), None, range, wrong));
        let tables: Vec<_> = raw.names_in(key).into_iter().map(read).collect();
        tables.into_iter().map(|(name, reward)| Some((name, reward?))).collect::<Option<_>>().map(Self)
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        self.0.iter().for_each(|(name, reward)| reward.write(&join(key, name), out));
    }
}

/// Refuses two rewards with the same name, and names that do not exist.
pub(super) fn check_names(config: &Config) -> Result<()> {
    let names = config.reward_names();
    // An environment's or an episode's own reward may be the only one.
    let may_be_empty =
        config.tools.has_environments() || config.tools.agent.is_some() || config.tools.environment.is_some();
    check("reward_funcs", "[]", !names.is_empty() || may_be_empty, "at least one reward")?;
    let unknown = config.eval_solved_by.iter().find(|name| !names.contains(name));
    let one_of = || format!("names that are in reward_funcs: {}", names.join(", "));
    check("eval_solved_by", unknown.map_or("", String::as_str), unknown.is_none(), one_of())?;
    let repeated = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
    match repeated {
        Some((_, name)) => Err(Error::invalid_value(
            "reward_funcs",
            format!("{:?}", config.reward_funcs),
            format!("{name} at most once"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn a_reward_with_its_own_process_is_a_table_named_after_it() {
        let given =
            ["reward_funcs=[\"brevity\", \"my.py:tone\", \"pkg.mod.depth\"]", "rewards.brevity.command=[\"b\"]"];
        let config = config(&[&given[..], &["rewards.brevity.timeout_s=3"]].concat());
        assert_eq!(config.reward_names(), ["brevity", "tone", "depth"]);
        let brevity = config.rewards.get("brevity").unwrap();
        assert_eq!((brevity.command.0.as_slice(), brevity.timeout_s), (&["b".to_owned()][..], Some(3.0)));
        assert_eq!(super::Config::from_toml(&config.to_toml()).unwrap(), config);
    }

    #[test]
    fn solved_is_decided_by_answer_rewards_or_else_by_all_rewards() {
        let deciding = |overrides: &[&str], judges: &[usize]| config(overrides).deciding_rewards(judges);
        assert_eq!(deciding(&["reward_funcs=[\"format\", \"numeric_answer\"]"], &[1]), [1]);
        assert_eq!(deciding(&["reward_funcs=[\"format\", \"my.py:tone\"]"], &[]), [0, 1]);
        let funcs = "reward_funcs=[\"my.py:right\", \"code\"]";
        assert_eq!(deciding(&[funcs, "eval_solved_by=right"], &[1]), [0]);
        let said = message(&[funcs, "eval_solved_by=[\"my.py:right\"]"]);
        assert!(
            said.starts_with("eval_solved_by = my.py:right: expected names that are in reward_funcs: right, code"),
            "{said}"
        );
    }

    #[test]
    fn invalid_tables_of_rewards_are_refused() {
        for (overrides, part) in [
            (&["rewards.a.timeout=1"][..], "unknown key 'rewards.a.timeout'; did you mean 'rewards.*.timeout_s'?"),
            (
                &["rewards.a.workers=1"],
                "rewards.a.function = none: expected exactly one of: a function here, a program in rewards.a.command",
            ),
            (&["rewards.a.function=f", "rewards.a.command=[]"], "file.py:function"),
            (&["rewards.a.function=m:f", "rewards.a.command=[\"x\"]"], "exactly one of"),
            (&["rewards.a.command=python3 score.py"], "expected a list [..] of a program and its arguments"),
            (&["reward.code.command=python3"], "expected a list [..] of a program and its arguments"),
            (&["reward_funcs=[\"a.py:f\", \"b:f\"]"], "f at most once"),
            (&["reward.code.may_lack=[\"walls\"]"], "user_namespace, mount_namespace"),
        ] {
            let text = message(overrides);
            assert!(text.contains(part), "{overrides:?}: {text}");
        }
    }
}
