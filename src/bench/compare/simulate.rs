//! Step times of other numbers of GPUs, from lines through the measured phase times. What is simulated is marked so.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::Run;

/// GPUs of a node.
const NODE_GPUS: usize = 8;
/// What weights cross nodes at, bytes a second: 400 Gb/s links, one of them in use.
const NODE_BYTES_PER_S: f64 = 50e9;
/// What is simulated.
const WORLDS: [usize; 4] = [8, 16, 32, 64];

/// A line of times: `at_zero + slope * x`. Through one place it says nothing of others.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Fit {
    at_zero: f64,
    slope: f64,
    only_at: Option<f64>,
}

/// What one machine takes, by numbers of ranks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Simulation {
    rows: Vec<Row>,
    /// Largest deviation of the lines from a measured step, as a share of it.
    worst_error: f64,
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    num_gpus: usize,
    num_sequences: usize,
    colocated_s: f64,
    /// Seconds of the best division, and its ranks that generate.
    split: (f64, usize),
    async_split: (f64, usize),
}

/// Generation by sequences an engine has, at every measured tensor-parallel degree, of which the fastest is taken; training by
/// the share of the batch a trainer has; both as fast on every node, with gradients' way between nodes hidden behind backward.
/// Weights cross nodes once a step where halves are apart.
struct Model {
    generate: BTreeMap<usize, Fit>,
    train: Fit,
    transitions_s: f64,
    push_s: f64,
    weight_bytes: f64,
}

/// Of runs that take every group they begin; nothing where they do not tell the lines.
pub(super) fn simulate(runs: &[Run]) -> Simulation {
    let runs: Vec<&Run> = runs.iter().filter(|run| run.oversample == 0.0).collect();
    let Some(model) = (!runs.is_empty()).then(|| Model::of(&runs)).flatten() else {
        return Simulation { rows: Vec::new(), worst_error: f64::NAN };
    };
    let error = |run: &&Run| (model.step_s(run) / run.step_s - 1.0).abs();
    let worst_error = runs.iter().map(error).fold(0.0, f64::max);
    let (num_measured, num_sequences) = (runs[0].num_gpus(), runs[0].num_sequences);
    let rows = WORLDS.iter().flat_map(|&num_gpus| {
        [num_sequences, num_sequences * num_gpus / num_measured].map(|sequences| model.row(num_gpus, sequences))
    });
    Simulation { rows: rows.collect(), worst_error }
}

impl Run {
    fn num_gpus(&self) -> usize {
        if self.is_split { self.num_trainers + self.num_generators } else { self.num_trainers }
    }
}

impl Model {
    fn of(runs: &[&Run]) -> Option<Self> {
        let mean = |wanted: &dyn Fn(&&&Run) -> bool| {
            let chosen: Vec<f64> = runs.iter().filter(wanted).map(|run| run.transitions_s()).collect();
            chosen.iter().sum::<f64>() / chosen.len() as f64
        };
        let mut places: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
        for run in runs {
            let of_engine = (run.num_sequences * run.tensor_parallel_size) as f64 / run.num_generators as f64;
            places.entry(run.tensor_parallel_size).or_default().push((of_engine, run.generate_s()));
        }
        let train: Vec<_> =
            runs.iter().map(|run| (run.num_sequences as f64 / run.num_trainers as f64, run.train_s())).collect();
        let train = Fit::through(&train);
        train.only_at.is_none().then(|| Self {
            generate: places.into_iter().map(|(tp, places)| (tp, Fit::through(&places))).collect(),
            train,
            transitions_s: mean(&|run| !run.is_split),
            push_s: mean(&|run| run.is_split),
            weight_bytes: runs[0].weight_bytes,
        })
    }

    /// What the model says of a run that was measured.
    fn step_s(&self, run: &Run) -> f64 {
        let of_engine = (run.num_sequences * run.tensor_parallel_size) as f64 / run.num_generators as f64;
        let generate = self.generate[&run.tensor_parallel_size].at(of_engine);
        match run.is_split {
            true => self.split_s(generate, (run.num_trainers, run.num_gpus()), run.num_sequences, run.is_async),
            false => self.colocated_s(generate, run.num_trainers, run.num_sequences),
        }
    }

    /// At the best degree.
    fn generate_s(&self, num_generators: usize, num_sequences: usize) -> f64 {
        let at_degree = self.generate.iter().filter(|(tp, _)| num_generators.is_multiple_of(**tp));
        let times = at_degree.map(|(&tp, fit)| fit.at((num_sequences * tp) as f64 / num_generators as f64));
        times.fold(f64::INFINITY, f64::min)
    }

    fn colocated_s(&self, generate: f64, num_gpus: usize, num_sequences: usize) -> f64 {
        generate + self.train.at(num_sequences as f64 / num_gpus as f64) + self.transitions_s
    }

    fn split_s(
        &self,
        generate: f64,
        (num_trainers, num_gpus): (usize, usize),
        num_sequences: usize,
        is_async: bool,
    ) -> f64 {
        let train = self.train.at(num_sequences as f64 / num_trainers as f64);
        let push_s = if num_gpus > NODE_GPUS { self.weight_bytes / NODE_BYTES_PER_S } else { self.push_s };
        push_s + if is_async { generate.max(train) } else { generate + train }
    }

    fn row(&self, num_gpus: usize, num_sequences: usize) -> Row {
        let best = |is_async| {
            let divisions = (1..num_gpus).map(|k| {
                let generate = self.generate_s(k, num_sequences);
                (self.split_s(generate, (num_gpus - k, num_gpus), num_sequences, is_async), k)
            });
            divisions.min_by(|a, b| a.0.total_cmp(&b.0)).expect("a world of several GPUs")
        };
        let colocated_s = self.colocated_s(self.generate_s(num_gpus, num_sequences), num_gpus, num_sequences);
        Row { num_gpus, num_sequences, colocated_s, split: best(false), async_split: best(true) }
    }
}

impl Fit {
    /// Least squares, among lines that neither fall nor begin below 0.
    fn through(points: &[(f64, f64)]) -> Self {
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let slope = if spread > 0.0 { (together / spread).clamp(0.0, y / x) } else { 0.0 };
        Self { at_zero: y - slope * x, slope, only_at: (spread == 0.0).then_some(x) }
    }

    /// Endless where it says nothing.
    fn at(self, x: f64) -> f64 {
        match self.only_at {
            Some(place) if place != x => f64::INFINITY,
            _ => self.at_zero + self.slope * x,
        }
    }
}

impl Simulation {
    pub(super) fn to_json(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "num_gpus": row.num_gpus, "num_sequences": row.num_sequences, "colocated_s": row.colocated_s,
                "split_s": row.split.0, "split_generators": row.split.1,
                "async_split_s": row.async_split.0, "async_split_generators": row.async_split.1,
            })
        };
        json!({"rows": self.rows.iter().map(row).collect::<Vec<_>>(), "worst_error_of_measured": self.worst_error})
    }

    pub(super) fn table(&self) -> String {
        if self.rows.is_empty() {
            return String::new();
        }
        let mut text = format!(
            "SIMULATED from lines through these phase times (measured steps are met within {:.0} %), {NODE_GPUS} GPUs a node, \
             {:.0} GB/s between nodes; seconds (ranks that generate)\n{:>6} {:>10} {:>10} {:>14} {:>14}\n",
            100.0 * self.worst_error,
            NODE_BYTES_PER_S / 1e9,
            "GPUs",
            "sequences",
            "colocated",
            "split",
            "async split"
        );
        for row in &self.rows {
            let known = |seconds: f64, text: String| if seconds.is_finite() { text } else { "-".to_owned() };
            let divided = |(seconds, ranks): (f64, usize)| known(seconds, format!("{seconds:.2} ({ranks})"));
            let _ = writeln!(
                text,
                "{:>6} {:>10} {:>10} {:>14} {:>14}",
                row.num_gpus,
                row.num_sequences,
                known(row.colocated_s, format!("{:.2}", row.colocated_s)),
                divided(row.split),
                divided(row.async_split)
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::line;
    use super::*;

    #[test]
    fn a_machine_that_is_linear_is_met_and_continued() {
        let lines = [line("colocated", 4, 4, 0), line("split", 2, 2, 0), line("split", 1, 3, 1)];
        let runs: Vec<Run> = lines.iter().map(|line| Run::read(line, Path::new("lines")).unwrap()).collect();
        let simulation = simulate(&runs);
        assert!(simulation.worst_error < 1e-9, "{simulation:?}");
        let row = &simulation.rows[1]; // 8 GPUs, twice the batch: as much for each as was measured
        assert_eq!((row.num_gpus, row.num_sequences), (8, 512));
        assert!((row.colocated_s - runs[0].step_s).abs() < 1e-9, "{row:?}");
        assert!(row.split.0 > row.colocated_s && row.async_split.0 < row.split.0, "{row:?}");
        assert!(simulation.table().starts_with("SIMULATED"));
        let mut seen_once = Run { tensor_parallel_size: 4, ..runs[0].clone() };
        seen_once.phases_s["generate"] = 2.0.into();
        let rows = simulate(&[&runs[..], &[seen_once]].concat()).rows;
        assert!((rows[1].colocated_s - 5.1).abs() < 1e-9, "{rows:?}"); // 2 + 3 + 0.1: engines of four, as measured
        assert!(rows[0].colocated_s > 5.1, "half of it for each is not what was measured: {rows:?}");
        assert!(simulate(&runs[..1]).rows.is_empty(), "one place is no line");
    }
}
