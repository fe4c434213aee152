//! The page that a browser shows: one page with its style and script inside, and the parts that it fetches again. All text is escaped here.

use std::fmt::Write;
use std::sync::LazyLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::runs::{WatchedRun, age, now};
use crate::metrics::ranks::RankState;
use crate::metrics::report::{self, History, escape, number};

/// The page, with style and script at their places.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let style = format!("{}{}", report::STYLE, include_str!("watch.css"));
    include_str!("page.html").replace("{style}", &style).replace("{script}", &SCRIPT)
});
static SCRIPT: LazyLock<String> = LazyLock::new(|| format!("{}{}", report::SCRIPT, include_str!("watch.js")));
/// Lets the page run its own script, talk to its own server, and nothing else.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = base64(&Sha256::digest(SCRIPT.as_bytes()));
    format!(
        "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

pub(super) fn whole() -> String {
    PAGE.clone()
}

pub(super) fn policy() -> &'static str {
    &POLICY
}

/// One run as the page's list has it; the script shows it as text.
pub(super) fn run_line(number: usize, run: &WatchedRun) -> Value {
    let (step, max_steps) = run.step();
    let reward = run.history().get("reward").and_then(|points| points.last()).map(|point| report::number(point.1));
    let messages: Vec<&str> = run.messages().collect();
    json!({"id": number, "name": run.name, "state": run.state(), "step": step, "max_steps": max_steps, "reward": reward,
        "messages": messages, "newest": run.steps.last(), "num_completions": run.steps.len()})
}

/// Tiles, charts, all metrics and the configuration.
pub(super) fn charts(runs: &[(usize, &WatchedRun)]) -> (String, String, String, String) {
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
    (tiles, report::charts(&named), metrics, configuration)
}

/// A table of every run's ranks: phase, memory, last sign of life.
pub(super) fn ranks(runs: &[(usize, &WatchedRun)]) -> String {
    let now = now();
    let table = |(_, run): &(usize, &WatchedRun)| {
        if run.ranks.is_empty() {
            return format!("<p>{}: no rank has written what it does.</p>", escape(&run.name));
        }
        let rows: String = run.ranks.iter().map(|rank| rank_row(rank, run.silence_s(rank, now))).collect();
        format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Ranks of {name}\"><table><caption>{name}</caption>\
             <thead><tr><th scope=\"col\">rank</th><th scope=\"col\">step</th><th scope=\"col\">phase</th>\
             <th scope=\"col\">for</th><th scope=\"col\">device memory</th><th scope=\"col\">host memory</th>\
             <th scope=\"col\">seen</th></tr></thead><tbody>{rows}</tbody></table></div>",
            name = escape(&run.name)
        )
    };
    runs.iter().map(table).collect()
}

fn rank_row(state: &RankState, silence_s: f64) -> String {
    let RankState { rank, step, max_steps, phases, phase_s, waits_in, resident_bytes, held, gpu_memory, end, .. } =
        state;
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
    // An ended process holds nothing any longer: what its GPU has in use is others'.
    let of_gpu = gpu_memory
        .filter(|_| end.is_none())
        .map(|gpu| format!("GPU: {} of {} in use; ", bytes(gpu.used_bytes), bytes(gpu.total_bytes)));
    let lasts = if end.is_some() { String::new() } else { age(phase_s + silence_s.max(0.0)) };
    let mut row = format!("<tr><th scope=\"row\">{rank}</th><td>{} of {max_steps}</td>", (step + 1).min(*max_steps));
    for cell in [
        format!("{phase}{waits}"),
        lasts,
        format!(
            "{}{} {}",
            of_gpu.unwrap_or_default(),
            bytes(on_device),
            if owners.is_empty() { String::new() } else { format!("({})", owners.join(", ")) }
        ),
        bytes(*resident_bytes),
        format!("{} ago", age(silence_s)),
    ] {
        let _ = write!(row, "<td>{}</td>", escape(cell.trim()));
    }
    row + "</tr>"
}

/// The newest warnings of all ranks of every run, the newest first; those that several ranks give at a time once.
pub(super) fn warnings(runs: &[(usize, &WatchedRun)]) -> String {
    let now = now();
    let mut html = String::new();
    for (_, run) in runs {
        let mut all: Vec<(f64, usize, &str)> = Vec::new();
        for rank in &run.ranks {
            all.extend(rank.warnings.iter().map(|warning| (warning.time, rank.rank, warning.text.as_str())));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut seen = std::collections::HashSet::new();
        all.retain(|(_, _, text)| seen.insert(*text));
        for message in run.messages() {
            let _ = write!(html, "<li>{}: {}</li>", escape(&run.name), escape(message));
        }
        for (time, rank, text) in all {
            let (name, text, ago) = (escape(&run.name), escape(text), age(now - time));
            let _ = write!(html, "<li>{name}, rank {rank}, {ago} ago: {text}</li>");
        }
    }
    if html.is_empty() { "<p>None.</p>".to_owned() } else { format!("<ul>{html}</ul>") }
}

fn bytes(bytes: u64) -> String {
    format!("{}B", number(bytes as f64))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let word = part.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for place in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= part.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_one_file_that_runs_no_script_but_its_own() {
        let page = whole();
        let script = page.split_once("<script>").unwrap().1.split_once("</script>").unwrap().0;
        assert_eq!(script, *SCRIPT, "the policy's hash is of exactly this");
        assert!(!page.contains("{style}") && !page.contains("http://") && !page.contains("https://"));
        assert!(!page.contains(" onclick="));
        assert!(policy().contains("default-src 'none'") && policy().contains("script-src 'sha256-"));
    }

    #[test]
    fn a_rank_s_gpu_is_told_while_it_runs() {
        let state = json!({"rank": 0, "world_size": 1, "process": 1, "time": 5.0, "step": 0, "max_steps": 2, "phases": [],
            "phase_s": 0.0, "waits_in": null, "resident_bytes": 1, "held": [], "warnings": [], "end": null,
            "gpu_memory": {"used_bytes": 61_000_000_000u64, "total_bytes": 80_000_000_000u64}});
        let mut state: RankState = serde_json::from_value(state).unwrap();
        assert!(rank_row(&state, 5.0).contains("GPU: 61GB of 80GB in use; "), "{}", rank_row(&state, 5.0));
        state.gpu_memory = None;
        assert!(!rank_row(&state, 5.0).contains("GPU"));
    }

    #[test]
    fn bytes_are_written_in_base_64() {
        for (text, expected) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }
}
