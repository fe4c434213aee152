//! Forward and backward of the sublayer that mixes information between tokens: attention or a gated delta net.

use tch::Tensor;

use super::attention::AttentionOutput;
use super::context::BlockContext;
use super::delta_net::DeltaOutput;
use super::packed::{PackedMixer, SequenceMixer};
use super::params::BlockParams;
use crate::error::Result;
use crate::model::spec::{Mixer, ParamName};
use crate::ops::attention::Attended;
use crate::types::Place;

/// Activations of a mixer's forward that its backward reads.
#[derive(Debug)]
pub(super) enum MixerOutput {
    Attention(AttentionOutput),
    DeltaNet(Box<DeltaOutput>),
}

impl MixerOutput {
    /// Whether backward is possible: attention must have returned its log-sum-exp.
    pub(super) fn can_go_back(&self) -> bool {
        match self {
            Self::Attention(output) => output.lse.is_some(),
            Self::DeltaNet(_) => true,
        }
    }

    /// Attention's output and log-sum-exp, with which a recomputed forward can skip attention.
    pub(super) fn attended(&self) -> Option<Attended> {
        match self {
            Self::Attention(output) => output.attended(),
            Self::DeltaNet(_) => None,
        }
    }
}

impl Mixer {
    /// Returns the residual stream after the mixer [T, D], and the activations that backward needs, including a gated delta net's chunks if
    /// requested. `attended` is the result of [`MixerOutput::attended`] from an earlier run of this forward.
    pub(super) fn forward(
        self,
        ctx: &BlockContext<'_>,
        layer: usize,
        w: &BlockParams,
        (x, attended): (&Tensor, Option<Attended>), // [T, D]
        mixer: &dyn SequenceMixer,
        keeps_chunks: bool,
    ) -> Result<(Tensor, MixerOutput)> {
        Ok(match self {
            Self::Attention(attention) => {
                let (h, output) = attention.forward(ctx, layer, w, (x, attended), mixer)?;
                (h, MixerOutput::Attention(output))
            }
            Self::DeltaNet(delta_net) => {
                let (h, output) = delta_net.forward(ctx, layer, w, x, mixer, keeps_chunks)?;
                (h, MixerOutput::DeltaNet(Box::new(output)))
            }
        })
    }

    /// Returns dx, given the gradient of the residual stream after the mixer.
    ///
    /// # Panics
    /// If `saved` comes from the other kind of mixer.
    pub(super) fn backward(
        self,
        ctx: &BlockContext<'_>,
        w: &BlockParams,
        (x, dh): (&Tensor, &Tensor), // [T, D]
        saved: MixerOutput,
        packed: &PackedMixer,
        grads: &mut BlockParams,
    ) -> Result<Tensor> {
        match (self, saved) {
            (Self::Attention(attention), MixerOutput::Attention(saved)) => {
                attention.backward(ctx, w, (x, dh), saved, packed, grads)
            }
            (Self::DeltaNet(delta_net), MixerOutput::DeltaNet(saved)) => {
                delta_net.backward(ctx, w, (x, dh), *saved, packed, grads)
            }
            (Self::Attention(_), MixerOutput::DeltaNet(_)) | (Self::DeltaNet(_), MixerOutput::Attention(_)) => {
                panic!("what another sublayer saved")
            }
        }
    }

    /// A tensor-parallel rank's slice of a parameter that is not a matrix.
    pub(super) fn own_part(self, name: ParamName, weight: &Tensor, Place { rank, size }: Place) -> Result<Tensor> {
        match self {
            Self::Attention(attention) => Ok(attention.own_norm(name, weight, rank, size)),
            Self::DeltaNet(delta_net) => delta_net.own_part(name, weight, rank, size),
        }
    }
}
