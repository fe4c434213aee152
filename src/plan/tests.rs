use std::sync::Arc;

use super::*;
use crate::model::ModelSpec;

fn config(overrides: &[&str]) -> Config {
    let required = ["model_name_or_path=model", "train_file=rows.jsonl", "reward_funcs=[\"format\"]"];
    let sizes = ["max_model_length=4096", "per_device_train_batch_size=64"];
    let keys: Vec<String> = required.iter().chain(&sizes).chain(overrides).map(|text| (*text).to_owned()).collect();
    Config::load(None, &keys).unwrap()
}

fn plan(overrides: &[&str], available_bytes: usize) -> Result<MemoryPlan> {
    plan_of(Role::Both, overrides, available_bytes)
}

fn plan_of(role: Role, overrides: &[&str], available_bytes: usize) -> Result<MemoryPlan> {
    plan_from(role, overrides, available_bytes, false)
}

fn plan_from(role: Role, overrides: &[&str], available_bytes: usize, starts_from_adapters: bool) -> Result<MemoryPlan> {
    plan_model("qwen2.5-1.5b", role, overrides, available_bytes, starts_from_adapters)
}

fn plan_model(
    model: &str,
    role: Role,
    overrides: &[&str],
    available_bytes: usize,
    starts_from_adapters: bool,
) -> Result<MemoryPlan> {
    let table = ParamTable::new(Arc::new(ModelSpec::preset(model).unwrap()), 1);
    let config = config(overrides);
    let input = PlanInput {
        config: &config,
        table: &table,
        teacher: None,
        kind: Kind::BFloat16,
        role,
        batch: config.validate_world(1).unwrap(),
        world_size: WorldSize { ranks: 1, local_ranks: 1 },
        engine_layers: &table.spec,
        engine_weight_bytes: 0,
        generator_params: table.total,
        starts_from_adapters,
        room: Room { available_bytes, swap_bytes: Some(1 << 40) },
    };
    MemoryPlan::new(&input, &|_| Ok(0))
}

/// The initial adapters, which are the reference for the KL term, are held during the whole run.
#[test]
fn the_plan_counts_initial_adapters_used_as_reference() {
    let of = |more: &[&str], role, from_adapters| -> Option<usize> {
        let keys = [&["lora.r=64"][..], more].concat();
        let plan = plan_from(role, &keys, 80 << 30, from_adapters).unwrap();
        let class = plan.classes.into_iter().find(|class| class.class == "reference adapters")?;
        assert_eq!(class.rollout_bytes, if role == Role::Both { class.train_bytes } else { 0 });
        Some(class.train_bytes)
    };
    // 2 bytes each for r x (in + out) of seven projections in 28 layers, padded
    let matrices = [(1536, 1536), (1536, 256), (1536, 256), (1536, 1536), (1536, 8960), (1536, 8960), (8960, 1536)];
    let elements: usize = matrices.iter().map(|(rows, columns)| 64 * (rows + columns)).sum();
    for role in [Role::Both, Role::Trains] {
        let bytes = of(&["beta=0.1"], role, true).unwrap();
        assert!((28 * 2 * elements..29 * 2 * elements).contains(&bytes), "{bytes}");
    }
    assert_eq!(of(&["beta=0.1"], Role::Both, false), None);
    assert_eq!(of(&["beta=0.1", "reference=base"], Role::Both, true), None);
    assert_eq!(of(&[], Role::Both, true), None);
}

/// Applying the advice must make the run fit.
#[test]
fn the_advised_change_is_the_smallest_that_fits() {
    let fixed = "residency.optimizer=resident";
    let none = "gradient_checkpointing=none";
    let full = "gradient_checkpointing=full";
    for (available, advised) in [
        (45 << 30, "gradient_checkpointing = selective"),
        (31 << 30, "gradient_checkpointing = keep_attention"),
        (29 << 30, "gradient_checkpointing = full"),
    ] {
        let refused = plan(&[fixed, none], available).unwrap_err().to_string();
        assert!(refused.contains(advised), "{refused}");
        plan(&[fixed, &advised.replace(' ', "")], available).unwrap();
    }
    let available = 31 << 30;
    let large = "max_tokens_per_micro_batch=65536";
    let refused = plan(&[fixed, none, large], available).unwrap_err().to_string();
    let (_, tokens) =
        refused.split_once("set gradient_checkpointing = full and max_tokens_per_micro_batch = ").expect(&refused);
    let tokens: usize = tokens.split(',').next().unwrap().parse().unwrap();
    let budget = |tokens: usize| plan(&[fixed, full, &format!("max_tokens_per_micro_batch={tokens}")], available);
    assert_eq!(budget(tokens).unwrap().largest_micro_batch, tokens);
    assert!(budget(tokens).unwrap().leaves_share() && !budget(tokens + 1).unwrap().leaves_share());
}

/// `auto` recomputes the least that leaves a tenth of the memory free.
#[test]
fn activations_that_fit_are_kept_instead_of_recomputed() {
    use GradientCheckpointing::{Full, KeepAttention, None, Selective};
    let of = |keep: &str, room| {
        let recompute = format!("gradient_checkpointing={keep}");
        plan(&["residency.optimizer=resident", "max_num_seqs=4", &recompute], room).unwrap()
    };
    let room_for = |keep| (of(keep, 1 << 40).train_bytes() as f64 / choices::MAX_KEPT_SHARE) as usize + 1;
    let [none, selective, attention] = ["none", "selective", "keep_attention"].map(room_for);
    for (room, expected) in [
        (1 << 40, None),
        (none, None),
        (none - 8, Selective),
        (selective, Selective),
        (selective - 8, KeepAttention),
        (attention, KeepAttention),
        (attention - 8, Full),
    ] {
        assert_eq!(of("auto", room).gradient_checkpointing, expected, "{room}");
    }
    assert_eq!(of("full", 1 << 40).gradient_checkpointing, Full);
}

/// `auto` keeps chunks of gated delta nets if a tenth of the memory stays free with them; a run that fits only without them must fit. If the
/// configuration keeps them and they do not fit, the advice is to recompute them.
#[test]
fn delta_net_chunks_are_kept_where_memory_allows() {
    use GradientCheckpointing::{KeepChunks, None, Selective};
    let of = |keep: &str, room| {
        let recompute = format!("gradient_checkpointing={keep}");
        let keys = ["residency.optimizer=resident", "max_num_seqs=4", &recompute];
        plan_model("qwen3.5-9b", Role::Both, &keys, room, false)
    };
    let room_for = |keep: &str| {
        let plan = of(keep, 1 << 40).unwrap();
        ((plan.train_bytes() as f64 / choices::MAX_KEPT_SHARE) as usize + 1, plan.train_bytes())
    };
    let [(keeping, most), (none, bytes)] = ["keep_chunks", "none"].map(room_for);
    for (room, expected) in
        [(1 << 40, KeepChunks), (keeping, KeepChunks), (keeping - 8, None), (none, None), (none - 8, Selective)]
    {
        assert_eq!(of("auto", room).unwrap().gradient_checkpointing, expected, "{room}");
    }
    assert_eq!(of("none", 1 << 40).unwrap().gradient_checkpointing, None);
    let refused = of("keep_chunks", most.midpoint(bytes)).unwrap_err().to_string();
    assert!(refused.contains("gradient_checkpointing = none"), "{refused}");
    assert_eq!(plan(&[], 1 << 40).unwrap().gradient_checkpointing, None, "a model without gated delta nets");
}

#[test]
fn planned_parameter_bytes_match_hand_counts() {
    let plan = plan(&["gradient_checkpointing=full"], 130 << 30).unwrap();
    assert!(plan.formula.contains("2.00 weights + 4.00 gradients + 12.00 optimizer"), "{}", plan.formula);
    assert!(plan.peak_bytes() <= 130 << 30 && plan.largest_micro_batch > 16_384);
}

/// A kept KV cache also needs memory while training. If both do not fit, the run is refused or the cache is smaller.
#[test]
fn a_kept_kv_cache_reduces_training_memory() {
    let keep = ["oversample=1", "partial_rollout=true", "carried_kv=keep", "gradient_checkpointing=full"];
    let of = |keys: &[&str], available| plan(&[&keep[..], keys].concat(), available);
    let kept = of(&[], 130 << 30).unwrap();
    let leaving = of(&["carried_kv=recompute"], 130 << 30).unwrap();
    assert_eq!(kept.num_kv_blocks, leaving.num_kv_blocks);
    let train_bytes = |plan: &MemoryPlan| plan.sum(|class| class.train_bytes);
    let stays = ["KV cache", "engine buffers"];
    let held = kept.classes.iter().filter(|class| stays.contains(&class.class));
    assert!(held.clone().all(|class| class.train_bytes == class.rollout_bytes) && held.clone().count() == 2);
    assert_eq!(train_bytes(&kept), train_bytes(&leaving) + held.map(|class| class.train_bytes).sum::<usize>());

    let resident = "residency.optimizer=resident";
    let short = train_bytes(&leaving) + (10 << 30);
    let small = of(&[resident], short).unwrap();
    assert!((1..kept.num_kv_blocks).contains(&small.num_kv_blocks) && small.peak_bytes() <= short, "{small}");
    let size = "kv_cache_bytes=12884901888";
    let refused = of(&[resident, size], short).unwrap_err().to_string();
    assert!(refused.contains("set carried_kv = recompute"), "{refused}");
    of(&[resident, size, "carried_kv=recompute"], short).unwrap();
}

#[test]
fn ranks_of_split_mode_hold_only_what_their_role_needs() {
    let available = 130 << 30;
    let [both, trains, generates] =
        [Role::Both, Role::Trains, Role::Generates].map(|role| plan_of(role, &[], available).unwrap());
    let bytes = |plan: &MemoryPlan| (plan.sum(|class| class.train_bytes), plan.sum(|class| class.rollout_bytes));
    let of =
        |plan: &MemoryPlan, name| plan.classes.iter().find(|class| class.class == name).map(|class| class.train_bytes);
    assert_eq!(bytes(&trains), (bytes(&both).0 - of(&both, "engine tables").unwrap(), 0));
    assert!(of(&trains, "engine tables").is_none() && of(&trains, "workspace of GEMMs") > Some(0));
    assert_eq!((trains.kv_cache_bytes, generates.sum(|class| class.train_bytes)), (0, 0));
    assert!(generates.num_kv_blocks >= both.num_kv_blocks);
    let weights = 2 * ModelSpec::preset("qwen2.5-1.5b").unwrap().num_params();
    let held = generates.classes[0].rollout_bytes;
    assert!((weights..weights + (1 << 20)).contains(&held), "{held} for {weights}");
    assert!(generates.to_string().starts_with("memory per rank that generates"));
    assert!(trains.to_string().contains("\nlargest micro-batch"));
}

/// The cache is sized for the sequences of a generation batch, and optimizer state is not moved to make a larger one.
#[test]
fn the_kv_cache_is_sized_for_the_sequences_of_a_batch() {
    let blocks = |keys: &[&str]| {
        let plan = plan(keys, 130 << 30).unwrap();
        (plan.num_kv_blocks, plan.num_seqs, plan.max_model_length)
    };
    assert_eq!(blocks(&[]), (64 * 256, 64, 4096));
    assert_eq!(blocks(&["max_num_seqs=10"]), (10 * 256, 10, 4096));
    assert_eq!(blocks(&["max_prompt_length=512"]), (64 * 64, 64, 1024));
    assert_eq!(blocks(&["max_prompt_length=512", "oversample=0.5"]), (96 * 64, 96, 1024));
    // An evaluation may have more sequences, but nothing is moved for them.
    let evaluated = ["max_prompt_length=512", "eval_file=rows.jsonl"];
    assert_eq!(blocks(&evaluated), (256 * 64, 64, 1024));
    let tight = 50 << 30;
    let [trained, evaluated] = [&evaluated[..1], &evaluated].map(|keys| plan(keys, tight).unwrap());
    assert_eq!((trained.optimizer, evaluated.optimizer), (OptimizerResidency::Resident, OptimizerResidency::Resident));
    assert!(
        evaluated.to_string().contains("sequences of 1024 tokens at once; a batch has 64 an engine"),
        "{evaluated}"
    );
}
