//! Which adapters the GPU kernels support.

use tch::Kind;

use super::spec::LoraSpec;
use crate::error::{Error, Result};
use crate::model::format::{Format, Use};
use crate::model::spec::ModelSpec;

/// The rank must be a multiple of this in bfloat16, because the kernels copy that many elements at once.
const RANK_UNIT: usize = 8;

impl LoraSpec {
    /// Checks that the GPU kernels support such adapters for this model, with weights of `kind` and in this format.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `lora.r`.
    pub fn check_gpu(&self, spec: &ModelSpec, kind: Kind, format: &dyn Format) -> Result<()> {
        if format.is_exact() && kind == Kind::BFloat16 && !self.r.is_multiple_of(RANK_UNIT) {
            let expected = format!(
                "a multiple of {RANK_UNIT} with exact = true on a GPU in bfloat16, as the LoRA kernel needs it; \
                 dtype=float32 supports any rank"
            );
            return Err(Error::invalid_value("lora.r", self.r, expected));
        }
        if !self.adapts_experts(spec) || kind != Kind::BFloat16 || self.r.is_multiple_of(RANK_UNIT) {
            return Ok(());
        }
        let expected = format!(
            "a multiple of {RANK_UNIT} for adapters of experts (gate_proj, up_proj, down_proj) on a GPU in bfloat16; \
             dtype=float32 and device=cpu support any rank"
        );
        Err(Error::invalid_value("lora.r", self.r, expected))
    }

    /// Checks that an engine whose matrices are in this format can compute the adapters.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for the key of the format.
    pub fn check_engine(&self, spec: &ModelSpec, format: &'static dyn Format, of: Use) -> Result<()> {
        if self.adapts_experts(spec) { format.check_expert_adapters(of) } else { Ok(()) }
    }
}
