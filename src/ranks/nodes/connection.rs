//! One end of a connection between a rank and the hub: a thread that writes what is queued and signs of life, and the loop that
//! reads. Nobody who sends waits for the network.

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

/// How often a side that has nothing to send shows that it lives.
const BEAT: Duration = Duration::from_millis(500);
/// How often a reader that gets nothing looks at the clock.
const LOOK: Duration = Duration::from_millis(100);
/// Payloads up to this size are sent in one piece with their header.
const SMALL_BYTES: usize = 64 << 10;

/// The sending end. Dropped, it is closed without a farewell.
#[derive(Debug)]
pub(super) struct Connection {
    queue: Sender<Frame>,
    stream: TcpStream,
    writer: Option<JoinHandle<()>>,
}

/// How a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The other side said farewell.
    Left,
    /// The other side's process ended, or the connection broke.
    Closed(String),
    /// Bytes came that are no message.
    Garbled(String),
    /// Nothing came for the longest time allowed.
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
    /// Takes a stream over for sending.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no thread or descriptor for it.
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

    /// Queues a frame; after the end of the connection it is dropped.
    pub(super) fn send(&self, frame: Frame) {
        let _ = self.queue.send(frame);
    }

    #[cfg(test)]
    pub(super) fn break_off(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says farewell and waits, no longer than `patience`, until all that was queued is on its way.
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
        let _ = self.stream.shutdown(Shutdown::Both); // which ends the reader
        self.send(Frame::empty(FrameKind::Bye)); // and wakes the writer, which cannot send it
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

/// Writes until a farewell is written, the queue is gone, or the connection is.
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
            Err(_) => return, // the reader of the same stream says why
            Ok(()) if frame.kind == FrameKind::Bye => {
                let _ = stream.shutdown(Shutdown::Write);
                return;
            }
            Ok(()) => {}
        }
    }
}

/// Hands every frame but signs of life to `take` until the connection ends, or `is_over` is set, which is the same as a farewell.
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

/// A stream whose reads wait until something comes, or nothing has for too long.
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
                    // Silence counts only where the kernel has nothing: a process that was stopped itself finds all that came, and its own
                    // time is left out, as the other side may have been stopped with it.
                    if self.is_over.load(Ordering::Relaxed) {
                        return Err(ErrorKind::ConnectionAborted.into());
                    }
                    if awake_now() - self.heard > self.longest_silence {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(std::io::Error::other(error.to_string())); // of the network, not of the read
                }
                outcome => {
                    self.heard = awake_now();
                    return outcome;
                }
            }
        }
    }
}
