//! Pipeline stages of an engine: rows go from each stage to the next, and sampled tokens back to all stages, in the order of each GPU's stream.
//!
//! Time is counted in ticks, equal on all ranks because all launch the same steps; ticks without a step complete the steps under way. In tick n a
//! stage sends what it computed in tick n - 1, receives what the previous stage computed, and computes. So on the devices, stage s runs s ticks
//! behind the first stage. Hosts run ahead and never wait here for a device. With P stages, the tokens of tick m are broadcast between the ticks m +
//! P - 1 and m + P of the first stage, and are on its device when tick m + P begins. All ranks communicate in one order, first the rows for the next
//! stage, then tokens, so no circular wait is possible.

use std::collections::VecDeque;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::buffers::DecodeBuffers;
use super::wait::wait;
use crate::cuda::{Context, CudaEvent, PinnedWords, TorchStream};
use crate::error::Result;
use crate::ranks::Collective;
use crate::rollout::stats::StageTimes;

/// The tokens of the last 2 P ticks, on the device and on their way to the host. Their addresses are fixed, so steps can be captured as CUDA graphs.
#[derive(Debug)]
pub(super) struct StageTokens {
    seqs: usize,
    ring: Tensor, // [2 P, 2 S] i32, each row like `DecodeBuffers::sampled`
    downloads: Vec<PinnedWords>,
}

impl StageTokens {
    /// Allocates memory for steps that sample for up to `seqs` sequences.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::error::Error::OutOfMemory); [`Cuda`](crate::error::Error::Cuda).
    pub(super) fn new(context: &Arc<Context>, num_stages: usize, seqs: usize) -> Result<Self> {
        let (ticks, device) = (2 * num_stages, Device::Cuda(context.ordinal()));
        let downloads = (0..ticks).map(|_| PinnedWords::new(context, 2 * seqs)).collect::<Result<_>>()?;
        let ring = Tensor::f_zeros([ticks as i64, 2 * seqs as i64], (Kind::Int, device))?;
        Ok(Self { seqs, ring, downloads })
    }

    /// Token ids and log-probability bits of all ticks in the ring, concatenated.
    pub(super) fn ids(&self) -> Tensor {
        self.ring.view(-1)
    }

    fn of_tick(&self, tick: usize) -> Tensor {
        self.ring.get((tick % self.downloads.len()) as i64)
    }
}

/// One rank's position in the pipeline, for one session.
#[derive(Debug)]
pub(super) struct StageLine<'a> {
    pipe: &'a dyn Collective,
    num_ticks: usize,
    /// Rows of the steps of the last P ticks, the newest first; `None` for a tick without a step.
    rows: VecDeque<Option<usize>>,
    /// When the current step began on the device, and whether others were under way.
    began: Option<(CudaEvent, bool)>,
    spans: VecDeque<StepSpan>,
    last_end: Option<CudaEvent>,
    times: StageTimes,
}

/// Start and end of a step on this rank's device.
#[derive(Debug)]
struct StepSpan {
    began: CudaEvent,
    ended: CudaEvent,
    /// Whether other steps were under way when this one was launched. If so, the gap after the previous step counts as waiting time.
    follows: bool,
}

impl<'a> StageLine<'a> {
    /// Joins the pipeline; `None` if one stage has all layers.
    pub(super) fn new(pipe: &'a dyn Collective) -> Option<Self> {
        (pipe.size() > 1).then(|| Self {
            pipe,
            num_ticks: 0,
            rows: VecDeque::new(),
            began: None,
            spans: VecDeque::new(),
            last_end: None,
            times: StageTimes::default(),
        })
    }

    /// Maximum number of steps under way when the next is launched: each stage computes one, and the first has another ready.
    pub(super) fn lag(&self) -> usize {
        self.pipe.size()
    }

    /// Queues the transfers before a step of `rows` rows; without rows, it only completes steps under way. Afterwards the step's `x` is in its buffer
    /// on all stages but the first.
    pub(super) fn tick(
        &mut self,
        stream: &TorchStream,
        (buffers, tokens): (&DecodeBuffers, &mut StageTokens),
        rows: Option<usize>,
        follows: bool,
    ) -> Result<()> {
        let (stage, num_stages) = (self.pipe.rank(), self.pipe.size());
        let last = num_stages - 1;
        let first = |rows: usize| buffers.x.narrow(0, 0, rows as i64);
        if let Some(&Some(rows)) = self.rows.front().filter(|_| stage < last) {
            self.pipe.send(&first(rows), stage + 1)?;
        }
        if let Some(rows) = rows.filter(|_| stage > 0) {
            self.pipe.receive(&mut first(rows), stage - 1)?;
        }
        if let Some(Some(_)) = self.rows.get(last - stage) {
            let tick = self.num_ticks + stage - num_stages;
            let mut sampled = tokens.of_tick(tick);
            if stage == last {
                sampled.f_copy_(&buffers.sampled)?;
            }
            self.pipe.broadcast(&mut sampled, last)?;
            let slot = tick % tokens.downloads.len();
            tokens.downloads[slot].download(&sampled)?;
        }
        self.rows.push_front(rows);
        self.rows.truncate(num_stages);
        self.num_ticks += 1;
        let began = rows.map(|_| stream.record_timed()).transpose()?;
        self.began = began.map(|began| (began, follows));
        Ok(())
    }

    /// Records that the step of the last tick is queued. Returns its tick, and the index of its first sample in [`StageTokens::ids`].
    pub(super) fn computed(&mut self, stream: &TorchStream, tokens: &StageTokens) -> Result<(usize, usize)> {
        let (began, follows) = self.began.take().expect("a step in this tick");
        self.spans.push_back(StepSpan { began, ended: stream.record_timed()?, follows });
        let tick = self.num_ticks - 1;
        Ok((tick, tick % tokens.downloads.len() * 2 * tokens.seqs))
    }

    /// Whether the tokens of a tick are being copied to the host. All ranks get the same answer after the same tick.
    pub(super) fn is_through(&self, tick: usize) -> bool {
        self.num_ticks > tick + self.pipe.size()
    }

    /// Returns the tokens of a tick as words and adds the times of its step. Call it for the oldest tick first.
    pub(super) fn collect<'t>(
        &mut self,
        tokens: &'t mut StageTokens,
        tick: usize,
        all: &dyn Collective,
    ) -> Result<&'t [i32]> {
        let slot = tick % tokens.downloads.len();
        let words = tokens.downloads[slot].words(&mut || wait(all))?;
        let StepSpan { began, ended, follows } = self.spans.pop_front().expect("a step was launched");
        self.times.computing += began.time_until(&ended)?;
        if let Some(before) = self.last_end.replace(ended).filter(|_| follows) {
            self.times.waiting += before.time_until(&began)?;
        }
        Ok(words)
    }

    /// Returns how long this rank's device computed, and waited between steps, since the last call.
    pub(super) fn take_times(&mut self) -> StageTimes {
        std::mem::take(&mut self.times)
    }
}
