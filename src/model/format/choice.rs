//! Maps configuration keys to formats, and refuses formats that a model or device does not support.

use tch::Device;

use super::{Exact, Format, Fp8, Int8, Mxfp4, Nf4, Plain, StoredFormat, Use};
use crate::config::{Config, MixedPrecision, Quantization, RolloutQuantization};
use crate::error::{Error, Result};
use crate::model::spec::ModelSpec;

impl Config {
    /// The number format in which the policy and the reference model compute GEMMs.
    pub(crate) fn training_format(&self) -> &'static dyn Format {
        if self.exact { &Exact } else { self.model.mixed_precision.format() }
    }
}

impl MixedPrecision {
    /// The format in which training computes GEMMs.
    pub fn format(self) -> &'static dyn Format {
        match self {
            MixedPrecision::None => &Plain,
            MixedPrecision::Fp8 => &Fp8::ROWS,
            MixedPrecision::Fp8All => &Fp8::ALL,
        }
    }
}

impl RolloutQuantization {
    /// The format in which an engine computes GEMMs.
    pub fn format(self) -> &'static dyn Format {
        match self {
            RolloutQuantization::None => &Plain,
            RolloutQuantization::Fp8 => &Fp8::ROWS,
            RolloutQuantization::Int8 => &Int8,
            RolloutQuantization::Mxfp4 => &Mxfp4,
        }
    }
}

impl Quantization {
    /// The format in which frozen blocks are stored; `None` if they are stored as they are computed with.
    pub fn format(self) -> Option<&'static dyn StoredFormat> {
        match self {
            Quantization::None => None,
            Quantization::Nf4 => Some(&Nf4),
        }
    }
}

impl dyn Format {
    /// Checks that the format supports a use of a model's blocks, on a GPU or a CPU. The GPU itself is checked when a network or an engine is
    /// created.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for the configuration key of that use, with the reason.
    pub fn check(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Result<()> {
        self.refusal(of, spec, on_gpu).map_or(Ok(()), |reason| self.refuse(of, &reason))
    }

    /// Checks that a device can compute in the format.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for the configuration key of that use, with the reason.
    pub fn check_device(&self, of: Use, device: Device) -> Result<()> {
        self.device_refusal(device)?.map_or(Ok(()), |reason| self.refuse(of, &reason))
    }

    /// Checks that experts in the format can have adapters.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for the configuration key of that use.
    pub fn check_expert_adapters(&self, of: Use) -> Result<()> {
        if self.adapts_experts() {
            return Ok(());
        }
        self.refuse(of, "adapters of experts are not supported beside experts in this format")
    }

    /// Returns the error that refuses a use of the format.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], always.
    pub fn refuse<T>(&self, of: Use, reason: &str) -> Result<T> {
        Err(Error::invalid_value(self.key(of), self.name(), format!("none: {reason}")))
    }
}

impl PartialEq for dyn Format {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}
