//! The optimizers to choose from.

use crate::config::{AdjustLr, MuonConfig, OptimizerName};

/// The optimizer, with options that AdamW does not have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optim {
    /// AdamW (arXiv 1711.05101).
    AdamW,
    /// AdamW with block-wise 8-bit moments (arXiv 2110.02861).
    AdamW8bit,
    /// Muon for the matrices of blocks, AdamW for all other parameters.
    Muon(MuonOptions),
}

impl Optim {
    /// Creates the optimizer of this name; `muon` has Muon's options.
    pub fn new(name: OptimizerName, muon: &MuonConfig) -> Self {
        match name {
            OptimizerName::AdamW => Self::AdamW,
            OptimizerName::AdamW8bit => Self::AdamW8bit,
            OptimizerName::Muon => Self::Muon(MuonOptions::new(muon)),
        }
    }
}

/// Options of Muon as in `torch.optim.Muon`, without learning rate and weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonOptions {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether to orthogonalise the mean of gradient and momentum (Nesterov), rather than the momentum.
    pub nesterov: bool,
    /// Number of Newton-Schulz iterations.
    pub ns_steps: usize,
    /// How the learning rate is adjusted to a matrix's shape.
    pub adjust_lr: AdjustLr,
}

impl MuonOptions {
    fn new(config: &MuonConfig) -> Self {
        let &MuonConfig { momentum, nesterov, ns_steps, adjust_lr_fn } = config;
        Self { momentum, nesterov, ns_steps, adjust_lr: adjust_lr_fn }
    }
}
