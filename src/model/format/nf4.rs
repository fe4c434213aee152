//! 4-bit NormalFloat with double quantization (QLoRA, arXiv 2305.14314), with the same values and layout as bitsandbytes.
//!
//! 64 weights of a row share a scale, their largest absolute value. Each weight is divided by the scale and rounded to the nearest of 16 levels, the
//! quantiles of a normal distribution. The scales, less their mean, are quantized in turn: 256 of them share a maximum, and each is rounded to the
//! nearest of 256 levels of a dynamic 8-bit float.

use tch::{Device, Kind, Tensor};

use super::stored::{Encoded, Encoder, StoredFormat};
use crate::cuda::kernels::{self, Nf4Codes};
use crate::error::{Error, Result};
use crate::ops::dynamic_map::{bounds, dynamic_levels, nearest, normalised};
use crate::torch::{self, scalar};

/// Number of weights that share a scale.
const BLOCK: usize = 64;
/// Number of scales that share a maximum.
const GROUP: usize = 256;

/// The 16 levels from QLoRA's appendix E, as bitsandbytes prints them.
const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The NF4 format; it needs 0.516 bytes per weight.
#[derive(Debug)]
pub struct Nf4;

impl StoredFormat for Nf4 {
    fn name(&self) -> &'static str {
        "nf4"
    }

    fn multiple(&self) -> usize {
        BLOCK
    }

    fn matrix_bytes(&self, [rows, columns]: [usize; 2]) -> usize {
        let (numel, scales) = (rows * columns, rows * columns / BLOCK);
        numel / 2 + scales + 4 * scales.div_ceil(GROUP) + 4
    }

    fn encoder(&self, device: Device) -> Result<Box<dyn Encoder>> {
        Ok(Box::new(Levels::new(device)?))
    }
}

/// A quantized matrix [N, K].
#[derive(Debug)]
struct Nf4Matrix {
    codes: Tensor,  // two codes per byte, the first in the upper 4 bits; [N K / 2] u8
    scales: Tensor, // [N K / 64] u8
    maxima: Tensor, // [ceil(N K / 64 / 256)] f32
    offset: Tensor, // [] f32
    levels: Levels,
}

/// The values of the NF4 codes and of the scales' codes, on one device.
#[derive(Debug)]
struct Levels {
    weights: Tensor, // [16] f32
    scales: Tensor,  // [256] f32
}

impl Levels {
    /// Copies both code books to a device.
    fn new(device: Device) -> Result<Self> {
        let on = |levels: &[f32]| torch::tensor_on(levels, device);
        Ok(Self { weights: on(&LEVELS)?, scales: on(&dynamic_levels(true))? })
    }

    fn shallow_clone(&self) -> Self {
        Self { weights: self.weights.shallow_clone(), scales: self.scales.shallow_clone() }
    }
}

impl Encoder for Levels {
    fn encode(&self, matrix: &Tensor) -> Result<Box<dyn Encoded>> {
        Ok(Box::new(Nf4Matrix::quantize(matrix, self)?))
    }
}

impl Nf4Matrix {
    /// Quantizes a matrix in row-major order, on the matrix's device.
    fn quantize(matrix: &Tensor /* [N, K] */, levels: &Levels) -> Result<Self> {
        if matrix.size()[1] % BLOCK as i64 != 0 {
            let got = format!("{:?}", matrix.size());
            let expected = format!("rows whose length is a multiple of {BLOCK}");
            return Err(Error::InvalidArgument { op: "Nf4::encode", expected, got });
        }
        let blocks = matrix.f_to_kind(Kind::Float)?.f_reshape([-1, BLOCK as i64])?;
        let scales = blocks.f_abs()?.f_amax([1i64], false)?;
        let codes = nearest(&normalised(&blocks, &scales)?, &bounds(&levels.weights)?)?.view([-1, 2]);
        let codes = codes.select(1, 0).f_mul(&scalar(16i32))?.f_add(&codes.select(1, 1))?.f_to_kind(Kind::Uint8)?;
        let offset = scales.f_mean(Kind::Float)?;
        let centred = scales.f_sub(&offset)?;
        let count = centred.size()[0];
        let padded = centred.f_constant_pad_nd([0, -count & (GROUP as i64 - 1)])?.view([-1, GROUP as i64]);
        let maxima = padded.f_abs()?.f_amax([1i64], false)?;
        let scales = nearest(&normalised(&padded, &maxima)?, &bounds(&levels.scales)?)?.view(-1).narrow(0, 0, count);
        let scales = scales.f_to_kind(Kind::Uint8)?.f_contiguous()?;
        Ok(Self { codes, scales, maxima, offset, levels: levels.shallow_clone() })
    }
}

impl Encoded for Nf4Matrix {
    fn tensors(&self) -> Vec<&Tensor> {
        let Self { codes, scales, maxima, offset, levels } = self;
        vec![codes, scales, maxima, offset, &levels.weights, &levels.scales]
    }

    fn decode(&self, y: &mut Tensor) -> Result<()> {
        if y.device().is_cuda() {
            let Self { codes, scales, maxima, offset, levels } = self;
            let codes =
                Nf4Codes { codes, scales, maxima, offset, levels: &levels.weights, scale_levels: &levels.scales };
            return kernels::nf4_dequantize(&codes, y);
        }
        let levels = &self.levels;
        let scales = levels.scales.f_index_select(0, &self.scales.f_to_kind(Kind::Int64)?)?;
        let maxima = self.maxima.f_repeat_interleave_self_int(GROUP as i64, 0, None)?.narrow(0, 0, scales.size()[0]);
        let scales = scales.f_mul(&maxima)?.f_add(&self.offset)?;
        let codes = self.codes.f_to_kind(Kind::Int64)?;
        let codes = Tensor::f_stack(
            &[codes.f_bitwise_right_shift(&scalar(4i64))?, codes.f_bitwise_and_tensor(&scalar(15i64))?],
            1,
        )?;
        let weights = levels.weights.f_index_select(0, &codes.view(-1))?;
        let blocks = weights.view([-1, BLOCK as i64]).f_mul(&scales.unsqueeze(1))?;
        y.f_copy_(&blocks.view_as(y))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix with blocks of zeros, of equal values and of wide range, by the formula in scripts/golden_peft.py.
    fn matrix(rows: i64, columns: i64) -> Tensor {
        let at = Tensor::arange(rows * columns, (Kind::Double, Device::Cpu));
        let block = (&at / 64.0).floor();
        let values = (&at * 12.9898).sin() * (block * 0.37).sin() * 0.05;
        values.where_scalarother(&at.ge(64.0), 0.0).to_kind(Kind::Float).view([rows, columns])
    }

    fn golden() -> serde_json::Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/nf4.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn numbers(value: &serde_json::Value) -> Vec<f64> {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn nf4_code_book_equals_bitsandbytes() {
        let golden = golden();
        let close = |own: &[f32], expected: &serde_json::Value| {
            let expected: Vec<f32> = numbers(expected).into_iter().map(|level| level as f32).collect();
            assert_eq!(own, expected);
        };
        close(&LEVELS, &golden["levels"]);
        close(&dynamic_levels(true), &golden["scale_levels"]);
    }

    #[test]
    fn nf4_codes_and_values_equal_bitsandbytes() {
        let golden = golden();
        let shape: Vec<i64> = serde_json::from_value(golden["shape"].clone()).unwrap();
        let matrix = matrix(shape[0], shape[1]);
        let nf4 = Nf4Matrix::quantize(&matrix, &Levels::new(Device::Cpu).unwrap()).unwrap();
        let list = |t: &Tensor| Vec::<f64>::try_from(t.to_kind(Kind::Double).view(-1)).unwrap();
        let codes = crate::torch::byte_vec(&nf4.codes).unwrap();
        let codes: String = codes.iter().map(|code| format!("{code:02x}")).collect();
        assert_eq!(golden["codes"], codes);
        assert_eq!(list(&nf4.scales), numbers(&golden["scales"]));
        let mut values = Tensor::zeros(&shape, (Kind::Float, Device::Cpu));
        nf4.decode(&mut values).unwrap();
        for (own, expected) in list(&values).iter().step_by(17).zip(numbers(&golden["every_17th_value"])) {
            assert!((own - expected).abs() <= 1e-7 * expected.abs(), "{own}, {expected}");
        }
        let stored = nf4.codes.numel() + nf4.scales.numel() + 4 * nf4.maxima.numel() + 4;
        assert_eq!(stored, Nf4.matrix_bytes([shape[0] as usize, shape[1] as usize]));
    }

    #[test]
    fn nf4_rows_are_written_to_the_given_view() {
        let matrix = matrix(6, 128);
        let nf4 = Nf4Matrix::quantize(&matrix, &Levels::new(Device::Cpu).unwrap()).unwrap();
        let mut plain = Tensor::zeros([1, 6, 128], (Kind::Float, Device::Cpu));
        nf4.decode(&mut plain).unwrap();
        let wide = Tensor::zeros([3, 5, 128], (Kind::BFloat16, Device::Cpu));
        nf4.decode(&mut wide.narrow(1, 1, 2)).unwrap();
        assert!(wide.narrow(1, 1, 2).reshape([1, 6, 128]).equal(&plain.to_kind(Kind::BFloat16)));
        assert_eq!(wide.narrow(1, 3, 2).abs().max().double_value(&[]), 0.0);
        let narrow = Tensor::zeros([2, 32], (Kind::Float, Device::Cpu));
        assert!(
            Nf4Matrix::quantize(&narrow, &Levels::new(Device::Cpu).unwrap())
                .unwrap_err()
                .to_string()
                .contains("multiple of 64")
        );
    }
}
