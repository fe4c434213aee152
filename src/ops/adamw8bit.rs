//! AdamW with block-wise 8-bit moments (arXiv 2110.02861) over flat shards, in place, quantized like bitsandbytes.
//!
//! 256 consecutive moments share a scale, their largest absolute value. Each is divided by the scale and rounded to the nearest of 256 levels of a
//! dynamic map, which is signed for the first moment and unsigned for the second. A step dequantizes the moments into the master weights' type,
//! updates the moments and the weights, and quantizes the moments again.

use tch::{Device, Kind, Tensor};

use super::adamw::{self, AdamW};
use super::dynamic_map::{DynamicMap, nearest, normalised};
use crate::cuda::kernels::{self, MomentCodes};
use crate::cuda::{OpCost, timed};
use crate::error::{Error, Result};

/// Number of moments that share a scale.
pub const BLOCK: usize = 256;
/// The code of a first moment of 0.
pub const ZERO_M_CODE: u8 = 127;

/// Blocks processed at once on a CPU, so that the temporaries stay in its cache.
const PIECE_BLOCKS: i64 = 1 << 8;

/// 8-bit moments of n elements; n is a multiple of [`BLOCK`].
#[derive(Debug)]
pub struct Moments8bit {
    /// Codes of first moments.
    pub m_codes: Tensor, // [n] u8
    /// Codes of second moments.
    pub v_codes: Tensor, // [n] u8
    /// Scales of first moments.
    pub m_absmax: Tensor, // [n / BLOCK] f32
    /// Scales of second moments.
    pub v_absmax: Tensor, // [n / BLOCK] f32
}

impl Moments8bit {
    /// Makes moments from four tensors, in the order of the fields.
    ///
    /// # Panics
    /// If the number of tensors is not four.
    pub fn of(tensors: &[Tensor]) -> Self {
        let [m_codes, v_codes, m_absmax, v_absmax] = tensors else { panic!("{} tensors of moments", tensors.len()) };
        let [m_codes, v_codes, m_absmax, v_absmax] = [m_codes, v_codes, m_absmax, v_absmax].map(Tensor::shallow_clone);
        Self { m_codes, v_codes, m_absmax, v_absmax }
    }

    fn narrow(&self, first_block: i64, num_blocks: i64) -> Self {
        let codes = |t: &Tensor| t.narrow(0, first_block * BLOCK as i64, num_blocks * BLOCK as i64);
        let scales = |t: &Tensor| t.narrow(0, first_block, num_blocks);
        let Self { m_codes, v_codes, m_absmax, v_absmax } = self;
        Self {
            m_codes: codes(m_codes),
            v_codes: codes(v_codes),
            m_absmax: scales(m_absmax),
            v_absmax: scales(v_absmax),
        }
    }
}

/// The quantization maps of both moments, on one device.
#[derive(Debug)]
pub struct Maps {
    /// Map of the first moments.
    pub m: DynamicMap,
    /// Map of the second moments.
    pub v: DynamicMap,
}

impl Maps {
    /// Creates both maps on a device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { m: DynamicMap::signed(device)?, v: DynamicMap::unsigned(device)? })
    }
}

/// Runs one step, number `step` (counted from 1), like [`adamw::step`] but with 8-bit moments; weight decay applies to every element. On a GPU,
/// float32 shards take one pass of one kernel.
///
/// # Errors
/// [`Error::InvalidArgument`] if the number of elements is not a multiple of [`BLOCK`]; [`Error::OutOfMemory`]; the errors of the kernel.
#[allow(clippy::too_many_arguments)]
pub fn step(
    master: &mut Tensor, // [n] f32 (f64 in tests)
    moments: &Moments8bit,
    maps: &Maps,
    grad: &Tensor,       // [n], any floating type
    weight: &mut Tensor, // [n], any floating type
    hyper: &AdamW,
    step: u64,
    grad_scale: f64,
) -> Result<()> {
    let total = master.size()[0];
    if total % BLOCK as i64 != 0 {
        let expected = format!("a multiple of {BLOCK} elements");
        return Err(Error::InvalidArgument { op: "adamw8bit::step", expected, got: total.to_string() });
    }
    if master.device().is_cuda() && master.kind() == Kind::Float {
        let Moments8bit { m_codes, v_codes, m_absmax, v_absmax } = moments;
        let (m_levels, v_levels) = (&maps.m.levels, &maps.v.levels);
        let codes = MomentCodes { m_codes, v_codes, m_absmax, v_absmax, m_levels, v_levels };
        let state = [&*master, m_codes, v_codes, m_absmax, v_absmax];
        let passes = OpCost::pass(&[&state[..], &state[..], &[grad, &*weight]].concat());
        let run = || kernels::adamw8bit(master, &codes, grad, weight, &adamw::scalars(hyper, step, grad_scale));
        return timed("optimizer", || passes, run);
    }
    adamw::decay(master, hyper, std::slice::from_ref(&(0..total)))?;
    let num_blocks = total / BLOCK as i64;
    for first in (0..num_blocks).step_by(PIECE_BLOCKS as usize) {
        let count = PIECE_BLOCKS.min(num_blocks - first);
        let cut = |t: &Tensor| t.narrow(0, first * BLOCK as i64, count * BLOCK as i64);
        let own = moments.narrow(first, count);
        let mut m = dequantize(&own.m_codes, &own.m_absmax, &maps.m)?.f_to_kind(master.kind())?;
        let mut v = dequantize(&own.v_codes, &own.v_absmax, &maps.v)?.f_to_kind(master.kind())?;
        adamw::update(&mut cut(master), &mut m, &mut v, &cut(grad), hyper, step, grad_scale)?;
        quantize(&m, &maps.m, &own.m_codes, &own.m_absmax)?;
        quantize(&v, &maps.v, &own.v_codes, &own.v_absmax)?;
        cut(weight).f_copy_(&cut(master))?;
    }
    Ok(())
}

/// Dequantizes moments. `[n]` f32
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn dequantize(
    codes: &Tensor,  /* [n] u8 */
    absmax: &Tensor, /* [n / BLOCK] */
    map: &DynamicMap,
) -> Result<Tensor> {
    let levels = map.levels.f_index_select(0, &codes.f_to_kind(Kind::Int)?)?;
    Ok(levels.view([-1, BLOCK as i64]).f_mul(&absmax.unsqueeze(1))?.view(-1))
}

/// Quantizes moments into codes and scales.
fn quantize(moments: &Tensor, map: &DynamicMap, codes: &Tensor, absmax: &Tensor) -> Result<()> {
    let blocks = moments.f_to_kind(Kind::Float)?.view([-1, BLOCK as i64]);
    let scales = blocks.f_abs()?.f_amax([1i64], false)?;
    let nearest = nearest(&normalised(&blocks, &scales)?, &map.bounds)?;
    codes.shallow_clone().f_copy_(&nearest.view(-1))?;
    absmax.shallow_clone().f_copy_(&scales)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{optim_golden, wave};

    const HYPER: AdamW = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

    fn floats(value: &serde_json::Value) -> Vec<f32> {
        let numbers: Vec<f64> = serde_json::from_value(value.clone()).unwrap();
        numbers.into_iter().map(|number| number as f32).collect()
    }

    /// Moments of 0, the initial state of an optimizer.
    fn zeros(n: i64) -> Moments8bit {
        let codes = |code: u8| Tensor::full([n], i64::from(code), (Kind::Uint8, Device::Cpu));
        let scales = || Tensor::zeros([n / BLOCK as i64], (Kind::Float, Device::Cpu));
        Moments8bit { m_codes: codes(ZERO_M_CODE), v_codes: codes(0), m_absmax: scales(), v_absmax: scales() }
    }

    #[test]
    fn adamw8bit_quantization_maps_equal_bitsandbytes() {
        let (golden, maps) = (&optim_golden()["adamw_8bit"], Maps::new(Device::Cpu).unwrap());
        for (map, name) in [(&maps.m, "m_levels"), (&maps.v, "v_levels")] {
            assert_eq!(Vec::<f32>::try_from(&map.levels).unwrap(), floats(&golden[name]), "{name}");
        }
        assert_eq!(floats(&golden["m_levels"])[usize::from(ZERO_M_CODE)], 0.0);
    }

    /// Compares every code, except for values within rounding of the midpoint between two levels, because bitsandbytes multiplies by a reciprocal.
    #[test]
    fn adamw8bit_steps_equal_bitsandbytes() {
        let (golden, maps, n) = (optim_golden(), Maps::new(Device::Cpu).unwrap(), 4096);
        let (mut master, moments) = ((wave(n, 0.5).to_kind(Kind::Double) * 0.3).to_kind(Kind::Float), zeros(n));
        let mut weight = master.to_kind(Kind::BFloat16);
        for (index, expected) in golden["adamw_8bit"]["steps"].as_array().unwrap().iter().enumerate() {
            let grad = wave(n, 1.0 + index as f64) * 2.0;
            step(&mut master, &moments, &maps, &grad, &mut weight, &HYPER, 1 + index as u64, 0.5).unwrap();
            for (codes, name) in [(&moments.m_codes, "m_codes"), (&moments.v_codes, "v_codes")] {
                let text = expected[name].as_str().unwrap();
                let theirs = (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap());
                let pairs = crate::torch::byte_vec(codes).unwrap().into_iter().zip(theirs);
                let apart: Vec<u8> = pairs.map(|(own, their)| own.abs_diff(their)).filter(|&apart| apart > 0).collect();
                assert!(apart.len() < 4 && apart.iter().all(|&apart| apart == 1), "{name}, step {index}: {apart:?}");
            }
            for (own, name) in [(&moments.m_absmax, "m_absmax"), (&moments.v_absmax, "v_absmax")] {
                let pairs = Vec::<f32>::try_from(own).unwrap().into_iter().zip(floats(&expected[name]));
                pairs.for_each(|(own, their)| assert!((own - their).abs() <= 3e-7 * their, "{name}: {own}, {their}"));
            }
            let own = Vec::<f32>::try_from(&master).unwrap();
            for (own, their) in own.iter().step_by(7).zip(floats(&expected["every_7th_weight"])) {
                assert!((own - their).abs() < 2e-6 * their.abs().max(1.0), "step {index}: {own}, {their}");
            }
            assert!(weight.equal(&master.to_kind(Kind::BFloat16)));
        }
    }

    #[test]
    fn sharded_adamw8bit_steps_equal_the_whole_bit_for_bit() {
        let (n, maps) = (3 * 256 * PIECE_BLOCKS + 512, Maps::new(Device::Cpu).unwrap());
        let run = |cuts: &[i64]| {
            let (master, moments) = (wave(n, 0.5), zeros(n));
            let weight = master.copy();
            for count in 1..=2 {
                let grad = wave(n, count as f64);
                for cut in cuts.windows(2) {
                    let part = |t: &Tensor| t.narrow(0, cut[0], cut[1] - cut[0]);
                    let own = moments.narrow(cut[0] / BLOCK as i64, (cut[1] - cut[0]) / BLOCK as i64);
                    step(&mut part(&master), &own, &maps, &part(&grad), &mut part(&weight), &HYPER, count, 0.7)
                        .unwrap();
                }
            }
            (master, moments.m_codes, moments.v_absmax)
        };
        let (whole, cut) = (run(&[0, n]), run(&[0, 256, 256 * 7, 256 * 300, n]));
        assert!(whole.0.equal(&cut.0) && whole.1.equal(&cut.1) && whole.2.equal(&cut.2));
    }

    #[test]
    fn adamw8bit_refuses_a_part_of_a_moment_block() {
        let (maps, moments) = (Maps::new(Device::Cpu).unwrap(), zeros(512));
        let numbers = wave(511, 0.5);
        let refused = step(&mut numbers.copy(), &moments, &maps, &numbers, &mut numbers.copy(), &HYPER, 1, 1.0);
        assert!(refused.unwrap_err().to_string().contains("a multiple of 256 elements"));
    }
}
