//! FP8 checkpoints: e4m3 matrices with scales. `NAME_scale_inv` (DeepSeek, Qwen) has one scale for each block of 128 x 128 or for the whole matrix;
//! `NAME_scale` (compressed-tensors) has one for each row, each block or the whole matrix. A weight is value times scale, in float32. Scales of
//! activations are ignored, as our activations are not quantized with them.

use safetensors::Dtype;
use tch::{Kind, Tensor};

use super::header::MappedFile;
use crate::error::{Error, Result};
use crate::ops::fp8::{BLOCK, blocks};

/// Suffixes of the names of scales, after the name of their matrix.
pub(super) const SCALES: [&str; 2] = [BLOCK_SCALES, "_scale"];
pub(super) const BLOCK_SCALES: &str = "_scale_inv";
/// Suffixes, after a module's name, of activation scales, which are ignored.
const UNREAD: [&str; 2] = ["input_scale", "activation_scale"];

/// Whether a tensor is in e4m3.
pub(super) fn is_scaled(file: &MappedFile, name: &str) -> bool {
    file.info(name).is_some_and(|info| info.dtype == Dtype::F8_E4M3)
}

/// The name of the matrix that a tensor has scales for: of the matrix itself or of its input activations.
pub(super) fn matrix_of(name: &str) -> Option<String> {
    let of_weight = || SCALES.iter().find_map(|scales| name.strip_suffix(scales)).map(str::to_owned);
    let module = UNREAD.iter().find_map(|scale| name.strip_suffix(scale));
    module.map(|module| format!("{module}weight")).or_else(of_weight)
}

/// The scales of one matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scales<'a> {
    pub file: &'a MappedFile,
    pub name: &'a str,
}

impl Scales<'_> {
    /// Checks that the scales fit a matrix of `shape`.
    ///
    /// # Errors
    /// [`Error::BadFile`] with what was found and what was expected.
    pub fn check(self, shape: &[i64]) -> Result<()> {
        let bad = |message| Err(Error::bad_file(&self.file.path, message));
        let &[rows, columns] = shape else {
            return bad(format!(
                "{} has scales for a tensor of shape {shape:?}, but only matrices may have scales",
                self.name
            ));
        };
        let own = self.shape();
        let blocks = [rows, columns].map(blocks);
        if own.iter().product::<i64>() != 1 && own != [rows] && own != [rows, 1] && own != blocks {
            return bad(format!(
                "{} has shape {own:?}, expected [{rows}, 1], {blocks:?} or one element for a matrix {shape:?} in e4m3",
                self.name
            ));
        }
        self.file.check(self.name, &own)
    }

    fn shape(self) -> Vec<i64> {
        self.file.info(self.name).map_or_else(Vec::new, |info| info.shape.iter().map(|&side| side as i64).collect())
    }

    /// Multiplies codes [R, K], rows from `first` on of a matrix with `all` rows, by their scales. Returns float32.
    ///
    /// # Errors
    /// [`Error::Torch`] if memory is exhausted.
    pub(super) fn apply(self, codes: &Tensor, (first, all): (i64, i64)) -> Result<Tensor> {
        let (shape, size) = (self.shape(), codes.size());
        let mut scales = Tensor::f_zeros(shape.as_slice(), (Kind::Float, codes.device()))?;
        self.file.copy_to(self.name, 0, &mut scales)?;
        let values = codes.f_to_kind(Kind::Float)?;
        if scales.numel() == 1 {
            return Ok(values.f_mul(&scales.f_view([1])?)?);
        }
        if shape[0] == all && shape.iter().product::<i64>() == all {
            return Ok(values.f_mul(&scales.f_view([-1, 1])?.f_narrow(0, first, size[0])?)?);
        }
        let begin = first / BLOCK;
        let blocks = blocks(first + size[0]) - begin;
        let of_rows = scales.f_narrow(0, begin, blocks)?.f_repeat_interleave_self_int(BLOCK, 0, None)?;
        let of_rows = of_rows.f_narrow(0, first - begin * BLOCK, size[0])?;
        Ok(values.f_mul(&of_rows.f_repeat_interleave_self_int(BLOCK, 1, None)?.f_narrow(1, 0, size[1])?)?)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::Device;

    use super::*;
    use crate::ops::fp8::rounded_blocks;

    fn golden() -> MappedFile {
        MappedFile::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fp8.safetensors")).unwrap()
    }

    fn sizes(file: &MappedFile, name: &str) -> Vec<i64> {
        file.info(name).unwrap().shape.iter().map(|&side| side as i64).collect()
    }

    fn codes(file: &MappedFile, name: &str) -> Tensor {
        Tensor::from_data_size(file.bytes(name).unwrap(), &sizes(file, name), Kind::Float8e4m3fn)
    }

    fn plain(file: &MappedFile, name: &str) -> Tensor {
        let mut values = Tensor::zeros(sizes(file, name).as_slice(), (Kind::Float, Device::Cpu));
        file.copy_to(name, 0, &mut values).unwrap();
        values
    }

    /// The expected values are those of transformers and compressed-tensors (scripts/golden_fp8.py). Bits must be equal for the whole matrix and from
    /// any row on.
    #[test]
    fn fp8_weights_dequantize_as_in_other_libraries() {
        let file = golden();
        for name in ["blocks", "matrix", "rows", "rows_bf16", "tensor", "grid"] {
            let codes = codes(&file, &format!("{name}.weight"));
            let scales =
                SCALES.iter().map(|scales| format!("{name}.weight{scales}")).find(|it| file.info(it).is_some());
            let name_of_scales = scales.unwrap();
            assert_eq!(matrix_of(&name_of_scales).unwrap(), format!("{name}.weight"));
            let scales = Scales { file: &file, name: &name_of_scales };
            scales.check(&codes.size()).unwrap();
            let expected = format!("{name}.expected");
            let is_rounded = file.info(&expected).unwrap().dtype == Dtype::BF16; // float32 scales give float32 weights
            let expected = plain(&file, &expected);
            let all = codes.size()[0];
            for (first, rows) in [(0, all), (7, 20), (all - 1, 1), (all / 2, all - all / 2)] {
                let got = scales.apply(&codes.narrow(0, first, rows), (first, all)).unwrap();
                let got = if is_rounded { got.to_kind(Kind::BFloat16).to_kind(Kind::Float) } else { got };
                assert!(got.equal(&expected.narrow(0, first, rows)), "{name} from row {first}");
            }
        }
    }

    /// Values must equal transformers' quantizer; scales may differ by one rounding, because transformers' are reciprocals of reciprocals. A block of
    /// zeros has the scale 0 here and 1 / 448 .. there; its values are 0 with either.
    #[test]
    fn fp8_rounding_equals_transformers() {
        let file = golden();
        let matrix = plain(&file, "exported.matrix");
        let [values, scales] = rounded_blocks(&matrix).unwrap();
        assert!(values.view_dtype(Kind::Uint8).equal(&codes(&file, "exported.weight").view_dtype(Kind::Uint8)));
        let theirs = plain(&file, "exported.weight_scale_inv");
        let [ours, theirs] = [&scales, &theirs].map(|scales| scales.double_value(&[0, 0]));
        assert!((ours / theirs - 1.0).abs() < 2e-7, "{ours} {theirs}");
        assert_eq!(scales.double_value(&[0, 1]), 0.0);
    }

    #[test]
    fn fp8_scales_of_wrong_shape_are_refused_by_name() {
        let file = golden();
        let scales = Scales { file: &file, name: "blocks.weight_scale_inv" };
        for shape in [vec![256, 400], vec![300, 256], vec![2, 256, 256]] {
            let error = scales.check(&shape).unwrap_err().to_string();
            assert!(error.contains("blocks.weight_scale_inv"), "{error}");
        }
    }
}
