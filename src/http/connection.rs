//! One connection: whether it waits for its client, and whether its client still waits for an answer.
//!
//! A client may close its own direction once it has asked (RFC 9112, 9.6) and still read the answer. To this end of the connection that
//! looks like a client that is gone, until something is sent: a client that is gone refuses it. So it is sent an interim answer, which
//! every client of HTTP/1.1 skips.

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

/// Sent to a client that has closed its own direction, while it waits.
const INTERIM_ANSWER: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// State of a connection that its task and the server's loop share.
#[derive(Debug)]
pub(super) struct ClientConnection {
    stream: TcpStream,
    /// The turn at which it began to wait for bytes of its client; 0 while it does not.
    waits_since: AtomicU64,
    /// Whether a whole request has no answer yet, and its client knows interim answers.
    is_unanswered: AtomicBool,
    takes_interim_answers: AtomicBool,
}

/// Counts the turns at which connections begin to wait.
static TURNS: AtomicU64 = AtomicU64::new(1);

impl ClientConnection {
    pub fn new(stream: TcpStream) -> Self {
        let waits_since = TURNS.fetch_add(1, Ordering::Relaxed).into();
        Self { stream, waits_since, is_unanswered: false.into(), takes_interim_answers: false.into() }
    }

    /// A number that is the smaller, the longer it has waited for its client; `None` while an answer is under way.
    pub fn waits_since(&self) -> Option<u64> {
        Some(self.waits_since.load(Ordering::Relaxed)).filter(|turn| *turn != 0)
    }

    /// Notes that the answer to a request is being made.
    pub fn begin(&self, version: Version) {
        self.is_unanswered.store(true, Ordering::Relaxed);
        self.takes_interim_answers.store(version >= Version::HTTP_11, Ordering::Relaxed);
    }

    /// Notes that the answer is there to be written.
    pub fn end(&self) {
        self.is_unanswered.store(false, Ordering::Relaxed);
    }

    /// Whether nobody waits for the answer that is being made. A client of HTTP/1.0 is taken to wait.
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

    /// Polls the connection's own `work` to its end, and every `look` whether anybody waits for it.
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

/// The bytes of a connection, as hyper reads and writes them.
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
