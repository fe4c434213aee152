use std::collections::BTreeMap;
use std::sync::Arc;

use super::rates::TRAIN;
use super::*;
use crate::config::AutoOr;
use crate::model::ParamTable;
use crate::train::TrainedModel;

/// Measured steps, one per line: shape, keys, seconds, and the page of docs/benchmarks with the source. Generation measured before the present
/// kernels (2026-11-21, noon) is left out.
const RECORDED: &str = include_str!("../../../tests/golden/recorded_steps.jsonl");

#[derive(Debug, serde::Deserialize)]
struct Recorded {
    source: String,
    chip: String,
    model: String,
    layers: Option<usize>,
    gpus: usize,
    prompts: usize,
    group: usize,
    prompt_len: usize,
    completion_len: usize,
    spread: Option<String>,
    keys: Vec<String>,
    seconds: BTreeMap<String, f64>,
}

fn recorded() -> Vec<Recorded> {
    RECORDED.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

fn config(keys: &[String]) -> Config {
    let required = ["model_name_or_path=model", "train_file=rows.jsonl", "reward_funcs=[\"format\"]"];
    let keys: Vec<String> = required.iter().map(|key| (*key).to_owned()).chain(keys.iter().cloned()).collect();
    Config::load(None, &keys).unwrap_or_else(|error| panic!("{keys:?}: {error}"))
}

fn given<T>(key: AutoOr<T>) -> Option<T> {
    match key {
        AutoOr::Given(value) => Some(value),
        AutoOr::Auto => None,
    }
}

impl Recorded {
    /// Predicted seconds by part. For training alone, without the additional time of a whole step.
    fn predicted(&self) -> BTreeMap<&'static str, f64> {
        let config = config(&self.keys);
        let mut spec = ModelSpec::preset(&self.model).unwrap();
        spec.layers.truncate(self.layers.unwrap_or(usize::MAX));
        let roles = config.roles(self.gpus).unwrap();
        let shards = if config.zero.stage == 0 { 1 } else { roles.num_trainers };
        let table = ParamTable::new(Arc::new(spec), shards);
        let model = TrainedModel::of(&config, &table, Kind::BFloat16);
        let fixed = CompletionLengths::fixed(self.completion_len);
        let work = PlannedStep {
            config: &config,
            spec: &table.spec,
            roles,
            num_prompts: self.prompts,
            group: self.group,
            updates: 1,
            lengths: ExpectedLengths {
                prompt: self.prompt_len as f64,
                completion: self.spread.as_ref().map_or(fixed, |spread| spread.parse().unwrap()),
            },
            keep: given(config.gradient_checkpointing).unwrap_or(GradientCheckpointing::None),
            residency: given(config.residency.optimizer).unwrap_or(OptimizerResidency::Resident),
            state_bytes: model.bytes().optimizer,
            optimizer_step_bytes: model.optimizer_step_bytes(),
        };
        let gpu = Gpu::named(&self.chip).unwrap();
        let StepSeconds { generate_s, train_s, transitions_s, step_s, .. } = StepSeconds::predict(&work, gpu).unwrap();
        let is_alone = self.seconds.keys().eq(["train"]);
        let train_s = if is_alone { train_s / (1.0 + TRAIN.whole_step) } else { train_s };
        BTreeMap::from([("generate", generate_s), ("train", train_s), ("transitions", transitions_s), ("step", step_s)])
    }
}

/// Relative errors for half of the records, largest first, each with a description.
fn errors(half: usize) -> Vec<(f64, String)> {
    let mut errors = Vec::new();
    for record in recorded().iter().skip(half).step_by(2) {
        let predicted = record.predicted();
        for (part, seconds) in record.seconds.iter().filter(|(part, _)| *part != "transitions") {
            let of = predicted[part.as_str()];
            let what = format!(
                "{part} of {} on {} {}: {of:.3} for {seconds:.3} s, {:?} ({})",
                record.model, record.gpus, record.chip, record.keys, record.source
            );
            errors.push(((of / seconds - 1.0).abs(), what));
        }
    }
    errors.sort_by(|a, b| b.0.total_cmp(&a.0));
    errors
}

/// The goal is a median error of 8 % and a maximum of 15 %; currently they are 2.4 % and 12.8 %.
#[test]
fn predicted_step_times_match_measurements_outside_the_fit() {
    for (half, median, worst) in [(0, 0.03, 0.10), (1, 0.03, 0.13)] {
        let errors = errors(half);
        let told: Vec<String> = errors.iter().take(12).map(|(error, what)| format!("{error:.3} {what}")).collect();
        assert!(errors.len() > 75);
        assert!(errors[0].0 < worst, "half {half}:\n{}", told.join("\n"));
        let middle = errors[errors.len() / 2].0;
        assert!(middle < median, "half {half}, median {middle}:\n{}", told.join("\n"));
    }
}

/// Transitions are compared relative to their step, because they are short and vary most.
#[test]
fn predicted_transition_times_are_close_to_measurements() {
    let mut checked = 0;
    for record in recorded() {
        let (Some(measured), Some(step)) = (record.seconds.get("transitions"), record.seconds.get("step")) else {
            continue;
        };
        let of = record.predicted()["transitions"];
        assert!((of - measured).abs() < 0.03 * step, "{of} for {measured} of {step}: {record:?}");
        checked += 1;
    }
    assert!(checked > 8, "{checked}");
}

#[test]
fn every_recorded_measurement_names_a_documented_page() {
    for record in recorded() {
        let (page, heading) = record.source.split_once('#').unwrap();
        let path = format!("{}/docs/benchmarks/{page}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let anchor = |line: &str| {
            let kept = line.trim_start_matches('#').trim().chars();
            let kept = kept.filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
            kept.collect::<String>().to_lowercase().replace(' ', "-")
        };
        assert!(text.lines().any(|line| line.starts_with('#') && anchor(line) == heading), "{}", record.source);
    }
}

fn work<'a>(config: &'a Config, spec: &'a ModelSpec) -> PlannedStep<'a> {
    PlannedStep {
        config,
        spec,
        roles: Roles { num_trainers: 1, num_generators: 1 },
        num_prompts: 16,
        group: 8,
        updates: 1,
        lengths: ExpectedLengths { prompt: 512.0, completion: CompletionLengths::fixed(1024) },
        keep: GradientCheckpointing::None,
        residency: OptimizerResidency::Resident,
        state_bytes: 1 << 34,
        optimizer_step_bytes: 1 << 35,
    }
}

#[test]
fn predictions_for_unmeasured_settings_are_refused() {
    let spec = ModelSpec::preset("qwen2.5-1.5b").unwrap();
    let refused = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        StepSeconds::predict(&work(&config(&keys), &spec), Gpu::ALL[0]).unwrap_err()
    };
    assert_eq!(refused(&["lora.r=8", "quantization=nf4"]), "quantization other than none");
    assert_eq!(refused(&["pipeline_parallel_size=2", "zero.stage=3"]), "engines in stages");
    assert_eq!(refused(&["tools=[\"t.py:f\"]"]), "tools, environments or agents");
    assert_eq!((Gpu::named("a100"), Gpu::named("h200").map(|gpu| gpu.driver_name)), (None, Some("NVIDIA H200")));
}

/// Each key with a cost or saving must change only the part that it concerns.
#[test]
fn each_key_changes_only_its_part_of_the_predicted_time() {
    let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
    let of = |keys: &[&str], change: &dyn Fn(&mut PlannedStep<'_>)| {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let config = config(&keys);
        let mut work = work(&config, &spec);
        change(&mut work);
        StepSeconds::predict(&work, Gpu::named("h200").unwrap()).unwrap()
    };
    let plain = of(&[], &|_| {});
    let fp8 = of(&["rollout_quantization=fp8"], &|_| {});
    assert!(fp8.generate_s < 0.85 * plain.generate_s && fp8.train_s == plain.train_s);
    let full = of(&[], &|work| work.keep = GradientCheckpointing::Full);
    let selective = of(&[], &|work| work.keep = GradientCheckpointing::Selective);
    assert!(
        full.train_s > selective.train_s && selective.train_s > plain.train_s && full.generate_s == plain.generate_s
    );
    let twice = of(&["num_iterations=2"], &|_| {});
    assert!(twice.train_s > 2.0 * plain.train_s && twice.generate_s == plain.generate_s);
    let reference = of(&["beta=0.1"], &|_| {});
    assert!((1.2..1.4).contains(&(reference.train_s / plain.train_s)), "{reference:?} {plain:?}");
    let waves = of(&["max_num_seqs=32"], &|_| {});
    assert!(waves.generate_s > 2.0 * plain.generate_s, "four waves of 32 rows");
    let swap = of(&[], &|work| work.residency = OptimizerResidency::Swap);
    assert!(swap.transitions_s > plain.transitions_s + 0.3 && swap.train_s == plain.train_s);
    let tail = of(&[], &|work| work.lengths.completion.shortest = 64);
    assert!(tail.generate_s < plain.generate_s && tail.train_s < 0.7 * plain.train_s);
    let ahead = of(&["mode=split", "split.rollout_gpus=1", "split.async_steps=1"], &|_| {});
    assert!(ahead.step_s < ahead.generate_s + ahead.train_s);
}

/// A window may hide a prompt from the end of a completion, so training computes it for each completion, whatever the key says.
#[test]
fn models_with_windows_do_not_share_prompts() {
    let train_s = |preset: &str, shares: bool| {
        let (spec, config) = (ModelSpec::preset(preset).unwrap(), config(&[format!("share_prompts={shares}")]));
        StepSeconds::predict(&work(&config, &spec), Gpu::named("h200").unwrap()).unwrap().train_s
    };
    assert!(train_s("qwen2.5-1.5b", true) < 0.9 * train_s("qwen2.5-1.5b", false));
    assert_eq!(train_s("gemma-3-4b", true), train_s("gemma-3-4b", false));
}

#[test]
fn experts_in_mxfp4_shorten_only_the_predicted_generation() {
    let spec = ModelSpec::preset("qwen3-30b-a3b").unwrap();
    let of = |keys: &[String]| StepSeconds::predict(&work(&config(keys), &spec), Gpu::named("h200").unwrap()).unwrap();
    let (plain, mxfp4) = (of(&[]), of(&["rollout_quantization=mxfp4".to_owned()]));
    assert!(mxfp4.generate_s < 0.75 * plain.generate_s, "{mxfp4} beside {plain}");
    assert_eq!(mxfp4.train_s, plain.train_s);
}
