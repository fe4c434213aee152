//! A web server for watching runs in a browser: live metrics, completions to read and compare, the state of every rank. Reads only the files in
//! output folders, so that it never disturbs a run.
//!
//! Files may be half written, cut, replaced or deleted at any time: that is shown as a message. Text of a model is escaped, and the page's policy
//! lets no script run but its own.
//!
//! | file | what it is |
//! |---|---|
//! | `routes` | HTTP routes and responses |
//! | `runs` | the runs in the watched folders and their state |
//! | `follow` | incremental reading of metrics.jsonl |
//! | `samples` | completions of a step: finding, filtering, and comparing with another step |
//! | `query` | the query of a request |
//! | `page` | the HTML page |

mod follow;
mod page;
mod query;
mod routes;
mod runs;
mod samples;

pub use routes::router;
