//! The load-balancing loss of experts (arXiv 2101.03961, equations 4 to 6), over all layers of a micro-batch as in transformers:
//!
//! aux = E sum_e f_e P_e, where f_e is the share of the N rows that chose expert e, and P_e the mean probability of e. The N rows are the tokens of
//! all layers with experts. A prompt that several sequences share counts once for each of them.
//!
//! The loss is a product of means, not a sum over tokens, so it depends on the micro-batches, as in transformers and TRL. Micro-batches are weighted
//! by their tokens, where TRL weights all equally.
//!
//! T tokens, E experts.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use super::micro_batch::MicroBatch;
use super::row_part::RowPart;
use crate::error::Result;
use crate::model::ModelSpec;
use crate::ops::router::Routing;
use crate::torch::{accumulation_kind, scalar, tensor_on};

/// Routing statistics of a micro-batch, summed over its layers, and the gradient that follows from them.
#[derive(Debug)]
pub(super) struct LoadBalance {
    /// Number of sequences that contain each row.
    repeats: Tensor, // [T, 1]
    num_rows: f64,
    sums: RefCell<Option<RouterSums>>,
    /// The gradient of the probabilities of a row that belongs to one sequence.
    slope: RefCell<Option<Tensor>>, // [1, E]
}

#[derive(Debug)]
struct RouterSums {
    chosen: Tensor, // [1, E]
    probs: Tensor,  // [1, E]
}

impl LoadBalance {
    /// Prepares the statistics for a pass; only for a model with experts.
    pub(super) fn new(
        spec: &ModelSpec,
        (micro_batch, part): (&MicroBatch, &RowPart),
        kind: Kind,
        device: Device,
    ) -> Result<Self> {
        let num_layers = spec.num_expert_layers();
        let repeats = micro_batch.repeats();
        let num_rows = num_layers as f64 * repeats.iter().sum::<f64>();
        let repeats = part.rows(&tensor_on(&repeats, device)?, 0.0)?;
        let repeats = repeats.f_to_kind(accumulation_kind(kind))?.f_unsqueeze(1)?;
        Ok(Self { repeats, num_rows, sums: RefCell::default(), slope: RefCell::default() })
    }

    /// The loss over the routing of all parts, a scalar. Collective over the ranks that share the micro-batch.
    pub(super) fn value(&self, part: &RowPart) -> Result<Tensor> {
        let sums = &mut *self.sums.borrow_mut();
        let RouterSums { chosen, probs } = sums.take().expect("a layer with experts was observed");
        let RouterSums { chosen, probs } =
            sums.insert(RouterSums { chosen: part.sum(chosen)?, probs: part.sum(probs)? });
        let product = chosen.f_mul(&*probs)?.f_sum(probs.kind())?;
        Ok(product.f_mul(&scalar(chosen.size()[1] as f64 / self.num_rows.powi(2)))?)
    }

    /// Sets the gradient of the total loss with respect to this loss.
    pub(super) fn set_gradient(&self, gradient: f64) -> Result<()> {
        let sums = self.sums.borrow();
        let RouterSums { chosen, .. } = sums.as_ref().expect("a layer with experts was observed");
        let factor = gradient * chosen.size()[1] as f64 / self.num_rows.powi(2);
        *self.slope.borrow_mut() = Some(chosen.f_mul(&scalar(factor))?);
        Ok(())
    }

    /// Adds the routing of one layer to the statistics.
    pub(super) fn observe(&self, routing: &Routing) -> Result<()> {
        let Routing { probs, experts, .. } = routing;
        let chosen = probs.f_zeros_like()?.f_scatter_value_(1, experts, 1.0)?;
        let sum = |rows: &Tensor| self.repeats.tr().f_mm(rows);
        let (chosen, probs) = (sum(&chosen)?, sum(probs)?);
        let sums = &mut *self.sums.borrow_mut();
        *sums = Some(match sums.take() {
            Some(RouterSums { chosen: mut all, probs: mut all_probs }) => {
                RouterSums { chosen: all.f_add_(&chosen)?, probs: all_probs.f_add_(&probs)? }
            }
            None => RouterSums { chosen, probs },
        });
        Ok(())
    }

    /// The gradient of a layer's probabilities [T, E]; `None` until [`LoadBalance::set_gradient`] is called.
    pub(super) fn d_probs(&self) -> Result<Option<Tensor>> {
        let slope = self.slope.borrow();
        slope.as_ref().map(|slope| Ok(self.repeats.f_mul(slope)?)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use serde_json::Value;

    use super::super::routes::PassRoutes;
    use super::*;
    use crate::model::{
        BlockContext, BlockParams, EmbeddingParams, PackedMixer, ParamTable, Unit, WeightFiles, block_forward,
    };
    use crate::ops::embedding;
    use crate::train::{PackOptions, Sequence, pack};

    /// Compares with the numbers of transformers, one per prompt, from scripts/golden.py.
    #[test]
    fn load_balancing_loss_equals_transformers() {
        for name in ["qwen3_moe", "qwen3_moe_mixed", "gpt_oss"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
            let numbers: Value = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
            let prompts: Vec<Vec<u32>> = serde_json::from_value(numbers["input_ids"].clone()).unwrap();
            let expected: Vec<f64> = serde_json::from_value(numbers["aux_loss"].clone()).unwrap();
            let spec = Arc::new(ModelSpec::from_folder(&folder).unwrap());
            let (files, table) = (WeightFiles::open(&folder, spec.clone()).unwrap(), ParamTable::new(spec.clone(), 1));
            let unit = |unit| (table.unit(unit), files.read_unit(table.unit(unit), Kind::Float).unwrap());
            for (token_ids, expected) in prompts.into_iter().zip(expected) {
                let options = PackOptions { max_tokens: 100, share_prompts: false, device: Device::Cpu };
                let micro_batch = &pack(&[Sequence::of_tokens(token_ids, 1)], &options).unwrap()[0];
                let (place, part) = ((Kind::Float, Device::Cpu), RowPart::new(micro_batch, None).unwrap());
                let routes = PassRoutes::new(&spec, (micro_batch, &part), place, false, true).unwrap().unwrap();
                let rope = spec.ropes().rows(&micro_batch.positions, Kind::Float).unwrap();
                let ctx = BlockContext::new(&spec, &rope, None, Some(&routes));
                let attention = PackedMixer::of(&spec, &micro_batch.bounds, Device::Cpu);
                let (layout, flat) = unit(Unit::Embedding);
                let table = EmbeddingParams::view(layout, &flat).table;
                let mut x = embedding::forward(&micro_batch.token_ids, &table).unwrap();
                for layer in 0..spec.num_layers() {
                    let (layout, flat) = unit(Unit::Block(layer));
                    let block = BlockParams::view(&spec, layout, &flat);
                    x = block_forward(&ctx, layer, &block, &x, &attention, None).unwrap().0;
                }
                let got = routes.aux_loss(&part).unwrap().unwrap().double_value(&[]);
                assert!((got - expected).abs() < 1e-5, "{name}: {got}, expected {expected}");
            }
        }
    }
}
