//! Metrics of an endpoint in Prometheus' text format.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::rollout::SessionLoad;

/// Upper bounds of the buckets of the time to the first token, in seconds.
const BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Counters since the start of the server.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub completed: AtomicU64,
    pub cancelled: AtomicU64,
    pub refused: AtomicU64,
    pub failed: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub generation_tokens: AtomicU64,
    load: Mutex<SessionLoad>,
    first_token: Mutex<FirstToken>,
}

/// Histogram of the times from a request's arrival to its first token.
#[derive(Debug, Default)]
struct FirstToken {
    counts: [u64; BUCKETS.len()],
    count: u64,
    sum_s: f64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, count: usize) {
        counter.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub fn set_load(&self, load: SessionLoad) {
        *self.load.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = load;
    }

    pub fn first_token(&self, after: Duration) {
        let mut times = self.first_token.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let seconds = after.as_secs_f64();
        times.count += 1;
        times.sum_s += seconds;
        if let Some(bucket) = BUCKETS.iter().position(|bound| seconds <= *bound) {
            times.counts[bucket] += 1;
        }
    }

    /// The metrics page for Prometheus.
    pub fn page(&self) -> String {
        let mut page = String::new();
        let mut metric = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
            let _ = writeln!(page, "# HELP colo_grpo_{name} {help}\n# TYPE colo_grpo_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(page, "colo_grpo_{name}{labels} {value}");
            }
        };
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let load = *self.load.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let gauges = [
            ("num_requests_running", "Completions that are being generated (they hold KV blocks).", load.num_running),
            ("num_requests_waiting", "Completions that wait for KV blocks or a slot.", load.num_waiting),
            ("kv_blocks", "Total number of KV blocks.", load.num_blocks),
            ("kv_blocks_free", "KV blocks that no sequence uses.", load.num_free_blocks),
        ];
        for (name, help, value) in gauges {
            metric(name, "gauge", help, &[("", value as f64)]);
        }
        let outcomes = [
            ("{outcome=\"completed\"}", read(&self.completed)),
            ("{outcome=\"cancelled\"}", read(&self.cancelled)),
            ("{outcome=\"refused\"}", read(&self.refused)),
            ("{outcome=\"failed\"}", read(&self.failed)),
        ];
        metric("requests_total", "counter", "Finished requests, by outcome.", &outcomes);
        let counters = [
            ("prompt_tokens_total", "Prompt tokens processed.", read(&self.prompt_tokens)),
            ("generation_tokens_total", "Tokens generated.", read(&self.generation_tokens)),
            (
                "preemptions_total",
                "Completions that were preempted to free their KV blocks.",
                load.num_preemptions as f64,
            ),
            ("spec_decode_num_draft_tokens_total", "Draft tokens proposed.", load.num_draft_tokens as f64),
            ("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", load.num_accepted_tokens as f64),
        ];
        for (name, help, value) in counters {
            metric(name, "counter", help, &[("", value)]);
        }
        page + &self.first_token_page()
    }

    fn first_token_page(&self) -> String {
        let name = "colo_grpo_time_to_first_token_seconds";
        let times = self.first_token.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut page =
            format!("# HELP {name} Time from a request to its first token, in seconds.\n# TYPE {name} histogram\n");
        let mut so_far = 0;
        for (bound, count) in BUCKETS.iter().zip(times.counts) {
            so_far += count;
            let _ = writeln!(page, "{name}_bucket{{le=\"{bound}\"}} {so_far}");
        }
        let FirstToken { count, sum_s, .. } = *times;
        page + &format!("{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum_s}\n{name}_count {count}\n")
    }
}
