//! Which metrics are plotted together.

use std::collections::{BTreeMap, BTreeSet};

use super::super::jsonl::MetricLine;
use super::plot::{Plot, Series, Shape};

/// The values of every metric over the steps.
#[derive(Debug, Clone)]
pub struct History {
    series: BTreeMap<String, Vec<(f64, f64)>>,
    /// Steps of the first and the last line.
    pub(super) steps: (f64, f64),
    num_values: usize,
}

impl Default for History {
    fn default() -> Self {
        Self { series: BTreeMap::new(), steps: (f64::INFINITY, f64::NEG_INFINITY), num_values: 0 }
    }
}

impl History {
    pub(super) fn new(lines: &[MetricLine]) -> Self {
        let mut history = Self::default();
        lines.iter().for_each(|line| history.push(line));
        history
    }

    /// Appends a line.
    pub fn push(&mut self, line: &MetricLine) {
        let step = line.step as f64;
        self.steps = (self.steps.0.min(step), self.steps.1.max(step));
        self.num_values += line.values.len();
        for (name, value) in &line.values {
            match self.series.get_mut(name) {
                Some(points) => points.push((step, *value)),
                None => drop(self.series.insert(name.clone(), vec![(step, *value)])),
            }
        }
    }

    /// Number of values of all metrics together.
    pub fn num_values(&self) -> usize {
        self.num_values
    }

    /// The largest step of all lines.
    pub fn last_step(&self) -> Option<f64> {
        Some(self.steps.1).filter(|step| step.is_finite())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.series.is_empty()
    }

    /// A metric's steps and values.
    pub fn get(&self, name: &str) -> Option<&[(f64, f64)]> {
        self.series.get(name).map(Vec::as_slice)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &[(f64, f64)])> {
        self.series.iter().map(|(name, points)| (name.as_str(), points.as_slice()))
    }

    fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = (&str, &[(f64, f64)])> {
        self.all().filter_map(move |(name, points)| Some((name.strip_prefix(prefix)?, points)))
    }
}

/// Panels: title, and metrics with their labels. Metrics that a run does not have are left out, and so are panels without metrics.
const PANELS: [(&str, &[(&str, &str)]); 16] = [
    ("Reward", &[("reward", "training"), ("eval_reward", "evaluation")]),
    ("Loss", &[("loss", "loss")]),
    ("KL to the reference", &[("kl", "kl")]),
    ("Divergence from the teacher, nats per token", &[("distillation/kl", "reverse KL")]),
    ("Entropy, nats per token", &[("entropy", "entropy")]),
    (
        "Completion length, tokens",
        &[
            ("completions/mean_length", "mean"),
            ("completions/min_length", "min"),
            ("completions/max_length", "max"),
            ("eval_completions/mean_length", "mean, evaluation"),
        ],
    ),
    (
        "Share of completions and groups",
        &[("completions/clipped_ratio", "cut by length"), ("frac_reward_zero_std", "groups of equal rewards")],
    ),
    (
        "Groups a step, with dynamic sampling",
        &[("dynamic_sampling/generated_groups", "sampled"), ("dynamic_sampling/kept_groups", "trained on")],
    ),
    (
        "Rows that come less often, by the curriculum",
        &[("curriculum/hard_rows", "solved too rarely"), ("curriculum/easy_rows", "solved too often")],
    ),
    ("Gradient norm before clipping", &[("grad_norm", "norm")]),
    ("Learning rate", &[("learning_rate", "learning rate")]),
    (
        "Clipped ratios",
        &[
            ("clip_ratio/low_mean", "low"),
            ("clip_ratio/high_mean", "high"),
            ("clip_ratio/region_mean", "either"),
            ("cispo_clip_ratio", "capped"),
        ],
    ),
    (
        "Sampler against trainer, |difference| in nats",
        &[("sampling/sampling_logp_difference/mean", "mean"), ("sampling/sampling_logp_difference/max", "max")],
    ),
    (
        "Sampler correction",
        &[
            ("sampling/importance_sampling_ratio/min", "min"),
            ("sampling/importance_sampling_ratio/mean", "mean"),
            ("sampling/importance_sampling_ratio/max", "max"),
        ],
    ),
    (
        "Tokens per second",
        &[
            ("perf/tokens_per_second_per_gpu", "whole step, each rank"),
            ("perf/generation_tokens_per_second", "generation, all ranks"),
        ],
    ),
    ("Memory, GB", &[("perf/max_resident_gb", "resident at most, a rank")]),
];

/// Series that follow a schedule or a limit, which are shown without a moving average because it would distort them.
const EXACT: [&str; 3] = ["learning_rate", "completions/min_length", "completions/max_length"];

/// Maximum number of colours that a reader can distinguish.
const MAX_SERIES: usize = 8;

/// The plots of a run, in reading order.
pub(super) fn plots(history: &History) -> Vec<Plot> {
    let mut plots = Vec::new();
    for (title, metrics) in PANELS {
        let series = metrics.iter().filter_map(|(name, label)| Some(series(name, label, history.get(name)?)));
        plots.push(Plot { title: title.into(), shape: Shape::Lines, series: series.collect() });
        if title == "Reward" {
            plots.push(reward_functions(history));
            plots.push(other_evaluation(history));
        }
    }
    plots.push(timing(history));
    plots.retain(|plot| !plot.series.is_empty());
    plots
}

/// The plots of several runs: each shows the main metric of a panel, with one line per run.
pub(super) fn compared(runs: &[(&str, &History)]) -> Vec<Plot> {
    let of_metric = |title: &str, name: &str| {
        let lines = runs.iter().filter_map(|(run, history)| Some(series(name, run, history.get(name)?)));
        Plot { title: title.into(), shape: Shape::Lines, series: lines.take(MAX_SERIES).collect() }
    };
    let mut plots = Vec::new();
    for (title, metrics) in PANELS {
        plots.extend(metrics.first().map(|(name, _)| of_metric(title, name)));
        if title == "Reward" {
            plots.push(of_metric("Reward in evaluations", "eval_reward"));
            let rewards = runs.iter().flat_map(|(_, history)| history.with_prefix("rewards/").map(|(name, _)| name));
            let names: BTreeSet<&str> = rewards.filter_map(|name| name.strip_suffix("/mean")).collect();
            let each = names.iter().map(|name| of_metric(&format!("Reward {name}"), &format!("rewards/{name}/mean")));
            plots.extend(each.take(MAX_SERIES));
        }
    }
    plots.push(of_metric("Seconds per step", "step_time"));
    plots.retain(|plot| !plot.series.is_empty());
    plots
}

fn series(name: &str, label: &str, points: &[(f64, f64)]) -> Series {
    let is_evaluation = name.starts_with("eval_");
    let is_smooth = !is_evaluation && !EXACT.contains(&name);
    Series { label: label.into(), points: points.to_vec(), is_smooth, has_marks: is_evaluation }
}

fn reward_functions(history: &History) -> Plot {
    let means = history.with_prefix("rewards/").filter_map(|(rest, points)| {
        let label = rest.strip_suffix("/mean")?;
        Some(series("rewards", label, points))
    });
    Plot { title: "Reward functions".into(), shape: Shape::Lines, series: means.take(MAX_SERIES).collect() }
}

fn other_evaluation(history: &History) -> Plot {
    let is_plotted = |name: &str| PANELS.iter().any(|(_, metrics)| metrics.iter().any(|(known, _)| *known == name));
    // The reward's spread is not a score to show beside pass@k.
    let is_score = |name: &str| name.starts_with("eval_") && !name.starts_with("eval_reward") && !name.contains('/');
    let rest = history.all().filter(|(name, _)| is_score(name) && !is_plotted(name));
    let series = rest.map(|(name, points)| series(name, &name["eval_".len()..], points)).take(MAX_SERIES);
    Plot { title: "Evaluation".into(), shape: Shape::Lines, series: series.collect() }
}

/// Phases by their time, with the small ones combined, and the time outside of phases.
fn timing(history: &History) -> Plot {
    let mut phases: Vec<Series> =
        history.with_prefix("timing_s/").map(|(name, points)| series("timing_s", name, points)).collect();
    let total = |series: &Series| series.points.iter().map(|point| point.1).sum::<f64>();
    phases.sort_by(|a, b| total(b).total_cmp(&total(a)));
    let mut rest = BTreeMap::new();
    for (step, value) in history.get("step_time").unwrap_or_default() {
        rest.insert(step.to_bits(), *value);
    }
    for (step, value) in phases.iter().take(MAX_SERIES - 1).flat_map(|phase| &phase.points) {
        rest.entry(step.to_bits()).and_modify(|rest| *rest -= value);
    }
    if rest.is_empty() {
        for (step, value) in phases.iter().skip(MAX_SERIES - 1).flat_map(|phase| &phase.points) {
            *rest.entry(step.to_bits()).or_default() += value;
        }
    }
    if !phases.is_empty() && !rest.is_empty() {
        phases.truncate(MAX_SERIES - 1);
        let points: Vec<_> = rest.into_iter().map(|(step, value)| (f64::from_bits(step), value.max(0.0))).collect();
        phases.push(series("timing_s", "everything else", &points));
    }
    Plot { title: "Seconds per step".into(), shape: Shape::Stack, series: phases }
}
