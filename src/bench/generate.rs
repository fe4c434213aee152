//! The generation engine on random weights and prompts, completions of one exact length.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::Kind;

use super::{SEED, median, token};
use crate::colocate::Served;
use crate::data::Tokenizer;
use crate::dist::{ReduceOp, World, all_reduce_f64};
use crate::error::Result;
use crate::model::{ModelSpec, ParamTable, init_unit_on};
use crate::rollout::{Engine, EngineOptions, kv_block_bytes};
use crate::types::{Prompt, SamplingParams};

/// Tokens per KV block.
const BLOCK_SIZE: usize = 16;

/// What is run.
#[derive(Debug, Clone)]
pub struct GenerateBench {
    /// Name in the output.
    pub model: String,
    /// The model; its end-of-sequence ids are ignored.
    pub spec: Arc<ModelSpec>,
    /// Type of weights, activations and cache.
    pub kind: Kind,
    /// Prompts per rank.
    pub prompts: usize,
    /// Completions per prompt.
    pub group: usize,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion.
    pub completion_len: usize,
    /// Ranks that share one engine.
    pub tensor_parallel_size: usize,
    /// Timed repetitions.
    pub repeats: usize,
}

/// Runs it; collective over the world.
///
/// # Errors
/// Out of memory, or a model that cannot be split so.
pub fn bench_generate(bench: &GenerateBench, world: Arc<World>) -> Result<Value> {
    let mesh = world.mesh(bench.tensor_parallel_size, world.size())?;
    let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..(*bench.spec).clone() });
    let (kind, device) = (bench.kind, world.device());
    let sequences = bench.prompts * bench.group * bench.tensor_parallel_size;
    let max_model_length = bench.prompt_len + bench.completion_len;
    let blocks = sequences * max_model_length.div_ceil(BLOCK_SIZE);
    let options = EngineOptions {
        kv_cache_bytes: blocks * kv_block_bytes(&spec, bench.tensor_parallel_size, BLOCK_SIZE, kind),
        block_size: BLOCK_SIZE,
        max_num_seqs: sequences,
        max_num_batched_tokens: 8192,
        max_model_length,
        kind,
        device,
        strict: false,
    };
    let tokenizer = Arc::new(Tokenizer::of_ids(spec.vocab_size)?);
    let engine = Engine::new(spec.clone(), tokenizer, options, mesh.tp.clone())?;
    let table = Arc::new(ParamTable::new(spec.clone(), 1));
    let mut served =
        Served::new(world.clone(), &mesh, table, engine, &|layout| init_unit_on(layout, SEED, kind, device))?;
    let mut times = Vec::with_capacity(bench.repeats);
    for repeat in 0..=bench.repeats {
        let prompts: Vec<Prompt> = (0..bench.prompts).map(|index| prompt(bench, &world, index)).collect();
        let params = SamplingParams {
            num_generations: bench.group,
            max_completion_length: bench.completion_len,
            step: repeat as u64,
            ..SamplingParams::default()
        };
        let mut seconds = served.with_engine(|rollout| {
            let start = Instant::now();
            rollout.generate(&prompts, &params, |_| ())?;
            Ok([start.elapsed().as_secs_f64()])
        })?;
        all_reduce_f64(&*world.group(), &mut seconds, ReduceOp::Max)?;
        if repeat > 0 {
            times.push(seconds[0]); // the first warms up
        }
    }
    let seconds = median(times);
    let generated = bench.prompts * bench.group * bench.completion_len * world.size();
    Ok(json!({
        "benchmark": "generate",
        "model": bench.model,
        "num_params": spec.num_params(),
        "device": if device.is_cuda() { "cuda" } else { "cpu" },
        "dtype": if kind == Kind::BFloat16 { "bfloat16" } else { "float32" },
        "world_size": world.size(),
        "tensor_parallel_size": bench.tensor_parallel_size,
        "threads_per_rank": tch::get_num_threads(),
        "prompts": bench.prompts * world.size(),
        "group": bench.group,
        "prompt_len": bench.prompt_len,
        "completion_len": bench.completion_len,
        "seconds": seconds,
        "tokens_per_second": generated as f64 / seconds,
        "step_ms": 1e3 * seconds / bench.completion_len as f64,
    }))
}

fn prompt(bench: &GenerateBench, world: &World, index: usize) -> Prompt {
    let id = world.rank() * bench.prompts + index;
    let first = id * bench.prompt_len;
    let token_ids = (first..first + bench.prompt_len).map(|at| token(at, bench.spec.vocab_size)).collect();
    Prompt { id: id as u64, text: String::new(), token_ids, columns: Arc::default() }
}
