//! The page around the plots.

use std::fmt::Write;
use std::path::Path;

use super::panels::History;
use super::samples::Samples;
use super::turns::{excerpt, turns};
use super::{SCRIPT, STYLE, charts, escape, number};
use crate::metrics::CompletionRow;

/// Longest text shown of a prompt or completion, in characters.
const MAX_CHARACTERS: usize = 1500;

pub(super) fn render(output_dir: &Path, history: &History, config: &[(String, String)], samples: &[Samples]) -> String {
    let name = output_dir.file_name().map_or("run".into(), |name| name.to_string_lossy());
    let model = config.iter().find(|(key, _)| key == "model_name_or_path").map_or("", |(_, value)| value.as_str());
    let figures = charts(&[("", history)]);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{name} – colo-grpo</title>\
         <style>{STYLE}</style></head>\n<body><header><h1>{name}</h1><p>{model}</p></header>\n<main>\n\
         <section class=\"tiles\">{tiles}</section>\n<section class=\"plots\">\n{figures}</section>\n\
         {completions}{metrics}{configuration}</main><script>{SCRIPT}</script></body></html>\n",
        name = escape(&name),
        model = escape(model),
        tiles = tiles(history),
        completions = samples.iter().map(completions).collect::<String>(),
        metrics = folded("All metrics", &metrics_table(history)),
        configuration = if config.is_empty() { String::new() } else { folded("Configuration", &config_table(config)) },
    )
}

fn folded(title: &str, table: &str) -> String {
    format!("<details><summary>{title}</summary><div class=\"scroll\">{table}</div></details>\n")
}

/// The newest figures of a run.
pub fn tiles(history: &History) -> String {
    let last = |name: &str| history.get(name).and_then(|points| points.last()).map(|point| point.1);
    let mut html = String::new();
    let mut tile = |label: &str, value: String| {
        let _ = write!(html, "<div><span>{label}</span><b>{value}</b></div>");
    };
    for (name, label) in [("eval_reward", "Evaluation reward"), ("reward", "Training reward")] {
        if let Some([first, .., last]) = history.get(name) {
            tile(label, format!("{} <small>→</small> {}", number(first.1), number(last.1)));
        }
    }
    tile("Steps", number(history.steps.1));
    if let Some(tokens) = last("num_tokens") {
        tile("Tokens", number(tokens));
    }
    if let Some(points) = history.get("step_time") {
        tile("Time in steps", duration(total(points)));
        tile("Seconds per step", number(median(points)));
    }
    if let Some(points) = history.get("perf/tokens_per_second_per_gpu") {
        tile("Tokens/s, each rank", number(median(points)));
    }
    html
}

fn median(points: &[(f64, f64)]) -> f64 {
    let mut values: Vec<f64> = points.iter().map(|point| point.1).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of all steps, from means over the steps since the line before.
fn total(points: &[(f64, f64)]) -> f64 {
    let before = [0.0].into_iter().chain(points.iter().map(|point| point.0));
    points.iter().zip(before).map(|(point, before)| (point.0 - before) * point.1).sum()
}

fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

fn completions(samples: &Samples) -> String {
    let groups: String = samples.groups.iter().map(|group| completions_of_prompt(group, MAX_CHARACTERS, 0)).collect();
    format!("<section><h2>Completions at step {}</h2>\n<div class=\"groups\">{groups}</div></section>\n", samples.step)
}

/// A prompt with its completions, each text cut after `max_characters`; `num_more` are not among `group`.
pub fn completions_of_prompt(group: &[CompletionRow], max_characters: usize, num_more: usize) -> String {
    let mut html = String::from("<article>");
    let excerpt = |text: &str| excerpt(text, max_characters);
    if let Some(first) = group.first() {
        let _ = write!(html, "<h4>Prompt</h4><pre>{}</pre>", excerpt(&first.prompt));
    }
    if let Some(answer) = group.first().and_then(|row| row.reference_answer.as_deref()) {
        let _ = write!(html, "<h4>Reference answer</h4><pre>{}</pre>", excerpt(answer));
    }
    for row in group {
        let sign = if row.advantage > 0.0 {
            "up"
        } else if row.advantage < 0.0 {
            "down"
        } else {
            "even"
        };
        let chip = |name: &str, value: Option<f32>| {
            let value = value.map_or("failed".to_owned(), |value| number(f64::from(value)));
            format!("<span>{} <b>{value}</b></span>", escape(name))
        };
        let left_out = if row.dropped == Some(true) { "<span>left out of the update</span>" } else { "" };
        let rewards: String = row.rewards.iter().map(|(name, value)| chip(name, *value)).collect();
        let text = match row.messages.as_slice() {
            [] => format!("<pre>{}</pre>", excerpt(&row.completion)),
            messages => turns(messages, max_characters),
        };
        let _ = write!(
            html,
            "<div class=\"completion {sign}\"><p>{}{rewards}{}{left_out}</p>{text}</div>",
            chip("reward", row.reward),
            chip("advantage", Some(row.advantage)),
        );
    }
    if num_more > 0 {
        let _ = write!(html, "<p>{num_more} more completions</p>");
    }
    html + "</article>\n"
}

/// First, last, least and greatest value of every metric.
pub fn metrics_table(history: &History) -> String {
    let row = |(name, points): (&str, &[(f64, f64)])| {
        let values = || points.iter().map(|point| point.1);
        let cells = [values().next(), values().next_back(), values().reduce(f64::min), values().reduce(f64::max)];
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", number(cell.unwrap_or(f64::NAN)))).collect();
        format!("<tr><th>{}</th>{cells}</tr>", escape(name))
    };
    format!(
        "<table class=\"numbers\"><tr><th>metric</th>\
         <td>first</td><td>last</td><td>least</td><td>greatest</td></tr>{}</table>",
        history.all().map(row).collect::<String>()
    )
}

/// The keys of a configuration and their values.
pub fn config_table(config: &[(String, String)]) -> String {
    let row = |(key, value): &(String, String)| format!("<tr><th>{}</th><td>{}</td></tr>", escape(key), escape(value));
    let rows: String = config.iter().map(row).collect();
    format!("<table>{rows}</table>")
}
