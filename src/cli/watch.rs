//! `watch`: shows runs in a browser.

use std::time::Duration;

use super::args::WatchArgs;
use crate::console;
use crate::error::{Error, Result};
use crate::http::{Guard, HttpServer};
use crate::launch::{self, OnStop};
use crate::phase;
use crate::watch;

/// Interval of checks for a request to end.
const LOOK: Duration = Duration::from_millis(100);

/// Serves the watch page until TERM or INT.
pub(super) fn watch(args: WatchArgs) -> Result<()> {
    for folder in &args.folders {
        if !folder.exists() {
            let folder = folder.display();
            console::say(format_args!("notice: {folder} does not exist yet; its runs appear once they start"));
        } else if !folder.is_dir() {
            let expected = "the output folder of a run, or a folder that contains such folders";
            return Err(Error::invalid_value("DIR", folder.display(), expected));
        }
    }
    launch::stop_on_signals(OnStop::Answer, false);
    let listener = HttpServer::bind(&args.hosts.host, args.port)?;
    let guard = Guard::new(&args.hosts.host, &args.hosts.allowed_hosts, &[]);
    let server = HttpServer::start(listener, watch::router(args.folders, guard))?;
    console::say(format_args!("watching at http://{} (Ctrl-C ends)", server.address()));
    while !phase::stop_requested() {
        std::thread::sleep(LOOK);
    }
    server.finish();
    Ok(())
}
