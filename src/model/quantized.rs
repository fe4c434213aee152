//! Blocks whose matrices are stored as NF4. Each matrix of a checkpoint is quantised by itself, as bitsandbytes does, whatever
//! our layout fuses; it comes back row by row to its place.

use tch::{Device, Kind, Tensor};

use super::files::names::{HfTensor, tensors};
use super::params::{Unit, UnitLayout};
use super::spec::{ModelSpec, product};
use crate::config::Quantization;
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
    /// Norms, biases, routers, and of delta nets the convolution and the gates' parameters.
    Plain(Tensor),
}

/// Rounds a base to what its adapters were trained beside.
#[derive(Debug)]
pub struct BaseRounding(Option<Levels>);

impl BaseRounding {
    /// Of bases that are stored so.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a model whose blocks cannot be stored so.
    pub fn new(spec: &ModelSpec, quantization: Quantization) -> Result<Self> {
        Ok(Self(match quantization {
            Quantization::None => None,
            Quantization::Nf4 => {
                QuantizedBlock::check(spec)?;
                Some(Levels::new(Device::Cpu)?)
            }
        }))
    }

    /// Rounds a unit's flat tensor [layout.len] on the CPU; embedding and head stay as they are.
    ///
    /// # Errors
    /// The errors of [`QuantizedBlock::quantize`].
    pub fn apply(&self, spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        match (&self.0, layout.unit) {
            (Some(levels), Unit::Block(_)) => {
                QuantizedBlock::quantize(spec, layout, flat, levels)?.dequantize(layout, flat)
            }
            _ => Ok(()),
        }
    }
}

impl QuantizedBlock {
    /// Whether a model's blocks can be stored so.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `quantization` where only some layers have experts, and for matrices whose rows are no multiple of 64
    /// weights.
    pub fn check(spec: &ModelSpec) -> Result<()> {
        if ![0, spec.num_layers()].contains(&spec.num_expert_layers()) {
            let expected =
                "none: only some layers of this model have experts, and NF4 is for experts in all layers or in none";
            return Err(Error::invalid_value("quantization", "nf4", expected));
        }
        let kinds = spec.kinds_of_blocks().into_iter();
        let mut tensors = kinds.flat_map(|(layer, _)| tensors(spec, Unit::Block(layer)));
        let ragged = |tensor: &HfTensor| tensor.is_projection() && tensor.shape[1] % nf4::BLOCK as i64 != 0;
        let Some(tensor) = tensors.find(ragged) else { return Ok(()) };
        let expected = format!(
            "none: NF4 needs rows of a multiple of {} weights, and those of {} have {}",
            nf4::BLOCK,
            tensor.name,
            tensor.shape[1]
        );
        Err(Error::invalid_value("quantization", "nf4", expected))
    }

    /// Quantises a block's flat tensor [layout.len], on its device; norms, biases and the router are kept in its kind.
    ///
    /// # Errors
    /// `InvalidArgument` for matrices whose rows are no multiple of 64 weights.
    pub fn quantize(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor, levels: &Levels) -> Result<Self> {
        let store = |tensor: HfTensor| {
            let view = tensor.view(layout, flat);
            let stored = match tensor.shape[..] {
                [_, columns] if tensor.is_projection() => {
                    Stored::Matrix(Nf4::quantize(&view.f_reshape([-1, columns])?, levels)?)
                }
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
    /// The errors of the kernel.
    pub fn dequantize(&self, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        self.copy_plain(layout, flat)?;
        for (tensor, stored) in &self.parts {
            if let Stored::Matrix(matrix) = stored {
                matrix.dequantize(&mut groups_of_rows(&tensor.view(layout, flat)))?;
            }
        }
        Ok(())
    }

    /// Writes what is not quantised alone to the block's flat tensor [layout.len].
    ///
    /// # Errors
    /// The errors of the device.
    pub fn copy_plain(&self, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        for (tensor, stored) in &self.parts {
            if let Stored::Plain(values) = stored {
                let mut view = tensor.view(layout, flat);
                view.f_copy_(&values.view_as(&view))?;
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
    pub fn bytes(spec: &ModelSpec, layer: usize, kind: Kind) -> usize {
        let bytes = |tensor: HfTensor| match tensor.shape.len() {
            2 if tensor.is_projection() => nf4::bytes(product(&tensor.shape)),
            _ => product(&tensor.shape) * kind.elt_size_in_bytes(),
        };
        tensors(spec, Unit::Block(layer)).into_iter().map(bytes).sum()
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
    use crate::model::tests::with_heads;
    use crate::model::{DenseSpec, Family, ModelSpec, ParamTable, QkNorm, SharedExpertSpec, init_unit};

    #[test]
    fn rows_of_ragged_blocks_are_refused_before_anything_is_loaded() {
        let spec = ModelSpec::preset("tiny").unwrap();
        QuantizedBlock::check(&spec).unwrap();
        let mut experts = ModelSpec::preset("tiny-moe").unwrap();
        QuantizedBlock::check(&experts).unwrap();
        experts.layers[1].mlp = spec.layers[1].mlp;
        let error = QuantizedBlock::check(&experts).unwrap_err().to_string();
        assert!(error.ends_with("NF4 is for experts in all layers or in none"), "{error}");
        // Of the block with attention alone.
        let hybrid = with_heads(ModelSpec::preset("tiny-hybrid").unwrap(), 3, 1);
        let error = QuantizedBlock::check(&hybrid).unwrap_err().to_string();
        assert!(error.ends_with("those of model.layers.3.self_attn.o_proj.weight have 96"), "{error}");
        let ragged = spec.with_widths(160, 384);
        let error = QuantizedBlock::check(&ragged).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Configuration);
        assert!(
            error.to_string().starts_with("quantization = nf4: expected none: NF4 needs rows of a multiple of 64"),
            "{error}"
        );
    }

    #[test]
    fn a_block_comes_back_matrix_by_matrix() {
        let dense = ModelSpec::preset("tiny").unwrap();
        let dense = dense.map_attention(|_, attention| attention.qk_norm = Some(QkNorm::Head));
        let [moe, hybrid] = ["tiny-moe", "tiny-hybrid"].map(|name| ModelSpec::preset(name).unwrap());
        let shared = ModelSpec { family: Family::Qwen2Moe, ..moe.clone() }.map_experts(|experts| {
            experts.shared = Some(SharedExpertSpec(DenseSpec { hidden: 128, intermediate: 320 }));
        });
        for (spec, layer) in [(dense, 1), (moe, 1), (shared, 1), (hybrid.clone(), 0), (hybrid, 3)] {
            let spec = Arc::new(spec);
            let layout = ParamTable::new(spec.clone(), 1).unit(Unit::Block(layer)).clone();
            let flat = init_unit(&layout, 3, Kind::BFloat16).unwrap();
            let levels = Levels::new(Device::Cpu).unwrap();
            let quantized = QuantizedBlock::quantize(&spec, &layout, &flat, &levels).unwrap();
            let back = Tensor::zeros([layout.len as i64], (Kind::BFloat16, Device::Cpu));
            quantized.dequantize(&layout, &back).unwrap();
            let plain = back.zeros_like();
            quantized.copy_plain(&layout, &plain).unwrap();
            for tensor in tensors(&spec, layout.unit) {
                let (own, source) = (tensor.view(&layout, &back), tensor.view(&layout, &flat));
                let expected = if tensor.is_projection() { source.zeros_like() } else { source.shallow_clone() };
                assert!(tensor.view(&layout, &plain).equal(&expected), "{} by itself", tensor.name);
                if tensor.is_projection() {
                    let [rows, columns] = tensor.shape[..] else { unreachable!() };
                    let matrix = Nf4::quantize(&source.reshape([rows, columns]), &levels).unwrap();
                    let mut expected = Tensor::zeros([rows, columns], (Kind::BFloat16, Device::Cpu));
                    matrix.dequantize(&mut expected).unwrap();
                    assert!(own.reshape([rows, columns]).equal(&expected), "{}", tensor.name);
                    let error =
                        (own - &source).to_kind(Kind::Float).square().mean(Kind::Float).sqrt().double_value(&[]);
                    assert!((1e-4..2.5e-3).contains(&error), "{}: {error}", tensor.name);
                } else {
                    assert!(own.equal(&source), "{}", tensor.name);
                }
            }
            let whole = QuantizedBlock::bytes(&spec, layer, Kind::BFloat16);
            let share = whole as f64 / layout.params.iter().map(|param| param.numel()).sum::<usize>() as f64;
            assert!((0.515..0.53).contains(&share), "{share} bytes a weight");
        }
    }
}
