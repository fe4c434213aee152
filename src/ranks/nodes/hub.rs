//! The hub, which rank 0 runs for all ranks of the world, including itself. It admits ranks, forwards their messages, gathers their data, collects
//! the nodes' outcomes of each epoch, and tells all ranks when one is gone.

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

/// Interval at which the listener is polled for new connections.
const LOOK: Duration = Duration::from_millis(10);
/// Maximum time for a new connection to authenticate.
const PROOF: Duration = Duration::from_secs(5);
/// Maximum number of connections that are not yet authenticated.
const MAX_UNKNOWN: usize = 256;
/// Interval of messages about the ranks that the hub still waits for.
const SAY: Duration = Duration::from_secs(20);
/// How long an ending hub continues to serve ranks that have not left yet.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// How long an ending hub waits until others have read its goodbye.
const FAREWELL: Duration = Duration::from_secs(2);

/// The running hub. When dropped, it serves until all other ranks have left, at most ten seconds, and says goodbye.
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
    /// Whether all readers must stop.
    is_deaf: Arc<AtomicBool>,
    readers: AtomicUsize,
    /// Whether the warning about a connection with another token was printed.
    has_warned: AtomicBool,
}

impl NodeHub {
    /// Starts the hub for the world described by `own`, the greeting of rank 0.
    ///
    /// # Errors
    /// [`Error::Environment`] if no thread can be started.
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
        // This rank's last messages may still be unread, and other ranks may still exchange data that they need to end.
        self.shared.await_readers(Instant::now() + LAST_WORDS, Switch::serves);
        let mut connections = self.shared.switch().close();
        let deadline = Instant::now() + FAREWELL;
        for connection in &mut connections {
            connection.leave(deadline.saturating_duration_since(Instant::now()));
        }
        // Read all messages first: closing a socket with unread bytes would discard the goodbye.
        self.shared.await_readers(deadline, |_| true);
        self.shared.is_deaf.store(true, Ordering::Relaxed);
    }
}

impl NodeHubState {
    fn switch(&self) -> MutexGuard<'_, Switch> {
        self.switch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every connection has ended, at most until `deadline` and while `goes_on` returns true.
    fn await_readers(&self, deadline: Instant, goes_on: fn(&Switch) -> bool) {
        while self.readers.load(Ordering::Relaxed) > 0 && Instant::now() < deadline && goes_on(&self.switch()) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Admits ranks until all have joined, then closes the port.
fn accept(listener: &TcpListener, shared: &Arc<NodeHubState>) {
    let unknown = Arc::new(AtomicUsize::new(0));
    let mut said = Instant::now();
    while !shared.is_over.load(Ordering::Relaxed) && !shared.switch().is_complete() {
        if said.elapsed() > SAY {
            said = Instant::now();
            let missing = shared.switch().describe_missing(); // without the lock while printing, because a terminal may block
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

/// Authenticates a new connection and returns its greeting.
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

/// A connection that is not yet authenticated, with one time limit for the whole authentication.
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

/// Handles a rank's messages until its connection ends.
fn serve(greeting: &Greeting, stream: &TcpStream, shared: &NodeHubState) {
    if shared.switch().is_complete() {
        return; // too late: all ranks have joined
    }
    let rank = greeting.rank;
    let (Ok(connection), Ok(reading)) = (Connection::new(stream), stream.try_clone()) else { return };
    let Some(place) = shared.switch().join(greeting, connection) else {
        // Refused: keep the connection until the rank has read the reason.
        connection::read(reading, PROOF, &shared.is_deaf, |_| ());
        return;
    };
    let take = |frame: Frame| shared.switch().take(rank, frame);
    let end = connection::read(reading, shared.longest_silence, &shared.is_deaf, take);
    shared.switch().end(rank, place, &end);
}
