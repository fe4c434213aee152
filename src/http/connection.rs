//! One connection: whether it waits for its client, and whether the client still waits for an answer.
//!
//! A client may close its sending direction after a request and still read the answer (RFC 9112, 9.6). The server cannot tell this from a client that
//! is gone until it sends something, so it sends an interim answer, which every HTTP/1.1 client skips: a client that is gone rejects it.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::Version;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Interim answer that probes a client which has closed its sending direction.
const INTERIM_ANSWER: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Connection state that the connection's task and the server's loop share.
#[derive(Debug)]
pub(super) struct ClientConnection {
    stream: TcpStream,
    /// Counter value at which the connection began to wait for bytes from its client; 0 while it does not wait.
    waits_since: AtomicU64,
    /// Whether a complete request is still unanswered and its client understands interim answers.
    is_unanswered: AtomicBool,
    takes_interim_answers: AtomicBool,
}

/// Counter that orders the moments at which connections begin to wait.
static TURNS: AtomicU64 = AtomicU64::new(1);

impl ClientConnection {
    pub fn new(stream: TcpStream) -> Self {
        let waits_since = TURNS.fetch_add(1, Ordering::Relaxed).into();
        Self { stream, waits_since, is_unanswered: false.into(), takes_interim_answers: false.into() }
    }

    /// Smaller for connections that have waited longer for their client; `None` while an answer is being computed.
    pub fn waits_since(&self) -> Option<u64> {
        Some(self.waits_since.load(Ordering::Relaxed)).filter(|turn| *turn != 0)
    }

    /// Notes that computing an answer has begun.
    pub fn begin(&self, version: Version) {
        self.is_unanswered.store(true, Ordering::Relaxed);
        self.takes_interim_answers.store(version >= Version::HTTP_11, Ordering::Relaxed);
    }

    /// Notes that the answer is complete and being written.
    pub fn end(&self) {
        self.is_unanswered.store(false, Ordering::Relaxed);
    }

    /// Whether the client is gone while its answer is being computed. HTTP/1.0 clients are assumed to wait.
    fn is_abandoned(&self) -> bool {
        if !self.is_unanswered.load(Ordering::Relaxed) {
            return false;
        }
        match recv(&self.stream, &mut [0_u8], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) if self.takes_interim_answers.load(Ordering::Relaxed) => {
                !matches!(self.stream.try_write(INTERIM_ANSWER), Ok(num_bytes) if num_bytes == INTERIM_ANSWER.len())
            }
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Polls the connection's `work` to its end, and every `look` checks whether the client still waits.
    pub async fn attend(self: Arc<Self>, work: impl Future, look: Duration) {
        let mut work = pin!(work);
        let mut looks = tokio::time::interval(look);
        let has_ended = std::future::poll_fn(|cx| {
            if work.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            while looks.poll_tick(cx).is_ready() {
                if self.is_abandoned() {
                    return Poll::Ready(());
                }
            }
            Poll::Pending
        });
        has_ended.await;
    }
}

/// The byte stream of a connection, as hyper reads and writes it.
#[derive(Debug)]
pub(super) struct ConnectionBytes(pub Arc<ClientConnection>);

impl AsyncRead for ConnectionBytes {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let ClientConnection { stream, waits_since, .. } = &*self.0;
        loop {
            let Poll::Ready(ready) = stream.poll_read_ready(cx) else {
                let turn = TURNS.fetch_add(1, Ordering::Relaxed);
                let _ = waits_since.compare_exchange(0, turn, Ordering::Relaxed, Ordering::Relaxed);
                return Poll::Pending;
            };
            ready?;
            match stream.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => {
                    waits_since.store(0, Ordering::Relaxed);
                    return Poll::Ready(outcome.map(|num_bytes| buffer.advance(num_bytes)));
                }
            }
        }
    }
}

impl ConnectionBytes {
    fn poll_try(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let stream = &self.0.stream;
        loop {
            ready!(stream.poll_write_ready(cx))?;
            match write(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl AsyncWrite for ConnectionBytes {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |stream| stream.try_write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&self.0.stream, rustix::net::Shutdown::Write).map_err(Into::into))
    }
}
