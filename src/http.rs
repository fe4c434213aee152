//! A server of HTTP on a thread of its own: its address, how many connections there may be, how long they may be idle, and
//! their end. Knows nothing of what is asked.

use std::future::poll_fn;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, oneshot};

use crate::error::{Error, Result};

/// Most connections at once; more are closed.
const MAX_CONNECTIONS: usize = 4096;
/// How long a connection may take for a request's head, and be idle between two requests.
const HEAD_TIME: Duration = Duration::from_secs(60);
/// How long a client may read nothing of what is sent to it.
const STALL_TIME: Duration = Duration::from_secs(300);
/// How long clients may take to read the end of their answers once the server ends.
const LAST_READ_TIME: Duration = Duration::from_secs(5);
/// A pause after the system had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Threads for work that computes or reads files.
const MAX_BLOCKING_THREADS: usize = 2;

/// A server on a thread of its own.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl HttpServer {
    /// Takes an address, so that a port that is in use is known before anything else is done.
    ///
    /// # Errors
    /// [`Error::Environment`] if it is in use or not this machine's.
    pub fn bind(host: &str, port: u16) -> Result<TcpListener> {
        let refuse = |error: std::io::Error| Error::Environment {
            message: format!("--host {host} --port {port}: {error}; give another, or --port 0 for a free one"),
        };
        let listener = TcpListener::bind((host, port)).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(refuse)?;
        Ok(listener)
    }

    /// Starts to answer what comes to `listener` by `router`.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no thread for it.
    pub fn start(listener: TcpListener, router: Router) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Environment { message: format!("the server's thread: {error}") };
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
            runtime.block_on(serve(listener, router, ended));
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("http".to_owned()).spawn(serve).map_err(failed)?;
        Ok(Self { address, end, thread })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the door; clients have a few seconds to read the end of their answers.
    pub fn finish(self) {
        drop(self.end);
        let _ = self.thread.join(); // a panic there has been told
    }
}

async fn serve(listener: tokio::net::TcpListener, router: Router, mut ended: oneshot::Receiver<()>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    loop {
        let next = poll_fn(|cx| match Pin::new(&mut ended).poll(cx) {
            Poll::Ready(_) => Poll::Ready(None),
            Poll::Pending => listener.poll_accept(cx).map(Some),
        });
        let Some(accepted) = next.await else { break };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await; // no descriptor is left, or the client is gone already
            continue;
        };
        let Ok(slot) = slots.clone().try_acquire_owned() else { continue };
        let _ = stream.set_nodelay(true);
        let _ = limit_stalls(&stream, STALL_TIME);
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
        let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            let _ = connection.await; // a client that vanished
            drop(slot);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_READ_TIME, graceful.shutdown()).await;
}

/// Ends a connection whose peer takes nothing of what is sent for so long: one that is gone, or that only holds the connection.
fn limit_stalls(stream: impl AsFd, limit: Duration) -> std::io::Result<()> {
    Ok(rustix::net::sockopt::set_tcp_user_timeout(stream, limit.as_millis() as u32)?)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_client_that_reads_nothing_is_let_go() {
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
