//! Rotary position embedding (arXiv 2104.09864), in Hugging Face's half-rotation convention: pair i is `(x[i], x[i + hd/2])`.

use std::f64::consts::PI;
use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::try_map;
use crate::error::Result;
use crate::torch::{accumulation_kind, f32_vec, f64_vec, tensor_on};

/// How a model scales its rotary frequencies for contexts longer than it was trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Divides all frequencies by one number: `rope_type = "linear"`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Scales frequencies by wavelength: `rope_type = "llama3"`.
    Llama3(Llama3Scaling),
    /// Scales frequencies by their number of rotations within the original context: `rope_type = "yarn"` (arXiv 2309.00071).
    Yarn(YarnScaling),
}

/// Frequency scaling of Llama 3.1 and later, with the field names of config.json.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Frequencies whose wavelength is above `original_max_position_embeddings / low_freq_factor` are divided by `factor`.
    pub low_freq_factor: f64,
    /// Frequencies whose wavelength is below `original_max_position_embeddings / high_freq_factor` are unchanged.
    pub high_freq_factor: f64,
    /// Context length of pre-training, in tokens.
    pub original_max_position_embeddings: f64,
}

/// YaRN's parameters, with the field names of config.json.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Context length of pre-training, in tokens.
    pub original_max_position_embeddings: f64,
    /// Frequencies with more rotations than this within the original context are unchanged.
    pub beta_fast: f64,
    /// Frequencies with fewer rotations than this within the original context are divided by `factor`.
    pub beta_slow: f64,
    /// Multiplier of cosines and sines; attention scores are thus multiplied by its square.
    pub attention_factor: f64,
    /// The dimensions between which frequencies are interpolated are rounded to integers.
    pub truncate: bool,
}

impl RopeScaling {
    /// The scaled inverse frequency of pair `index`.
    fn scale(&self, inv_freq: f64, index: usize, head_dim: usize, theta: f64) -> f64 {
        match self {
            RopeScaling::Linear { factor } => inv_freq / factor,
            RopeScaling::Llama3(scaling) => scaling.scale(inv_freq),
            RopeScaling::Yarn(scaling) => {
                let [low, high] = scaling.bounds(head_dim as f64, theta);
                let share = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
                inv_freq / scaling.factor * share + inv_freq * (1.0 - share)
            }
        }
    }

    fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn(scaling) => scaling.attention_factor,
            RopeScaling::Linear { .. } | RopeScaling::Llama3(_) => 1.0,
        }
    }
}

/// Coefficients of the two parts of YaRN's default multiplier: `mscale` and `mscale_all_dim` of config.json.
#[derive(Debug)]
pub struct YarnMscale {
    /// Coefficient in the numerator.
    pub mscale: f64,
    /// Coefficient in the denominator.
    pub all_dim: f64,
}

impl YarnScaling {
    /// The default multiplier of cosines and sines: 0.1 m ln(factor) + 1 with m = 1, or its ratio for the two coefficients of `mscale`.
    pub fn default_attention_factor(factor: f64, mscale: Option<YarnMscale>) -> f64 {
        let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        mscale.map_or_else(|| of(1.0), |scales| of(scales.mscale) / of(scales.all_dim))
    }

    /// Indices of two pairs: pairs before the first are unchanged, pairs after the second are divided by `factor`.
    fn bounds(&self, head_dim: f64, theta: f64) -> [f64; 2] {
        let pair_of_turns = |turns: f64| {
            head_dim * (self.original_max_position_embeddings / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of_turns(self.beta_fast), pair_of_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(head_dim - 1.0));
        [low, if low == high { high + 0.001 } else { high }]
    }
}

impl Llama3Scaling {
    /// The scaled inverse frequency, interpolated between the two wavelength bounds.
    fn scale(&self, inv_freq: f64) -> f64 {
        let turns = self.original_max_position_embeddings * inv_freq / (2.0 * PI);
        if turns < self.low_freq_factor {
            inv_freq / self.factor
        } else if turns > self.high_freq_factor {
            inv_freq
        } else {
            let smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            (1.0 - smooth) * inv_freq / self.factor + smooth * inv_freq
        }
    }
}

/// The rotary frequencies of a layer.
#[derive(Debug)]
pub struct Rope {
    inv_freq: Tensor, // [hd/2] f64, CPU
    /// Multiplier of cosines and sines.
    attention_factor: f64,
    /// The longest table that [`Rope::exact_table`] has computed.
    exact: Mutex<Option<Tensor>>,
}

impl Rope {
    /// Creates theta^(-2i / head_dim) for i < head_dim / 2, scaled if `scaling` is given.
    pub fn new(head_dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> Self {
        let inv_freq = |index: usize| {
            let inv_freq = theta.powf(-2.0 * index as f64 / head_dim as f64);
            scaling.map_or(inv_freq, |scaling| scaling.scale(inv_freq, index, head_dim, theta))
        };
        let inv_freq: Vec<f64> = (0..head_dim / 2).map(inv_freq).collect();
        let attention_factor = scaling.map_or(1.0, RopeScaling::attention_factor);
        Self { inv_freq: Tensor::from_slice(&inv_freq), attention_factor, exact: Mutex::default() }
    }

    /// Frequencies of 0: the rotation leaves all bits unchanged at every position.
    pub fn still(head_dim: usize) -> Self {
        let inv_freq = Tensor::from_slice(&vec![0.0; head_dim / 2]);
        Self { inv_freq, attention_factor: 1.0, exact: Mutex::default() }
    }

    /// Number of columns of a head that are rotated.
    pub fn columns(&self) -> usize {
        2 * self.inv_freq.numel()
    }

    /// Cosines, then sines, of all positions below `len`, computed in f64: [len, hd] f32, as decode kernels read them.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn table(&self, len: usize, device: Device) -> Result<Tensor> {
        let positions = Tensor::f_arange(len as i64, (Kind::Double, Device::Cpu))?;
        let [cos, sin] = self.turns(&positions)?;
        Ok(Tensor::f_cat(&[cos, sin], 1)?.f_to_kind(Kind::Float)?.f_to_device(device)?)
    }

    /// Cosines and sines at each token's position, computed in f64 and stored in `accumulation_kind(kind)`, on the device of `positions`. They are
    /// computed once per batch and used by all layers.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn rows(&self, positions: &Tensor /* [T] i64 */, kind: Kind) -> Result<RopeRows> {
        let [cos, sin] = self.turns(&positions.f_to_kind(Kind::Double)?)?;
        let kind = accumulation_kind(kind);
        Ok(RopeRows {
            cos: Tensor::f_cat(&[&cos, &cos], 1)?.unsqueeze(1).f_to_kind(kind)?,
            sin: Tensor::f_cat(&[&sin.f_neg()?, &sin], 1)?.unsqueeze(1).f_to_kind(kind)?,
            exact: None,
        })
    }

    /// Computes [`Rope::rows`] such that cosines and sines depend only on the position. (libtorch computes the last elements of a tensor with
    /// different functions.)
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn exact_rows(&self, positions: &Tensor /* [T] i64 */, kind: Kind) -> Result<RopeRows> {
        let device = positions.device();
        let len = if positions.numel() == 0 { 0 } else { positions.f_max()?.int64_value(&[]) + 1 };
        let table = self.exact_table(len as usize, device)?;
        let turns = table.f_index_select(0, positions)?; // [T, hd]
        let half = turns.size()[1] / 2;
        let (cos, sin) = (turns.narrow(1, 0, half), turns.narrow(1, half, half));
        let kind = accumulation_kind(kind);
        let host = if device == Device::Cpu { f32_vec(&turns)? } else { Vec::new() };
        Ok(RopeRows {
            cos: Tensor::f_cat(&[&cos, &cos], 1)?.unsqueeze(1).f_to_kind(kind)?,
            sin: Tensor::f_cat(&[&sin.f_neg()?, &sin], 1)?.unsqueeze(1).f_to_kind(kind)?,
            exact: Some(ExactTurns { host, table, positions: positions.f_to_kind(Kind::Int)? }),
        })
    }

    /// Computes [`Rope::table`] for at least `len` positions, such that rows depend only on their position. The table is kept for later calls.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn exact_table(&self, len: usize, device: Device) -> Result<Tensor> {
        let mut kept = self.exact.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = kept.as_ref().filter(|table| table.size()[0] >= len as i64 && table.device() == device) {
            return Ok(table.shallow_clone());
        }
        let (len, inv_freq) = (len.next_power_of_two(), f64_vec(&self.inv_freq)?);
        let mut turns = Vec::with_capacity(len * self.columns());
        for position in 0..len {
            let angles = inv_freq.iter().map(|inv_freq| position as f64 * inv_freq);
            let turn = |value: f64| (value * self.attention_factor) as f32;
            turns.extend(angles.clone().map(|angle| turn(angle.cos())));
            turns.extend(angles.map(|angle| turn(angle.sin())));
        }
        let table = tensor_on(&turns, device)?.view([len as i64, self.columns() as i64]);
        Ok(kept.insert(table).shallow_clone())
    }

    /// Cosines and sines [T, hd/2] f64 at positions [T] f64.
    fn turns(&self, positions: &Tensor) -> Result<[Tensor; 2]> {
        let inv_freq = self.inv_freq.f_to_device(positions.device())?;
        let angle = positions.unsqueeze(1).f_mul(&inv_freq)?; // [T, hd/2]
        let turns = [angle.f_cos()?, angle.f_sin()?];
        match self.attention_factor {
            1.0 => Ok(turns),
            factor => try_map(turns, |turn| Ok(turn.f_mul_scalar(factor)?)),
        }
    }
}

/// The cosines and sines that [`forward`] multiplies with, one row per token.
#[derive(Debug)]
pub struct RopeRows {
    cos: Tensor, // [T, 1, hd], both halves alike
    sin: Tensor, // [T, 1, hd], the first half negated
    exact: Option<ExactTurns>,
}

/// Cosines and sines in the form that [`crate::ops::exact`] reads.
#[derive(Debug)]
struct ExactTurns {
    host: Vec<f32>,    // [T, hd], cosines, then sines; on a CPU
    table: Tensor,     // [positions, hd] f32, cosines, then sines
    positions: Tensor, // [T] i32
}

impl RopeRows {
    /// Cosines and sines of each token on a CPU, [T, hd], and the number of cosines per token.
    ///
    /// # Panics
    /// If the rows were not created by [`Rope::exact_rows`].
    pub(super) fn turns(&self) -> (&[f32], usize) {
        (&self.exact_turns().host, self.cos.size()[2] as usize / 2)
    }

    /// The table [positions, hd] and the positions [T] i32 that the engine's kernel reads.
    ///
    /// # Panics
    /// If the rows were not created by [`Rope::exact_rows`].
    pub(super) fn table_and_positions(&self) -> (&Tensor, &Tensor) {
        let ExactTurns { table, positions, .. } = self.exact_turns();
        (table, positions)
    }

    fn exact_turns(&self) -> &ExactTurns {
        self.exact.as_ref().expect("rows for exact operations")
    }

    /// Cosines and sines for the kernels, contiguous in the accumulation type. [T, 1, hd] each
    pub(super) fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// The rotated columns of heads, and the remaining ones; `None` if all are rotated.
    fn parts(&self, x: &Tensor /* [.., hd] */) -> Option<(Tensor, Tensor)> {
        let (turned, all) = (self.cos.size()[2], x.size()[x.dim() - 1]);
        (turned < all).then(|| (x.narrow(-1, 0, turned), x.narrow(-1, turned, all - turned)))
    }

    /// (cos, sin) with the number of dimensions of `x`: [T, 1 .., hd].
    fn like(&self, x: &Tensor) -> (Tensor, Tensor) {
        let mut shape = vec![1; x.dim()];
        (shape[0], shape[x.dim() - 1]) = (self.cos.size()[0], self.cos.size()[2]);
        (self.cos.view(shape.as_slice()), self.sin.view(shape.as_slice()))
    }
}

/// Computes y = x * cos + rotate_half(x) * sin, contiguous.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn forward(
    x: &Tensor, // [T, .., hd]
    rows: &RopeRows,
) -> Result<Tensor> {
    if let Some((turned, rest)) = rows.parts(x) {
        return Ok(Tensor::f_cat(&[forward(&turned, rows)?, rest], -1)?);
    }
    let half = rows.cos.size()[2] / 2;
    let (cos, sin) = rows.like(x);
    let y = x.f_mul(&cos)?;
    rotate(&y, x, &sin.narrow(-1, 0, half), &sin.narrow(-1, half, half))?;
    Ok(y.f_to_kind(x.kind())?)
}

/// Computes the transposed rotation into `dx`, which may be a strided view of a larger gradient.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn backward_into(
    dy: &Tensor, // [T, .., hd]
    rows: &RopeRows,
    dx: &mut Tensor, // [T, .., hd]
) -> Result<()> {
    if let (Some((turned, rest)), Some((mut d_turned, mut d_rest))) = (rows.parts(dy), rows.parts(dx)) {
        d_rest.f_copy_(&rest)?;
        return backward_into(&turned, rows, &mut d_turned);
    }
    let half = rows.cos.size()[2] / 2;
    let (cos, sin) = rows.like(dy);
    let (first, second) = (sin.narrow(-1, 0, half), sin.narrow(-1, half, half));
    if dx.kind() == rows.cos.kind() {
        let _ = dy.f_mul_out(dx, &cos)?;
        rotate(dx, dy, &second, &first)
    } else {
        let wide = dy.f_mul(&cos)?;
        rotate(&wide, dy, &second, &first)?;
        Ok(dx.f_copy_(&wide)?)
    }
}

/// Computes y[.., :half] += x[.., half:] * first and y[.., half:] += x[.., :half] * second.
fn rotate(y: &Tensor, x: &Tensor, first: &Tensor, second: &Tensor) -> Result<()> {
    let half = *first.size().last().unwrap_or(&0);
    let _ = y.narrow(-1, 0, half).f_addcmul_(&x.narrow(-1, half, half), first)?;
    let _ = y.narrow(-1, half, half).f_addcmul_(&x.narrow(-1, 0, half), second)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    fn rotate_half(x: &Tensor) -> Tensor {
        let halves = x.chunk(2, -1);
        Tensor::cat(&[&-&halves[1], &halves[0]], -1)
    }

    #[test]
    fn rope_matches_autograd() {
        let rope = Rope::new(8, 10_000.0, None);
        let positions = Tensor::from_slice(&[0i64, 1, 7, 30_000]);
        let inv_freq: Vec<f64> = (0..4).map(|i| 10_000f64.powf(-(i as f64) / 4.0)).collect();
        let angle = positions.to_kind(Kind::Double).unsqueeze(1) * Tensor::from_slice(&inv_freq);
        let angle = Tensor::cat(&[&angle, &angle], 1).unsqueeze(1);
        let (x, dy) = (leaf(&rand(&[4, 3, 8])), rand(&[4, 3, 8]));
        let reference = &x * angle.cos() + rotate_half(&x) * angle.sin();
        let grads = Tensor::run_backward(&[(&reference * &dy).sum(None)], &[&x], false, false);
        let rows = rope.rows(&positions, Kind::Double).unwrap();
        assert_close(&forward(&x.detach(), &rows).unwrap(), &reference);
        let mut dx = rand(&[4, 5, 8]).narrow(1, 1, 3);
        backward_into(&dy, &rows, &mut dx).unwrap();
        assert_close(&dx, &grads[0]);
    }

    /// Follows transformers' `_compute_llama3_parameters` with Llama 3.1's parameters: both ends of the bands, and one value between them, computed
    /// by hand from the wavelength form of the formula.
    #[test]
    fn llama3_rope_scaling_matches_the_reference() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        assert_eq!(scaling.scale(1.0), 1.0);
        assert_eq!(scaling.scale(1e-5), 1e-5 / 8.0);
        let wavelength: f64 = 4096.0;
        let inv_freq = 2.0 * PI / wavelength;
        let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
        let expected = (1.0 - smooth) * inv_freq / 8.0 + smooth * inv_freq;
        assert!((scaling.scale(inv_freq) / expected - 1.0).abs() < 1e-14);
    }

    #[test]
    fn rope_in_bfloat16_rounds_once() {
        let rows = Rope::new(8, 10_000.0, None).rows(&Tensor::from_slice(&[5i64]), Kind::BFloat16).unwrap();
        let x = rand(&[1, 2, 8]).to_kind(Kind::BFloat16);
        let expected = forward(&x.to_kind(Kind::Float), &rows).unwrap().to_kind(Kind::BFloat16);
        assert!(forward(&x, &rows).unwrap().equal(&expected));
        let mut dx = x.zeros_like();
        backward_into(&expected, &rows, &mut dx).unwrap();
        assert!(f64::try_from((&dx - &x).abs().max()).unwrap() < 0.05);
    }
}
