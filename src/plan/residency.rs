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
    let mut plans = Vec::new(); // with their places among the candidates
    let mut refusal = None;
    for (place, residencies) in candidates.into_iter().enumerate() {
        match MemoryPlan::with_residencies(residencies, input) {
            Ok(plan) => plans.push((place, plan)),
            Err(error) => refusal = Some(error),
        }
    }
    let most_blocks = plans.iter().map(|(_, plan)| plan.num_kv_blocks).max();
    let Some(at) = plans.iter().position(|(_, plan)| Some(plan.num_kv_blocks) == most_blocks) else {
        return Err(refusal.expect("there is a candidate, and it was refused"));
    };
    let reason = match (is_forced, at, plans[at].0) {
        (true, ..) => "as configured, or all that there is".to_owned(),
        (false, 0, 0) => "all fits on the device".to_owned(),
        (false, 0, _) => format!("what moves less needs more than {}", human(input.available_bytes)),
        (false, ..) => format!("what moves less leaves {} KV blocks", plans[0].1.num_kv_blocks),
    };
    Ok(MemoryPlan { reason, ..plans.swap_remove(at).1 })
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Kind;

    use super::*;
    use crate::config::Config;
    use crate::model::{ModelSpec, ParamTable};

    fn plan(available_bytes: usize, on_gpu: bool, keys: &[&str]) -> Result<MemoryPlan> {
        let common = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]", "beta=0.04"];
        let sizes = [
            "max_model_length=64",
            "max_completion_length=32",
            "kv_cache_bytes=65536",
            "max_tokens_per_micro_batch=64",
        ];
        let overrides: Vec<String> = common.iter().chain(&sizes).chain(keys).map(|&key| key.to_owned()).collect();
        let config = Config::load(None, &overrides)?;
        let table = ParamTable::new(Arc::new(ModelSpec::preset("micro").unwrap()), 2);
        MemoryPlan::new(&PlanInput {
            config: &config,
            table: &table,
            kind: Kind::BFloat16,
            completions_per_update: 1,
            engine_weight_bytes: 0,
            available_bytes,
            swap_bytes: on_gpu.then_some(1 << 40),
        })
    }

    #[test]
    fn what_moves_least_is_taken_among_what_fits() {
        use OptimizerResidency as Optimizer;
        use ReferenceResidency as Reference;
        let roomy = plan(1 << 40, true, &[]).unwrap();
        assert_eq!((roomy.optimizer, roomy.reference), (Optimizer::Resident, Reference::Resident), "{roomy}");
        assert_eq!(roomy.reason, "all fits on the device");
        let tight = plan(roomy.peak_bytes() - 1, true, &[]).unwrap();
        assert_ne!((tight.optimizer, tight.reference), (roomy.optimizer, roomy.reference));
        assert!(tight.reason.starts_with("what moves less needs more"), "{}", tight.reason);
        let forced = plan(1 << 40, true, &["residency.optimizer=stream", "residency.reference=host"]).unwrap();
        assert_eq!((forced.optimizer, forced.reference), (Optimizer::Stream, Reference::Host));
        let host = |plan: &MemoryPlan| plan.classes.iter().map(|class| class.host_bytes).sum::<usize>();
        assert!(host(&forced) > 0 && host(&roomy) == 0);
        let on_cpu = plan(1 << 40, false, &[]).unwrap();
        assert_eq!((on_cpu.optimizer, on_cpu.reference), (Optimizer::Resident, Reference::Resident));
        assert!(plan(1 << 10, true, &[]).is_err());
    }
}
