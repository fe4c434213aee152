//! Whole rollouts of a model's own text with and without draft tokens: their times, including drafting, and differences in their results.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use tch::Kind;

use super::{device_name, dtype_name, median};
use crate::config::{EngineShape, Speculation};
use crate::console;
use crate::data::{Dataset, DatasetOptions};
use crate::error::{Error, Result};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::rollout::{EngineFormats, EngineStats, SpeculationOptions};
use crate::serve::{EngineDivision, ModelService, ServeOptions};
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// The benchmark of speculative decoding. All ranks share one engine.
#[derive(Debug, Clone)]
pub struct SpeculationBench {
    /// The model's folder.
    pub model: PathBuf,
    /// File of rows with prompts.
    pub rows: PathBuf,
    /// Dtype of weights, activations and cache.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Drafting methods to compare; the first is the reference.
    pub methods: Vec<Speculation>,
    /// Maximum number of draft tokens of a completion in a step.
    pub num_tokens: usize,
    /// Numbers of completions in a rollout; each is measured separately.
    pub sequences: Vec<usize>,
    /// Completions per prompt.
    pub group: usize,
    /// Maximum completion length in tokens.
    pub max_completion_length: usize,
    /// Softmax temperature.
    pub temperature: f32,
    /// Whether every rollout has the same rows, as in later epochs: draft tokens then come from completions of earlier rollouts.
    pub same_rows: bool,
    /// Number of timed rollouts, after an untimed one.
    pub repeats: usize,
}

/// The rollouts of one method and number of sequences.
#[derive(Debug, Default)]
struct Rollouts {
    seconds: Vec<f64>,
    tokens: usize,
    stats: EngineStats,
    completions: Vec<Vec<u32>>,
}

/// Runs the benchmark; collective over the world.
///
/// # Errors
/// The errors of reading the model folder and the rows; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub fn bench_speculation(bench: &SpeculationBench, world: &Arc<World>) -> Result<Value> {
    let mut of_methods: Vec<Vec<Rollouts>> = bench.methods.iter().map(|_| Vec::new()).collect();
    for has_head in [false, true] {
        let is_served = |method: Speculation| (method == Speculation::Mtp) == has_head;
        let served = || bench.methods.iter().copied().enumerate().filter(|(_, method)| is_served(*method));
        // One engine for all methods that it can serve: two engines of a process differed by up to 12 % in speed.
        let Some((_, first)) = served().max_by_key(|(_, method)| *method != Speculation::None) else { continue };
        let mut service = bench.service(world, first)?;
        for (index, method) in served() {
            service.served.engine_mut().set_speculation(method);
            of_methods[index] = bench.rollouts(world, &mut service, method)?;
        }
    }
    let mut sizes = Vec::new();
    for (index, &sequences) in bench.sequences.iter().enumerate() {
        let all: Vec<&Rollouts> = of_methods.iter().map(|rollouts| &rollouts[index]).collect();
        let methods = bench.methods.iter().zip(&all).map(|(method, own)| own.to_json(*method, all[0]));
        sizes.push(json!({"sequences": sequences, "methods": methods.collect::<Vec<_>>()}));
    }
    Ok(json!({
        "benchmark": "speculation",
        "model": bench.model.display().to_string(),
        "device": device_name(world.device()),
        "dtype": dtype_name(bench.kind),
        "tensor_parallel_size": world.size(),
        "group": bench.group,
        "max_completion_length": bench.max_completion_length,
        "temperature": bench.temperature,
        "num_speculative_tokens": bench.num_tokens,
        "same_rows": bench.same_rows,
        "repeats": bench.repeats,
        "sizes": sizes,
    }))
}

impl SpeculationBench {
    /// Loads the model into an engine with memory for the draft tokens of `method`.
    fn service(&self, world: &Arc<World>, method: Speculation) -> Result<ModelService> {
        let options = ServeOptions {
            model: &self.model,
            base_model: None,
            adapters: &[],
            quantization: None,
            template_variables: &Map::new(),
            division: EngineDivision {
                shape: EngineShape::from(world.size()),
                pipeline_partition: &[],
                enable_expert_parallel: false,
            },
            max_model_length: None,
            kind: self.kind,
            residual: self.residual,
            formats: EngineFormats::PLAIN,
            speculation: SpeculationOptions { method, num_tokens: self.num_tokens },
        };
        ModelService::load(&options, world)
    }

    /// Runs the rollouts of the engine's method, by number of sequences, and says how fast each was.
    fn rollouts(&self, world: &Arc<World>, service: &mut ModelService, method: Speculation) -> Result<Vec<Rollouts>> {
        let ModelService { served, tokenizer, max_model_length, .. } = service;
        let limits = DatasetOptions {
            max_model_length: Some(*max_model_length),
            max_completion_length: self.max_completion_length,
            ..DatasetOptions::default()
        };
        let dataset = Dataset::from_file(&self.rows, tokenizer, &limits)?;
        let mut all = Vec::new();
        for &sequences in &self.sequences {
            let mut rollouts = Rollouts::default();
            for repeat in 0..=self.repeats {
                let prompts = if world.rank() == 0 { self.prompts(&dataset, sequences, repeat)? } else { Vec::new() };
                let params = SamplingParams {
                    num_generations: self.group.min(sequences),
                    max_completion_length: self.max_completion_length,
                    temperature: self.temperature,
                    step: repeat as u64,
                    ..SamplingParams::default()
                };
                let (groups, mut seconds, stats) = served.with_engine(|rollout| {
                    let start = Instant::now();
                    let groups = rollout.generate(&prompts, &params, |_| ())?;
                    Ok((groups, [start.elapsed().as_secs_f64()], *rollout.stats()))
                })?;
                all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
                if repeat > 0 {
                    rollouts.add(&groups, seconds[0], stats);
                }
            }
            if world.rank() == 0 {
                let rate = rollouts.tokens as f64 / rollouts.seconds.iter().sum::<f64>();
                console::say(format_args!("{}: {sequences} at once: {rate:.0} tokens/s", method.name()));
            }
            all.push(rollouts);
        }
        Ok(all)
    }

    /// The prompts of one rollout; different for every repetition unless `same_rows` is set.
    fn prompts(&self, dataset: &Dataset, sequences: usize, repeat: usize) -> Result<Vec<Prompt>> {
        let group = self.group.min(sequences);
        if !sequences.is_multiple_of(group) {
            let expected = format!("a multiple of {group}, the number of completions per prompt");
            return Err(Error::invalid_value("--sequences", sequences, expected));
        }
        let count = sequences / group;
        let first = if self.same_rows { 0 } else { repeat * count };
        let needed = first + count;
        if needed > dataset.len() {
            return Err(self.too_few(&self.rows, needed, dataset.len()));
        }
        Ok((first..needed).map(|row| dataset.prompt(row).clone()).collect())
    }

    fn too_few(&self, rows: &Path, needed: usize, got: usize) -> Error {
        let got = format!("{} with {got} rows", rows.display());
        Error::invalid_value("--rows", got, format!("a file with at least {needed} rows, or --same_rows to reuse rows"))
    }
}

impl Rollouts {
    fn add(&mut self, groups: &[RolloutGroup], seconds: f64, stats: EngineStats) {
        let completions = groups.iter().flat_map(|group| &group.completions);
        self.completions.extend(completions.map(|completion| completion.token_ids.clone()));
        self.seconds.push(seconds);
        self.tokens += stats.num_generated_tokens;
        self.stats.num_steps += stats.num_steps;
        self.stats.num_draft_tokens += stats.num_draft_tokens;
        self.stats.num_accepted_tokens += stats.num_accepted_tokens;
        self.stats.num_drafted_sequences += stats.num_drafted_sequences;
        self.stats.num_waited_steps += stats.num_waited_steps;
    }

    fn to_json(&self, method: Speculation, first: &Self) -> Value {
        let all: f64 = self.seconds.iter().sum();
        let EngineStats { num_steps, num_draft_tokens, num_accepted_tokens, num_drafted_sequences, .. } = self.stats;
        let share = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let differing = self.completions.iter().zip(&first.completions).filter(|(own, first)| own != first).count();
        json!({
            "speculation": method.name(),
            "seconds": median(self.seconds.clone()),
            "tokens_per_second": self.tokens as f64 / all,
            "speedup": first.seconds.iter().sum::<f64>() / all,
            "steps": num_steps,
            "waited_steps": self.stats.num_waited_steps,
            "tokens": self.tokens,
            "longest_completion": self.completions.iter().map(Vec::len).max().unwrap_or(0),
            "draft_tokens": num_draft_tokens,
            "accepted_tokens": num_accepted_tokens,
            "acceptance": share(num_accepted_tokens, num_draft_tokens),
            "mean_accepted": share(num_accepted_tokens, num_drafted_sequences),
            "differing_completions": share(differing, first.completions.len()),
        })
    }
}
