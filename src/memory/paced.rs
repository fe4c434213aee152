//! A long copy to a GPU that lets short copies pass in between.
//!
//! A GPU's copy engine continues with one stream's copies as long as more are queued, so a batch's token ids and positions would wait for a whole
//! optimizer state that was queued earlier. A thread therefore queues the state piece by piece, each after the previous one has ended; other copies
//! then wait for at most one piece.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use tch::{Device, Tensor};

use super::host_pool::{Direction, HostPool, Mark, PendingCopy, copy};
use super::pages::{Pages, PinnedPages};
use crate::cuda::CudaEvent;
use crate::error::{Error, Result, panic_message};

/// Size of a piece: 0.6 ms on a bus of 55 GB/s.
const PIECE_BYTES: usize = 32 << 20;

/// A copy to a tensor whose pieces are queued by a thread. Dropping it waits for the copy.
#[derive(Debug)]
#[must_use = "a copy is waited for when this is dropped: keep it while other work goes on"]
pub struct Paced {
    feeder: Option<JoinHandle<Result<Queued>>>, // None if the copy was done immediately
    tensor: Tensor,
}

/// State once all pieces are queued: the end of the last one.
#[derive(Debug)]
struct Queued {
    event: CudaEvent,
    end: Mark,
}

/// A copy whose pieces are all queued, with a mark at its end.
#[derive(Debug)]
pub struct MarkedCopy {
    /// The running copy.
    pub copy: PendingCopy,
    /// Mark after the last piece.
    pub end: Mark,
}

/// Host address, device address and length of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CopyPiece {
    host: usize,
    device: usize,
    len: usize,
}

impl HostPool {
    /// Starts [`HostPool::copy_to`] for a contiguous tensor, which must not be used until the copy is waited for. Other copies to the same GPU wait
    /// for only a few pieces of it.
    ///
    /// # Errors
    /// The errors of [`HostPool::copy_to`]; [`Error::Environment`] if no thread can be started.
    pub fn copy_to_paced(&self, byte_offset: usize, tensor: &mut Tensor) -> Result<Paced> {
        let bytes = self.check("HostPool::copy_to_paced", byte_offset, tensor)?;
        let Pages::Pinned(pages) = &self.pages else { return self.copy_at_once(byte_offset, tensor) };
        if tensor.device() == Device::Cpu {
            return self.copy_at_once(byte_offset, tensor);
        }
        pages.stream(Direction::In).wait_for_libtorch()?; // of this thread, not of the feeder thread
        let places = self.pages.pieces(byte_offset..byte_offset + bytes);
        let pieces = pieces(places.into_iter().map(|(host, len)| (host as usize, len)), tensor.data_ptr() as usize);
        let pages = pages.clone();
        let thread = std::thread::Builder::new().name("copy-feeder".to_owned());
        let feeder = thread.spawn(move || feed(&pages, &pieces));
        let feeder = feeder.map_err(|error| Error::Environment {
            message: format!("cannot start the thread that copies host memory to the GPU: {error}"),
        })?;
        Ok(Paced { feeder: Some(feeder), tensor: tensor.shallow_clone() })
    }

    fn copy_at_once(&self, byte_offset: usize, tensor: &mut Tensor) -> Result<Paced> {
        self.copy_to_async(byte_offset, tensor)?.wait()?;
        Ok(Paced { feeder: None, tensor: tensor.shallow_clone() })
    }
}

impl Paced {
    /// Waits on the host until all of the copy is queued; returns it as an ordinary running copy with a mark at its end.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a piece could not be copied.
    pub fn queued(mut self) -> Result<MarkedCopy> {
        let queued = self.join()?;
        let (event, end) = match queued {
            Some(Queued { event, end }) => (Some(event), end),
            None => (None, Mark { event: None, at: Instant::now() }),
        };
        Ok(MarkedCopy { copy: PendingCopy { event, tensor: self.tensor.shallow_clone() }, end })
    }

    /// Whether all of the copy is queued, so that [`Paced::queued`] would not wait.
    pub fn is_queued(&self) -> bool {
        self.feeder.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn join(&mut self) -> Result<Option<Queued>> {
        let joined = self.feeder.take().map(JoinHandle::join).transpose();
        joined.map_err(|panic| Error::of_panic("a copy to the GPU", panic_message(&*panic)))?.transpose()
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        // An error will appear at the next use of the GPU.
        if let Ok(Some(Queued { event, .. })) = self.join() {
            let _ = event.synchronize();
        }
    }
}

/// Queues all pieces, one at a time. With three pieces queued at a time the copy engine was never idle, and a short copy waited for all of 8 GiB
/// (measured on an H200).
fn feed(pages: &Arc<PinnedPages>, pieces: &[CopyPiece]) -> Result<Queued> {
    let stream = pages.stream(Direction::In);
    stream.context().make_current()?;
    for &CopyPiece { host, device, len } in pieces {
        // SAFETY: the piece lies in the pages, which this thread holds, and in the tensor (`pieces` of a checked copy), which `Paced`
        // holds until this thread has ended and the stream has passed its last piece; both wait for their streams when they drop.
        unsafe { copy(host as *mut u8, device as *mut u8, len, Direction::In, Some(stream))? };
        stream.record_sleeping()?.synchronize()?;
    }
    let end = Mark { event: Some(stream.record_timed()?), at: Instant::now() };
    Ok(Queued { event: stream.record()?, end })
}

/// Divides host ranges at `places` (address, bytes) into pieces; on the device they are consecutive, from address `device` on.
fn pieces(places: impl Iterator<Item = (usize, usize)>, mut device: usize) -> Vec<CopyPiece> {
    let mut pieces = Vec::new();
    for (host, bytes) in places {
        for start in (0..bytes).step_by(PIECE_BYTES) {
            let len = PIECE_BYTES.min(bytes - start);
            pieces.push(CopyPiece { host: host + start, device, len });
            device += len;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn paced_copies_use_short_pieces_that_cover_everything() {
        let places = [(1 << 40, 2 * PIECE_BYTES + 5), (7 << 40, 3)];
        let piece = |host, at, len| CopyPiece { host, device: 1000 + at, len };
        let expected = [
            piece(1 << 40, 0, PIECE_BYTES),
            piece((1 << 40) + PIECE_BYTES, PIECE_BYTES, PIECE_BYTES),
            piece((1 << 40) + 2 * PIECE_BYTES, 2 * PIECE_BYTES, 5),
            piece(7 << 40, 2 * PIECE_BYTES + 5, 3),
        ];
        assert_eq!(pieces(places.into_iter(), 1000), expected);
    }

    #[test]
    fn paced_copies_to_the_cpu_are_synchronous() {
        let mut pool = HostPool::new("paced_test", 4096, Device::Cpu, &mut |_, _| ()).unwrap();
        let tensor = Tensor::from_slice(&[1i64, 2, 3]);
        pool.copy_from(8, &tensor).unwrap();
        let mut back = tensor.zeros_like();
        let copy = pool.copy_to_paced(8, &mut back).unwrap();
        assert!(copy.is_queued());
        copy.queued().unwrap().copy.hold_libtorch().unwrap();
        assert_eq!(back, tensor);
        let mut outside = Tensor::zeros([1 << 10], (Kind::Int64, Device::Cpu));
        assert!(matches!(pool.copy_to_paced(8, &mut outside), Err(Error::InvalidArgument { .. })));
    }
}
