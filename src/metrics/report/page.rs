//! The page around the plots.

use std::fmt::Write;
use std::path::Path;

use super::panels::{History, plots};
use super::samples::Samples;
use super::{escape, number};
use crate::metrics::CompletionRow;

/// Longest text shown of a prompt or completion, in characters.
const MAX_CHARACTERS: usize = 1500;

pub(super) fn render(output_dir: &Path, history: &History, config: &[(String, String)], samples: &[Samples]) -> String {
    let name = output_dir.file_name().map_or("run".into(), |name| name.to_string_lossy());
    let model = config.iter().find(|(key, _)| key == "model_name_or_path").map_or("", |(_, value)| value.as_str());
    let figures: String = plots(history).iter().map(|plot| plot.render(history.steps)).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{name} – colo-grpo</title>\
         <style>{css}</style></head>\n<body><header><h1>{name}</h1><p>{model}</p></header>\n<main>\n\
         <section class=\"tiles\">{tiles}</section>\n<section class=\"plots\">\n{figures}</section>\n\
         {completions}{metrics}{configuration}</main><script>{script}</script></body></html>\n",
        name = escape(&name),
        model = escape(model),
        css = include_str!("report.css"),
        tiles = tiles(history),
        completions = samples.iter().map(completions).collect::<String>(),
        metrics = metrics_table(history),
        configuration = config_table(config),
        script = include_str!("report.js"),
    )
}

fn tiles(history: &History) -> String {
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
    let groups: String = samples.groups.iter().map(|group| group_html(group)).collect();
    format!("<section><h2>Completions at step {}</h2>\n<div class=\"groups\">{groups}</div></section>\n", samples.step)
}

fn group_html(group: &[CompletionRow]) -> String {
    let mut html = String::from("<article>");
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
        let rewards: String = row.rewards.iter().map(|(name, value)| chip(name, *value)).collect();
        let _ = write!(
            html,
            "<div class=\"completion {sign}\"><p>{}{rewards}{}</p><pre>{}</pre></div>",
            chip("reward", row.reward),
            chip("advantage", Some(row.advantage)),
            excerpt(&row.completion),
        );
    }
    html + "</article>\n"
}

fn excerpt(text: &str) -> String {
    let Some((cut, _)) = text.char_indices().nth(MAX_CHARACTERS) else { return escape(text) };
    format!("{}<em> … {} more bytes</em>", escape(&text[..cut]), text.len() - cut)
}

fn metrics_table(history: &History) -> String {
    let row = |(name, points): (&str, &[(f64, f64)])| {
        let values = || points.iter().map(|point| point.1);
        let cells = [values().next(), values().next_back(), values().reduce(f64::min), values().reduce(f64::max)];
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", number(cell.unwrap_or(f64::NAN)))).collect();
        format!("<tr><th>{}</th>{cells}</tr>", escape(name))
    };
    format!(
        "<details><summary>All metrics</summary><div class=\"scroll\"><table class=\"numbers\"><tr><th>metric</th>\
         <td>first</td><td>last</td><td>least</td><td>greatest</td></tr>{}</table></div></details>\n",
        history.all().map(row).collect::<String>()
    )
}

fn config_table(config: &[(String, String)]) -> String {
    if config.is_empty() {
        return String::new();
    }
    let row = |(key, value): &(String, String)| format!("<tr><th>{}</th><td>{}</td></tr>", escape(key), escape(value));
    let rows: String = config.iter().map(row).collect();
    format!("<details><summary>Configuration</summary><div class=\"scroll\"><table>{rows}</table></div></details>\n")
}
