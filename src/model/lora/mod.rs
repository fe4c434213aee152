//! Low-rank adapters (LoRA, arXiv 2106.09685): y = x W^T + (alpha / r) (x A^T) B^T with W frozen.
//!
//! An adapter belongs to a projection as its users know it (`q_proj`), a product to a fused matrix. Of the n adapted
//! projections of a fused matrix the A are stacked, [n r, in], and the B keep the matrix's order of rows, those of other
//! projections left out: Qkv's are grouped by key/value head, GateUp's alternate. For use, B is expanded to all rows of the
//! matrix and n r columns, each row with its own projection's r columns and zeros elsewhere ([`Lora`]): a product is then
//! one pair of products whatever is fused, and a tensor-parallel slice of B is that of the matrix, a range of rows; for
//! row-parallel matrices A is sliced by columns as the matrix is, and its sum over ranks is the product's own.
//!
//! | file | what it is |
//! |---|---|
//! | `layout` | the parameters of a block's adapters, and their expansion |
//! | `product` | forward and backward beside a frozen matrix |
//! | `stacked` | adapters of several names, of which every row of a batch uses one |
//! | `peft` | adapter folders |

mod layout;
mod peft;
mod product;
mod stacked;
#[cfg(test)]
mod tests;

use super::spec::ModelSpec;
use crate::config::{LoraConfig, TargetModule};
use crate::error::{Error, Result};

pub use layout::{BlockLora, Lora};
pub(super) use peft::WEIGHTS as ADAPTER_WEIGHTS;
pub use peft::{AdapterFiles, write_adapters};

/// Settings of adapters: which projections, of which rank, with which scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// Rank.
    pub r: usize,
    /// Numerator of the scale, alpha / r.
    pub alpha: f64,
    /// Chance that an element of an adapter's input is dropped in training. The projections of one fused matrix share
    /// their input's mask.
    pub dropout: f64,
    /// Adapted projections, each once, in [`TargetModule`]'s order.
    pub targets: Vec<TargetModule>,
}

impl LoraSpec {
    /// The adapters that a configuration asks for; `None` trains all weights.
    pub fn new(config: &LoraConfig) -> Option<Self> {
        let LoraConfig { r, alpha, dropout, target_modules } = config;
        Some(Self { r: (*r)?, alpha: *alpha, dropout: *dropout, targets: target_modules.modules() })
    }

    /// Whether a model's matrices can be adapted so.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `lora.target_modules` for projections that are experts', on `lora.r` for a model with gated delta
    /// nets.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        if spec.delta_net.is_some() {
            let expected =
                "none: adapters are not beside the matrices of gated delta nets yet; all weights can be trained";
            return Err(Error::invalid_value("lora.r", self.r, expected));
        }
        let of_mlp = self.targets.iter().any(|&module| module > TargetModule::OProj);
        if !of_mlp || spec.num_expert_layers() == 0 {
            return Ok(());
        }
        let names: Vec<_> = self.targets.iter().map(|module| module.name()).collect();
        let expected = "some of q_proj, k_proj, v_proj, o_proj: experts cannot be adapted yet";
        Err(Error::invalid_value("lora.target_modules", names.join(", "), expected))
    }

    /// alpha / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.r as f64
    }
}
