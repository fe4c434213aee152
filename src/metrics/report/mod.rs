//! The HTML report: one file without external resources, made from metrics.jsonl, run_config.json and the completions. `watch` uses its parts to show
//! runs under way.

mod page;
mod panels;
mod plot;
mod samples;
mod templates;
mod turns;

use std::path::{Path, PathBuf};

pub use self::page::{completions_of_prompt, config_table, metrics_table, tiles};
pub use self::panels::History;
use self::panels::{compared, plots};
use super::completions::FOLDER as COMPLETIONS;
use super::jsonl::{self, read_metrics_in};
use super::writer::RUN_CONFIG;
pub use crate::console::number;
use crate::error::{Error, Result};
use crate::untrusted::{Folder, MAX_RUN_CONFIG_BYTES};

/// Name of the report in a run's output folder.
const REPORT: &str = "report.html";

/// The page's CSS.
pub const STYLE: &str = include_str!("report.css");
/// The page's script, which shows a chart's values at a step.
pub const SCRIPT: &str = include_str!("report.js");

/// The charts of one run, or of several runs with one line each. Runs are passed with their names.
pub fn charts(runs: &[(&str, &History)]) -> String {
    let range = |steps: (f64, f64), (_, history): &(&str, &History)| {
        (steps.0.min(history.steps.0), steps.1.max(history.steps.1))
    };
    let steps = runs.iter().fold((f64::INFINITY, f64::NEG_INFINITY), range);
    let plots = match runs {
        [(_, history)] => plots(history),
        _ => compared(runs),
    };
    plots.iter().map(|plot| plot.render(steps)).collect()
}

/// Writes `report.html` into the output folder of a run, finished or not, and returns its path.
///
/// # Errors
/// [`Error::BadFile`] if metrics.jsonl is missing or empty, [`Error::Io`] if a file cannot be read or written.
pub fn write_report(output_dir: &Path) -> Result<PathBuf> {
    let (folder, metrics) = (Folder::new(output_dir), output_dir.join(jsonl::FILE));
    if !folder.has(jsonl::FILE) {
        return Err(Error::bad_file(metrics, "missing: expected the output folder of a run, which contains this file"));
    }
    let history = History::new(&read_metrics_in(&folder)?);
    if history.is_empty() {
        return Err(Error::bad_file(metrics, "no metrics yet: the report needs at least one line"));
    }
    let config = read_config(&folder)?;
    let samples = samples::first_and_last(&folder.folder(COMPLETIONS));
    let path = output_dir.join(REPORT);
    let page = page::render(output_dir, &history, &config, &samples);
    folder.write(REPORT, page).map_err(Error::io(&path))?; // written atomically: a browser never reads a partial page
    Ok(path)
}

/// The configuration of a run from run_config.json, as dotted keys and values; empty if there is no such file.
///
/// # Errors
/// [`Error::Io`] if it cannot be read, [`Error::BadFile`] if it is not JSON.
pub(crate) fn read_config(folder: &Folder) -> Result<Vec<(String, String)>> {
    let path = folder.path().join(RUN_CONFIG);
    if !folder.has(RUN_CONFIG) {
        return Ok(Vec::new());
    }
    let bytes = folder.read(RUN_CONFIG, MAX_RUN_CONFIG_BYTES).map_err(Error::io(&path))?;
    let value = serde_json::from_slice(&bytes).map_err(|error| Error::bad_file(path, error.to_string()))?;
    let mut rows = Vec::new();
    flatten("", &value, &mut rows);
    Ok(rows)
}

fn flatten(prefix: &str, value: &serde_json::Value, rows: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(members) => {
            for (name, member) in members {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&key, member, rows);
            }
        }
        serde_json::Value::String(text) => rows.push((prefix.to_owned(), text.clone())),
        other => rows.push((prefix.to_owned(), other.to_string())),
    }
}

/// Escapes text for HTML, because completions are untrusted model output.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_escapes_model_text_and_is_self_contained() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u64| {
            format!(
                r#"{{"step":{step},"time":{step}.5,"reward":0.{step},"rewards/<img>/mean":1,"timing_s/generate":2}}"#
            )
        };
        std::fs::write(folder.path().join("metrics.jsonl"), (1..9).map(|step| line(step) + "\n").collect::<String>())
            .unwrap();
        let path = write_report(folder.path()).unwrap();
        let html = std::fs::read_to_string(path).unwrap();
        assert!(html.contains("<svg") && html.contains("Reward") && html.contains("generate"));
        assert!(!html.contains("<img>") && html.contains("&lt;img&gt;"));
        assert!(!html.contains("http://") && !html.contains("https://"), "no external resource");
    }

    #[test]
    fn a_report_without_metrics_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write_report(folder.path()).is_err());
        std::fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
        assert!(write_report(folder.path()).unwrap_err().to_string().contains("at least one line"));
    }
}
