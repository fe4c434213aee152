//! The page around the plots.

use std::path::Path;

use serde_json::{Value, json};

use super::panels::History;
use super::samples::Samples;
use super::templates::{self, Excerpt};
use super::turns::{MAX_MESSAGES, turns};
use super::{SCRIPT, STYLE, charts, number};
use crate::metrics::CompletionRow;

/// Maximum number of characters shown of a prompt or completion.
const MAX_CHARACTERS: usize = 1500;

pub(super) fn render(output_dir: &Path, history: &History, config: &[(String, String)], samples: &[Samples]) -> String {
    let name = output_dir.file_name().map_or("run".into(), |name| name.to_string_lossy());
    let model = config.iter().find(|(key, _)| key == "model_name_or_path").map_or("", |(_, value)| value.as_str());
    let groups = |samples: &Samples| -> String {
        samples.groups.iter().map(|group| completions_of_prompt(group, MAX_CHARACTERS, 0)).collect()
    };
    let samples: Vec<_> =
        samples.iter().map(|samples| json!({"step": samples.step, "groups": groups(samples)})).collect();
    let config = if config.is_empty() { String::new() } else { config_table(config) };
    let (tiles, figures, metrics) = (tiles(history), charts(&[("", history)]), metrics_table(history));
    let values = json!({
        "name": name, "model": model, "style": STYLE, "script": SCRIPT, "tiles": tiles, "figures": figures, "samples": samples,
        "metrics": metrics, "config": config,
    });
    templates::render("page.html", values)
}

/// Tiles with the newest key figures of a run.
pub fn tiles(history: &History) -> String {
    let last = |name: &str| history.get(name).and_then(|points| points.last()).map(|point| point.1);
    let tile = |label: &str, value: String| json!({"label": label, "value": value});
    let mut tiles = Vec::new();
    for (name, label) in [("eval_reward", "Evaluation reward"), ("reward", "Training reward")] {
        if let Some([first, .., last]) = history.get(name) {
            tiles.push(json!({"label": label, "first": number(first.1), "value": number(last.1)}));
        }
    }
    tiles.push(tile("Steps", number(history.steps.1)));
    tiles.extend(last("num_tokens").map(|tokens| tile("Tokens", number(tokens))));
    if let Some(points) = history.get("step_time") {
        tiles.push(tile("Time in steps", duration(total(points))));
        tiles.push(tile("Seconds per step", number(median(points))));
    }
    if let Some(points) = history.get("perf/tokens_per_second_per_gpu") {
        tiles.push(tile("Tokens/s, each rank", number(median(points))));
    }
    templates::render("tiles.html", json!({"tiles": tiles}))
}

fn median(points: &[(f64, f64)]) -> f64 {
    let mut values: Vec<f64> = points.iter().map(|point| point.1).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Total seconds of all steps, from means over the steps since the previous line.
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

/// A prompt with its completions; each text is truncated to `max_characters`. `num_more` completions are not shown.
pub fn completions_of_prompt(group: &[CompletionRow], max_characters: usize, num_more: usize) -> String {
    let excerpt = |text| Excerpt::of(text, max_characters);
    let (first, rows) = (group.first(), group.iter().map(|row| completion(row, max_characters)).collect::<Vec<_>>());
    let values = json!({
        "prompt": first.map(|row| excerpt(&row.prompt)),
        "answer": first.and_then(|row| row.reference_answer.as_deref()).map(excerpt),
        "rows": rows,
        "num_more": num_more,
    });
    templates::render("completions.html", values)
}

fn completion(row: &CompletionRow, max_characters: usize) -> Value {
    let chip = |name: &str, value: Option<f32>| {
        let value = value.map_or("failed".to_owned(), |value| number(f64::from(value)));
        json!({"name": name, "value": value})
    };
    let sign = match row.advantage {
        advantage if advantage > 0.0 => "up",
        advantage if advantage < 0.0 => "down",
        _ => "even",
    };
    let rewards = row.rewards.iter().map(|(name, value)| chip(name, *value));
    let chips =
        std::iter::once(chip("reward", row.reward)).chain(rewards).chain([chip("advantage", Some(row.advantage))]);
    json!({
        "sign": sign,
        "chips": chips.collect::<Vec<_>>(),
        "is_left_out": row.dropped == Some(true),
        "turns": turns(&row.messages, max_characters),
        "num_more_turns": row.messages.len().saturating_sub(MAX_MESSAGES),
        "completion": Excerpt::of(&row.completion, max_characters),
    })
}

/// A table with first, last, minimum and maximum of every metric.
pub fn metrics_table(history: &History) -> String {
    let row = |(name, points): (&str, &[(f64, f64)])| {
        let values = || points.iter().map(|point| point.1);
        let cells = [values().next(), values().next_back(), values().reduce(f64::min), values().reduce(f64::max)];
        json!({"name": name, "cells": cells.map(|cell| number(cell.unwrap_or(f64::NAN)))})
    };
    templates::render("metrics.html", json!({"metrics": history.all().map(row).collect::<Vec<_>>()}))
}

/// A table of a configuration's keys and values.
pub fn config_table(config: &[(String, String)]) -> String {
    templates::render("config.html", json!({"entries": config}))
}
