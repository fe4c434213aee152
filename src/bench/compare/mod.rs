//! Compares steps of several placements, from lines printed by `bench step`, as a table and a picture.

mod svg;

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use crate::config::CarriedKv;
use crate::error::{Error, Result};
use crate::metrics::read_metrics;
use crate::phase::Phase;
use crate::untrusted::{self, MAX_LOG_BYTES};
pub use svg::ChartLine;

/// The phases of generation, grouped under labels.
const GENERATING: [(&str, &[Phase]); 3] = [
    ("weights, memory", &[Phase::Offload, Phase::Gather, Phase::Wake, Phase::Sleep, Phase::Reload]),
    ("generate", &[Phase::Generate]),
    ("rewards", &[Phase::Reward]),
];
const TRAINING: [(&str, &[Phase]); 3] = [
    ("score", &[Phase::Score]),
    ("forward, backward", &[Phase::Pack, Phase::ForwardBackward]),
    ("optimizer", &[Phase::Optimizer]),
];

/// One measured placement.
#[derive(Debug, Clone, PartialEq)]
struct PlacementRun {
    name: String,
    is_split: bool,
    is_async: bool,
    tokens_per_second: f64,
    step_s: f64,
    /// Median seconds, by the phases' names.
    phases_s: serde_json::Map<String, Value>,
    idle_trainers_s: f64,
    idle_generators_s: f64,
    /// Used memory of the fullest GPU, in GB.
    used_gb: Option<f64>,
}

/// Compares the runs in `results`, one JSON line each. Writes `compare.json` and `compare.svg` to `output`, and `curves.svg` with the rewards in
/// `curves` (labels and metrics.jsonl files), if there are any. Returns a table as text.
///
/// # Errors
/// [`Error::BadFile`] for a line that `bench step` did not print; [`Error::Io`].
pub fn compare(results: &Path, output: &Path, curves: &[(String, std::path::PathBuf)]) -> Result<String> {
    let text = untrusted::read_text(results, MAX_LOG_BYTES).map_err(|error| {
        Error::bad_file(results, format!("{error}; expected a file with the JSON lines that `bench step` prints"))
    })?;
    let runs = text.lines().filter(|line| !line.trim().is_empty()).map(|line| PlacementRun::read(line, results));
    let runs: Vec<PlacementRun> = runs.collect::<Result<_>>()?;
    if runs.is_empty() {
        return Err(Error::bad_file(
            results,
            "the file is empty: expected the JSON lines that `bench step` prints".to_owned(),
        ));
    }
    let write = |name: &str, text: &str| {
        let path = output.join(name);
        std::fs::write(&path, text).map_err(Error::io(path))
    };
    std::fs::create_dir_all(output).map_err(Error::io(output))?;
    let rows: Vec<Value> = runs.iter().map(PlacementRun::to_json).collect();
    write("compare.json", &format!("{:#}\n", json!({"measured": rows})))?;
    write("compare.svg", &svg::bars(&runs.iter().flat_map(PlacementRun::bars).collect::<Vec<_>>()))?;
    if !curves.is_empty() {
        let lines: Vec<ChartLine> =
            curves.iter().map(|(label, path)| reward_line(label, path)).collect::<Result<_>>()?;
        write("curves.svg", &svg::lines("reward by step", &lines))?;
    }
    Ok(table(&runs))
}

fn reward_line(label: &str, path: &Path) -> Result<ChartLine> {
    let lines = read_metrics(path)?;
    let points = lines.iter().filter_map(|line| Some((line.step as f64, *line.values.get("reward")?))).collect();
    Ok(ChartLine { label: label.to_owned(), points })
}

impl PlacementRun {
    fn read(line: &str, path: &Path) -> Result<Self> {
        let bad = |what: &str| Error::bad_file(path, format!("a line has no {what}: {line:.80}"));
        let value: Value = serde_json::from_str(line).map_err(|_| {
            Error::bad_file(path, format!("expected lines of JSON, as `bench step` prints them: {line:.80}"))
        })?;
        let number = |key: &str| value[key].as_f64().ok_or_else(|| bad(key));
        let count = |key: &str| number(key).map(|number| number as usize);
        let (is_split, async_steps) = (value["mode"] == "split", value["async_steps"].as_u64().unwrap_or(0));
        let (num_generators, tensor_parallel_size) = (count("num_generators")?, count("tensor_parallel_size")?);
        let stages = value["pipeline_parallel_size"].as_u64().filter(|stages| *stages > 1);
        let pp = stages.map(|stages| format!(", pp {stages}")).unwrap_or_default();
        let (num_trainers, tp) = (count("num_trainers")?, format!("tp {tensor_parallel_size}{pp}"));
        let oversample = value["oversample"].as_f64().unwrap_or(0.0);
        let kept = if value["carried_kv"] == CarriedKv::Keep.name() { ", KV cache kept" } else { "" };
        let kind = match async_steps {
            0 => "split".to_owned(),
            1 => "async split".to_owned(),
            steps => format!("async split by {steps}"),
        };
        let used = |rank: &Value| rank["used_bytes"].as_f64().filter(|bytes| *bytes > 0.0);
        let peaks = value["peak_by_rank"].as_array().into_iter().flatten();
        Ok(Self {
            name: match is_split {
                true => format!("{kind} {num_trainers} + {num_generators}, {tp}"),
                false if oversample > 0.0 => format!("colocated, {tp}, oversample {oversample}{kept}"),
                false => format!("colocated, {tp}"),
            },
            is_split,
            is_async: async_steps > 0,
            tokens_per_second: number("tokens_per_second")?,
            step_s: number("step_s")?,
            phases_s: value["phases_s"].as_object().ok_or_else(|| bad("phases_s"))?.clone(),
            idle_trainers_s: value["metrics"]["timing_s/idle_trainers"].as_f64().unwrap_or(0.0),
            idle_generators_s: value["metrics"]["timing_s/idle_generators"].as_f64().unwrap_or(0.0),
            used_gb: peaks.filter_map(used).max_by(f64::total_cmp).map(|bytes| bytes / 1e9),
        })
    }

    fn seconds(&self, phases: &[Phase]) -> f64 {
        phases.iter().filter_map(|phase| self.phases_s.get(phase.name())?.as_f64()).sum()
    }

    fn sum(&self, parts: &[(&str, &[Phase])]) -> f64 {
        parts.iter().map(|(_, phases)| self.seconds(phases)).sum()
    }

    fn transitions_s(&self) -> f64 {
        self.seconds(GENERATING[0].1)
    }

    fn generate_s(&self) -> f64 {
        self.seconds(GENERATING[1].1)
    }

    fn train_s(&self) -> f64 {
        self.sum(&TRAINING)
    }

    /// One bar for a colocated run, two (training and generation) for a split run; training starts after the trainers' idle time.
    fn bars(&self) -> Vec<svg::Bar> {
        let parts = |parts: &[(&'static str, &[Phase])]| -> Vec<(&'static str, f64)> {
            parts.iter().map(|(name, phases)| (*name, self.seconds(phases))).collect()
        };
        let bar = |name: String, start, parts| svg::Bar { name, start, parts, total: self.step_s };
        if !self.is_split {
            return vec![bar(self.name.clone(), 0.0, [parts(&GENERATING), parts(&TRAINING)].concat())];
        }
        let half = |who: &str| format!("{}: {who}", self.name);
        let trainers = bar(half("train"), self.idle_trainers_s, parts(&TRAINING));
        vec![bar(half("generate"), 0.0, parts(&GENERATING)), trainers]
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "step_s": self.step_s,
            "generate_s": self.generate_s(),
            "train_s": self.train_s(),
            "weights_and_memory_s": self.transitions_s(),
            "idle_trainers_s": self.idle_trainers_s,
            "idle_generators_s": self.idle_generators_s,
            "tokens_per_second": self.tokens_per_second,
            "used_gb": self.used_gb,
        })
    }
}

fn table(runs: &[PlacementRun]) -> String {
    let best =
        |wanted: fn(&&PlacementRun) -> bool| runs.iter().filter(wanted).map(|run| run.step_s).min_by(f64::total_cmp);
    let colocated = best(|run| !run.is_split);
    let mut text = format!(
        "{:<31} {:>8} {:>9} {:>8} {:>8} {:>14} {:>12} {:>9} {:>8} {:>9}\n",
        "seconds",
        "step",
        "generate",
        "train",
        "weights",
        "idle: trainers",
        "generators",
        "tokens/s",
        "used, GB",
        "colocated"
    );
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for run in runs {
        let _ = writeln!(
            text,
            "{:<31} {:>8.3} {:>9.3} {:>8.3} {:>8.3} {:>14.3} {:>12.3} {:>9.0} {:>8} {:>9}",
            run.name,
            run.step_s,
            run.generate_s(),
            run.train_s(),
            run.transitions_s(),
            run.idle_trainers_s,
            run.idle_generators_s,
            run.tokens_per_second,
            or_dash(run.used_gb.map(|gb| format!("{gb:.1}"))),
            or_dash(colocated.map(|colocated| format!("{:.2}x", run.step_s / colocated))),
        );
    }
    for (name, step_s) in [
        ("best synchronous split", best(|run| run.is_split && !run.is_async)),
        ("best asynchronous split", best(|run| run.is_async)),
    ] {
        if let (Some(step_s), Some(colocated)) = (step_s, colocated) {
            let _ = writeln!(text, "colocated is {:.2} times as fast as the {name}", step_s / colocated);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line as printed by `bench step`, for a machine on which `b` sequences take `1 + 0.1 b` seconds to generate and training takes 12 / n.
    fn line(mode: &str, num_trainers: usize, num_generators: usize, async_steps: usize) -> String {
        let (generate, train) = (1.0 + 6.4 * 4.0 / num_generators as f64, 12.0 / num_trainers as f64);
        let step_s = if async_steps == 1 { generate.max(train) } else { generate + train } + 0.1;
        let idle = |other: f64| if mode == "split" && async_steps == 0 { other } else { 0.0 };
        let metrics = json!({"timing_s/idle_trainers": idle(generate), "timing_s/idle_generators": idle(train)});
        json!({
            "mode": mode, "async_steps": async_steps, "num_trainers": num_trainers, "num_generators": num_generators,
            "tensor_parallel_size": 1, "prompts": 32, "group": 8, "num_params": 1000, "tokens_per_second": 5.0,
            "step_s": step_s, "metrics": metrics,
            "phases_s": {"generate": generate, "forward_backward": train, "gather": 0.1},
        })
        .to_string()
    }

    #[test]
    fn benchmark_results_become_a_table_a_chart_and_json() {
        let folder = tempfile::tempdir().unwrap();
        let (results, output) = (folder.path().join("results.jsonl"), folder.path().join("out"));
        let lines = [line("colocated", 4, 4, 0), line("split", 2, 2, 0), line("split", 2, 2, 1)];
        std::fs::write(&results, lines.join("\n")).unwrap();
        let table = compare(&results, &output, &[]).unwrap();
        for part in [
            "colocated, tp 1 ",
            "split 2 + 2, tp 1 ",
            "async split 2 + 2, tp 1 ",
            "1.90 times as fast as the best synchronous",
        ] {
            assert!(table.contains(part), "{part}:\n{table}");
        }
        let written: Value = serde_json::from_slice(&std::fs::read(output.join("compare.json")).unwrap()).unwrap();
        assert_eq!(written["measured"][1]["idle_generators_s"], 6.0);
        let picture = std::fs::read_to_string(output.join("compare.svg")).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("async split 2 + 2, tp 1: train"), "{picture}");
        let mut staged: Value = serde_json::from_str(&lines[1]).unwrap();
        staged["pipeline_parallel_size"] = json!(2);
        assert_eq!(PlacementRun::read(&staged.to_string(), &results).unwrap().name, "split 2 + 2, tp 1, pp 2");
        let alone = super::table(&[PlacementRun::read(&lines[1], &results).unwrap()]);
        assert!(alone.trim_end().ends_with(" -"), "nothing to compare with:\n{alone}");
        std::fs::write(&results, "{\"mode\": \"split\"}\n").unwrap();
        let error = compare(&results, &output, &[]).unwrap_err().to_string();
        assert!(error.contains("a line has no num_generators"), "{error}");
    }
}
