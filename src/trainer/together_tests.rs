//! Tests every pair of features in the table of features that exclude each other: either a run with both can be constructed, or the table refuses the
//! pair.
//!
//! A solver sets both features of a pair, and changes the rest of the run until the table refuses nothing. If it finds a run, the run must pass
//! checks, planning and training. Runs have as many features as possible, so a few dozen runs cover all pairs. If it finds none, the run must be
//! refused for reasons from the table.

mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::construction::{self, TrainerParts};
use super::preflight::{OpenModel, Preflight, combination};
use super::{Trainer, rows};
use crate::config::{Circumstance, Combination, Config, Device, KeyDoc, KeyValues, TABLE, Term, WorldSize, described};
use crate::cuda::Placement;
use crate::data::{Dataset, Tokenizer};
use crate::error::{Error, Result};
use crate::grpo::LossFunction;
use crate::model::{BlockSpec, Family, Mlp, ModelSource, ModelSpec, init_unit};
use crate::plan::Room;
use crate::ranks::{World, testing};
use crate::reward::RewardPool;
use crate::types::Prompt;
use run::DraftedRun;

const TEACHER: &str = "configs/arithmetic/model";
/// Generation batches in a test run's training.
const NUM_STEPS: usize = 2;

/// The terms of one side of a row of the table.
type Feature = Vec<Term>;

/// Every feature of the table once.
fn features() -> Vec<Feature> {
    let mut features: Vec<Feature> = Vec::new();
    for feature in TABLE.iter().flat_map(|row| [vec![row.feature], row.with.to_vec()]) {
        if !features.contains(&feature) {
            features.push(feature);
        }
    }
    features
}

/// A value of a key that is not its default.
fn other_than_default(key: &str) -> Value {
    match key {
        "train_file" | "eval_file" => json!("rows.jsonl"),
        "dataset_name" => json!("a/data_set"),
        "dataset_config" => json!("main"),
        "dataset_test_split" => json!("held_out"),
        "teacher_model_name_or_path" => json!(TEACHER),
        "teacher_model_revision" => json!("main"),
        "agent" => json!("agent.py:play"),
        "environment" => json!("openenv:http://localhost:8000"),
        "teacher_prompt_template" => json!("{prompt} {privileged_context}"),
        "reprompt_template" => json!("{prompt} {solution} {feedback}"),
        "solution_template" => json!("{successful_previous_attempt}"),
        "feedback_template" => json!("{feedback_raw}"),
        "use_successful_as_teacher" | "dont_reprompt_on_self_success" => json!(false),
        "include_environment_feedback"
        | "environment_feedback_only_without_solution"
        | "remove_thinking_from_demonstration" => json!(true),
        "success_reward_threshold" => json!(0.5),
        "num_loss_tokens_to_skip" => json!(1),
        "max_reprompt_len" => json!(64),
        "tools" => json!(["tools.py:add"]),
        "environment_factory" => json!("tools.py:Environment"),
        "lora.r" => json!(8),
        "lora.target_modules" => json!(["q_proj"]),
        "curriculum.solve_rate" | "dynamic_sampling_range" => json!([0.0, 1.0]),
        "delta" | "entropy_coef_max" => json!(1.5),
        "entropy_coef_min" => json!(-0.5),
        "importance_sampling_clip_min" | "ref_model_mixup_alpha" | "top_entropy_quantile" => json!(0.5),
        "lr_scheduler_kwargs.min_lr_rate" | "distillation_alpha" | "distillation_weight" => json!(0.25),
        "entropy_coef" | "entropy_coef_delta" | "router_aux_loss_coef" => json!(0.01),
        "muon" => json!(0.5),
        "num_speculative_tokens" => json!(3),
        "steps_per_generation" | "zero.shard_group_size" | "split.rollout_gpus" => json!(1),
        "environment_args" | "lora" | "generation_batch_size" | "eval_steps" | "early_stopping_patience" => json!(4),
        "curriculum.every" | "distillation_topk" | "ref_model_sync_steps" | "split" | "distillation_is_clip" => {
            json!(3)
        }
        "sapo_temperature_neg" | "sapo_temperature_pos" | "entropy_target" => json!(1.25),
        "vespo_k_pos" | "vespo_lambda_pos" | "vespo_k_neg" | "vespo_lambda_neg" => json!(1.25),
        other => panic!("no value of {other}"),
    }
}

/// A run that the solver is constructing.
#[derive(Clone)]
struct RunDraft {
    set: BTreeMap<String, Value>,
    /// Keys that the solver may not change.
    fixed: BTreeSet<&'static str>,
    has: Vec<Circumstance>,
    lacks: Vec<Circumstance>,
}

struct Solver {
    keys: BTreeMap<String, KeyDoc>,
    defaults: Combination,
    models: Vec<Arc<ModelSpec>>,
}

impl Solver {
    fn new() -> Self {
        let keys: BTreeMap<_, _> = described::<Config>().into_iter().map(|doc| (doc.key.clone(), doc)).collect();
        let defaults = keys.values().filter_map(|doc| Some((&*doc.key, doc.default.clone()?)));
        let defaults = Combination::of(defaults.filter(|(key, _)| *key != "environment_factory"));
        // Small experts: engines on CPUs decode MXFP4 in each step, which without optimisation would take most of the test's time.
        let small = |_, block: &mut BlockSpec| {
            if let Mlp::Experts(experts) = &mut block.mlp {
                experts.expert.intermediate = 64;
            }
        };
        let preset = |name: &str, layers| ModelSpec::preset(name).unwrap().with_num_layers(layers).map_blocks(small);
        let [dense, experts, hybrid] = [preset("tiny", 2), preset("tiny-moe", 2), preset("tiny-hybrid", 8)];
        let (plain, routed) = (dense.layers[0].mlp, experts.layers[0].mlp);
        let mixed = experts.clone().map_blocks(|layer, block| block.mlp = if layer == 0 { plain } else { routed });
        let both = hybrid.clone().map_blocks(|_, block| block.mlp = routed);
        let fused = ModelSpec { family: Family::Qwen3Next, ..hybrid.clone() };
        let fused_experts = ModelSpec { family: Family::Qwen3Next, ..both.clone() };
        let headed = hybrid.clone().with_draft_head();
        let models = [dense, experts, mixed, hybrid, headed, both, fused, fused_experts].map(Arc::new).to_vec();
        Self { keys, defaults, models }
    }

    fn start(&self) -> RunDraft {
        let base = [
            ("model_name_or_path", json!("m")),
            ("train_file", json!("t")),
            ("reward_funcs", json!(["format"])),
            ("reward.format_pattern", json!("(?s).*[a-m]")),
            ("device", json!("auto")),
            ("per_device_train_batch_size", json!(4)),
            ("num_generations", json!(2)),
            ("max_prompt_length", json!(8)),
            ("max_completion_length", json!(4)),
            ("max_model_length", json!(64)),
            ("kv_cache_bytes", json!(1 << 22)),
            ("max_steps", json!(64)),
        ];
        let set = base.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        RunDraft { set, fixed: BTreeSet::new(), has: Vec::new(), lacks: Vec::new() }
    }

    fn model(&self, draft: &RunDraft) -> Option<&Arc<ModelSpec>> {
        self.models.iter().find(|model| {
            let own: Vec<_> = model.circumstances().collect();
            draft.has.iter().all(|one| own.contains(one) || !is_of_model(*one))
                && !draft.lacks.iter().any(|one| own.contains(one))
        })
    }

    fn combination(&self, draft: &RunDraft) -> Option<Combination> {
        let set = draft.set.iter().map(|(key, value)| (&**key, value.clone()));
        let device = if draft.set["device"] == "auto" { json!("cpu") } else { draft.set["device"].clone() };
        let others = draft.has.iter().copied().filter(|one| !is_of_model(*one));
        let own = self.model(draft)?.circumstances().chain(others);
        Some(self.defaults.clone().with(set).with([("device", device)]).in_circumstances(own))
    }

    /// A word as a value of the key's type.
    fn typed(&self, key: &str, word: &str) -> Value {
        match self.keys[key].expected.ends_with("true or false") {
            true => json!(word == "true"),
            false => json!(word),
        }
    }

    fn has(&self, draft: &RunDraft, feature: &Feature) -> bool {
        self.combination(draft).is_some_and(|all| feature.iter().all(|term| term.is_in(&all)))
    }

    /// The draft with or without a term; `None` if that is impossible.
    fn with(&self, draft: &RunDraft, term: Term, wanted: bool) -> Option<RunDraft> {
        let mut draft = draft.clone();
        match term {
            Term::Circumstance(one) => {
                let (to, from) = if wanted { (&mut draft.has, &draft.lacks) } else { (&mut draft.lacks, &draft.has) };
                if from.contains(&one) || (!wanted && !is_of_model(one)) {
                    return None;
                }
                to.push(one);
                self.model(&draft)?;
            }
            Term::Setting(key, values) => {
                let is_there = |draft: &RunDraft| self.has(draft, &vec![term]) == wanted;
                if is_there(&draft) {
                    draft.fixed.insert(key);
                    return Some(draft);
                }
                if draft.fixed.contains(key) {
                    return None;
                }
                let value = match (values, wanted) {
                    (KeyValues::Given, true) => other_than_default(key),
                    (KeyValues::Is(words), true) | (KeyValues::Not(words), false) => self.typed(key, words[0]),
                    (KeyValues::Is(words), false) | (KeyValues::Not(words), true) => {
                        let expected = &self.keys[key].expected;
                        let all = expected.split_once("one of ").map_or("true, false", |(_, listed)| listed);
                        let is_listed = expected == "true or false" || expected.contains("one of ");
                        let other = all.split(", ").find(|word| is_listed && !words.contains(word));
                        other.map_or_else(|| other_than_default(key), |word| self.typed(key, word))
                    }
                    (KeyValues::Above(_), true) if ["lora.dropout", "warmup_ratio"].contains(&key) => json!(0.5),
                    (KeyValues::Above(number), true) | (KeyValues::AtMost(number), false) => json!(number as u64 + 1),
                    (KeyValues::Above(number), false) | (KeyValues::AtMost(number), true) => json!(number as u64),
                    (KeyValues::Begins("openenv:"), true) => other_than_default(key),
                    (KeyValues::Begins(start), true) => json!(format!("{start}a")),
                    (KeyValues::Given | KeyValues::Begins(_), false) => self.keys.get(key)?.default.clone()?,
                };
                let name = match key {
                    "split" => "split.async_steps",
                    "lora" => "lora.alpha",
                    "muon" => "muon.momentum",
                    "environment_args" => "environment_args.seed",
                    key => key,
                };
                if draft.fixed.contains(name) {
                    return None;
                }
                draft.set.insert(name.to_owned(), value);
                draft.fixed.extend([key, name]);
                if !is_there(&draft) {
                    return None;
                }
            }
        }
        Some(draft)
    }

    fn with_all(&self, draft: &RunDraft, feature: &Feature) -> Option<RunDraft> {
        feature.iter().try_fold(draft.clone(), |draft, term| self.with(&draft, *term, true))
    }

    /// A run with all fixed keys that the table does not refuse; `None` if there is none.
    fn mended(&self, draft: &RunDraft, depth: usize) -> Option<RunDraft> {
        let all = self.combination(draft)?;
        let Some(row) = TABLE.iter().find(|row| row.refusal(&all).is_some()) else { return Some(draft.clone()) };
        if depth == 0 {
            return None;
        }
        let mut terms = row.with.iter().chain([&row.feature]);
        terms.find_map(|term| self.mended(&self.with(draft, *term, false)?, depth - 1))
    }
}

fn is_of_model(one: Circumstance) -> bool {
    !matches!(one, Circumstance::SeveralNodes | Circumstance::OwnLoop | Circumstance::OwnLoss)
}

impl RunDraft {
    fn is(&self, key: &str, value: &str) -> bool {
        self.set.get(key).is_some_and(|set| set == value)
    }

    fn number(&self, key: &str) -> usize {
        self.set.get(key).and_then(Value::as_u64).unwrap_or(1) as usize
    }

    /// Sets the numbers that depend on other keys, and returns the ranks.
    fn sized(&mut self) -> WorldSize {
        let engine = self.number("tensor_parallel_size") * self.number("pipeline_parallel_size");
        let is_split = self.is("mode", "split");
        let local = engine * self.number("sequence_parallel_size");
        if let Some(num_gpus) = self.set.get_mut("split.rollout_gpus").filter(|_| is_split) {
            *num_gpus = if num_gpus.is_u64() { json!(local) } else { num_gpus.take() };
        }
        let is_apart = self.has.contains(&Circumstance::SeveralNodes);
        let nodes = if is_split || is_apart { 2 } else { 1 };
        let ranks = local * nodes;
        if self.set.get("generation_batch_size").is_some_and(Value::is_u64) {
            self.set.insert("generation_batch_size".into(), json!(4 * ranks));
        }
        WorldSize { ranks, local_ranks: if is_apart { local } else { ranks } }
    }

    fn config(&self) -> Result<Config> {
        Config::from_imported(self.set.clone())
    }
}

fn told(feature: &Feature) -> String {
    feature.iter().map(Term::described).collect::<Vec<_>>().join(" and ")
}

/// Whether every part of an error is from the table.
fn is_of_table(error: &Error) -> bool {
    match error {
        Error::InvalidConfig(all) => all.iter().all(is_of_table),
        error => TABLE.iter().any(|row| error.to_string().contains(row.why)),
    }
}

#[test]
fn every_pair_of_features_runs_or_is_refused_by_the_table() {
    tch::set_num_threads(1);
    let (solver, features) = (Solver::new(), features());
    let (mut left, mut num_refused, mut wrong) = (BTreeSet::new(), 0, Vec::new());
    for (a, first) in features.iter().enumerate() {
        for (b, second) in features.iter().enumerate().skip(a) {
            let both = |one, other| solver.with_all(&solver.with_all(&solver.start(), one)?, other);
            let Some(draft) = both(first, second).or_else(|| both(second, first)) else { continue };
            if solver.mended(&draft, 8).is_some() {
                left.insert((a, b));
                continue;
            }
            num_refused += 1;
            match DraftedRun::new(&solver, &draft).err() {
                Some(error) if is_of_table(&error) => {}
                other => wrong.push(format!("{} with {}: {other:?}", told(first), told(second))),
            }
        }
    }
    let num_pairs = left.len();
    println!("{} features, {num_pairs} pairs, {num_refused} refused, wrong {}", features.len(), wrong.len());
    let (mut num_runs, mut num_trained) = (0, 0);
    while let Some(&(a, b)) = left.first() {
        let both = |one, other| solver.with_all(&solver.with_all(&solver.start(), &features[one])?, &features[other]);
        let draft = both(a, b).or_else(|| both(b, a)).expect("found above");
        let mut run = solver.mended(&draft, 8).expect("found above");
        for (c, feature) in features.iter().enumerate() {
            let is_new =
                left.contains(&(a, c)) || left.contains(&(b, c)) || left.contains(&(c, a)) || left.contains(&(c, b));
            let more = is_new.then(|| solver.with_all(&run, feature)).flatten();
            if let Some(mended) = more.and_then(|draft| solver.mended(&draft, 3)) {
                run = mended;
            }
        }
        let present: Vec<_> = (0..features.len()).filter(|c| solver.has(&run, &features[*c])).collect();
        assert!(present.contains(&a) && present.contains(&b));
        left.retain(|(a, b)| !(present.contains(a) && present.contains(b)));
        num_runs += 1;
        let outcome = DraftedRun::new(&solver, &run).and_then(|run| {
            run.preflight()?;
            num_trained += usize::from(run.is_trainable());
            if run.is_trainable() { run.train() } else { Ok(()) }
        });
        if let Err(error) = outcome {
            wrong.push(format!("{:?} of {:?}: {error}", run.set, run.has));
        }
    }
    println!("{num_runs} runs, {num_trained} trained");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong[..wrong.len().min(60)].join("\n"));
    assert!(num_pairs > 2000 && num_refused > 200 && num_trained > 15, "{num_pairs} {num_refused} {num_trained}");
}
