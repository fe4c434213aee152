//! Frozen blocks whose matrices are stored in a compressed format. Each matrix of a checkpoint is encoded separately, as bitsandbytes does, even
//! where our layout fuses several; decoding writes its rows to their places in the fused matrix.
//!
//! Every rank holds all stored blocks, also at ZeRO-3: they are a quarter of the size. An engine's step dequantizes a whole block before the block's
//! first norm, because its GEMMs prefetch weights while the previous kernel runs and must find them complete.

use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

use crate::config::Quantization;
use crate::error::{Error, Result};
use crate::model::files::names::{HfTensor, tensors};
use crate::model::params::UnitLayout;
use crate::model::spec::{ModelSpec, Unit, product};

/// A format in which frozen blocks are stored. Blocks are decoded one after the other into the type of the network.
pub trait StoredFormat: Debug + Sync {
    /// The format's name, as used in configuration values.
    fn name(&self) -> &'static str;

    /// The length of a row must be a multiple of this many weights.
    fn multiple(&self) -> usize;

    /// Bytes of an encoded matrix [N, K].
    fn matrix_bytes(&self, size: [usize; 2]) -> usize;

    /// Creates an encoder for matrices on a device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn encoder(&self, device: Device) -> Result<Box<dyn Encoder>>;
}

/// Encodes matrices on one device.
pub trait Encoder: Debug {
    /// Encodes a matrix in row-major order, on the matrix's device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the length of a row is not a multiple of [`StoredFormat::multiple`]; [`Error::OutOfMemory`].
    fn encode(&self, matrix: &Tensor /* [N, K] */) -> Result<Box<dyn Encoded>>;
}

/// An encoded matrix [N, K].
pub trait Encoded: Debug + Send {
    /// The tensors that decoding reads.
    fn tensors(&self) -> Vec<&Tensor>;

    /// Decodes the matrix into `y`, rounded once to y's type. Allocates nothing on a GPU.
    ///
    /// # Errors
    /// The errors of the kernel; [`Error::OutOfMemory`] on a CPU.
    fn decode(&self, y: &mut Tensor /* [groups, rows of a group, K], strided by rows */) -> Result<()>;
}

impl dyn StoredFormat {
    /// Checks that a model's blocks can be stored in this format.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `quantization` if only some layers have experts, or if the rows of a matrix do not have a suitable length.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let (name, multiple) = (self.name().to_uppercase(), self.multiple());
        let refuse = |reason: String| Err(Error::invalid_value("quantization", self.name(), format!("none: {reason}")));
        spec.check_with([("quantization", self.name().into())])?;
        let kinds = spec.kinds_of_blocks().into_iter();
        let mut tensors = kinds.flat_map(|kind| tensors(spec, Unit::Block(kind.layer)));
        let ragged = |tensor: &HfTensor| tensor.is_projection() && tensor.shape[1] % multiple as i64 != 0;
        let Some(tensor) = tensors.find(ragged) else { return Ok(()) };
        let columns = tensor.shape[1];
        refuse(format!(
            "{name} needs rows whose length is a multiple of {multiple}, but rows of {} have {columns} elements",
            tensor.name
        ))
    }

    /// Bytes of a stored block whose other weights are of `kind`.
    pub fn block_bytes(&self, spec: &ModelSpec, layer: usize, kind: Kind) -> usize {
        let bytes = |tensor: HfTensor| match tensor.shape[..] {
            [rows, columns] if tensor.is_projection() => self.matrix_bytes([rows as usize, columns as usize]),
            _ => product(&tensor.shape) * kind.elt_size_in_bytes(),
        };
        tensors(spec, Unit::Block(layer)).into_iter().map(bytes).sum()
    }
}

/// The stored weights of one block.
#[derive(Debug)]
pub struct StoredBlock {
    parts: Vec<(HfTensor, Stored)>,
}

#[derive(Debug)]
enum Stored {
    Matrix(Box<dyn Encoded>),
    /// Weights that are not encoded: norms, biases, routers, and a delta net's convolution and gate parameters.
    Plain(Tensor),
}

/// Rounds base weights to the values that their adapters were trained with.
#[derive(Debug)]
pub struct BaseRounding(Option<Box<dyn Encoder>>);

impl BaseRounding {
    /// Rounds as base weights with this quantization are stored.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a model whose blocks cannot be stored in that format.
    pub fn new(spec: &ModelSpec, quantization: Quantization) -> Result<Self> {
        let encoder = |format: &'static dyn StoredFormat| {
            format.check(spec)?;
            format.encoder(Device::Cpu)
        };
        Ok(Self(quantization.format().map(encoder).transpose()?))
    }

    /// Rounds a unit's flat tensor [layout.len] on the CPU; embedding and head are unchanged.
    ///
    /// # Errors
    /// The errors of [`StoredBlock::encode`].
    pub fn apply(&self, spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        match (&self.0, layout.unit) {
            (Some(encoder), Unit::Block(_)) => {
                StoredBlock::encode(spec, layout, flat, &**encoder)?.decode(layout, flat)
            }
            _ => Ok(()),
        }
    }
}

impl StoredBlock {
    /// Encodes a block's flat tensor [layout.len], on its device; norms, biases and the router keep their type.
    ///
    /// # Errors
    /// The errors of [`Encoder::encode`].
    pub fn encode(spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor, encoder: &dyn Encoder) -> Result<Self> {
        let store = |tensor: HfTensor| {
            let view = tensor.view(layout, flat);
            let stored = match tensor.shape[..] {
                [_, columns] if tensor.is_projection() => {
                    Stored::Matrix(encoder.encode(&view.f_reshape([-1, columns])?)?)
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

    /// Decodes the block's weights into a flat tensor [layout.len]; padding is not written. Allocates nothing on a GPU.
    ///
    /// # Errors
    /// The errors of the kernel.
    pub fn decode(&self, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        self.copy_plain(layout, flat)?;
        for (tensor, stored) in &self.parts {
            if let Stored::Matrix(matrix) = stored {
                matrix.decode(&mut groups_of_rows(&tensor.view(layout, flat)))?;
            }
        }
        Ok(())
    }

    /// Copies only the weights that are not encoded to the block's flat tensor [layout.len].
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

    /// All tensors that decoding the block reads.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.parts.iter().flat_map(|(_, stored)| match stored {
            Stored::Matrix(matrix) => matrix.tensors(),
            Stored::Plain(values) => vec![values],
        })
    }
}

/// Views a matrix's rows as [groups, rows of a group, K], with each group contiguous.
fn groups_of_rows(view: &Tensor) -> Tensor {
    let size = view.size(); // [groups, heads, inner, K]
    view.view([size[0], -1, size[3]])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Device;

    use super::*;
    use crate::model::format::Nf4;
    use crate::model::tests::with_heads;
    use crate::model::{DenseSpec, Family, ModelSpec, ParamTable, QkNorm, SharedExpertSpec, init_unit};

    #[test]
    fn row_lengths_that_nf4_does_not_divide_are_refused_before_loading() {
        let spec = ModelSpec::preset("tiny").unwrap();
        <dyn StoredFormat>::check(&Nf4, &spec).unwrap();
        let mut experts = ModelSpec::preset("tiny-moe").unwrap();
        <dyn StoredFormat>::check(&Nf4, &experts).unwrap();
        experts.layers[1].mlp = spec.layers[1].mlp;
        let error = <dyn StoredFormat>::check(&Nf4, &experts).unwrap_err().to_string();
        assert!(error.ends_with("NF4 supports models with experts in all layers or in none"), "{error}");
        // The block with attention is the only one whose rows do not fit.
        let hybrid = with_heads(ModelSpec::preset("tiny-hybrid").unwrap(), 3, 1);
        let error = <dyn StoredFormat>::check(&Nf4, &hybrid).unwrap_err().to_string();
        assert!(error.ends_with("rows of model.layers.3.self_attn.o_proj.weight have 96 elements"), "{error}");
        let ragged = spec.with_widths(160, 384);
        let error = <dyn StoredFormat>::check(&Nf4, &ragged).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Configuration);
        assert!(
            error
                .to_string()
                .starts_with("quantization = nf4: expected none: NF4 needs rows whose length is a multiple of 64"),
            "{error}"
        );
    }

    #[test]
    fn a_stored_block_is_dequantized_matrix_by_matrix() {
        let dense = ModelSpec::preset("tiny").unwrap();
        let dense = dense.map_attention(|_, attention| attention.qk_norm = Some(QkNorm::Head));
        let [moe, hybrid] = ["tiny-moe", "tiny-hybrid"].map(|name| ModelSpec::preset(name).unwrap());
        let shared = ModelSpec { family: Family::Qwen2Moe, ..moe.clone() }.map_experts(|experts| {
            experts.shared = Some(SharedExpertSpec(DenseSpec::new(128, 320)));
        });
        for (spec, layer) in [(dense, 1), (moe, 1), (shared, 1), (hybrid.clone(), 0), (hybrid, 3)] {
            let spec = Arc::new(spec);
            let layout = ParamTable::new(spec.clone(), 1).unit(Unit::Block(layer)).clone();
            let flat = init_unit(&layout, 3, Kind::BFloat16).unwrap();
            let encoder = Nf4.encoder(Device::Cpu).unwrap();
            let stored = StoredBlock::encode(&spec, &layout, &flat, &*encoder).unwrap();
            let back = Tensor::zeros([layout.len as i64], (Kind::BFloat16, Device::Cpu));
            stored.decode(&layout, &back).unwrap();
            let plain = back.zeros_like();
            stored.copy_plain(&layout, &plain).unwrap();
            for tensor in tensors(&spec, layout.unit) {
                let (own, source) = (tensor.view(&layout, &back), tensor.view(&layout, &flat));
                let expected = if tensor.is_projection() { source.zeros_like() } else { source.shallow_clone() };
                assert!(tensor.view(&layout, &plain).equal(&expected), "{} by itself", tensor.name);
                if tensor.is_projection() {
                    let [rows, columns] = tensor.shape[..] else { unreachable!() };
                    let matrix = encoder.encode(&source.reshape([rows, columns])).unwrap();
                    let mut expected = Tensor::zeros([rows, columns], (Kind::BFloat16, Device::Cpu));
                    matrix.decode(&mut expected).unwrap();
                    assert!(own.reshape([rows, columns]).equal(&expected), "{}", tensor.name);
                    let error =
                        (own - &source).to_kind(Kind::Float).square().mean(Kind::Float).sqrt().double_value(&[]);
                    assert!((1e-4..2.5e-3).contains(&error), "{}: {error}", tensor.name);
                } else {
                    assert!(own.equal(&source), "{}", tensor.name);
                }
            }
            let whole = <dyn StoredFormat>::block_bytes(&Nf4, &spec, layer, Kind::BFloat16);
            let share = whole as f64 / layout.params.iter().map(|param| param.numel()).sum::<usize>() as f64;
            assert!((0.515..0.53).contains(&share), "{share} bytes a weight");
        }
    }
}
