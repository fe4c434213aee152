use std::sync::Arc;

use tch::Kind;

use super::super::Room;
use super::super::choices::MAX_KEPT_SHARE;
use super::*;
use crate::config::WorldSize;
use crate::model::{ModelSpec, ParamTable, Unit};

/// A run of `nproc` ranks per node on GPUs with `gpu_gib` GiB, on machines with `host_gib` GiB per rank.
#[derive(Debug, Clone, Copy)]
struct Machine {
    num_nodes: usize,
    nproc: usize,
    gpu_gib: usize,
    host_gib: usize,
}

fn spec(name: &str) -> Arc<ModelSpec> {
    let of_32b = ModelSpec::preset("qwen2.5-32b").unwrap();
    let sizes = || of_32b.with_widths(8_192, 29_568).with_num_layers(80).map_attention(|_, own| own.num_heads = 64);
    Arc::new(if name == "72b" { sizes() } else { ModelSpec::preset(name).unwrap() })
}

/// Bytes as the trainer counts them, without the alignment of slices.
fn engine_weights(config: &Config, table: &ParamTable) -> usize {
    match (config.quantization, config.zero.stage) {
        (Quantization::Nf4, _) => 4 * table.unit(Unit::Block(0)).len,
        (Quantization::None, 3) if table.shards > 1 => 2 * table.total / config.tensor_parallel_size,
        (Quantization::None, _) => 0,
    }
}

fn plan(model: &str, machine: Machine, keys: &[String]) -> Result<MemoryPlan> {
    with_input(model, machine, keys, |input| MemoryPlan::new(input, &|config| Ok(engine_weights(config, input.table))))?
}

fn with_input<T>(model: &str, machine: Machine, keys: &[String], run: impl FnOnce(&PlanInput<'_>) -> T) -> Result<T> {
    let required = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"].map(str::to_owned);
    let config = Config::load(None, &required.iter().chain(keys).cloned().collect::<Vec<_>>())?;
    let table = ParamTable::new(spec(model), machine.nproc);
    table.spec.validate_tp(config.tensor_parallel_size)?;
    let input = PlanInput {
        config: &config,
        table: &table,
        teacher: None,
        kind: Kind::BFloat16,
        role: Role::Both,
        batch: config.validate_world(machine.nproc * machine.num_nodes)?,
        world_size: WorldSize { ranks: machine.nproc * machine.num_nodes, local_ranks: machine.nproc },
        engine_layers: &table.spec,
        engine_weight_bytes: engine_weights(&config, &table),
        generator_params: table.total,
        starts_from_adapters: false,
        room: Room { available_bytes: machine.gpu_gib << 30, swap_bytes: Some(machine.host_gib << 30) },
    };
    Ok(run(&input))
}

/// The settings that an error message recommends, as on a command line.
fn advised(message: &str) -> Option<Vec<String>> {
    let first = message.lines().next().unwrap();
    let (_, set) = first.split_once("; set ")?;
    let end = set.find(" (").unwrap_or(set.len()).min(set.find(", or").unwrap_or(set.len()));
    Some(set[..end].split(" and ").map(|change| change.replace(" = ", "=")).collect())
}

fn keys(words: &str) -> Vec<String> {
    words.split_whitespace().map(str::to_owned).collect()
}

fn refused(model: &str, machine: Machine, keys: &[String]) -> String {
    plan(model, machine, keys).unwrap_err().to_string()
}

/// Number of processes, GiB of a GPU, and GiB of host memory per process.
const MACHINES: [(usize, usize, usize); 7] =
    [(1, 12, 512), (1, 24, 512), (1, 80, 512), (2, 40, 16), (4, 80, 64), (8, 80, 512), (8, 139, 512)];

/// Applying the advice must give a plan that fits, must not include an unnecessary key, and must leave the reserve for libtorch's cache where it
/// recommends a micro-batch size. Where no advice is given, no known change may help. Returns how many runs got advice, and how many did not.
fn what_is_advised_helps(model: &str, machines: &[(usize, usize, usize)]) -> (usize, usize) {
    let runs = [
        "",
        "beta=0.04 max_prompt_length=512 max_completion_length=2048",
        "zero.stage=3 residency.optimizer=resident residency.reference=resident beta=0.04",
        "gradient_checkpointing=none zero.stage=1 kv_cache_bytes=100000000000",
        "lora.r=16 max_completion_length=4096",
        "partial_rollout=true oversample=1 carried_kv=keep zero.stage=3",
    ];
    let (mut num_advised, mut num_hopeless) = (0, 0);
    for &(nproc, gpu_gib, host_gib) in machines {
        for run in runs {
            let (machine, given) = (Machine { num_nodes: 1, nproc, gpu_gib, host_gib }, keys(run));
            let case = format!("{model} {machine:?} {run}");
            let Err(error) = plan(model, machine, &given) else { continue };
            let message = error.to_string();
            let Some(changes) = advised(&message) else {
                assert!(!last_resort(model, machine, run), "{case}\n{message}");
                num_hopeless += 1;
                continue;
            };
            num_advised += 1;
            let followed = plan(model, machine, &[&given[..], &changes].concat());
            let followed = followed.unwrap_or_else(|error| panic!("{case}: {changes:?} gives\n{error}"));
            let says_tokens = changes.iter().any(|change| change.starts_with("max_tokens_per_micro_batch"));
            let share = (followed.room.available_bytes as f64 * MAX_KEPT_SHARE) as usize;
            assert!(!says_tokens || followed.train_bytes() <= share, "{case}: {changes:?}\n{followed}");
            for left_out in (0..changes.len()).filter(|_| !message.contains("gradient_checkpointing = full and")) {
                let mut fewer = changes.clone();
                fewer.remove(left_out);
                let fits = plan(model, machine, &[&given[..], &fewer].concat()).is_ok();
                assert!(!fits, "{case}: {changes:?}, of which {} does nothing", changes[left_out]);
            }
        }
    }
    (num_advised, num_hopeless)
}

#[test]
fn advised_keys_make_small_models_fit() {
    let (advised, _) = what_is_advised_helps("qwen2.5-1.5b", &MACHINES);
    assert!(advised > 3, "{advised}");
}

#[test]
fn advised_keys_make_7b_models_fit() {
    let (advised, _) = what_is_advised_helps("qwen2.5-7b", &MACHINES);
    assert!(advised > 8, "{advised}");
}

#[test]
fn advised_keys_make_32b_models_fit() {
    let (advised, hopeless) =
        what_is_advised_helps("qwen2.5-32b", &[(1, 12, 512), (1, 80, 512), (2, 40, 16), (8, 80, 512)]);
    assert!(advised > 8 && hopeless > 0, "{advised} and {hopeless}");
}

#[test]
fn advised_keys_make_72b_models_fit() {
    let (advised, hopeless) = what_is_advised_helps("72b", &[(1, 24, 512), (4, 80, 64), (8, 139, 512)]);
    assert!(advised > 8 && hopeless > 0, "{advised} and {hopeless}");
}

/// Whether all possible changes together make a run fit with the reserve for libtorch's cache.
fn last_resort(model: &str, machine: Machine, run: &str) -> bool {
    let (longest, context) = match run {
        run if run.contains("max_prompt_length=512") => (2560, 2560),
        run if run.contains("max_completion_length=4096") => (4097, 4608),
        _ => (513, 1024),
    };
    let adapters = if run.contains("lora.r") { "" } else { "lora.r=16" };
    let sizes =
        format!("max_tokens_per_micro_batch={longest} max_model_length={context} kv_cache_bytes=none {adapters}");
    let places = "residency.optimizer=auto residency.reference=auto carried_kv=recompute zero.stage=3";
    let fits = |quantization: &str, tp: usize| {
        let last = format!("{run} {sizes} {places} gradient_checkpointing=auto");
        let last = format!("{last} quantization={quantization} tensor_parallel_size={tp}");
        plan(model, machine, &keys(&last)).is_ok_and(|plan| plan.leaves_share())
    };
    [1, 2, 4, 8].iter().any(|&tp| fits("nf4", tp) || fits("none", tp))
}

#[test]
fn two_keys_are_advised_when_training_and_rollout_lack_memory() {
    let machine = Machine { num_nodes: 1, nproc: 8, gpu_gib: 80, host_gib: 512 };
    let run = "zero.stage=3 beta=0.04 max_prompt_length=512 max_completion_length=2048 per_device_train_batch_size=16 \
               gradient_accumulation_steps=4";
    let message = refused("72b", machine, &keys(run));
    let changes = advised(&message).unwrap();
    assert!(changes[0].starts_with("tensor_parallel_size="), "{message}");
    assert!(!message.contains("lora.r"), "{message}");
}

#[test]
fn qlora_is_advised_where_lora_does_not_fit() {
    let machine = |gpu_gib| Machine { num_nodes: 1, nproc: 1, gpu_gib, host_gib: 512 };
    let advised = |model, gpu_gib| advised(&refused(model, machine(gpu_gib), &[])).unwrap();
    assert_eq!(advised("72b", 80)[..2], ["lora.r=16", "quantization=nf4"]);
    assert_eq!(advised("qwen2.5-7b", 24)[0], "lora.r=16");
    assert_ne!(advised("qwen2.5-7b", 24).get(1).map(String::as_str), Some("quantization=nf4"));
}

/// Adapters of every expert would need as much memory as they are meant to save.
#[test]
fn lora_of_attention_is_advised_for_models_with_experts() {
    let machine = Machine { num_nodes: 1, nproc: 1, gpu_gib: 80, host_gib: 512 };
    let changes = advised(&refused("qwen3-30b-a3b", machine, &[])).unwrap();
    let attention = "lora.target_modules=[\"q_proj\",\"k_proj\",\"v_proj\",\"o_proj\"]";
    assert_eq!(changes[..2], ["lora.r=16", attention]);
}

/// The KV cache of one sequence cannot be smaller: the advice must be larger engines, not a smaller cache.
#[test]
fn lowering_a_minimal_kv_cache_is_not_advised() {
    let machine = Machine { num_nodes: 1, nproc: 4, gpu_gib: 80, host_gib: 512 };
    let message = refused("qwen2.5-32b", machine, &keys("zero.stage=3 beta=0.04"));
    assert!(!message.contains("kv_cache_bytes = ") && message.contains("set tensor_parallel_size = "), "{message}");
    let message =
        refused("qwen2.5-32b", machine, &keys("zero.stage=3 tensor_parallel_size=4 kv_cache_bytes=1000000000"));
    let (_, length) = message.split_once(", or a context of ").unwrap();
    let shorter = format!("zero.stage=3 tensor_parallel_size=4 kv_cache_bytes=1000000000 max_model_length={length}");
    plan("qwen2.5-32b", machine, &keys(&shorter)).unwrap();
    let message = refused("qwen2.5-1.5b", machine, &keys("kv_cache_bytes=100000000000"));
    assert_eq!(advised(&message).unwrap(), ["kv_cache_bytes=none"]);
}

/// The device has enough memory, but the host does not.
#[test]
fn host_memory_is_required_for_all_ranks_of_a_node() {
    let small = Machine { num_nodes: 1, nproc: 4, gpu_gib: 80, host_gib: 64 };
    let run = keys("zero.stage=3 tensor_parallel_size=4 beta=0.04 max_prompt_length=512 max_completion_length=2048");
    let message = refused("qwen2.5-32b", small, &run);
    assert!(message.contains("4 ranks need a machine with"), "{message}");
    assert!(!message.contains("set resident"), "{message}");
    plan("qwen2.5-32b", Machine { host_gib: 512, ..small }, &run).unwrap();
    let message = refused("qwen2.5-32b", Machine { num_nodes: 2, ..small }, &run);
    assert!(message.contains("; 4 ranks need a machine with"), "{message}");
}

/// The rows in docs/benchmarks/whole-steps.md were measured with optimizer state resident by the plan's choice. A run of 64 sequences per rank must
/// not move state for a cache of 256 sequences at the model's whole context.
#[test]
fn nothing_is_offloaded_for_kv_blocks_that_no_run_fills() {
    let of = |gpu_gib, run: &str| {
        plan("qwen2.5-7b", Machine { num_nodes: 1, nproc: 4, gpu_gib, host_gib: 512 }, &keys(run)).unwrap()
    };
    let measured = "per_device_train_batch_size=32 max_completion_length=512 max_model_length=1024 beta=0.04";
    let trl = "per_device_train_batch_size=64 max_completion_length=1024 max_model_length=1536 zero.stage=2";
    let mut rows = vec![format!("{trl} tensor_parallel_size=4")];
    for stage in [2, 3] {
        for tp in [1, 2, 4] {
            let stage = format!("zero.stage={stage} tensor_parallel_size={tp}");
            rows.push(format!("{measured} gradient_checkpointing=full {stage}"));
        }
    }
    for row in rows {
        assert_eq!(of(139, &row).reason, "all fits on the device", "{row}");
    }
    let asked = "per_device_train_batch_size=16 gradient_accumulation_steps=4 beta=0.04 max_prompt_length=512 \
                 max_completion_length=2048";
    let plan = of(80, asked);
    assert_eq!(plan.reason, "all fits on the device", "{plan}");
    assert_eq!((plan.num_kv_blocks, plan.num_seqs, plan.max_model_length), (64 * 160, 64, 2560));
}

/// Sizes that do not divide the model and the ranks are not tried: with 4,096 ranks that would take minutes.
#[test]
fn advised_engine_sizes_divide_the_model_and_the_node() {
    let sizes = |num_nodes, nproc, run: &str| {
        let machine = Machine { num_nodes, nproc, gpu_gib: 80, host_gib: 512 };
        let sizes = |input: &PlanInput<'_>| Advice { input, trials: Trials::new(input, &|_| Ok(0)) }.engine_sizes();
        with_input("qwen2.5-7b", machine, &keys(run), sizes).unwrap()
    };
    assert_eq!(sizes(1, 4096, ""), [1, 2, 4]);
    assert_eq!(sizes(1, 6, ""), [1, 2]);
    assert_eq!(sizes(8, 2, ""), [1, 2]);
    assert_eq!(sizes(2, 8, "tensor_parallel_size=2"), [2, 4]);
    let message =
        refused("qwen2.5-32b", Machine { num_nodes: 8, nproc: 2, gpu_gib: 40, host_gib: 512 }, &keys("zero.stage=3"));
    assert!(!message.contains("tensor_parallel_size = 8"), "{message}");
}

/// Each concurrent sequence needs states of gated delta nets. The advice is as many as a batch has, then the largest power of two that fits.
#[test]
fn fewer_sequences_are_advised_where_delta_net_states_lack_memory() {
    let machine = Machine { num_nodes: 1, nproc: 1, gpu_gib: 79, host_gib: 512 };
    let model = "qwen3.5-9b";
    let message = refused(model, machine, &keys("max_num_seqs=100000"));
    assert_eq!(advised(&message).unwrap(), ["max_num_seqs=8"], "{message}");
    plan(model, machine, &keys("max_num_seqs=8")).unwrap();
    let batch = "per_device_train_batch_size=4096 max_model_length=4096 max_num_seqs";
    let message = refused(model, machine, &keys(&format!("{batch}=4096")));
    let changes = advised(&message).unwrap();
    let [change] = &changes[..] else { panic!("{message}") };
    let num_seqs: usize = change.strip_prefix("max_num_seqs=").expect(&message).parse().unwrap();
    plan(model, machine, &keys(&format!("{batch}={num_seqs}"))).unwrap();
    refused(model, machine, &keys(&format!("{batch}={}", 2 * num_seqs)));
    let short = "per_device_train_batch_size=64 lora.r=16 quantization=nf4";
    let small = Machine { gpu_gib: 12, ..machine };
    if let Some(changes) = advised(&refused(model, small, &keys(short))) {
        plan(model, small, &[keys(short), changes].concat()).unwrap();
    }
}
