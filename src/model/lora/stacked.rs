//! Several named adapters on one base model. Every row of a batch uses one of them, or none.
//!
//! The A of all adapters are stacked and their B are concatenated, so that one pair of GEMMs serves the whole batch: low = x A^T contains the inner
//! products with all adapters; those that do not belong to the row's own adapter are set to zero, and low B^T is added.

use tch::Tensor;

use super::layout::{BlockLora, Lora};
use crate::error::Result;
use crate::model::spec::Matrix;
use crate::torch;

impl BlockLora {
    /// Stacks adapters of one block and numbers them from 0, in their order. They may differ in rank and in the projections that they adapt.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn stacked(all: &[BlockLora]) -> Result<Self> {
        let mut matrices: Vec<Matrix> = Vec::new();
        for (matrix, _) in all.iter().flat_map(Self::iter) {
            if !matrices.contains(matrix) {
                matrices.push(*matrix);
            }
        }
        let stack = |matrix: Matrix| {
            let beside = |lora: &BlockLora| lora.iter().position(|(own, _)| *own == matrix);
            let parts: Vec<(usize, &Lora)> =
                all.iter().enumerate().filter_map(|(number, lora)| Some((number, &lora.0[beside(lora)?].1))).collect();
            Ok((matrix, Lora::stacked(&parts)?))
        };
        Ok(Self(matrices.into_iter().map(stack).collect::<Result<_>>()?))
    }
}

impl Lora {
    fn stacked(parts: &[(usize, &Lora)]) -> Result<Self> {
        let [a, b]: [Vec<&Tensor>; 2] =
            [parts.iter().map(|(_, lora)| &lora.a).collect(), parts.iter().map(|(_, lora)| &lora.b).collect()];
        let owners = parts.iter().flat_map(|(number, lora)| std::iter::repeat_n(*number as i32, lora.rank()));
        let owners: Vec<i32> = owners.collect();
        let owners = Some(torch::tensor_on(&owners, a[0].device())?);
        Ok(Self { owners, ..Self::new(Tensor::f_cat(&a, -2)?, Tensor::f_cat(&b, -1)?) })
    }

    /// Number of rows of A; for experts, of each expert's.
    fn rank(&self) -> usize {
        self.a.size()[self.a.dim() - 2] as usize
    }

    /// The stacked adapters for a batch in which row t uses adapter number `adapters[t]`, or none if that is negative.
    pub(in crate::model) fn for_rows(&self, adapters: &Tensor /* [T] i32 */) -> Result<Self> {
        let others = match &self.owners {
            Some(owners) => Some(owners.f_unsqueeze(0)?.f_ne_tensor(&adapters.f_unsqueeze(1)?)?),
            None => None,
        };
        Ok(Self { others, ..self.shallow_clone() })
    }
}
