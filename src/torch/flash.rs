//! Flash attention over packed runs on a GPU, with libtorch's kernels (FlashAttention-2, arXiv 2307.08691), whose forward `tch` does not bind.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use tch::{Kind, Tensor};

use super::{Attended, QkvGradients, SavedAttention, ffi};
use crate::error::Result;

/// Head widths in flash attention must be multiples of this.
pub const FLASH_HEAD_STEP: usize = 8;
/// Largest head width in flash attention.
pub const FLASH_MOST_HEAD_DIM: usize = 256;

/// Query runs, and the key runs that they attend to, for [`flash_forward`] and [`flash_backward`].
#[derive(Debug)]
pub struct Varlen {
    /// Bounds of the query runs. [N + 1] i32
    pub cu_seqlens_q: Tensor,
    /// Bounds of the key runs. [N + 1] i32
    pub cu_seqlens_k: Tensor,
    /// Length of the longest query run.
    pub max_len_q: i64,
    /// Length of the longest key run.
    pub max_len_k: i64,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
    /// Largest number of keys that a causal query attends to, including its own.
    pub window: Option<i64>,
}

impl Varlen {
    /// At least 2, because for single queries the kernel uses another path, with another layout of the log-sum-exp.
    fn max_len_q(&self) -> i64 {
        self.max_len_q.max(2)
    }

    /// A copy of the runs with another window.
    pub fn within(&self, window: Option<i64>) -> Self {
        let [cu_seqlens_q, cu_seqlens_k] = [&self.cu_seqlens_q, &self.cu_seqlens_k].map(Tensor::shallow_clone);
        Self { cu_seqlens_q, cu_seqlens_k, window, ..*self }
    }

    fn window_left(&self) -> Option<i64> {
        self.window.map(|window| window - 1)
    }
}

/// Computes attention over packed runs: o [T, H, hd], log-sum-exp [H, T] f32.
///
/// # Errors
/// [`crate::Error::Environment`] with libtorch's message for unsupported tensors: they must be on a GPU, in bfloat16 or half, with a head width that
/// is a multiple of 8 up to 256.
pub fn flash_forward(
    q: &Tensor, // [T, H, hd]
    k: &Tensor, // [Tk, Hkv, hd]
    v: &Tensor, // [Tk, Hkv, hd]
    varlen: &Varlen,
    scale: f64,
) -> Result<Attended> {
    let (mut o, mut lse) = (std::ptr::null_mut(), std::ptr::null_mut());
    let raw = |tensor: &Tensor| tensor.as_ptr().cast::<c_void>();
    // SAFETY: the tensors outlive the call; the results are written on success only.
    let status = unsafe {
        ffi::colo_flash_attention_forward(
            raw(q),
            raw(k),
            raw(v),
            raw(&varlen.cu_seqlens_q),
            raw(&varlen.cu_seqlens_k),
            varlen.max_len_q(),
            varlen.max_len_k,
            c_int::from(varlen.causal),
            scale,
            varlen.window_left().unwrap_or(-1),
            &mut o,
            &mut lse,
        )
    };
    ffi::check(status, || format!("flash attention of {:?} {:?}", q.size(), q.kind()))?;
    // SAFETY: both are new tensors that the call gave to us alone.
    Ok(unsafe { Attended { o: Tensor::from_ptr(o.cast()), lse: Tensor::from_ptr(lse.cast()) } })
}

/// Computes gradients from the inputs and results of [`flash_forward`]. Sums into dq have no fixed order, unless [`super::set_deterministic`] is on.
///
/// # Errors
/// [`crate::Error::Torch`] for unsupported tensors.
pub fn flash_backward(
    d_o: &Tensor,          // [T, H, hd]
    saved: SavedAttention, // q, o [T, H, hd], k, v [Tk, Hkv, hd], lse [H, T] f32
    varlen: &Varlen,
    scale: f64,
) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    let unused = Tensor::f_empty([0], (Kind::Int64, q.device()))?; // dropout state; there is no dropout
    ffi::only_deterministic(|| {
        let (dq, dk, dv) = Tensor::f_internal_flash_attention_backward(
            d_o,
            q,
            k,
            v,
            o,
            lse,
            &varlen.cu_seqlens_q,
            &varlen.cu_seqlens_k,
            varlen.max_len_q(),
            varlen.max_len_k,
            0.0,
            varlen.causal,
            &unused,
            &unused,
            scale,
            varlen.window_left(),
            None::<i64>,
        )?;
        Ok(QkvGradients { dq, dk, dv })
    })
}
