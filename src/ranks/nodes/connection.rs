//! One end of a connection between a rank and the hub: a thread that writes queued messages and heartbeats, and the loop that reads. Senders never
//! wait for the network.

use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frame::{Frame, FrameKind};
use crate::error::{Error, Result};
use crate::phase::awake_now;

/// Interval of heartbeats when nothing else is sent.
const BEAT: Duration = Duration::from_millis(500);
/// Interval at which an idle reader checks the time.
const LOOK: Duration = Duration::from_millis(100);
/// Payloads up to this size are sent in one write with their header.
const SMALL_BYTES: usize = 64 << 10;

/// The sending end. Dropping it closes the connection without a goodbye.
#[derive(Debug)]
pub(super) struct Connection {
    queue: Sender<Frame>,
    stream: TcpStream,
    writer: Option<JoinHandle<()>>,
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The other side said goodbye.
    Left,
    /// The other side's process ended, or the connection broke.
    Closed(String),
    /// The received bytes are not a valid message.
    Garbled(String),
    /// Nothing was received for this time, the maximum allowed.
    Silent(Duration),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Left => f.write_str("its program ended"),
            End::Closed(why) => write!(f, "its connection closed ({why}): its process ended or was killed"),
            End::Garbled(what) => {
                write!(f, "received {what} from it: the network or another program corrupts the connection")
            }
            End::Silent(silence) => write!(
                f,
                "no message from it for {:.0} s (node_timeout_s): its host is down, the network is interrupted, or its \
                 process is stopped",
                silence.as_secs_f64()
            ),
        }
    }
}

impl Connection {
    /// Takes over a stream for sending.
    ///
    /// # Errors
    /// [`Error::Environment`] if no thread or file descriptor is available.
    pub(super) fn new(stream: &TcpStream) -> Result<Self> {
        let failed = |error: std::io::Error| Error::Environment {
            message: format!("cannot set up a connection between nodes: {error}"),
        };
        stream.set_nodelay(true).map_err(failed)?;
        let (queue, frames) = channel();
        let (own, writing) = (stream.try_clone().map_err(failed)?, stream.try_clone().map_err(failed)?);
        let thread = std::thread::Builder::new().name("node-writer".to_owned()).stack_size(128 << 10);
        let writer = thread.spawn(move || write(writing, &frames)).map_err(failed)?;
        Ok(Self { queue, stream: own, writer: Some(writer) })
    }

    /// Queues a frame. After the end of the connection it is dropped.
    pub(super) fn send(&self, frame: Frame) {
        let _ = self.queue.send(frame);
    }

    #[cfg(test)]
    pub(super) fn break_off(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says goodbye and waits until all queued messages are sent, at most for `patience`.
    pub(super) fn leave(&mut self, patience: Duration) {
        self.send(Frame::empty(FrameKind::Bye));
        let deadline = Instant::now() + patience;
        while self.writer.as_ref().is_some_and(|writer| !writer.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both); // ends the reader
        self.send(Frame::empty(FrameKind::Bye)); // wakes the writer, whose write then fails
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Writes frames until a goodbye is written, the queue is closed, or the connection ends.
fn write(mut stream: TcpStream, frames: &Receiver<Frame>) {
    loop {
        let frame = match frames.recv_timeout(BEAT) {
            Ok(frame) => frame,
            Err(RecvTimeoutError::Timeout) => Frame::empty(FrameKind::Beat),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let written = match frame.payload.len() <= SMALL_BYTES {
            true => stream.write_all(&[&frame.header()[..], &frame.payload].concat()),
            false => stream.write_all(&frame.header()).and_then(|()| stream.write_all(&frame.payload)),
        };
        match written {
            Err(_) => return, // the reader of the stream reports why
            Ok(()) if frame.kind == FrameKind::Bye => {
                let _ = stream.shutdown(Shutdown::Write);
                return;
            }
            Ok(()) => {}
        }
    }
}

/// Calls `take` with every frame except heartbeats until the connection ends. Setting `is_over` has the effect of a goodbye.
pub(super) fn read(
    stream: TcpStream,
    longest_silence: Duration,
    is_over: &Arc<AtomicBool>,
    mut take: impl FnMut(Frame),
) -> End {
    if let Err(error) = stream.set_read_timeout(Some(LOOK)) {
        return End::Closed(error.to_string());
    }
    let patient = Patient { stream, heard: awake_now(), longest_silence, is_over: is_over.clone() };
    let mut reader = BufReader::with_capacity(SMALL_BYTES, patient);
    loop {
        match Frame::read(&mut reader) {
            Ok(Frame { kind: FrameKind::Beat, .. }) => {}
            Ok(Frame { kind: FrameKind::Bye, .. }) => return End::Left,
            Ok(frame) => take(frame),
            Err(error) if error.kind() == ErrorKind::TimedOut => return End::Silent(longest_silence),
            Err(_) if is_over.load(Ordering::Relaxed) => return End::Left,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return End::Closed("end of stream".to_owned()),
            Err(error) if error.kind() == ErrorKind::InvalidData => return End::Garbled(error.to_string()),
            Err(error) => return End::Closed(error.to_string()),
        }
    }
}

/// A stream whose reads wait until data arrives, or no data has arrived for too long.
struct Patient {
    stream: TcpStream,
    heard: Instant,
    longest_silence: Duration,
    is_over: Arc<AtomicBool>,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.stream.read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Silence counts only if the kernel has no data: a process that was itself suspended finds all data that arrived meanwhile. The
                    // time of its suspension is not counted, because the other side may have been suspended with it.
                    if self.is_over.load(Ordering::Relaxed) {
                        return Err(ErrorKind::ConnectionAborted.into());
                    }
                    if awake_now() - self.heard > self.longest_silence {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(std::io::Error::other(error.to_string())); // an error of the network, not of the read call
                }
                outcome => {
                    self.heard = awake_now();
                    return outcome;
                }
            }
        }
    }
}
