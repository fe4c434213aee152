//! Options of a network's computation.

use tch::{Device, Kind};

use crate::model::Format;

/// Options of a network's computation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkOptions {
    /// Dtype of weights and activations.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Device of weights and activations.
    pub device: Device,
    /// The format of the blocks' GEMMs; see [`crate::model::BlockParams::training_in`].
    pub format: &'static dyn Format,
}
