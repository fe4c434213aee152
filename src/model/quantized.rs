//! Blocks whose matrices are stored as NF4. Each matrix of a checkpoint is quantised by itself, as bitsandbytes does, whatever
//! our layout fuses; it comes back row by row to its place.

use tch::{Kind, Tensor};

use super::files::names::{HfTensor, tensors};
use super::params::{Unit, UnitLayout};
use super::spec::{ModelSpec, product};
use crate::error::{Error, Result};
use crate::ops::nf4::{self, Levels, Nf4};

/// One block.
#[derive(Debug)]
pub struct QuantizedBlock {
    parts: Vec<(HfTensor, Stored)>,
}

#[derive(Debug)]
enum Stored {
    Matrix(Nf4),
    /// Norms and biases.
    Plain(Tensor),
}

impl QuantizedBlock {
    /// Whether a model's blocks can be stored so.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `quantization` for experts, and for matrices whose rows are no multiple of 64 weights.
    pub fn check(spec: &ModelSpec) -> Result<()> {
        if spec.num_expert_layers() > 0 {
            let expected = "none: experts cannot be stored as NF4 yet";
            return Err(Error::invalid_value("quantization", "nf4", expected));
        }
        let tensors = tensors(spec, Unit::Block(0));
        let ragged = |tensor: &&HfTensor| matches!(tensor.shape[..], [_, columns] if columns % nf4::BLOCK as i64 != 0);
        let Some(tensor) = tensors.iter().find(ragged) else { return Ok(()) };
        let expected = format!(
            "none: NF4 needs rows of a multiple of {} weights, and those of {} have {}",
            nf4::BLOCK,
            tensor.name,
            tensor.shape[1]
        );
        Err(Error::invalid_value("quantization", "nf4", expected))
    }

    /// Quantises a block's flat tensor [layout.len], on its device; norms and biases are kept in its kind.
    ///
    /// # Errors
    /// `InvalidArgument` for matrices whose rows are no multiple of 64 weights.
    pub fn quantize(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor, levels: &Levels) -> Result<Self> {
        let store = |tensor: HfTensor| {
            let view = tensor.view(layout, flat);
            let stored = match tensor.shape[..] {
                [_, columns] => Stored::Matrix(Nf4::quantize(&view.f_reshape([-1, columns])?, levels)?),
                _ => {
                    let values = view.f_contiguous()?;
                    let mut kept = values.f_empty_like()?;
                    kept.f_copy_(&values)?;
                    Stored::Plain(kept)
                }
            };
            Ok((tensor, stored))
        };
        Ok(Self { parts: tensors(spec, layout.unit).into_iter().map(store).collect::<Result<_>>()? })
    }

    /// Writes the block's weights to a flat tensor [layout.len]; padding is left as it is. On a GPU nothing is allocated.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn dequantize(&self, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        for (tensor, stored) in &self.parts {
            let mut view = tensor.view(layout, flat);
            match stored {
                Stored::Matrix(matrix) => matrix.dequantize(&mut groups_of_rows(&view))?,
                Stored::Plain(values) => view.f_copy_(&values.view_as(&view))?,
            }
        }
        Ok(())
    }

    /// The tensors that are read to dequantise it.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().flat_map(|(_, stored)| match stored {
            Stored::Matrix(matrix) => matrix.tensors().to_vec(),
            Stored::Plain(values) => vec![values],
        })
    }

    /// Bytes of a block whose other weights are of `kind`.
    pub fn bytes(spec: &ModelSpec, kind: Kind) -> usize {
        let bytes = |tensor: HfTensor| match tensor.shape.len() {
            2 => nf4::bytes(product(&tensor.shape)),
            _ => product(&tensor.shape) * kind.elt_size_in_bytes(),
        };
        tensors(spec, Unit::Block(0)).into_iter().map(bytes).sum()
    }
}

/// A matrix's rows as [groups, rows of a group, K], each group contiguous.
fn groups_of_rows(view: &Tensor) -> Tensor {
    let size = view.size(); // [groups, heads, inner, K]
    view.view([size[0], -1, size[3]])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Device;

    use super::*;
    use crate::model::{ModelSpec, ParamTable, QkNorm, init_unit};

    #[test]
    fn rows_of_ragged_blocks_are_refused_before_anything_is_loaded() {
        let spec = ModelSpec::preset("tiny").unwrap();
        QuantizedBlock::check(&spec).unwrap();
        let experts = QuantizedBlock::check(&ModelSpec::preset("tiny-moe").unwrap()).unwrap_err().to_string();
        assert!(experts.ends_with("experts cannot be stored as NF4 yet"), "{experts}");
        let ragged = ModelSpec { hidden_size: 160, ..spec };
        let error = QuantizedBlock::check(&ragged).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Configuration);
        assert!(
            error.to_string().starts_with("quantization = nf4: expected none: NF4 needs rows of a multiple of 64"),
            "{error}"
        );
    }

    #[test]
    fn a_block_comes_back_matrix_by_matrix() {
        let spec = Arc::new(ModelSpec { qk_norm: Some(QkNorm::Head), ..ModelSpec::preset("tiny").unwrap() });
        let layout = ParamTable::new(spec.clone(), 1).unit(Unit::Block(1)).clone();
        let flat = init_unit(&layout, 3, Kind::BFloat16).unwrap();
        let levels = Levels::new(Device::Cpu).unwrap();
        let quantized = QuantizedBlock::quantize(&spec, &layout, &flat, &levels).unwrap();
        let back = Tensor::zeros([layout.len as i64], (Kind::BFloat16, Device::Cpu));
        quantized.dequantize(&layout, &back).unwrap();
        for tensor in tensors(&spec, layout.unit) {
            let (own, source) = (tensor.view(&layout, &back), tensor.view(&layout, &flat));
            if let [rows, columns] = tensor.shape[..] {
                let matrix = Nf4::quantize(&source.reshape([rows, columns]), &levels).unwrap();
                let mut expected = Tensor::zeros([rows, columns], (Kind::BFloat16, Device::Cpu));
                matrix.dequantize(&mut expected).unwrap();
                assert!(own.reshape([rows, columns]).equal(&expected), "{}", tensor.name);
                let error = (own - &source).to_kind(Kind::Float).square().mean(Kind::Float).sqrt().double_value(&[]);
                assert!((1e-4..2.5e-3).contains(&error), "{}: {error}", tensor.name);
            } else {
                assert!(own.equal(&source), "{}", tensor.name);
            }
        }
        let whole = QuantizedBlock::bytes(&spec, Kind::BFloat16);
        let share = whole as f64 / layout.params.iter().map(|param| param.numel()).sum::<usize>() as f64;
        assert!((0.515..0.53).contains(&share), "{share} bytes a weight");
    }
}
