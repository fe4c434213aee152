//! Metrics: how they are reduced over ranks and where they are written: metrics.jsonl (the primary source), TensorBoard event files, completions as
//! Parquet, an HTML report. The module knows nothing of training, only names and values.

mod columns;
mod completions;
mod history;
mod jsonl;
mod lasting;
mod log;
mod messages;
mod over_steps;
pub mod ranks;
pub mod report;
mod sidecar;
mod step;
mod tensorboard;
mod writer;

pub use columns::CompletionRow;
pub use completions::{
    CompletionsWriter, LoggedGroup, check_samples_file, gather_completions, read_completions, write_completions,
};
pub(crate) use completions::{FOLDER as COMPLETIONS, read_rows};
pub use history::LogHistory;
pub(crate) use jsonl::read_metrics_in;
pub use jsonl::{MetricLine, read_metrics};
pub use log::{EarlierLog, FirstAndNewest, LogOptions, RunLog};
pub use report::write_report;
pub use sidecar::Services;
pub use step::{MetricValues, Reduce, StepMetrics};
