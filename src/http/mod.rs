//! An HTTP server on its own thread: its address, limits on connections and idle time, protection against foreign web pages, and shutdown.
//! Independent of what is served.
//!
//! | file | what it is |
//! |---|---|
//! | `guard` | accepted hosts, origins and content types |
//! | `connection` | one connection: whether it waits for its client, and whether the client still waits |

mod connection;
mod guard;

use std::future::poll_fn;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use self::connection::{ClientConnection, ConnectionBytes};
pub use self::guard::{Guard, check_json_type, parse_origin};
use crate::error::{Error, Result};

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Maximum number of connections. For one more, the connection that has waited longest for its client is closed.
    max_connections: usize,
    /// Interval at which a connection checks whether its client still waits.
    look: Duration,
}

impl Limits {
    /// Limits derived from the process's limit on file descriptors, of which half are left for other purposes.
    fn of_process() -> Self {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let half = descriptors.map_or(usize::MAX, |most| usize::try_from(most / 2).unwrap_or(usize::MAX));
        Self { max_connections: half.clamp(1, 4096), look: Duration::from_secs(2) }
    }
}

/// Time limit for reading a request's head and for idling between two requests.
const HEAD_TIME: Duration = Duration::from_secs(60);
/// Time limit for a client that does not read what is sent to it.
const STALL_TIME: Duration = Duration::from_secs(300);
/// Time that clients have to read the end of their answers when the server stops.
const LAST_READ_TIME: Duration = Duration::from_secs(5);
/// Pause before accepting again after the system ran out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Number of threads for work that computes or reads files.
const MAX_BLOCKING_THREADS: usize = 2;

/// A running HTTP server with its own thread.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl HttpServer {
    /// Binds a listening socket, so that a used port is reported before anything else is done.
    ///
    /// # Errors
    /// [`Error::Environment`] if the port is in use or the address is not of this machine.
    pub fn bind(host: &str, port: u16) -> Result<TcpListener> {
        let refuse = |error: std::io::Error| Error::Environment {
            message: format!(
                "cannot listen on --host {host} --port {port}: {error}; choose another port, or --port 0 for any free \
                 port"
            ),
        };
        let listener = TcpListener::bind((host, port)).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(refuse)?;
        Ok(listener)
    }

    /// Starts to serve `router` on `listener`.
    ///
    /// # Errors
    /// [`Error::Environment`] if the thread cannot be started.
    pub fn start(listener: TcpListener, router: Router) -> Result<Self> {
        Self::start_within(listener, router, Limits::of_process())
    }

    fn start_within(listener: TcpListener, router: Router, limits: Limits) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Environment {
            message: format!("cannot start the thread of the HTTP server: {error}"),
        };
        let address = listener.local_addr().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(MAX_BLOCKING_THREADS)
            .build()
            .map_err(failed)?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(failed)?
        };
        let (end, ended) = oneshot::channel();
        let serve = move || {
            runtime.block_on(serve(listener, router, limits, ended));
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("http".to_owned()).spawn(serve).map_err(failed)?;
        Ok(Self { address, end, thread })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections; clients have a few seconds to read the end of their answers.
    pub fn finish(self) {
        drop(self.end);
        let _ = self.thread.join(); // a panic there has been told
    }
}

async fn serve(listener: tokio::net::TcpListener, router: Router, limits: Limits, mut ended: oneshot::Receiver<()>) {
    let mut open = OpenConnections { limits, connections: Vec::new() };
    let graceful = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).half_close(true);
    loop {
        let next = poll_fn(|cx| match Pin::new(&mut ended).poll(cx) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => listener.poll_accept(cx).map(Some),
        });
        let Some(accepted) = next.await else { break };
        let Ok((stream, _)) = accepted else {
            open.close_one(); // no descriptor is left, or the client is gone already
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        if !open.make_room() {
            continue;
        }
        let _ = stream.set_nodelay(true);
        let _ = limit_stalls(&stream, STALL_TIME);
        let connection = Arc::new(ClientConnection::new(stream));
        let (asked, service) = (Arc::clone(&connection), TowerToHyperService::new(router.clone()));
        let service = service_fn(move |request: Request<Incoming>| {
            asked.begin(request.version());
            let (asked, answer) = (Arc::clone(&asked), service.call(request));
            async move {
                let answer = answer.await;
                asked.end();
                answer
            }
        });
        let work = builder.serve_connection(TokioIo::new(ConnectionBytes(Arc::clone(&connection))), service);
        let task = tokio::spawn(Arc::clone(&connection).attend(graceful.watch(work), limits.look));
        open.connections.push((connection, task.abort_handle()));
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_READ_TIME, graceful.shutdown()).await;
}

/// The connections of a server, including ended ones.
#[derive(Debug)]
struct OpenConnections {
    limits: Limits,
    connections: Vec<(Arc<ClientConnection>, AbortHandle)>,
}

impl OpenConnections {
    /// Whether one more connection fits, after closing one that waits for its client if necessary.
    fn make_room(&mut self) -> bool {
        if self.connections.len() >= self.limits.max_connections {
            self.connections.retain(|(_, task)| !task.is_finished());
        }
        self.connections.len() < self.limits.max_connections || self.close_one()
    }

    /// Closes the connection that has waited longest for its client; false if none waits.
    fn close_one(&mut self) -> bool {
        let waiting = self.connections.iter().enumerate().filter(|(_, (_, task))| !task.is_finished());
        let waiting = waiting.filter_map(|(place, (connection, _))| Some((connection.waits_since()?, place)));
        let Some((_, place)) = waiting.min() else { return false };
        self.connections.swap_remove(place).1.abort();
        true
    }
}

/// Closes a connection after `limit` if its peer does not read what is sent to it.
fn limit_stalls(stream: impl AsFd, limit: Duration) -> std::io::Result<()> {
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, limit.as_millis() as u32)?)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Shutdown, TcpStream};
    use std::sync::mpsc;

    use axum::routing::get;
    use tokio::sync::Semaphore;

    use super::*;

    /// Longest time that a failing test waits.
    const LONGEST: Duration = Duration::from_secs(60);

    /// A test server whose path /slow answers when a semaphore permits, and reports when it begins and ends.
    struct SlowServer {
        server: HttpServer,
        may_answer: Arc<Semaphore>,
        told: mpsc::Receiver<&'static str>,
    }

    struct AtEnd(mpsc::Sender<&'static str>);

    impl Drop for AtEnd {
        fn drop(&mut self) {
            let _ = self.0.send("ended");
        }
    }

    impl SlowServer {
        fn start(max_connections: usize) -> Self {
            let (may_answer, (tell, told)) = (Arc::new(Semaphore::new(0)), mpsc::channel());
            let permit = Arc::clone(&may_answer);
            let slow = move || async move {
                let _ = tell.send("begun");
                let _at_end = AtEnd(tell);
                permit.acquire().await.unwrap().forget();
                "late"
            };
            let router = Router::new().route("/slow", get(slow)).route("/quick", get(async || "quick"));
            let listener = HttpServer::bind("127.0.0.1", 0).unwrap();
            let limits = Limits { max_connections, look: Duration::from_millis(5) };
            Self { server: HttpServer::start_within(listener, router, limits).unwrap(), may_answer, told }
        }

        fn send(&self, path: &str, version: &str) -> TcpStream {
            let mut stream = TcpStream::connect(self.server.address()).unwrap();
            write!(stream, "GET {path} HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            stream
        }
    }

    fn answer_of(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn half_closed_clients_are_answered_and_vanished_ones_cancelled() {
        let slow = SlowServer::start(10);
        for version in ["1.0", "1.1"] {
            let stream = slow.send("/slow", version);
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(slow.told.recv_timeout(LONGEST), Ok("begun"));
            if version == "1.1" {
                let mut interim = [0; 25];
                (&stream).read_exact(&mut interim).unwrap(); // the connection was looked at, and lives on
                assert_eq!(interim, *b"HTTP/1.1 100 Continue\r\n\r\n");
            }
            slow.may_answer.add_permits(1);
            let answer = answer_of(stream);
            assert!(answer.contains(&format!("HTTP/{version} 200 OK")) && answer.ends_with("late"), "{answer}");
            assert_eq!(slow.told.recv_timeout(LONGEST), Ok("ended"));
        }
        let stream = slow.send("/slow", "1.1");
        assert_eq!(slow.told.recv_timeout(LONGEST), Ok("begun"));
        drop(stream);
        assert_eq!(slow.told.recv_timeout(LONGEST), Ok("ended"), "without any answer");
        slow.server.finish();
    }

    #[test]
    fn the_oldest_idle_connection_is_closed_for_a_new_one() {
        let slow = SlowServer::start(3);
        let busy = slow.send("/slow", "1.1");
        assert_eq!(slow.told.recv_timeout(LONGEST), Ok("begun"));
        let mut idle: Vec<TcpStream> = Vec::new();
        for _ in 0..20 {
            let mut stream = TcpStream::connect(slow.server.address()).unwrap();
            write!(stream, "GET /quick HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            let mut answer = [0; 15];
            stream.read_exact(&mut answer).unwrap(); // each is let in
            assert_eq!(&answer, b"HTTP/1.1 200 OK");
            idle.push(stream);
        }
        assert!(answer_of(slow.send("/quick", "1.1")).ends_with("quick"));
        let newest = idle.pop().unwrap();
        for stream in idle {
            assert!(answer_of(stream).ends_with("quick"), "what it had was not lost, and it was closed");
        }
        let _ = write!(&newest, "GET /quick HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        assert_eq!(answer_of(newest).matches("quick").count(), 2, "the newest was kept");
        slow.may_answer.add_permits(1);
        assert!(answer_of(busy).ends_with("late"), "one with an answer under way is never closed");
        slow.server.finish();
    }

    #[test]
    fn a_new_connection_is_closed_when_all_others_are_busy() {
        let slow = SlowServer::start(1);
        let busy = slow.send("/slow", "1.1");
        assert_eq!(slow.told.recv_timeout(LONGEST), Ok("begun"));
        assert_eq!(answer_of(TcpStream::connect(slow.server.address()).unwrap()), "");
        slow.may_answer.add_permits(1);
        assert!(answer_of(busy).ends_with("late"));
        slow.server.finish();
    }

    #[test]
    fn a_client_that_does_not_read_is_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        limit_stalls(&stream, Duration::from_millis(100)).unwrap();
        let error = loop {
            if let Err(error) = stream.write_all(&[0; 1 << 16]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
}
