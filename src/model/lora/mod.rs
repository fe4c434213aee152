//! Low-rank adapters (LoRA, arXiv 2106.09685): y = x W^T + (alpha / r) (x A^T) B^T with W frozen.
//!
//! An adapter belongs to a projection as its users know it (`q_proj`), a product to a fused matrix. Of the n adapted
//! projections of a fused matrix the A are stacked, [n r, in], and the B keep the matrix's order of rows, those of other
//! projections left out: Qkv's are grouped by key/value head, GateUp's alternate. For use, B is expanded to all rows of the
//! matrix and n r columns, each row with its own projection's r columns and zeros elsewhere ([`Lora`]): a product is then
//! one pair of products whatever is fused, and a tensor-parallel slice of B is that of the matrix, a range of rows; for
//! row-parallel matrices A is sliced by columns as the matrix is, and its sum over ranks is the product's own. Projections that a checkpoint has
//! in one module share an A, [r, in].
//!
//! Every expert has adapters of its own, one after the other as their matrices are: A [E, n r, in], B [E, out, r]. PEFT reads them
//! expert by expert, and where transformers has one parameter for all experts, stacks them itself; it does so where gate, up and down
//! are adapted or down alone, without dropout, in models whose layers all have experts. Others are refused.
//!
//! | file | what it is |
//! |---|---|
//! | `layout` | the parameters of a block's adapters, and their expansion |
//! | `product` | forward and backward beside a frozen matrix |
//! | `grouped` | forward and backward beside experts' matrices |
//! | `stacked` | adapters of several names, of which every row of a batch uses one |
//! | `peft` | adapter folders |

mod grouped;
mod layout;
mod peft;
mod product;
mod stacked;
#[cfg(test)]
mod tests;

use tch::Kind;

use super::block::Projection;
use super::files::names::{MLP, room};
use super::format::Format;
use super::spec::ModelSpec;
use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::config::{LoraConfig, TargetModule};
use crate::error::{Error, Result};

pub use layout::{BlockLora, Lora};
pub(super) use peft::WEIGHTS as ADAPTER_WEIGHTS;
pub use peft::{AdapterFiles, write_adapters};

/// Kernels of adapters and of experts copy so many elements at once in bfloat16.
const RANK_UNIT: usize = 8;

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
    /// Adapted projections, each once, in [`TargetModule`]'s order; all of them are those that the model has.
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
    /// [`Error::InvalidValue`] on `lora.target_modules` for projections that the model does not have or has in one tensor with others, and on
    /// `lora.target_modules` and `lora.dropout` for experts' adapters that PEFT would not read.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let refuse = |expected: &str| Err(Error::invalid_value("lora.target_modules", names(&self.targets), expected));
        let own = modules(spec);
        let strange = self.targets.iter().find(|module| !own.contains(module));
        if let Some(module) = strange.filter(|_| self.targets != TargetModule::ALL) {
            return refuse(&format!("some of {}: this model has no {}", names(&own), module.name()));
        }
        let targets: Vec<_> = self.targets.iter().map(|module| module.name()).collect();
        let settings =
            [("lora.r", self.r.into()), ("lora.dropout", self.dropout.into()), ("lora.target_modules", targets.into())];
        spec.check_with(settings)?;
        for fused in spec.family.traits().fused_tensors {
            let count = fused.modules.iter().filter(|module| self.targets.contains(module)).count();
            if count > 0 && count < fused.modules.len() {
                return refuse(&format!("{} together: PEFT adapts {} as one", names(fused.modules), fused.name));
            }
        }
        if !self.adapts_experts(spec) {
            return Ok(());
        }
        let of_mlp: Vec<_> = self.targets.iter().filter(|&&module| room(module) == MLP).collect();
        if ![&[GateProj, UpProj, DownProj][..], &[DownProj]].iter().any(|all| of_mlp.iter().copied().eq(*all)) {
            return refuse(
                "gate_proj, up_proj and down_proj together, down_proj alone, or none of them: PEFT reads no other adapters of experts",
            );
        }
        Ok(())
    }

    /// Whether kernels of a GPU compute with such adapters of a model in weights of `kind` and of a format.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `lora.r`.
    pub fn check_gpu(&self, spec: &ModelSpec, kind: Kind, format: &dyn Format) -> Result<()> {
        if format.is_exact() && kind == Kind::BFloat16 && !self.r.is_multiple_of(RANK_UNIT) {
            let expected = format!(
                "a multiple of {RANK_UNIT} with exact = true on a GPU in bfloat16: one kernel adds adapters in the engine and in training, and \
                 it takes no others; dtype=float32 has any"
            );
            return Err(Error::invalid_value("lora.r", self.r, expected));
        }
        if !self.adapts_experts(spec) || kind != Kind::BFloat16 || self.r.is_multiple_of(RANK_UNIT) {
            return Ok(());
        }
        let expected = format!(
            "a multiple of {RANK_UNIT} beside experts (gate_proj, up_proj, down_proj) on a GPU in bfloat16; dtype=float32 and device=cpu \
             have any"
        );
        Err(Error::invalid_value("lora.r", self.r, expected))
    }

    /// Whether projections of experts are adapted.
    fn adapts_experts(&self, spec: &ModelSpec) -> bool {
        spec.num_expert_layers() > 0 && self.targets.iter().any(|&module| room(module) == MLP)
    }

    /// The adapted projections that the model has, in order.
    pub fn modules(&self, spec: &ModelSpec) -> Vec<TargetModule> {
        modules(spec).into_iter().filter(|module| self.targets.contains(module)).collect()
    }

    /// alpha / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.r as f64
    }
}

/// The projections that a model has in any of its layers, in order.
fn modules(spec: &ModelSpec) -> Vec<TargetModule> {
    let linears = spec.kinds_of_blocks().into_iter().flat_map(|kind| spec.layers[kind.layer].linears());
    let own = linears.flat_map(|linear| linear.projections).filter_map(|(projection, _)| match projection {
        Projection::Module(module) => Some(module),
        Projection::SharedExpert(_) => None,
    });
    let own: Vec<_> = own.collect();
    TargetModule::ALL.iter().copied().filter(|module| own.contains(module)).collect()
}

/// Names as a user writes them.
pub(super) fn names(modules: &[TargetModule]) -> String {
    modules.iter().map(|module| module.name()).collect::<Vec<_>>().join(", ")
}
