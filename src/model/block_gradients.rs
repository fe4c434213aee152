//! Where a block's gradients go.

use tch::Tensor;

use super::lora::{BlockLora, Gradient, Matrix};
use super::views::{BlockParams, Qkv};
use crate::error::Result;
use crate::torch::accumulation_kind;

/// Gradients of all of a block's weights, or of its adapters while the weights are frozen.
#[derive(Debug)]
pub enum BlockGradients {
    /// Of the weights.
    Weights(BlockParams),
    /// Of A and the expanded B: [`BlockLora::gradients`].
    Adapters(BlockLora),
}

impl BlockGradients {
    /// What the backward of a product with one of `w`'s matrices adds to.
    ///
    /// # Panics
    /// For the gradient of a slice: only whole blocks train.
    pub(super) fn of<'a>(&'a mut self, w: &'a BlockParams, matrix: Matrix) -> Gradient<'a> {
        match self {
            BlockGradients::Weights(grads) => Gradient::Weight(match matrix {
                Matrix::Qkv => match &mut grads.qkv {
                    Qkv::Grouped { weight, .. } => weight,
                    Qkv::Split { .. } => panic!("a slice has no gradient"),
                },
                Matrix::O => &mut grads.o,
                Matrix::GateUp => &mut grads.gate_up,
                Matrix::Down => &mut grads.down,
            }),
            BlockGradients::Adapters(grads) => Gradient::Adapter(w.lora.get(matrix).zip(grads.get_mut(matrix))),
        }
    }

    /// The gradient of a norm's weight; of a frozen one, a tensor that nobody reads.
    pub(super) fn norm(&self, weight: &Tensor, of: impl Fn(&BlockParams) -> Option<&Tensor>) -> Result<Tensor> {
        match self {
            BlockGradients::Weights(grads) => {
                Ok(of(grads).map(Tensor::shallow_clone).expect("the gradients of this block"))
            }
            BlockGradients::Adapters(_) => {
                Ok(Tensor::f_zeros(weight.size(), (accumulation_kind(weight.kind()), weight.device()))?)
            }
        }
    }

    /// The gradient of the bias of query, key and value, if there is one and it is trained.
    pub(super) fn qkv_bias(&self) -> Option<Tensor> {
        match self {
            BlockGradients::Weights(BlockParams { qkv: Qkv::Grouped { bias, .. }, .. }) => {
                bias.as_ref().map(Tensor::shallow_clone)
            }
            _ => None,
        }
    }
}
