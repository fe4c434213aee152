//! The dynamic map of 8 bits (arXiv 1511.04561), as bitsandbytes makes it: what codes stand for, and the nearest code of a value.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::torch;

/// Powers of ten, from 10^-6.
const NUM_POWERS: u32 = 7;

/// The value of each of 256 codes, ascending, with the bounds between them.
#[derive(Debug)]
pub struct DynamicMap {
    /// The values of the codes.
    pub levels: Tensor, // [256] f32
    /// A value above a bound has a code above the bound's place.
    pub bounds: Tensor, // [255] f32
}

impl DynamicMap {
    /// The map of values of both signs: for each power of ten the middles of 2^i equal parts of [0.1, 1], negative and positive; 0 and 1.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn signed(device: Device) -> Result<Self> {
        Self::of(&dynamic_levels(true), device)
    }

    /// The map of values that are not negative, with twice as many parts.
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

/// The middles between neighbours of ascending levels `[L]`: `[L - 1]`
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn bounds(levels: &Tensor) -> Result<Tensor> {
    let count = levels.size()[0] - 1;
    Ok(levels.narrow(0, 0, count).f_add(&levels.narrow(0, 1, count))?.f_div(&torch::scalar(2.0))?)
}

/// The index of the nearest of the levels that have these bounds; the lower one of two at the same distance. i32
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn nearest(x: &Tensor, bounds: &Tensor) -> Result<Tensor> {
    Ok(x.f_contiguous()?.f_bucketize(bounds, true, false)?)
}

/// x / scale, by rows; 0 where a row is all zero.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn normalised(x: &Tensor /* [R, B] */, scale: &Tensor /* [R] */) -> Result<Tensor> {
    let divisor = scale.f_where_self(&scale.f_gt_tensor(&torch::scalar(0f32))?, &torch::scalar(1f32))?;
    Ok(x.f_div(&divisor.unsqueeze(1))?)
}

/// The levels of a map, ascending.
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
