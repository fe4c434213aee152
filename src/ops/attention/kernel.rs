//! Selects the kernel for an attention. The rule was measured on an H200 in bfloat16, with 28 query and 4 key/value heads of width 128: cuDNN's
//! kernels require runs of equal length, and are the faster ones from 128 rows on.
//!
//! | causal runs | flash forward, backward | cuDNN forward, backward, TFLOP/s |
//! |---|---|---|
//! | 128 x 128 | 79, 47 | 131, 57 |
//! | 16 x 1,024 | 213, 188 | 417, 298 |
//! | 4 x 4,096 | 316, 268 | 584, 478 |
//! | 1 x 16,384 | 347, 307 | 644, 531 |
//!
//! With heads of width 256 (16 query and 4 key/value heads, 4 x 4,096, causal), flash attention takes 1.85 and 6.38 ms, cuDNN 0.89 and 3.72 ms; cuDNN
//! supports these on Hopper only.
//!
//! cuDNN plans a shape on first use: 80 ms for the first forward and backward together, more than most micro-batches gain. So cuDNN is used from the
//! second micro-batch with a shape on. Among runs of different lengths, long ones are computed one by one, rounded up to a length that recurs
//! ([`Mixed`]); for short ones the GPU would wait for launches.
//!
//! | a layer, forward and backward, ms | flash | mixed |
//! |---|---|---|
//! | 28/4 heads, 14 runs of 512 to 4,096 | 2.38, 7.14 | 1.99, 5.81 |
//! | 28/4 heads, 6 runs of 2,048 to 8,192 | 3.61, 10.56 | 2.40, 7.01 |
//! | 12/2 heads, the same | 1.75, 4.98 | 1.26, 3.60 |
//! | 28/4 heads, 24 runs of 512 to 2,048, those from 1,024 on as long ones | 1.15, 3.46 | 1.23, 3.70 |
//!
//! Only flash attention has a backward that sums in a fixed order, at a fifth of its speed ([`torch::set_deterministic`]).

use std::cell::RefCell;
use std::collections::HashSet;

use tch::{Kind, Tensor};

use super::mixed::Mixed;
use super::runs::{Dense, Runs};
use crate::cuda::cudnn_most_head_dim;
use crate::torch::{self, FLASH_HEAD_STEP, FLASH_MOST_HEAD_DIM};

/// Shortest runs for which cuDNN is used.
const LEAST_DENSE_LEN: i64 = 128;

/// Fewest queries (rows times heads) for which a single run gets its own cuDNN call.
const LEAST_LONG_QUERIES: i64 = 48 << 10;

/// The kernel that computes an attention.
#[derive(Debug)]
pub(super) enum AttentionKernel {
    /// cuDNN on one rectangle of runs of equal length.
    Dense(Dense),
    /// cuDNN for each long run, flash attention for the others.
    Mixed(Mixed),
    /// Flash attention over the packed runs.
    Flash,
    /// Padded buckets, for types and devices that the other kernels do not support.
    Padded,
}

impl AttentionKernel {
    /// Chooses the kernel for queries like `q`; called once per micro-batch.
    pub(super) fn choose(q: &Tensor /* [T, H, hd] */, runs: &Runs) -> Self {
        let (num_heads, head_dim) = (q.size()[1], q.size()[2]);
        let has_flash = (head_dim as usize).is_multiple_of(FLASH_HEAD_STEP) && head_dim as usize <= FLASH_MOST_HEAD_DIM;
        if !(q.device().is_cuda() && q.kind() == Kind::BFloat16 && has_flash) {
            return Self::Padded;
        }
        if head_dim as usize > cudnn_most_head_dim(q.device()) || torch::is_deterministic() {
            return Self::Flash;
        }
        if let Some(dense) = runs.dense() {
            return if is_worth_a_plan(&dense) { Self::Dense(dense) } else { Self::Flash };
        }
        let is_long = |len: i64| {
            len * num_heads >= LEAST_LONG_QUERIES && is_worth_a_plan(&Dense { runs: 1, q_len: len, k_len: len })
        };
        Mixed::new(runs, is_long).map_or(Self::Flash, Self::Mixed)
    }
}

/// Whether the runs are long enough for cuDNN, and this shape was seen before.
fn is_worth_a_plan(dense: &Dense) -> bool {
    thread_local! {
        // cuDNN's plans are per thread, too.
        static MET: RefCell<HashSet<Dense>> = RefCell::default();
    }
    dense.q_len.min(dense.k_len) >= LEAST_DENSE_LEN && MET.with_borrow_mut(|met| !met.insert(*dense))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attention_plan_is_built_when_a_shape_repeats() {
        let dense = Dense { runs: 2, q_len: 300, k_len: 200 };
        assert!(!is_worth_a_plan(&dense) && is_worth_a_plan(&dense));
        assert!(!is_worth_a_plan(&Dense { runs: 3, ..dense }));
        let short = Dense { k_len: 100, ..dense };
        assert!(!is_worth_a_plan(&short) && !is_worth_a_plan(&short));
    }
}
