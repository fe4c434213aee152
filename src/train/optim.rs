//! The optimizers that a run chooses between.

use crate::config::{AdjustLr, MuonConfig, OptimizerName};

/// The optimizer, with what AdamW does not have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optim {
    /// AdamW (arXiv 1711.05101).
    AdamW,
    /// AdamW with block-wise 8-bit moments (arXiv 2110.02861).
    AdamW8bit,
    /// Muon for the matrices of blocks, AdamW for everything else.
    Muon(MuonOptions),
}

impl Optim {
    /// By its name, with the keys of Muon.
    pub fn new(name: OptimizerName, muon: &MuonConfig) -> Self {
        match name {
            OptimizerName::AdamW => Self::AdamW,
            OptimizerName::AdamW8bit => Self::AdamW8bit,
            OptimizerName::Muon => Self::Muon(MuonOptions::new(muon)),
        }
    }
}

/// Muon as `torch.optim.Muon` has it, without learning rate and weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonOptions {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Orthogonalise the gradient's mean with the momentum, not the momentum itself.
    pub nesterov: bool,
    /// Newton-Schulz iterations.
    pub ns_steps: usize,
    /// How the learning rate follows from a matrix' shape.
    pub adjust_lr: AdjustLr,
}

impl MuonOptions {
    fn new(config: &MuonConfig) -> Self {
        let &MuonConfig { momentum, nesterov, ns_steps, adjust_lr_fn } = config;
        Self { momentum, nesterov, ns_steps, adjust_lr: adjust_lr_fn }
    }
}
