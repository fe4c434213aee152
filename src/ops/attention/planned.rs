//! Runs with the data that their kernels need, created on first use and kept for all layers, forward and backward.

use std::cell::OnceCell;

use tch::Tensor;

use super::kernel::AttentionKernel;
use super::padded::Padded;
use super::runs::{Runs, made_once};
use crate::error::Result;

/// Runs and the kernel that computes them.
#[derive(Debug)]
pub(super) struct PlannedRuns {
    pub rows: Runs,
    padded: OnceCell<Padded>,
    kernel: OnceCell<AttentionKernel>,
}

impl PlannedRuns {
    pub(super) fn new(rows: Runs) -> Self {
        Self { rows, padded: OnceCell::new(), kernel: OnceCell::new() }
    }

    /// Chooses the kernel for queries like `q`.
    pub(super) fn kernel(&self, q: &Tensor /* [T, H, hd] */) -> &AttentionKernel {
        self.kernel.get_or_init(|| AttentionKernel::choose(q, &self.rows))
    }

    /// Pads the runs to buckets of similar length.
    pub(super) fn padded(&self) -> Result<&Padded> {
        let Runs { q, k, sees, num_kv_heads, device, .. } = &self.rows;
        made_once(&self.padded, || Padded::new(q, k, *sees, *num_kv_heads, *device))
    }
}
