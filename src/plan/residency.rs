//! Which of the residencies a run takes: the one that moves least among those that serve it best.

use super::{MemoryPlan, PlanInput, human};
use crate::config::{OptimizerResidency, ReferenceResidency};
use crate::error::Result;

/// Where optimizer state and reference weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Residencies {
    pub optimizer: OptimizerResidency,
    pub reference: ReferenceResidency,
}

/// The first of the residencies that are left open, from the one that moves least, whose KV cache has the most blocks.
///
/// # Errors
/// Why the one that takes least of the device cannot be, if none can.
pub(super) fn choose(input: &PlanInput<'_>) -> Result<MemoryPlan> {
    let candidates = candidates(input);
    let is_forced = candidates.len() == 1;
    let mut plans = Vec::new();
    let mut refusal = None;
    for residencies in candidates {
        match MemoryPlan::with_residencies(residencies, input) {
            Ok(plan) => plans.push(plan),
            Err(error) => refusal = Some(error),
        }
    }
    let most_blocks = plans.iter().map(|plan| plan.num_kv_blocks).max();
    let Some(at) = plans.iter().position(|plan| Some(plan.num_kv_blocks) == most_blocks) else {
        return Err(refusal.expect("there is a candidate, and it was refused"));
    };
    let reason = match (is_forced, at, refusal) {
        (true, ..) => "as configured, or all that there is".to_owned(),
        (false, 0, None) => "all fits on the device".to_owned(),
        (false, 0, Some(_)) => format!("what moves less needs more than {}", human(input.available_bytes)),
        (false, ..) => format!("what moves less leaves {} KV blocks", plans[0].num_kv_blocks),
    };
    Ok(MemoryPlan { reason, ..plans.swap_remove(at) })
}

/// From the one that moves least. On a CPU, where all memory is one, moving frees nothing.
fn candidates(input: &PlanInput<'_>) -> Vec<Residencies> {
    use OptimizerResidency as Optimizer;
    use ReferenceResidency as Reference;
    let can_move = input.swap_bytes.is_some();
    let optimizers = match input.config.residency.optimizer {
        Optimizer::Auto if can_move => vec![Optimizer::Resident, Optimizer::Swap, Optimizer::Stream],
        Optimizer::Auto => vec![Optimizer::Resident],
        forced => vec![forced],
    };
    let references = match input.config.residency.reference {
        Reference::Auto if can_move && input.config.beta > 0.0 && input.config.lora.r.is_none() => {
            vec![Reference::Resident, Reference::Host]
        }
        Reference::Auto => vec![Reference::Resident],
        forced => vec![forced],
    };
    let pairs =
        optimizers.iter().flat_map(|&optimizer| references.iter().map(move |&reference| (optimizer, reference)));
    pairs.map(|(optimizer, reference)| Residencies { optimizer, reference }).collect()
}
