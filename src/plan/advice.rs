//! Advice for a run that does not fit into memory. Every change is tried before it is recommended.

use std::rc::Rc;

use serde_json::{Value, json};

use super::shortage::MemoryShortage;
use super::{MemoryPlan, PlanInput, Role, human};
use crate::config::{AutoOr, Config, EngineShape, GradientCheckpointing, Quantization, divisors};
use crate::error::{Error, Result};
use crate::migration::word;
use crate::rollout::{cache_kind, kv_block_bytes};

mod trials;

#[cfg(test)]
mod tests;

use trials::{TrialResult, Trials};

/// Minimum number of prompt tokens for which a recommended context has space.
pub(super) const LEAST_PROMPT_LENGTH: usize = 512;
/// Rank of recommended LoRA adapters.
const LORA_R: usize = 16;

/// A configuration key with its recommended value.
type KeySetting = (&'static str, Value);

impl MemoryShortage {
    /// The error for the user, with the smallest change that makes the run fit.
    pub(super) fn explain(self, input: &PlanInput<'_>, engine_weights: &dyn Fn(&Config) -> Result<usize>) -> Error {
        let plan = match self {
            Self::Value(error) => return error,
            Self::Memory(plan) => plan,
        };
        let (per_rank, available) = (human(plan.peak_bytes()), human(plan.room.available_bytes));
        let advice = Advice { input, trials: Trials::new(input, engine_weights) }.find();
        let advice = advice.map(|changes| told(&changes, input));
        let message = if plan.fits_device() {
            let (swapped, ranks) = (plan.swapped_bytes(), input.world_size.local_ranks);
            let change = advice.map_or_else(String::new, |advice| format!("; {advice}"));
            format!(
                "residency.optimizer = {} and residency.reference = {} need {} of host memory per rank and {} are available; \
                 {ranks} ranks need a machine with {} free{change}, or use a smaller model\n{plan}",
                plan.optimizer.name(),
                plan.reference.name(),
                human(swapped),
                human(plan.room.swap_bytes.unwrap_or(0)),
                human(swapped * ranks),
            )
        } else {
            let nothing = "no change of a key is enough: use more GPUs or GPUs with more memory";
            let change = advice.as_deref().unwrap_or(nothing);
            format!(
                "this run needs {per_rank} per rank and {available} are available; {change}, or use a smaller model\n{plan}"
            )
        };
        Error::Environment { message }
    }
}

impl MemoryPlan {
    fn generation_fits(&self) -> bool {
        self.rollout_bytes() <= self.room.available_bytes
    }

    /// The longest context for which one sequence fits beside the other memory of generation, if it has enough space for prompts.
    fn longest_that_fits(&self, config: &Config, block_bytes: usize) -> Option<usize> {
        let others = self.rollout_bytes() - self.kv_cache_bytes;
        let free = self.room.available_bytes.checked_sub(others)?;
        let length = free / block_bytes * self.kv_block_size;
        let least = config.max_completion_length + LEAST_PROMPT_LENGTH;
        (least..self.max_model_length).contains(&length).then_some(length)
    }
}

/// Searches for changes, the least costly first.
struct Advice<'a> {
    input: &'a PlanInput<'a>,
    trials: Trials<'a>,
}

impl Advice<'_> {
    /// Finds the least costly changes with which the run fits. It tries, in this order: recomputation or smaller micro-batches in training, larger
    /// engines, sharding, fewer concurrent sequences, a shorter context, other residencies than configured; adapters and quantization last.
    fn find(&self) -> Option<Vec<KeySetting>> {
        let residencies = self.residencies();
        self.trained().iter().find_map(|trained| {
            residencies.iter().find_map(|residency| {
                let kept = [&trained[..], residency].concat();
                Concession::ALL.iter().find_map(|&concession| self.sharded(&kept, concession))
            })
        })
    }

    /// Options for what trains, and for where it is stored.
    fn trained(&self) -> Vec<Vec<KeySetting>> {
        let (config, spec) = (self.input.config, &self.input.table.spec);
        let mut trained = vec![vec![]];
        if !config.activation_offload {
            let mut offloaded: Vec<KeySetting> = vec![("activation_offload", json!(true))];
            let keeps_more = matches!(config.gradient_checkpointing, AutoOr::Given(keep) if !keep.recomputes_blocks());
            offloaded.extend(keeps_more.then(|| ("gradient_checkpointing", json!(GradientCheckpointing::Full.name()))));
            trained.push(offloaded);
        }
        let mut adapters: Vec<KeySetting> =
            config.lora.r.is_none().then(|| ("lora.r", json!(LORA_R))).into_iter().collect();
        if !adapters.is_empty() && spec.num_expert_layers() > 0 {
            adapters.push(("lora.target_modules", json!(["q_proj", "k_proj", "v_proj", "o_proj"])));
        }
        if !adapters.is_empty() {
            trained.push(adapters.clone());
        }
        let serves = |stored: &&Quantization| stored.format().is_some_and(|format| format.check(spec).is_ok());
        for stored in Quantization::ALL.iter().filter(|_| config.quantization == Quantization::None).filter(serves) {
            trained.push([adapters.clone(), vec![("quantization", json!(stored.name()))]].concat());
        }
        trained
    }

    /// The configured residencies, and the `auto` ones.
    fn residencies(&self) -> Vec<Vec<KeySetting>> {
        let configured = &self.input.config.residency;
        let optimizer = (configured.optimizer != AutoOr::Auto).then(|| ("residency.optimizer", json!("auto")));
        let reference = (configured.reference != AutoOr::Auto).then(|| ("residency.reference", json!("auto")));
        let both: Vec<KeySetting> = optimizer.iter().chain(&reference).cloned().collect();
        let mut all = vec![vec![]];
        all.extend(optimizer.into_iter().chain(reference).map(|one| vec![one]));
        if both.len() > 1 {
            all.push(both);
        }
        all
    }

    /// Searches, in addition to `kept`: sharding from the configured stage up, for each stage larger engines while generation lacks memory, and for
    /// each engine changes of training.
    fn sharded(&self, kept: &[KeySetting], concession: Concession) -> Option<Vec<KeySetting>> {
        let PlanInput { config, table, role, .. } = *self.input;
        let (stage, own, sizes) = (config.zero.stage, config.tensor_parallel_size, self.engine_sizes());
        let last = if table.shards > 1 && role != Role::Generates { 3 } else { stage };
        for stage in stage..=last {
            for &tp in &sizes {
                let mut changes = kept.to_vec();
                changes.extend((stage > config.zero.stage).then(|| ("zero.stage", json!(stage))));
                changes.extend((tp > own).then(|| ("tensor_parallel_size", json!(tp))));
                match self.cached(changes, concession) {
                    SearchResult::Fits(changes) => return Some(changes),
                    SearchResult::TrainingLacks => break,
                    SearchResult::Lacks => {}
                }
            }
        }
        None
    }

    /// Tensor-parallel sizes, from the configured one up, that divide the model and the ranks of a node.
    fn engine_sizes(&self) -> Vec<usize> {
        let PlanInput { config, table, batch, world_size, .. } = *self.input;
        let own = config.tensor_parallel_size;
        let first = world_size.ranks - batch.roles.num_generators;
        let can_be = |&tp: &usize| {
            let shape = EngineShape { tensor_parallel_size: tp, ..config.engine_shape() };
            tp.is_multiple_of(own)
                && table.spec.validate_tp(tp).is_ok()
                && world_size.check_engines(first, shape).is_ok()
        };
        divisors(batch.roles.num_generators).into_iter().filter(can_be).collect()
    }

    /// Searches, in addition to `changes`: the configured KV cache or an automatic size, for the configured number of sequences or only as many as a
    /// batch has; then with the concession.
    fn cached(&self, changes: Vec<KeySetting>, concession: Concession) -> SearchResult {
        let config = self.input.config;
        let sized = config.kv_cache_bytes.map(|_| [&changes[..], &[("kv_cache_bytes", json!("none"))]].concat());
        let mut found = SearchResult::Lacks;
        let caches = [changes].into_iter().chain(sized);
        let beside = caches.flat_map(|changes| {
            let of_batch = self.sequences_of_batch(&changes);
            [changes].into_iter().chain(of_batch)
        });
        for changes in beside {
            let tried = self.trials.of(&changes);
            let conceded = match &*tried {
                TrialResult::Lacks(plan) if !plan.generation_fits() => self.conceded(plan, &changes, concession),
                _ => None,
            };
            let (changes, tried) = conceded.unwrap_or((changes, tried));
            match &*tried {
                TrialResult::Fits => return SearchResult::Fits(changes),
                TrialResult::Lacks(plan) if plan.generation_fits() => match self.trainable(&changes) {
                    Some(changes) => return SearchResult::Fits(changes),
                    None => found = SearchResult::TrainingLacks,
                },
                TrialResult::Lacks(_) | TrialResult::Refused => {}
            }
        }
        found
    }

    /// `changes` plus a limit of concurrent sequences to those of a batch, if more are configured.
    fn sequences_of_batch(&self, changes: &[KeySetting]) -> Option<Vec<KeySetting>> {
        let config = self.trials.config(changes)?;
        let batch = config.validate_world(self.input.world_size.ranks).ok()?;
        let num_seqs = PlanInput { config: &config, batch, ..*self.input }.num_seqs();
        (num_seqs < config.max_num_seqs).then(|| [changes, &[("max_num_seqs", json!(num_seqs))]].concat())
    }

    /// Generation lacks memory with `changes`: adds the smallest amount of a concession that helps, and returns the result of trying it.
    fn conceded(
        &self,
        plan: &MemoryPlan,
        changes: &[KeySetting],
        concession: Concession,
    ) -> Option<(Vec<KeySetting>, Rc<TrialResult>)> {
        let with = |change: KeySetting| {
            let others = changes.iter().filter(|(key, _)| *key != change.0);
            others.cloned().chain([change.clone()]).collect::<Vec<_>>()
        };
        let shorter = |length: usize| with(("max_model_length", json!(length)));
        let fewer = |changes: &[KeySetting]| {
            let of = |num_seqs: usize| {
                let changes = [changes, &[("max_num_seqs", json!(num_seqs))]].concat();
                let tried = self.trials.of(&changes);
                tried.has_room_to_generate().then_some((changes, tried))
            };
            let one = of(1)?;
            let powers = (1..usize::BITS).map(|power| 1 << power).take_while(|&num_seqs| num_seqs < plan.num_seqs);
            powers.collect::<Vec<_>>().into_iter().rev().find_map(of).or(Some(one))
        };
        let others: Vec<KeySetting> = changes.iter().filter(|(key, _)| *key != "max_num_seqs").cloned().collect();
        match concession {
            Concession::Nothing => None,
            Concession::Sequences => fewer(&others),
            Concession::Context => {
                let changes = shorter(self.shorter(plan, changes)?);
                let tried = self.trials.of(&changes);
                Some((changes, tried))
            }
            Concession::Both => {
                let least = self.input.config.max_completion_length + LEAST_PROMPT_LENGTH;
                (least < plan.max_model_length)
                    .then(|| fewer(&[&others[..], &[("max_model_length", json!(least))]].concat()))?
            }
        }
    }

    fn shorter(&self, plan: &MemoryPlan, changes: &[KeySetting]) -> Option<usize> {
        let config = self.trials.config(changes)?;
        let (spec, tp) = (self.input.engine_layers, config.tensor_parallel_size);
        plan.longest_that_fits(
            &config,
            kv_block_bytes(spec, tp, config.kv_block_size, cache_kind(config.kv_cache_dtype, self.input.kind)),
        )
    }

    /// Generation fits with `changes`: also tries to release caches while training, more recomputation, then smaller micro-batches.
    fn trainable(&self, changes: &[KeySetting]) -> Option<Vec<KeySetting>> {
        use GradientCheckpointing::{Full, KeepAttention, KeepChunks, None as Nothing, Selective};
        let config = self.input.config;
        let more: &[GradientCheckpointing] = match config.gradient_checkpointing {
            AutoOr::Given(KeepChunks) => &[Nothing, Selective, KeepAttention, Full],
            AutoOr::Given(Nothing) => &[Selective, KeepAttention, Full],
            AutoOr::Given(Selective) => &[KeepAttention, Full],
            AutoOr::Given(KeepAttention) => &[Full],
            AutoOr::Given(Full) | AutoOr::Auto => &[],
        };
        let recomputed = |keep: &GradientCheckpointing| ("gradient_checkpointing", json!(keep.name()));
        let leaving = config.keeps_kv_cache().then(|| [changes, &[("carried_kv", json!("recompute"))]].concat());
        if leaving.as_ref().is_some_and(|changes| self.trials.of(changes).fits()) {
            return leaving;
        }
        [changes.to_vec()].into_iter().chain(leaving).find_map(|kept| {
            let mut last = kept.clone();
            for recomputed in more.iter().map(recomputed) {
                last = [&kept[..], &[recomputed]].concat();
                if self.trials.of(&last).fits() {
                    return Some(last);
                }
            }
            self.smaller_micro_batch(last)
        })
    }

    /// Adds to `changes` the largest micro-batch that leaves the reserve for libtorch's cache, if one sequence fits into it.
    fn smaller_micro_batch(&self, mut changes: Vec<KeySetting>) -> Option<Vec<KeySetting>> {
        let (config, tried) = (self.trials.config(&changes)?, self.trials.of(&changes));
        let TrialResult::Lacks(plan) = &*tried else { return None };
        let tokens = plan.largest_micro_batch(&PlanInput { config: &config, ..*self.input });
        let longest = config.max_completion_length + config.max_prompt_length.unwrap_or(1);
        changes.push(("max_tokens_per_micro_batch", json!(tokens)));
        let is_enough = (longest..config.max_tokens_per_micro_batch).contains(&tokens);
        (is_enough && self.trials.of(&changes).fits()).then_some(changes)
    }
}

/// Ways to reduce the memory of generation, the least costly first: fewer sequences take longer, and a shorter context excludes prompts.
#[derive(Clone, Copy)]
enum Concession {
    Nothing,
    Sequences,
    Context,
    Both,
}

impl Concession {
    const ALL: [Self; 4] = [Self::Nothing, Self::Sequences, Self::Context, Self::Both];
}

/// The result of a search on top of some changes.
enum SearchResult {
    Fits(Vec<KeySetting>),
    /// Generation has enough memory, but training lacks some.
    TrainingLacks,
    Lacks,
}

/// Formats changes like `set a = 1 and b = 2 (explanations)`.
fn told(changes: &[KeySetting], input: &PlanInput<'_>) -> String {
    let meanings = changes.iter().filter_map(|(key, to)| match *key {
        "lora.r" => Some("only LoRA adapters are trained".to_owned()),
        "tensor_parallel_size" => Some("the ranks of an engine share its weights and KV cache".to_owned()),
        "max_num_seqs" => Some(format!("at most this many sequences at once, now {}", input.config.max_num_seqs)),
        "activation_offload" => Some("saved inputs of blocks are kept on the host until backward".to_owned()),
        "carried_kv" => Some("the KV cache is freed while training".to_owned()),
        "max_model_length" => {
            let prompt = to.as_u64()? as usize - input.config.max_completion_length;
            Some(format!("now {}; prompts may then have at most {prompt} tokens", input.max_model_length()))
        }
        _ => None,
    });
    let meanings: Vec<String> = meanings.collect();
    let meant = if meanings.is_empty() { String::new() } else { format!(" ({})", meanings.join("; ")) };
    format!("set {}{meant}", settings(changes))
}

/// Formats changes like `a = 1 and b = 2`.
fn settings(changes: &[KeySetting]) -> String {
    let each: Vec<String> = changes.iter().map(|(key, to)| format!("{key} = {}", word(to))).collect();
    each.join(" and ")
}
