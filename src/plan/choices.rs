//! Resolves `auto`: among the residencies that serve a run best, the one that moves the least data; then the least recomputation.
//!
//! On a CPU `auto` is `resident`: the host pool would be the same memory, so moving state frees nothing.

use super::shortage::MemoryShortage;
use super::{MemoryPlan, PlanInput, Role, human};
use crate::config::{AutoOr, GradientCheckpointing, OptimizerResidency, ReferenceResidency};

/// Share of the memory that training may fill where keys are `auto`, so that the plan chooses. Fragmentation in libtorch's cache takes up to 9 % in addition
/// (docs/benchmarks/training-memory.md).
pub(super) const MAX_KEPT_SHARE: f64 = 0.9;

/// The choices that a configuration may leave to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choices {
    pub optimizer: OptimizerResidency,
    pub reference: ReferenceResidency,
    pub gradient_checkpointing: GradientCheckpointing,
}

/// Chooses among the open residencies, from the one that moves the least data: the first with which training leaves a tenth of the memory free, if
/// any does, and whose KV cache has the most usable blocks. Then chooses the least recomputation.
///
/// # Errors
/// If none fits, the shortage of the closest candidate.
pub(super) fn choose(input: &PlanInput<'_>) -> Result<MemoryPlan, MemoryShortage> {
    let candidates = candidates(input);
    let is_forced = candidates.len() == 1;
    let mut plans = Vec::new(); // with their indexes among the candidates
    let mut refusal = None;
    for (place, &choices) in candidates.iter().enumerate() {
        match MemoryPlan::with(choices, input) {
            Ok(plan) => plans.push((place, plan)),
            Err(other) => refusal = Some(other.closer(refusal)),
        }
    }
    let all_fit = plans.len() == candidates.len();
    if plans.iter().any(|(_, plan)| plan.leaves_share()) {
        plans.retain(|(_, plan)| plan.leaves_share());
    }
    let most_blocks = plans.iter().map(|(_, plan)| plan.num_useful_blocks()).max();
    let Some(at) = plans.iter().position(|(_, plan)| Some(plan.num_useful_blocks()) == most_blocks) else {
        return Err(refusal.expect("there is a candidate, and it was refused"));
    };
    let available = human(input.room.available_bytes);
    let reason = match (is_forced, at, plans[at].0) {
        (true, ..) => "as configured, or the only choice".to_owned(),
        (false, 0, 0) => "all fits on the device".to_owned(),
        (false, 0, _) if all_fit => format!("keeping more on the device needs more than nine tenths of {available}"),
        (false, 0, _) => format!("keeping more on the device needs more than {available}"),
        (false, ..) => {
            let (less, seqs) = (&plans[0].1, input.num_seqs());
            let (blocks, length) = (less.num_kv_blocks, less.max_model_length);
            format!(
                "keeping more on the device would leave space for only {blocks} KV blocks, for {seqs} sequences of \
                 {length} tokens"
            )
        }
    };
    let (place, plan) = plans.swap_remove(at);
    let plan = least_recomputation(candidates[place], input, plan);
    let largest_micro_batch = if input.role == Role::Generates { 0 } else { plan.largest_micro_batch(input) };
    let micro_batch_advice = larger_micro_batches(input, largest_micro_batch);
    Ok(MemoryPlan { reason, largest_micro_batch, micro_batch_advice, ..plan })
}

/// Describes how many all-gathers larger micro-batches would save with sharded weights, because each micro-batch gathers all weights.
fn larger_micro_batches(input: &PlanInput<'_>, largest: usize) -> String {
    let (budget, update) = (input.config.max_tokens_per_micro_batch, input.update_tokens());
    let (now, most) = (update.div_ceil(budget), largest.min(update));
    if input.room.swap_bytes.is_none() || !input.model().shards_weights() || most == 0 || update.div_ceil(most) >= now {
        return String::new();
    }
    format!(
        "micro-batches: each gathers all weights (zero.stage = 3); an update of up to {update} tokens per rank takes \
         at least {now} micro-batches, and {} with max_tokens_per_micro_batch = {most}",
        update.div_ceil(most)
    )
}

/// The plan `full`, or one with less recomputation if that is left open and its activations fit.
fn least_recomputation(choices: Choices, input: &PlanInput<'_>, full: MemoryPlan) -> MemoryPlan {
    use GradientCheckpointing::{KeepAttention, KeepChunks, None as Nothing, Selective};
    if input.config.gradient_checkpointing != AutoOr::Auto {
        return full;
    }
    let has_chunks = input.table.spec.delta_net().is_some();
    let offloads = input.config.activation_offload; // offload works only with recomputed blocks
    let less = [KeepChunks, Nothing, Selective, KeepAttention].into_iter();
    let less = less.filter(|&keep| (has_chunks || keep != KeepChunks) && (keep.recomputes_blocks() || !offloads));
    let plans =
        less.map(|gradient_checkpointing| MemoryPlan::with(Choices { gradient_checkpointing, ..choices }, input));
    let has_blocks = |plan: &MemoryPlan| plan.num_useful_blocks() == full.num_useful_blocks();
    let mut fitting = plans.flatten().filter(|plan| has_blocks(plan) && plan.leaves_share());
    fitting.next().unwrap_or(full)
}

/// The candidates, beginning with the one that moves the least data. On a CPU moving frees nothing, because all memory is the same.
fn candidates(input: &PlanInput<'_>) -> Vec<Choices> {
    let (config, can_move) = (input.config, input.room.swap_bytes.is_some());
    // Without an engine on this rank, state need not leave the device during rollout.
    let may_swap = |residency: &OptimizerResidency| input.role == Role::Both || *residency != OptimizerResidency::Swap;
    let optimizers = match config.residency.optimizer {
        AutoOr::Auto if can_move => OptimizerResidency::ALL.iter().copied().filter(may_swap).collect(),
        AutoOr::Auto => vec![OptimizerResidency::Resident],
        AutoOr::Given(forced) => vec![forced],
    };
    let references = match config.residency.reference {
        AutoOr::Auto if can_move && input.frozen().next().is_some() => ReferenceResidency::ALL.to_vec(),
        AutoOr::Auto => vec![ReferenceResidency::Resident],
        AutoOr::Given(forced) => vec![forced],
    };
    let gradient_checkpointing = match config.gradient_checkpointing {
        AutoOr::Auto => GradientCheckpointing::Full,
        AutoOr::Given(forced) => forced,
    };
    let with_optimizer = |&optimizer: &OptimizerResidency| {
        let choices = move |reference| Choices { optimizer, reference, gradient_checkpointing };
        references.iter().copied().map(choices)
    };
    optimizers.iter().flat_map(with_optimizer).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Kind;

    use super::super::Room;
    use super::*;
    use crate::config::{Config, WorldSize};
    use crate::error::Result;
    use crate::model::{ModelSpec, ParamTable};

    #[test]
    fn larger_micro_batches_are_advised_with_zero_stage_3() {
        let advice =
            |available: usize, on_gpu, keys: &[&str]| plan(available, on_gpu, keys).unwrap().micro_batch_advice;
        // 16 sequences of 64 tokens per rank.
        let keys = ["zero.stage=3", "num_generations=8", "generation_batch_size=32", "per_device_train_batch_size=16"];
        let told = advice(1 << 40, true, &keys);
        assert!(told.contains("an update of up to 1024 tokens per rank"), "{told}");
        assert!(
            told.ends_with("takes at least 16 micro-batches, and 1 with max_tokens_per_micro_batch = 1024"),
            "{told}"
        );
        let of_stage_2 = [&["zero.stage=2"], &keys[1..]].concat();
        assert_eq!(advice(1 << 40, true, &of_stage_2), "", "weights are whole");
        assert_eq!(advice(1 << 40, false, &keys), "", "on a CPU nothing is gained");
        let whole = [&keys[..], &["max_tokens_per_micro_batch=1024"]].concat();
        assert_eq!(advice(1 << 40, true, &whole), "");
    }

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
        let input = PlanInput {
            config: &config,
            table: &table,
            teacher: None,
            kind: Kind::BFloat16,
            role: Role::Both,
            batch: config.validate_world(2)?,
            world_size: WorldSize { ranks: 2, local_ranks: 2 },
            engine_layers: &table.spec,
            engine_weight_bytes: 0,
            generator_params: table.total,
            starts_from_adapters: false,
            room: Room { available_bytes, swap_bytes: on_gpu.then_some(1 << 40) },
        };
        MemoryPlan::new(&input, &|_| Ok(0))
    }

    #[test]
    fn the_plan_that_offloads_least_is_chosen_among_those_that_fit() {
        use OptimizerResidency as Optimizer;
        use ReferenceResidency as Reference;
        let roomy = plan(1 << 40, true, &[]).unwrap();
        assert_eq!((roomy.optimizer, roomy.reference), (Optimizer::Resident, Reference::Resident), "{roomy}");
        assert_eq!(roomy.reason, "all fits on the device");
        let tight = plan(roomy.peak_bytes() - 1, true, &[]).unwrap();
        assert_ne!((tight.optimizer, tight.reference), (roomy.optimizer, roomy.reference));
        assert!(tight.reason.starts_with("keeping more on the device needs more"), "{}", tight.reason);
        let forced = plan(1 << 40, true, &["residency.optimizer=stream", "residency.reference=host"]).unwrap();
        assert_eq!((forced.optimizer, forced.reference), (Optimizer::Stream, Reference::Host));
        let host = |plan: &MemoryPlan| plan.classes.iter().map(|class| class.host_bytes).sum::<usize>();
        assert!(host(&forced) > 0 && host(&roomy) == 0);
        let on_cpu = plan(1 << 40, false, &[]).unwrap();
        assert_eq!((on_cpu.optimizer, on_cpu.reference), (Optimizer::Resident, Reference::Resident));
        assert!(plan(1 << 10, true, &[]).is_err());
    }
}
