//! The rows of a run. They are read before planning, so that the plan knows the longest prompt.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::preflight::OpenModel;
use crate::config::{BatchPlan, Config};
use crate::console;
use crate::data::{Dataset, DatasetOptions, Hub, RowSources, ToolSchemas};
use crate::error::{Error, Result};
use crate::eval;
use crate::ranks::{World, all_gather_bytes};
use crate::reward::RewardPool;
use crate::tools::{MadeRows, ToolProcess};
use crate::types::Prompt;

/// Training rows and held-out rows.
#[derive(Debug)]
pub(crate) struct TrainingRows {
    pub train: Dataset,
    pub eval: Option<Dataset>,
    /// How rows became prompts.
    pub options: DatasetOptions,
    /// Names of both sources; `None` for generated rows.
    names: Option<(String, Option<String>)>,
}

impl TrainingRows {
    /// Reads all rows from local files; those of a Hub repository must be in the cache. They must have the columns `required`. `told` is called as in
    /// [`Dataset::read_with`].
    pub(super) fn read(
        config: &Config,
        model: &OpenModel,
        required: Vec<String>,
        tools: Option<&ToolProcess>,
        mut told: impl FnMut(usize, bool),
    ) -> Result<Self> {
        let (data, hub) = (&config.data, Hub::cached());
        let options = DatasetOptions {
            max_prompt_length: config.max_prompt_length,
            max_model_length: Some(config.context_len(model.spec.max_position_embeddings)),
            max_completion_length: config.max_completion_length,
            tools: tools.map_or_else(ToolSchemas::default, |tools| tools.schemas().clone()),
            ..DatasetOptions::of(data, config.seed, required)
        };
        let mut read = |sources: &RowSources| Dataset::read_with(sources, &model.tokenizer, &options, &mut told);
        let made = MadeRows::of(config)?;
        let named = RowSources::held_out(data, config.eval_steps, &hub)?;
        let (train, held_out) = match &made {
            Some(made) => {
                let of_environment = config.has_held_out().then(|| made.held_out.clone());
                (made.train.clone(), named.or(of_environment))
            }
            None => (RowSources::train(data, &hub)?, named),
        };
        let names = (train.name.clone(), held_out.as_ref().map(|sources| sources.name.clone()));
        let (train, eval) = (read(&train)?, held_out.as_ref().map(&mut read).transpose()?);
        let train = if made.is_some() { train.without_digest() } else { train };
        Ok(Self { train, eval, options, names: Some(names) })
    }

    /// Rows that are generated instead of read.
    pub fn made(train: Dataset) -> Self {
        Self { train, eval: None, options: DatasetOptions::default(), names: None }
    }

    /// The configuration with the longest prompt's length in place of `max_prompt_length = none`, so that the plan assumes no longer sequences than
    /// possible.
    pub fn planned(&self, config: &Config) -> Config {
        let longest = self.train.longest_prompt().max(self.eval.as_ref().map_or(0, Dataset::longest_prompt));
        Config { max_prompt_length: Some(config.max_prompt_length.unwrap_or(longest)), ..config.clone() }
    }

    /// Refuses rows that an environment has generated differently on another rank; collective over the world.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], on every rank; the errors of the collective.
    pub fn check_same(&self, config: &Config, world: &World) -> Result<()> {
        let Some(environment) = config.tools.environment.as_ref().filter(|_| config.makes_rows()) else {
            return Ok(());
        };
        let mut hasher = DefaultHasher::new();
        for (_, rows) in self.named() {
            rows.prompts().iter().for_each(|prompt: &Prompt| {
                prompt.token_ids.hash(&mut hasher);
                serde_json::to_string(&*prompt.columns).unwrap_or_default().hash(&mut hasher);
            });
        }
        let all = all_gather_bytes(&*world.group(), &hasher.finish().to_le_bytes())?;
        if all.iter().all(|hash| *hash == all[0]) {
            return Ok(());
        }
        let expected = "an environment that makes the same rows on every rank: its random choices must depend only on \
                        its arguments and the seed";
        Err(Error::invalid_value("environment", environment, expected))
    }

    /// Refuses a generation batch with more prompts than there are rows.
    pub fn check_batch(&self, config: &Config, batch: &BatchPlan) -> Result<()> {
        let (needed, rows) = (batch.num_begun, self.train.len());
        if needed <= rows {
            return Ok(());
        }
        let expected = format!(
            "at most {} completions: a generation batch needs {needed} prompts, but {} has {rows} rows; lower \
             per_device_train_batch_size or --nproc, or raise num_generations",
            rows * config.num_generations,
            self.names.as_ref().map_or("the data set", |(train, _)| train)
        );
        Err(Error::invalid_value("generation_batch_size", batch.generation_batch_size, expected))
    }

    /// Refuses rows if none has the columns that a reward function requires.
    pub fn check_columns(&self, rewards: &RewardPool) -> Result<()> {
        self.named().try_for_each(|(name, rows)| rewards.check_columns(name, rows.prompts()))
    }

    /// Warns if no held-out row can ever count as solved.
    pub fn say_unsolvable(&self, config: &Config, rewards: &RewardPool, world: &World) {
        let decides = self.eval.is_some() || config.curriculum.solve_rate.is_some();
        let deciding = config.deciding_rewards(rewards.judges());
        let doubt = rewards.doubt_of_solving(&deciding, !config.eval_solved_by.is_empty());
        if let Some(doubt) = doubt.filter(|_| decides && world.rank() == 0) {
            console::say(format_args!("warning: {doubt}"));
        }
    }

    /// Warns about rows whose reference answers cannot be parsed; collective over the world.
    pub fn say_unreadable(&self, rewards: &RewardPool, world: &World) -> Result<()> {
        for (name, rows) in self.named() {
            let notice = eval::unreadable_notice(name, rows, rewards, world)?;
            notice.filter(|_| world.rank() == 0).iter().for_each(console::say);
        }
        Ok(())
    }

    /// Lines that describe the rows, and show the first prompt as the model sees it.
    pub fn description(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, rows) in self.named() {
            lines.push(format!("{name}: {}", rows.counts()));
            lines.extend(rows.counts().notices());
        }
        if self.names.is_some() {
            lines.push(self.train.description());
        }
        lines
    }

    /// Training and held-out rows with the names of their sources; empty if rows were generated.
    fn named(&self) -> impl Iterator<Item = (&str, &Dataset)> {
        let (train, held_out) = self.names.as_ref().map(|(train, held_out)| (train, held_out.as_ref())).unzip();
        let train = train.map(|name| (&**name, &self.train));
        let held_out = held_out.flatten().map(|name| &**name).zip(self.eval.as_ref());
        train.into_iter().chain(held_out)
    }
}
