//! Which format a key asks for, and what it says where one does not serve.

use tch::Device;

use super::{Exact, Format, Fp8, Nf4, Plain, StoredFormat, Use};
use crate::config::{Config, MixedPrecision, Quantization, RolloutQuantization};
use crate::error::{Error, Result};
use crate::model::spec::ModelSpec;

impl Config {
    /// The format that policy and reference model are multiplied in.
    pub(crate) fn training_format(&self) -> &'static dyn Format {
        if self.exact { &Exact } else { self.mixed_precision.format() }
    }
}

impl MixedPrecision {
    /// The format that training multiplies in.
    pub fn format(self) -> &'static dyn Format {
        match self {
            MixedPrecision::None => &Plain,
            MixedPrecision::Fp8 => &Fp8::ROWS,
            MixedPrecision::Fp8All => &Fp8::ALL,
        }
    }
}

impl RolloutQuantization {
    /// The format that an engine multiplies in.
    pub fn format(self) -> &'static dyn Format {
        match self {
            RolloutQuantization::None => &Plain,
            RolloutQuantization::Fp8 => &Fp8::ROWS,
        }
    }
}

impl Quantization {
    /// The format that frozen blocks are stored in; none where they are kept as they are multiplied.
    pub fn format(self) -> Option<&'static dyn StoredFormat> {
        match self {
            Quantization::None => None,
            Quantization::Nf4 => Some(&Nf4),
        }
    }
}

impl dyn Format {
    /// Whether it serves a use of a model's blocks, on a GPU or not. A chip is looked at where a network or an engine is made.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on the key of the use, with the reason.
    pub fn check(&self, of: Use, spec: &ModelSpec, on_gpu: bool) -> Result<()> {
        self.refusal(of, spec, on_gpu).map_or(Ok(()), |reason| self.refuse(of, &reason))
    }

    /// Whether a device multiplies in it.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on the key of the use, with the reason.
    pub fn check_device(&self, of: Use, device: Device) -> Result<()> {
        self.device_refusal(device)?.map_or(Ok(()), |reason| self.refuse(of, &reason))
    }

    /// Refuses a use.
    ///
    /// # Errors
    /// [`Error::InvalidValue`], always.
    pub fn refuse<T>(&self, of: Use, reason: &str) -> Result<T> {
        Err(Error::invalid_value(self.key(of), self.name(), format!("none: {reason}")))
    }
}
