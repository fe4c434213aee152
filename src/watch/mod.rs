//! Runs watched in a browser: the report live over HTTP, completions to read and compare, what every rank is doing. Reads the files
//! of output folders and nothing else, so that it never stands in a run's way. Knows nothing of training.
//!
//! Files may be half written, cut, replaced or deleted at any time: that is shown as a message. Text of a model is escaped, and the
//! page's policy lets no script run but its own.
//!
//! | file | what it is |
//! |---|---|
//! | `routes` | paths and their answers |
//! | `runs` | the runs of the watched folders and how they are |
//! | `follow` | metrics.jsonl, read on from where it was read to |
//! | `samples` | completions of a step: found, filtered, beside those of another |
//! | `query` | what a request asks for |
//! | `page` | what a browser shows |

mod follow;
mod page;
mod query;
mod routes;
mod runs;
mod samples;

pub use routes::router;
