//! Attention over runs of equal length on a GPU, with cuDNN's kernels through libtorch, whose forward `tch` does not bind. About twice as fast as
//! flash attention on Hopper. cuDNN plans every shape on first use.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use tch::{Kind, Tensor};

use super::{Attended, QkvGradients, SavedAttention, ffi};
use crate::error::Result;

/// Computes attention over runs of equal length: o [B, H, L, hd] with the strides of `q`, log-sum-exp [B, H, L, 1] f32.
///
/// # Errors
/// [`crate::Error::Environment`] with libtorch's message for unsupported tensors: they must be on a GPU, in bfloat16 or half, with a head width that
/// is a multiple of 8 up to 128.
pub fn cudnn_forward(
    q: &Tensor, // [B, H, L, hd]
    k: &Tensor, // [B, Hkv, Lk, hd]
    v: &Tensor, // [B, Hkv, Lk, hd]
    causal: bool,
    scale: f64,
) -> Result<Attended> {
    let (mut o, mut lse) = (std::ptr::null_mut(), std::ptr::null_mut());
    let raw = |tensor: &Tensor| tensor.as_ptr().cast::<c_void>();
    // SAFETY: the tensors outlive the call; the results are written on success only.
    let status = unsafe {
        ffi::colo_cudnn_attention_forward(raw(q), raw(k), raw(v), c_int::from(causal), scale, &mut o, &mut lse)
    };
    ffi::check(status, || format!("cuDNN attention of {:?} {:?}", q.size(), q.kind()))?;
    // SAFETY: both are new tensors that the call gave to us alone.
    Ok(unsafe { Attended { o: Tensor::from_ptr(o.cast()), lse: Tensor::from_ptr(lse.cast()) } })
}

/// Computes gradients from the inputs and results of [`cudnn_forward`].
///
/// # Errors
/// The errors of [`cudnn_forward`].
pub fn cudnn_backward(
    d_o: &Tensor,          // [B, H, L, hd]
    saved: SavedAttention, // q, o [B, H, L, hd], k, v [B, Hkv, Lk, hd], lse [B, H, L, 1] f32
    causal: bool,
    scale: f64,
) -> Result<QkvGradients> {
    let SavedAttention { q, k, v, o, lse } = saved;
    let unused = Tensor::f_empty([0], (Kind::Int64, q.device()))?; // dropout state; there is no dropout
    let absent = Tensor::new(); // no bias, no bounds
    let (len, k_len) = (q.size()[2], k.size()[2]);
    let (dq, dk, dv) = Tensor::f_internal_scaled_dot_product_cudnn_attention_backward(
        d_o, q, k, v, o, lse, &unused, &unused, &absent, &absent, &absent, len, k_len, 0.0, causal, scale,
    )?;
    Ok(QkvGradients { dq, dk, dv })
}
