//! Which kernel serves an attention. The rule was measured on an H200 in bfloat16, 28 query and 4 key/value heads of 128:
//! cuDNN's kernels take runs of one length only, and are the faster ones from 128 rows on.
//!
//! | causal runs | flash forward, backward | cuDNN forward, backward, TFLOP/s |
//! |---|---|---|
//! | 128 x 128 | 79, 47 | 131, 57 |
//! | 16 x 1,024 | 213, 188 | 417, 298 |
//! | 4 x 4,096 | 316, 268 | 584, 478 |
//! | 1 x 16,384 | 347, 307 | 644, 531 |
//!
//! cuDNN plans a shape when it first meets it, 80 ms for forward and backward together, more than most micro-batches gain: a
//! shape is taken from the second micro-batch on that has it. Padding runs of nearly one length to one, with the
//! copies that takes, gained 20 to 30 % of attention's time at 3,072 tokens and nothing at 1,024, less than the plans cost while
//! lengths vary; it is not done.
//!
//! Only flash attention has a backward that sums in a fixed order, at a fifth of its rate ([`torch::set_deterministic`]).

use std::cell::RefCell;
use std::collections::HashSet;

use tch::{Kind, Tensor};

use super::runs::{Dense, Runs};
use crate::torch;

/// Fewest rows of a dense run.
const LEAST_DENSE_LEN: i64 = 128;

/// How an attention is computed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kernel {
    /// cuDNN on one rectangle.
    Dense(Dense),
    /// Flash attention over the runs as they lie.
    Flash,
    /// Padded buckets: kinds and devices that the others do not serve.
    Padded,
}

impl Kernel {
    /// For queries like `q`; asked once for a micro-batch.
    pub(super) fn choose(q: &Tensor /* [T, H, hd] */, runs: &Runs) -> Self {
        let head_dim = q.size()[2];
        if !(q.device().is_cuda() && q.kind() == Kind::BFloat16 && head_dim % 8 == 0 && head_dim <= 256) {
            return Self::Padded;
        }
        match runs.dense().filter(|dense| head_dim <= 128 && !torch::is_deterministic() && is_worth_a_plan(dense)) {
            Some(dense) => Self::Dense(dense),
            None => Self::Flash,
        }
    }
}

/// Long enough, and met before.
fn is_worth_a_plan(dense: &Dense) -> bool {
    thread_local! {
        // cuDNN's plans, too, are of one thread.
        static MET: RefCell<HashSet<Dense>> = RefCell::default();
    }
    dense.q_len.min(dense.k_len) >= LEAST_DENSE_LEN && MET.with_borrow_mut(|met| !met.insert(*dense))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_planned_when_it_comes_again() {
        let dense = Dense { runs: 2, q_len: 300, k_len: 200 };
        assert!(!is_worth_a_plan(&dense) && is_worth_a_plan(&dense));
        assert!(!is_worth_a_plan(&Dense { runs: 3, ..dense }));
        let short = Dense { k_len: 100, ..dense };
        assert!(!is_worth_a_plan(&short) && !is_worth_a_plan(&short));
    }
}
