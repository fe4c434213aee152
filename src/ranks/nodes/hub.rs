//! The hub: what rank 0 serves to all ranks of the world, itself among them. It admits them, passes on what they send one another,
//! gathers, collects the nodes' verdicts, and tells all when one is gone.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::auth::{TOKEN_VARIABLE, Token, Unproven};
use super::connection::{self, Connection};
use super::frame::Frame;
use super::layout::Greeting;
use super::switch::Switch;
use crate::console;
use crate::error::{Error, Result};
use crate::process::detach;

/// How often the listener is asked for somebody new.
const LOOK: Duration = Duration::from_millis(10);
/// How long somebody unknown may take to prove that they belong here.
const PROOF: Duration = Duration::from_secs(5);
/// Most that are unknown at once.
const MAX_UNKNOWN: usize = 256;
/// How often a hub says whom it still waits for.
const SAY: Duration = Duration::from_secs(20);
/// How long a hub that ends goes on serving ranks that have not left yet.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// How long a hub that ends waits for others to hear it.
const FAREWELL: Duration = Duration::from_secs(2);

/// The running hub. Dropped, it serves until all others have left, for ten seconds at most, and says farewell.
#[derive(Debug)]
pub(super) struct NodeHub {
    shared: Arc<NodeHubState>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct NodeHubState {
    token: Token,
    longest_silence: Duration,
    switch: Mutex<Switch>,
    is_over: AtomicBool,
    /// Whether nobody is listened to any more.
    is_deaf: Arc<AtomicBool>,
    readers: AtomicUsize,
    /// Whether it was said that somebody has another token.
    has_warned: AtomicBool,
}

impl NodeHub {
    /// Serves the ranks that `own`, rank 0's greeting, tells of.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no thread for it.
    pub(super) fn start(listener: TcpListener, token: Token, own: Greeting, longest_silence: Duration) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Environment {
            message: format!("cannot start the hub that connects the nodes: {error}"),
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let switch = Mutex::new(Switch::new(own));
        let (is_over, is_deaf) = (AtomicBool::new(false), Arc::new(AtomicBool::new(false)));
        let readers = AtomicUsize::new(0);
        let has_warned = AtomicBool::new(false);
        let shared = Arc::new(NodeHubState { token, longest_silence, switch, is_over, is_deaf, readers, has_warned });
        let serving = shared.clone();
        let thread = std::thread::Builder::new().name("node-hub".to_owned());
        let acceptor = thread.spawn(move || accept(&listener, &serving)).map_err(failed)?;
        Ok(Self { shared, acceptor: Some(acceptor) })
    }
}

impl Drop for NodeHub {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let _ = self.acceptor.take().map(JoinHandle::join);
        // What this rank sent last may still be unread, and others may be exchanging what they need to end.
        self.shared.await_readers(Instant::now() + LAST_WORDS, Switch::serves);
        let mut connections = self.shared.switch().close();
        let deadline = Instant::now() + FAREWELL;
        for connection in &mut connections {
            connection.leave(deadline.saturating_duration_since(Instant::now()));
        }
        // What others have sent is read first: a socket that is closed with unread bytes takes the farewell with it.
        self.shared.await_readers(deadline, |_| true);
        self.shared.is_deaf.store(true, Ordering::Relaxed);
    }
}

impl NodeHubState {
    fn switch(&self) -> MutexGuard<'_, Switch> {
        self.switch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every connection has ended, no longer than until `deadline` and while `goes_on`.
    fn await_readers(&self, deadline: Instant, goes_on: fn(&Switch) -> bool) {
        while self.readers.load(Ordering::Relaxed) > 0 && Instant::now() < deadline && goes_on(&self.switch()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Admits ranks until all are there; the port is closed then.
fn accept(listener: &TcpListener, shared: &Arc<NodeHubState>) {
    let unknown = Arc::new(AtomicUsize::new(0));
    let mut said = Instant::now();
    while !shared.is_over.load(Ordering::Relaxed) && !shared.switch().is_complete() {
        if said.elapsed() > SAY {
            said = Instant::now();
            let missing = shared.switch().describe_missing(); // not while writing: a terminal may stand still
            console::say(format_args!("still waiting for {missing}"));
        }
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(LOOK);
            continue;
        };
        if unknown.fetch_add(1, Ordering::Relaxed) >= MAX_UNKNOWN {
            unknown.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (shared, counted) = (shared.clone(), unknown.clone());
        let thread = std::thread::Builder::new().name("node-reader".to_owned()).stack_size(256 << 10);
        let serving = detach(thread, move || {
            let admitted = admit(stream, &shared);
            counted.fetch_sub(1, Ordering::Relaxed);
            if let Some((greeting, stream)) = admitted {
                shared.readers.fetch_add(1, Ordering::Relaxed);
                serve(&greeting, &stream, &shared);
                shared.readers.fetch_sub(1, Ordering::Relaxed);
            }
        });
        if serving.is_err() {
            unknown.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The greeting of somebody who proves that they have the token.
fn admit(stream: TcpStream, shared: &NodeHubState) -> Option<(Greeting, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    let greeting = match shared.token.admit(&mut ProofStream::new(&stream, PROOF)) {
        Ok(greeting) => greeting,
        Err(unproven) => {
            let from =
                stream.peer_addr().map_or_else(|_| "an unknown address".to_owned(), |from| from.ip().to_string());
            tracing::debug!("refused a connection from {from}: {unproven:?}");
            if matches!(unproven, Unproven::Denied) && !shared.has_warned.swap(true, Ordering::Relaxed) {
                console::say(format_args!(
                    "refused a connection from {from}: its {TOKEN_VARIABLE} differs, or it is not a node of this run \
                     (reported once)"
                ));
            }
            return None;
        }
    };
    stream.set_write_timeout(None).ok()?;
    Some((serde_json::from_slice(&greeting).ok()?, stream))
}

/// A connection of somebody unknown, for as long as a proof may take in all.
pub(super) struct ProofStream<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl<'a> ProofStream<'a> {
    pub(super) fn new(stream: &'a TcpStream, limit: Duration) -> Self {
        Self { stream, until: Instant::now() + limit }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for ProofStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for ProofStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Passes on what a rank sends until its connection ends.
fn serve(greeting: &Greeting, stream: &TcpStream, shared: &NodeHubState) {
    if shared.switch().is_complete() {
        return; // too late: all are there
    }
    let rank = greeting.rank;
    let (Ok(connection), Ok(reading)) = (Connection::new(stream), stream.try_clone()) else { return };
    let Some(place) = shared.switch().join(greeting, connection) else {
        // Refused: the connection stays until the rank has read why.
        connection::read(reading, PROOF, &shared.is_deaf, |_| ());
        return;
    };
    let take = |frame: Frame| shared.switch().take(rank, frame);
    let end = connection::read(reading, shared.longest_silence, &shared.is_deaf, take);
    shared.switch().end(rank, place, &end);
}
