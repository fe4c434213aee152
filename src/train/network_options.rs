//! How a network computes.

use tch::{Device, Kind};

use crate::model::Format;

/// How a network computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkOptions {
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Kind of the residual stream.
    pub residual: Kind,
    /// Where they live.
    pub device: Device,
    /// The format that products of blocks are made in, as [`crate::model::BlockParams::training_in`] describes.
    pub format: &'static dyn Format,
}
