//! Training in FP8: which models, kinds and chips it serves, and the memory of the weights that it rounds.

use tch::{Device, Kind};

use crate::config::MixedPrecision;
use crate::cuda::{Context, kernels};
use crate::error::{Error, Result};
use crate::model::{Fp8Products, LinearSpec, ModelSpec};

/// Whether blocks of a model with weights of `kind` train in such a precision, on a GPU or not. A chip is looked at where a network is made.
///
/// # Errors
/// [`Error::InvalidValue`] on `mixed_precision` for models with experts, and on a GPU for weights of another kind than bfloat16 or a
/// matrix whose sides kernels do not serve.
pub fn check_mixed_precision(precision: MixedPrecision, spec: &ModelSpec, kind: Kind, on_gpu: bool) -> Result<()> {
    if precision == MixedPrecision::None {
        return Ok(());
    }
    let refuse = |reason: &str| refuse(precision, reason);
    if spec.num_expert_layers() > 0 {
        return refuse("experts do not train in FP8 yet");
    }
    if !on_gpu {
        return Ok(());
    }
    if kind != Kind::BFloat16 {
        return refuse(&format!("on a GPU FP8 is rounded from dtype = bfloat16, not from {kind:?}"));
    }
    let unserved = |linear: &LinearSpec| !kernels::fp8_trains([linear.rows(), linear.columns]);
    let Some(linear) = rounded_linears(spec).find(unserved) else { return Ok(()) };
    let (matrix, rows, columns) = (linear.matrix, linear.rows(), linear.columns);
    refuse(&format!(
        "on a GPU sides of matrices have to be multiples of 16 and at most 65536; {matrix:?} is [{rows}, {columns}]"
    ))
}

/// The products of blocks that are in FP8.
pub fn fp8_products(precision: MixedPrecision) -> Option<Fp8Products> {
    match precision {
        MixedPrecision::None => None,
        MixedPrecision::Fp8 => Some(Fp8Products::OfRows),
        MixedPrecision::Fp8All => Some(Fp8Products::All),
    }
}

fn refuse(precision: MixedPrecision, reason: &str) -> Result<()> {
    Err(Error::invalid_value("mixed_precision", precision.name(), format!("none: {reason}")))
}

/// Whether the chip multiplies in FP8; a CPU simulates it.
pub(super) fn check_chip(products: Fp8Products, device: Device) -> Result<()> {
    let Device::Cuda(ordinal) = device else { return Ok(()) };
    let precision = match products {
        Fp8Products::OfRows => MixedPrecision::Fp8,
        Fp8Products::All => MixedPrecision::Fp8All,
    };
    Context::retain(ordinal)?.fp8_refusal()?.map_or(Ok(()), |reason| refuse(precision, &reason))
}

/// The matrices of a model that are rounded, those of blocks that are alike once.
fn rounded_linears(spec: &ModelSpec) -> impl Iterator<Item = LinearSpec> + '_ {
    let linears = spec.kinds_of_blocks().into_iter().flat_map(|(layer, _)| spec.layers[layer].linears());
    linears.filter(|linear| linear.matrix.is_rounded())
}

/// Bytes of the largest matrix as it is rounded for a product: values, scales, and the largest values of columns by which they are found.
pub(super) fn rounded_matrix_bytes(spec: &ModelSpec) -> usize {
    let scales = 2 * size_of::<f32>();
    let bytes = |linear: LinearSpec| linear.rows() * linear.columns + scales * linear.rows().max(linear.columns);
    rounded_linears(spec).map(bytes).max().unwrap_or(0)
}
