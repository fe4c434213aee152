//! The dynamic 8-bit quantization map (arXiv 1511.04561), as in bitsandbytes: the value of each code, and the nearest code of a value.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::torch;

/// Number of powers of ten, from 10^-6 on.
const NUM_POWERS: u32 = 7;

/// The value of each of 256 codes, ascending, with the midpoints between them.
#[derive(Debug)]
pub struct DynamicMap {
    /// The value of each code.
    pub levels: Tensor, // [256] f32
    /// Midpoints between codes: a value above `bounds[i]` has a code above i.
    pub bounds: Tensor, // [255] f32
}

impl DynamicMap {
    /// The map for signed values: for each power of ten the midpoints of 2^i equal parts of [0.1, 1], negative and positive; 0 and 1.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn signed(device: Device) -> Result<Self> {
        Self::of(&dynamic_levels(true), device)
    }

    /// The map for values of at least 0, with twice as many parts.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn unsigned(device: Device) -> Result<Self> {
        Self::of(&dynamic_levels(false), device)
    }

    fn of(levels: &[f32], device: Device) -> Result<Self> {
        let levels = torch::tensor_on(levels, device)?;
        Ok(Self { bounds: bounds(&levels)?, levels })
    }
}

/// Returns the midpoints `[L - 1]` between ascending levels `[L]`.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn bounds(levels: &Tensor) -> Result<Tensor> {
    let count = levels.size()[0] - 1;
    Ok(levels.narrow(0, 0, count).f_add(&levels.narrow(0, 1, count))?.f_div(&torch::scalar(2.0))?)
}

/// Returns the index of the level nearest to each value, given the levels' midpoints; ties go to the lower one. i32
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn nearest(x: &Tensor, bounds: &Tensor) -> Result<Tensor> {
    Ok(x.f_contiguous()?.f_bucketize(bounds, true, false)?)
}

/// Divides each row by its scale; a row of zeros stays 0.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn normalised(x: &Tensor /* [R, B] */, scale: &Tensor /* [R] */) -> Result<Tensor> {
    let divisor = scale.f_where_self(&scale.f_gt_tensor(&torch::scalar(0f32))?, &torch::scalar(1f32))?;
    Ok(x.f_div(&divisor.unsqueeze(1))?)
}

/// The levels of a signed or unsigned map, ascending.
pub fn dynamic_levels(signed: bool) -> Vec<f32> {
    let mut levels = vec![0.0, 1.0];
    for i in 0..NUM_POWERS {
        let parts = 1i64 << if signed { i } else { i + 1 };
        let power = 10f64.powi(i as i32 - 6) as f32;
        let bounds = Tensor::linspace(0.1, 1.0, parts + 1, (Kind::Float, Device::Cpu));
        let middles = (bounds.narrow(0, 0, parts) + bounds.narrow(0, 1, parts)) / 2.0;
        let middles = Vec::<f32>::try_from(middles).expect("a vector of f32");
        levels.extend(middles.iter().map(|middle| power * middle));
        if signed {
            levels.extend(middles.iter().map(|middle| -power * middle));
        }
    }
    levels.sort_by(f32::total_cmp);
    levels
}
