//! Combines the metrics of several steps into one line.

use super::step::MetricValues;

/// How a metric is reduced over the steps of a logging interval that have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OverSteps {
    /// The mean of the steps' values, as in TRL; also for minima and maxima, which TRL averages, too.
    Mean,
    /// The sum over steps, for counts.
    Sum,
    /// The maximum.
    Max,
    /// The newest value, for metrics that describe progress.
    Newest,
}

/// Metrics that are not averaged; `*` matches any part of a name. docs/metrics.md lists every metric with its rule.
const RULES: &[(&str, OverSteps)] = &[
    ("epoch", OverSteps::Newest),
    ("learning_rate", OverSteps::Newest),
    ("num_tokens", OverSteps::Newest),
    ("partial_rollout/carried_groups", OverSteps::Newest),
    ("curriculum/hard_rows", OverSteps::Newest),
    ("curriculum/easy_rows", OverSteps::Newest),
    ("num_skipped_updates", OverSteps::Sum),
    ("rewards/num_failed", OverSteps::Sum),
    ("rewards/*/failed/*", OverSteps::Sum),
    ("dynamic_sampling/generated_groups", OverSteps::Sum),
    ("dynamic_sampling/kept_groups", OverSteps::Sum),
    ("dynamic_sampling/no_signal_groups", OverSteps::Sum),
    ("dynamic_sampling/replaced_groups", OverSteps::Sum),
    ("partial_rollout/kept_tokens", OverSteps::Sum),
    ("partial_rollout/recomputed_tokens", OverSteps::Sum),
    ("partial_rollout/staleness_max", OverSteps::Max),
    ("staleness/max", OverSteps::Max),
    ("agent/num_failed", OverSteps::Sum),
    ("agent/num_timeouts", OverSteps::Sum),
    ("agent/num_refused", OverSteps::Sum),
    ("agent/kept_tokens", OverSteps::Sum),
    ("agent/recomputed_tokens", OverSteps::Sum),
    ("speculation/draft_tokens", OverSteps::Sum),
    ("speculation/accepted_tokens", OverSteps::Sum),
    ("tools/num_unreadable", OverSteps::Sum),
    ("tools/num_timeouts", OverSteps::Sum),
    ("tools/num_overlong", OverSteps::Sum),
    ("tools/num_cut", OverSteps::Sum),
    ("tools/kept_tokens", OverSteps::Sum),
    ("tools/recomputed_tokens", OverSteps::Sum),
    ("perf/max_resident_gb", OverSteps::Max),
];

fn rule(name: &str) -> OverSteps {
    let fits = |pattern: &str| {
        let (wanted, parts) = (pattern.split('/'), name.split('/'));
        wanted.clone().count() == parts.clone().count() && wanted.zip(parts).all(|(a, b)| a == "*" || a == b)
    };
    RULES.iter().find(|(pattern, _)| fits(pattern)).map_or(OverSteps::Mean, |(_, rule)| *rule)
}

/// Combines the reduced metrics of `steps`, oldest first, into one line: every name is reduced over the steps that have it. NaN means no value and is
/// skipped; if there is nothing but NaN, the result is NaN.
pub(super) fn over_steps(steps: &[MetricValues]) -> MetricValues {
    let mut line = MetricValues::new();
    for name in steps.iter().flat_map(MetricValues::keys) {
        line.entry(name.clone()).or_insert_with(|| reduced(name, steps));
    }
    line
}

fn reduced(name: &str, steps: &[MetricValues]) -> f64 {
    let values = || steps.iter().filter_map(|values| values.get(name).copied()).filter(|value| !value.is_nan());
    let Some(newest) = values().next_back() else { return f64::NAN };
    match rule(name) {
        OverSteps::Mean => values().sum::<f64>() / values().count() as f64,
        OverSteps::Sum => values().sum(),
        OverSteps::Max => values().fold(newest, f64::max),
        OverSteps::Newest => newest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(values: &[(&str, f64)]) -> MetricValues {
        values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn metrics_of_a_logging_interval_are_reduced_by_their_rules() {
        let steps = [
            step(&[("loss", 1.0), ("num_tokens", 10.0), ("rewards/num_failed", 2.0), ("rewards/a/failed/output", 2.0)]),
            step(&[("loss", f64::NAN), ("num_tokens", 20.0), ("timing_s/eval", 4.0), ("perf/max_resident_gb", 3.0)]),
            step(&[("loss", 2.0), ("num_tokens", 30.0), ("rewards/num_failed", 1.0), ("perf/max_resident_gb", 2.0)]),
        ];
        let expected = step(&[
            ("loss", 1.5),
            ("num_tokens", 30.0),
            ("perf/max_resident_gb", 3.0),
            ("rewards/a/failed/output", 2.0),
            ("rewards/num_failed", 3.0),
            ("timing_s/eval", 4.0),
        ]);
        assert_eq!(over_steps(&steps), expected);
        assert!(over_steps(&[step(&[("loss", f64::NAN)])])["loss"].is_nan());
        assert!(over_steps(&[]).is_empty());
    }

    /// The first column of the table on the page has names; later names in a cell omit the part that they share with the first.
    #[test]
    fn the_metrics_page_names_every_reduction_rule() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
        let rows: Vec<Vec<&str>> = page.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
        let (mut seen, mut num_seen) = (vec![false; RULES.len()], 0);
        for row in rows.iter().filter(|row| row.len() == 5 && row[1].starts_with('`') && row[3] != "of the line") {
            let names: Vec<&str> = row[1].split('`').skip(1).step_by(2).collect();
            let folder = names[0].rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
            for name in names {
                let name =
                    if name.contains('/') || folder.is_empty() { name.to_owned() } else { folder.clone() + name };
                assert_eq!(format!("{:?}", rule(&name)).to_lowercase(), row[3], "{name}");
                RULES.iter().zip(&mut seen).for_each(|((pattern, _), seen)| {
                    *seen |= pattern.replacen('*', "NAME", 1).replacen('*', "KIND", 1) == name;
                });
                num_seen += 1;
            }
        }
        assert!(num_seen > 40, "{num_seen}");
        assert_eq!(seen, vec![true; RULES.len()], "every rule is on the page");
    }
}
