//! Decode steps captured as CUDA graphs, one for each bucket of batch sizes. A batch runs in the smallest bucket that holds it.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::processing::Processing;
use crate::cuda::{Graph, TorchStream};
use crate::error::{Error, Result};
use crate::memory::{Ledger, MemoryKind};

/// Preparing a batch size is logged if it takes longer than this.
const MENTIONED: Duration = Duration::from_millis(100);

/// What tells recorded steps apart: the host decides what they launch by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    /// Rows of the bucket.
    pub(super) rows: usize,
    pub(super) processing: Processing,
    pub(super) of: GraphedStep,
}

/// Kinds of recorded steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum GraphedStep {
    /// A decode step; whether sequences have several rows, or take stored drafts in.
    Decode { is_drafted: bool },
    /// Rows of the draft head; whether they are drawn from.
    DraftHead { draws: bool },
}

/// The recorded steps, and what they were recorded over.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    of_batch: HashMap<GraphKey, Graph>,
    recorded_over: Vec<usize>,
    /// Bytes of GPU memory that the graphs take, as the driver reports them.
    bytes: usize,
}

impl Graphs {
    /// Drops all graphs if the addresses or communicators, listed in `seen`, have changed since the capture.
    pub(super) fn keep_if(&mut self, seen: Vec<usize>) {
        if self.recorded_over != seen {
            self.of_batch.clear();
            self.recorded_over = seen;
            self.account(0);
        }
    }

    /// Runs the `step` of a key: the first time as it is, which lets libraries choose their
    /// algorithms and communicators warm up, and then from its recording.
    pub(super) fn run(
        &mut self,
        key: GraphKey,
        stream: &TorchStream,
        step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if let Some(graph) = self.of_batch.get_mut(&key) {
            // SAFETY: the engine is awake, and `keep_if` has compared the addresses since.
            return unsafe { graph.replay(stream) };
        }
        let start = Instant::now();
        step()?;
        let chosen = start.elapsed();
        let free_bytes = || Ok::<_, Error>(stream.context().memory()?.free_bytes);
        let free = free_bytes()?;
        let graph = Graph::capture(stream, step)?;
        self.account(self.bytes + free.saturating_sub(free_bytes()?));
        self.of_batch.insert(key, graph);
        if start.elapsed() > MENTIONED {
            let (batch, all, chosen) = (key.rows, start.elapsed().as_secs_f64(), chosen.as_secs_f64());
            tracing::info!(
                "prepared decode steps of up to {batch} rows in {all:.2} s, {chosen:.2} of it to choose GEMMs"
            );
        }
        Ok(())
    }

    fn account(&mut self, bytes: usize) {
        self.bytes = bytes;
        Ledger::set("engine_graphs", MemoryKind::Device, bytes);
    }
}
