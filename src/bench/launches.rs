//! The launches of a decode step: how many there are, what each adds to the step's time, and how long the GPU is idle between them.

use serde_json::{Value, json};

use crate::cuda::GpuLaunch;

/// A launch that adds less time than this to a step counts as short, in microseconds.
const SHORT_US: f64 = 5.0;
/// Maximum number of kernels in the JSON results.
const NAMED: usize = 16;
/// Maximum number of kernels in the printed table.
const IN_TABLE: usize = 8;
/// Maximum number of characters of a kernel's name in the table.
const NAME_LEN: usize = 56;

/// Number and times of a decode step's launches.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StepLaunches {
    /// Number of sequences of the step.
    sequences: usize,
    /// Time of the step without recording, in microseconds.
    step_us: f64,
    count: usize,
    /// Time from the start of the first launch to the end of the last one, as recorded, in microseconds.
    span_us: f64,
    /// Part of `span_us` in which the GPU is idle.
    gaps_us: f64,
    /// Number of short launches, and the time in microseconds that they add together.
    short: (usize, f64),
    /// Times by kernel name; kernels that add most time come first.
    kernels: Vec<KernelShare>,
}

/// All launches of one kernel in a step.
#[derive(Debug, Clone, PartialEq)]
struct KernelShare {
    name: String,
    calls: usize,
    /// Time that these launches add to the step, in microseconds: only time after all earlier launches have ended counts.
    us: f64,
    /// Time in which the GPU is idle before these launches, in microseconds.
    gaps_us: f64,
}

impl StepLaunches {
    /// Sums up `launches` of a step, which are sorted by start. The step has `sequences` sequences and takes `step_us` microseconds without
    /// recording.
    pub(super) fn new(sequences: usize, step_us: f64, launches: &[GpuLaunch]) -> Self {
        let first = launches.first().map_or(0, |launch| launch.start_ns);
        let (mut end, mut kernels, mut short) = (first, Vec::<KernelShare>::new(), (0, 0.0));
        for launch in launches {
            let gap = launch.start_ns.saturating_sub(end) as f64 / 1e3;
            let us = launch.end_ns.saturating_sub(launch.start_ns.max(end)) as f64 / 1e3;
            end = end.max(launch.end_ns);
            if us < SHORT_US {
                short = (short.0 + 1, short.1 + us);
            }
            let place = kernels.iter().position(|kernel| kernel.name == launch.name).unwrap_or_else(|| {
                kernels.push(KernelShare { name: launch.name.clone(), calls: 0, us: 0.0, gaps_us: 0.0 });
                kernels.len() - 1
            });
            let kernel = &mut kernels[place];
            (kernel.calls, kernel.us, kernel.gaps_us) = (kernel.calls + 1, kernel.us + us, kernel.gaps_us + gap);
        }
        kernels.sort_by(|a, b| b.us.total_cmp(&a.us));
        let gaps_us = kernels.iter().map(|kernel| kernel.gaps_us).sum();
        Self { sequences, step_us, count: launches.len(), span_us: (end - first) as f64 / 1e3, gaps_us, short, kernels }
    }

    pub(super) fn span_us(&self) -> f64 {
        self.span_us
    }

    pub(super) fn to_json(&self) -> Value {
        let tenth = |us: f64| (10.0 * us).round() / 10.0;
        let kernel = |KernelShare { name, calls, us, gaps_us }: &KernelShare| json!({"name": name, "calls": calls, "us": tenth(*us), "gaps_us": tenth(*gaps_us)});
        json!({
            "count": self.count,
            "recorded_us": tenth(self.span_us),
            "gaps_us": tenth(self.gaps_us),
            "short_count": self.short.0,
            "short_us": tenth(self.short.1),
            "kernels": self.kernels.iter().take(NAMED).map(kernel).collect::<Vec<_>>(),
        })
    }
}

/// Formats a table with one line per step, then the kernels that add most time to the first and to the last step.
pub(super) fn table(steps: &[StepLaunches]) -> String {
    let mut lines = vec![
        "launches of decode steps, times in us:".to_owned(),
        format!("{:>9} {:>8} {:>8} {:>8} {:>6}  short ones", "sequences", "launches", "step", "recorded", "gaps"),
    ];
    for step in steps {
        let StepLaunches { sequences, step_us, count, span_us, gaps_us, short: (short, short_us), .. } = step;
        lines.push(format!(
            "{sequences:>9} {count:>8} {step_us:>8.0} {span_us:>8.0} {gaps_us:>6.0}  {short} of {short_us:.0}"
        ));
    }
    let ends = steps.iter().take(1).chain(steps.iter().skip(1).next_back());
    for step in ends {
        lines.push(format!("of {} sequences:", step.sequences));
        lines.push(format!("{:>9} {:>8} {:>8}  kernel", "us", "calls", "gaps"));
        for KernelShare { name, calls, us, gaps_us } in step.kernels.iter().take(IN_TABLE) {
            let name: String = name.chars().take(NAME_LEN).collect();
            lines.push(format!("{us:>9.0} {calls:>8} {gaps_us:>8.0}  {name}"));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(name: &str, start_ns: u64, end_ns: u64) -> GpuLaunch {
        GpuLaunch { name: name.to_owned(), start_ns, end_ns }
    }

    #[test]
    fn what_launches_add_and_what_lies_between_them_is_the_step() {
        // The second launch starts while the first still runs; the third starts after a gap.
        let launches = [
            launch("product", 1_000, 11_000),
            launch("norm", 9_000, 12_000),
            launch("product", 13_500, 20_000),
            launch("norm", 14_000, 15_000),
        ];
        let step = StepLaunches::new(8, 18.0, &launches);
        assert_eq!((step.count, step.span_us(), step.gaps_us, step.short), (4, 19.0, 1.5, (2, 1.0)));
        let share = |name: &str, calls, us, gaps_us| KernelShare { name: name.to_owned(), calls, us, gaps_us };
        assert_eq!(step.kernels, [share("product", 2, 16.5, 1.5), share("norm", 2, 1.0, 0.0)]);
        let own: f64 = step.kernels.iter().map(|kernel| kernel.us).sum();
        assert_eq!(own + step.gaps_us, step.span_us());
        let table = table(std::slice::from_ref(&step));
        assert!(table.contains("        8        4       18       19      2  2 of 1"), "{table}");
        assert_eq!(table.matches("product").count(), 1, "{table}");
        assert_eq!(step.to_json()["kernels"][0]["gaps_us"], 1.5);
    }

    #[test]
    fn a_step_without_launches_takes_no_time() {
        assert_eq!(StepLaunches::new(1, 0.0, &[]).span_us(), 0.0);
    }
}
