//! The HTML page: one page with inline style and script, and the parts that the script reloads. All text is escaped here.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use minijinja::Environment;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::runs::{RunStep, WatchedRun, age, now};
use crate::metrics::ranks::RankState;
use crate::metrics::report::{self, History, escape, number};

/// The page with style and script inserted.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let style = format!("{}{}", report::STYLE, include_str!("watch.css"));
    include_str!("page.html").replace("{style}", &style).replace("{script}", &SCRIPT)
});
static SCRIPT: LazyLock<String> = LazyLock::new(|| format!("{}{}", report::SCRIPT, include_str!("watch.js")));
/// The Content-Security-Policy header: allows only the page's own script, and connections to its own server.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = STANDARD.encode(Sha256::digest(SCRIPT.as_bytes()));
    format!(
        "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

/// Templates of the page's parts that are reloaded.
static PARTS: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut parts = Environment::new();
    for (name, text) in [("ranks.html", include_str!("ranks.html")), ("warnings.html", include_str!("warnings.html"))] {
        parts.add_template(name, text).expect("a template of this folder");
    }
    parts
});

pub(super) fn whole() -> String {
    PAGE.clone()
}

pub(super) fn policy() -> &'static str {
    &POLICY
}

/// The entry of one run in the page's list; the script shows it as text.
pub(super) fn run_line(number: usize, run: &WatchedRun) -> Value {
    let RunStep { newest: step, last: max_steps } = run.step();
    let reward = run.history().get("reward").and_then(|points| points.last()).map(|point| report::number(point.1));
    let messages: Vec<&str> = run.messages().collect();
    json!({"id": number, "name": run.name, "state": run.state(), "step": step, "max_steps": max_steps, "reward": reward,
        "messages": messages, "newest": run.steps.last(), "num_completions": run.steps.len()})
}

/// Parts of the page with the metrics of the selected runs, as HTML.
#[derive(Debug, serde::Serialize)]
pub(super) struct MeasuredParts {
    tiles: String,
    charts: String,
    metrics: String,
    configuration: String,
    /// A text that changes when a run has new steps.
    revision: String,
}

/// Renders tiles, charts, all metrics and the configuration of the runs.
pub(super) fn charts(runs: &[(usize, &WatchedRun)], revision: String) -> MeasuredParts {
    let titled = |html: &dyn Fn(&WatchedRun) -> String| -> String {
        let of = |(_, run): &(usize, &WatchedRun)| match runs.len() {
            1 => html(run),
            _ => format!("<h3>{}</h3>{}", escape(&run.name), html(run)),
        };
        runs.iter().map(of).collect()
    };
    let tiles = titled(&|run| format!("<div class=\"tiles\">{}</div>", report::tiles(run.history())));
    let named: Vec<(&str, &History)> = runs.iter().map(|(_, run)| (run.name.as_str(), run.history())).collect();
    let metrics = titled(&|run| report::metrics_table(run.history()));
    let configuration = titled(&|run| match run.config() {
        Ok(config) => report::config_table(&config),
        Err(message) => format!("<p>{}</p>", escape(&message)),
    });
    MeasuredParts { tiles, charts: report::charts(&named), metrics, configuration, revision }
}

/// Renders a table of all ranks: phase, memory, time since the last update.
pub(super) fn ranks(runs: &[(usize, &WatchedRun)]) -> String {
    let now = now();
    let of_run = |(_, run): &(usize, &WatchedRun)| {
        let ranks =
            run.ranks.iter().map(|rank| json!({"rank": rank.rank, "cells": cells(rank, run.silence_s(rank, now))}));
        json!({"name": run.name, "ranks": ranks.collect::<Vec<_>>()})
    };
    part("ranks.html", &json!({"runs": runs.iter().map(of_run).collect::<Vec<_>>()}))
}

/// The cells of one rank: step, phase, duration of the phase, GPU memory, host memory, time since the last update.
fn cells(state: &RankState, silence_s: f64) -> [String; 6] {
    let RankState { step, max_steps, phases, phase_s, waits_in, resident_bytes, held, gpu_memory, end, .. } = state;
    let phase = match (end, phases.is_empty()) {
        (Some(end), _) if end.code == Some(0) => "done".to_owned(),
        (Some(_), _) => "ended".to_owned(),
        (None, true) => "between phases".to_owned(),
        (None, false) => phases.join(" › "),
    };
    let waits = waits_in.as_ref().map(|op| format!(", may wait in {op}")).unwrap_or_default();
    let on_device: u64 = held.iter().filter(|held| held.on_device).map(|held| held.bytes).sum();
    let owners = held.iter().filter(|held| held.on_device).take(4);
    let owners: Vec<String> = owners.map(|held| format!("{} {}", held.owner, bytes(held.bytes))).collect();
    let owners = if owners.is_empty() { String::new() } else { format!(" ({})", owners.join(", ")) };
    // An ended process holds nothing any longer: what its GPU has in use is others'.
    let of_gpu = gpu_memory
        .filter(|_| end.is_none())
        .map(|gpu| format!("GPU: {} of {} in use; ", bytes(gpu.used_bytes), bytes(gpu.total_bytes)));
    [
        format!("{} of {max_steps}", (step + 1).min(*max_steps)),
        format!("{phase}{waits}"),
        if end.is_some() { String::new() } else { age(phase_s + silence_s.max(0.0)) },
        format!("{}{}{owners}", of_gpu.unwrap_or_default(), bytes(on_device)),
        bytes(*resident_bytes),
        format!("{} ago", age(silence_s)),
    ]
}

/// Renders the latest warnings of all ranks and runs, the most recent first. Equal warnings of several ranks at the same time are shown once.
pub(super) fn warnings(runs: &[(usize, &WatchedRun)]) -> String {
    let now = now();
    let mut warnings = Vec::new();
    for (_, run) in runs {
        let mut all: Vec<(f64, usize, &str)> = Vec::new();
        for rank in &run.ranks {
            all.extend(rank.warnings.iter().map(|warning| (warning.time, rank.rank, warning.text.as_str())));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut seen = std::collections::HashSet::new();
        all.retain(|(_, _, text)| seen.insert(*text));
        warnings.extend(run.messages().map(|message| format!("{}: {message}", run.name)));
        let told = |(time, rank, text): (f64, usize, &str)| {
            format!("{}, rank {rank}, {} ago: {text}", run.name, age(now - time))
        };
        warnings.extend(all.into_iter().map(told));
    }
    part("warnings.html", &json!({"warnings": warnings}))
}

/// Renders one of this folder's templates; values are escaped.
fn part(name: &str, values: &Value) -> String {
    let part = PARTS.get_template(name).and_then(|part| part.render(values));
    part.expect("a template of this folder, with the values that it names")
}

fn bytes(bytes: u64) -> String {
    format!("{}B", number(bytes as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watch_page_runs_only_its_own_script() {
        let page = whole();
        let script = page.split_once("<script>").unwrap().1.split_once("</script>").unwrap().0;
        assert_eq!(script, *SCRIPT, "the policy's hash is of exactly this");
        assert!(!page.contains("{style}") && !page.contains("http://") && !page.contains("https://"));
        assert!(!page.contains(" onclick="));
        assert!(policy().contains("default-src 'none'") && policy().contains("script-src 'sha256-"));
    }

    #[test]
    fn the_gpu_of_a_running_rank_is_shown() {
        let state = json!({"rank": 0, "world_size": 1, "process": 1, "time": 5.0, "step": 0, "max_steps": 2, "phases": [],
            "phase_s": 0.0, "waits_in": null, "resident_bytes": 1, "held": [], "warnings": [], "end": null,
            "gpu_memory": {"used_bytes": 61_000_000_000u64, "total_bytes": 80_000_000_000u64}});
        let mut state: RankState = serde_json::from_value(state).unwrap();
        assert_eq!(cells(&state, 5.0)[3], "GPU: 61GB of 80GB in use; 0B");
        state.gpu_memory = None;
        assert_eq!(cells(&state, 5.0)[3], "0B");
    }

    #[test]
    fn text_of_a_run_is_escaped_on_the_watch_page() {
        let cells = ["1 of 2", "generate › <decode>", "5 s", "0B", "1B", "5 s ago"];
        let runs = json!([{"name": "a<b>", "ranks": [{"rank": 3, "cells": cells}]}, {"name": "none", "ranks": []}]);
        let html = part("ranks.html", &json!({"runs": runs}));
        assert!(
            html.contains("<caption>a&lt;b&gt;</caption>")
                && html.contains("<tr><th scope=\"row\">3</th><td>1 of 2</td>")
        );
        assert!(
            html.contains("<td>generate › &lt;decode&gt;</td>") && html.contains("<p>none: no rank has written"),
            "{html}"
        );
        assert_eq!(part("warnings.html", &json!({"warnings": []})), "<p>None.</p>");
        assert_eq!(part("warnings.html", &json!({"warnings": ["<i>"]})), "<ul><li>&lt;i&gt;</li></ul>");
    }
}
