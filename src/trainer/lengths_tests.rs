//! Checks the maximum lengths in docs/memory.md against the memory plan.

use std::fmt::Write;

use super::planned_run::PlannedRun;
use crate::config::{Config, Dtype, WorldSize, divisors};
use crate::cuda::Placement;
use crate::model::ModelSpec;
use crate::plan::Room;

const MODELS: [(&str, &str); 6] = [
    ("Qwen2.5-1.5B", "qwen2.5-1.5b"),
    ("Qwen2.5-7B", "qwen2.5-7b"),
    ("Qwen3-8B", "qwen3-8b"),
    ("Qwen3.5-9B", "qwen3.5-9b"),
    ("Qwen2.5-14B", "qwen2.5-14b"),
    ("Qwen2.5-32B", "qwen2.5-32b"),
];
/// GiB available to a run on a GPU with 80 GB and on one with 141 GB.
const GPUS_GIB: [usize; 2] = [79, 139];
const NUM_GPUS: [usize; 4] = [1, 2, 4, 8];
const KEYS: &str = "model_name_or_path=unread train_file=unread reward_funcs=[\"format\"] zero.stage=3 residency.optimizer=stream \
    gradient_checkpointing=keep_attention max_prompt_length=1024 max_completion_length=4096 max_num_seqs=8";

/// The longest micro-batch in thousands of tokens, shared by as many ranks as the heads allow.
fn longest(preset: &str, num_gpus: usize, gib: usize, offloads: bool) -> String {
    let spec = ModelSpec::preset(preset).unwrap();
    let shared = divisors(num_gpus).into_iter().rev().find(|&size| spec.validate_sequence_parallel(size).is_ok());
    let shared = shared.expect("one rank shares with nobody");
    let mut keys: Vec<String> = KEYS.split_whitespace().map(str::to_owned).collect();
    keys.extend([format!("sequence_parallel_size={shared}"), format!("activation_offload={offloads}")]);
    let (config, placement) = (Config::load(None, &keys).unwrap(), Placement::on_other_gpus(Dtype::Auto));
    let room = Room { available_bytes: gib << 30, swap_bytes: Some(usize::MAX / num_gpus) };
    let world_size = WorldSize { ranks: num_gpus, local_ranks: num_gpus };
    let run = PlannedRun::of_shape(&config, &spec, placement).unwrap();
    let tokens = run.preflight(placement, world_size, room).map_or(0, |preflight| preflight.plan.largest_micro_batch);
    let thousands = match tokens / 1000 {
        0 => return "-".to_owned(),
        all @ 1000.. => format!("{},{:03}", all / 1000, all % 1000),
        few => few.to_string(),
    };
    if shared == num_gpus { thousands } else { format!("{thousands} (shared by {shared})") }
}

fn table(offloads: bool) -> String {
    let mut table = String::new();
    for (name, preset) in MODELS {
        write!(table, "| {name} |").unwrap();
        for gib in GPUS_GIB {
            NUM_GPUS.iter().for_each(|&gpus| write!(table, " {} |", longest(preset, gpus, gib, offloads)).unwrap());
        }
        table.push('\n');
    }
    table
}

#[test]
fn lengths_documented_for_memory_match_the_plan() {
    let page = include_str!("../../docs/memory.md");
    for (offloads, what) in [(false, "attention kept on the GPU"), (true, "activation_offload")] {
        let expected = table(offloads);
        assert!(page.contains(&expected), "docs/memory.md, {what}, is to have\n{expected}");
    }
}
