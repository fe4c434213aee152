//! The loops over blocks, forward and backward.

use tch::Tensor;

use super::gradients::Gradients;
use super::network::Network;
use super::pass::Pass;
use super::upcoming::upcoming;
use crate::config::GradientCheckpointing;
use crate::error::Result;
use crate::model::{SavedBlock, Unit, block_backward, block_forward};

impl Network {
    /// Runs all blocks forward. Returns the residual stream after the last block [T, D] and, if `recompute` is given, what the blocks keep for
    /// backward.
    pub(super) fn blocks_forward(
        &mut self,
        pass: &mut Pass<'_>,
        recompute: Option<GradientCheckpointing>,
    ) -> Result<(Tensor, Vec<SavedBlock>)> {
        let mut x = self.embed(&pass.part.token_ids)?;
        let mut saved = Vec::new();
        let num_layers = self.spec().num_layers();
        for layer in 0..num_layers {
            let leaves = recompute.is_some() && layer + 1 < num_layers; // the last block's backward is next
            if let Some(offload) = self.offload.as_mut().filter(|_| leaves) {
                offload.before_forward(layer, &x)?;
            }
            let (y, mut kept) = self.one_block_forward(pass, layer, &x, recompute)?;
            x = y;
            if let Some((offload, block)) = self.offload.as_mut().zip(kept.as_mut()) {
                if leaves { offload.after_forward(block)? } else { offload.release()? }
            }
            saved.extend(kept);
        }
        Ok((x, saved))
    }

    pub(super) fn one_block_forward(
        &mut self,
        pass: &Pass<'_>,
        layer: usize,
        x: &Tensor, // [T, D]
        recompute: Option<GradientCheckpointing>,
    ) -> Result<(Tensor, Option<SavedBlock>)> {
        let upcoming = upcoming(self.spec(), Unit::Block(layer), false);
        let block = self.block(layer, &upcoming, pass.adapter_use)?;
        let context = pass.context(self.spec());
        block_forward(&context, layer, &block, x, &pass.mixer, recompute)
    }

    /// Runs all blocks backward. Takes the gradient of the last block's output and returns that of the embedding's output. [T, D]
    pub(super) fn blocks_backward(
        &mut self,
        pass: &Pass<'_>,
        mut dx: Tensor,
        saved: Vec<SavedBlock>,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        for (layer, mut saved) in saved.into_iter().enumerate().rev() {
            self.offload.as_mut().map_or(Ok(()), |offload| offload.before_backward(layer, &mut saved))?;
            let upcoming = upcoming(self.spec(), Unit::Block(layer), true);
            let block = self.block(layer, &upcoming, pass.adapter_use)?;
            let (flat, mut block_gradients) = self.begin_block(layer, gradients)?;
            let context = pass.context(self.spec());
            dx = block_backward(&context, &block, &dx, saved, &pass.mixer, &mut block_gradients)?;
            if let Some(adapters) = &self.adapters {
                adapters.end_gradients(layer, &block_gradients, &flat)?;
            }
            gradients.end(Unit::Block(layer), flat)?;
        }
        Ok(dx)
    }
}
