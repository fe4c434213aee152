//! The rows of one attention over packed runs: query run n attends to key run n.

use std::cell::OnceCell;

use tch::{Device, Tensor};

use crate::error::Result;
use crate::torch::{self, Varlen};

/// Which keys of its run a query attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sees {
    /// Itself and the keys before it, at most `window` in total; queries and keys have the same rows.
    Before { window: Option<i64> },
    /// All keys of the run.
    All,
}

/// The bounds of B runs, for queries and keys.
#[derive(Debug)]
pub(super) struct Runs {
    pub q: Vec<i64>, // [B + 1], from 0
    pub k: Vec<i64>, // [B + 1], from 0
    pub sees: Sees,
    pub num_kv_heads: i64,
    pub device: Device,
    varlen: OnceCell<Varlen>, // made on first use
}

/// B runs with equal lengths of queries and of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Dense {
    pub runs: i64,
    pub q_len: i64,
    pub k_len: i64,
}

impl Runs {
    /// Creates runs. Bounds may start at any row, as rows are counted from the first.
    pub(super) fn new(q: &[i64], k: &[i64], sees: Sees, num_kv_heads: i64, device: Device) -> Self {
        let from_zero = |bounds: &[i64]| bounds.iter().map(|bound| bound - bounds[0]).collect();
        Self { q: from_zero(q), k: from_zero(k), sees, num_kv_heads, device, varlen: OnceCell::new() }
    }

    /// A part of the runs, consecutive ones, given by their bounds.
    pub(super) fn some(&self, bounds: &[i64]) -> Self {
        Self::new(bounds, bounds, self.sees, self.num_kv_heads, self.device)
    }

    /// The arguments of kernels that read packed runs.
    pub(super) fn varlen(&self) -> Result<&Varlen> {
        made_once(&self.varlen, || {
            let (causal, window) = match self.sees {
                Sees::Before { window } => (true, window),
                Sees::All => (false, None),
            };
            Ok(Varlen {
                cu_seqlens_q: self.device_bounds(&self.q)?,
                cu_seqlens_k: self.device_bounds(&self.k)?,
                max_len_q: lens(&self.q).max().unwrap_or(0),
                max_len_k: lens(&self.k).max().unwrap_or(0),
                causal,
                window,
            })
        })
    }

    /// The runs as one rectangle, if all have the same length and no window cuts them.
    pub(super) fn dense(&self) -> Option<Dense> {
        let (q_len, k_len) = (lens(&self.q).next()?, lens(&self.k).next()?);
        let same = lens(&self.q).all(|len| len == q_len) && lens(&self.k).all(|len| len == k_len);
        let whole = self.sees == Sees::All || self.causal_bounds().is_some();
        (same && whole).then_some(Dense { runs: self.q.len() as i64 - 1, q_len, k_len })
    }

    /// The bounds of causal runs that no window cuts; `None` for other runs.
    pub(super) fn causal_bounds(&self) -> Option<&[i64]> {
        let is_whole = |window: Option<i64>| window.is_none_or(|window| lens(&self.q).all(|len| window >= len));
        match self.sees {
            Sees::Before { window } if is_whole(window) => Some(&self.q),
            Sees::Before { .. } | Sees::All => None,
        }
    }

    fn device_bounds(&self, bounds: &[i64]) -> Result<Tensor> {
        let bounds: Vec<i32> = bounds.iter().map(|&bound| bound as i32).collect();
        torch::tensor_on(&bounds, self.device)
    }
}

/// The cell's value; `make` creates it if the cell is empty.
pub(super) fn made_once<T>(cell: &OnceCell<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(made) = cell.get() {
        return Ok(made);
    }
    let made = make()?;
    Ok(cell.get_or_init(|| made))
}

/// Length of each run.
pub(super) fn lens(bounds: &[i64]) -> impl Iterator<Item = i64> + '_ {
    bounds.windows(2).map(|bounds| bounds[1] - bounds[0])
}

/// Views [T, heads, hd] as [T / len, heads, len, hd].
pub(super) fn as_runs(t: &Tensor, len: i64) -> Tensor {
    t.unflatten(0, [-1, len]).transpose(1, 2)
}
