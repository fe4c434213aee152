//! Tests trajectories of 100,000 tokens with tools in bounded time and memory: earlier turns are never rendered, tokenized or computed again.

use std::fs;
use std::sync::Arc;

use super::records;
use super::turns_tests::assembled;
use crate::data::fixtures::{Dice, bytes_and};
use crate::memory::{peak_resident_bytes, resident_bytes};
use crate::model::{DeltaNetSpec, Mixer, ModelSpec};
use crate::ops::delta_net::DeltaHeads;
use crate::types::Prompt;

/// Maximum tokens of a completion, over all turns and their context.
const MAX_COMPLETION: usize = 100_000;
/// Tokens of a tool's answer.
const ANSWER: usize = 10_000;

const TOOL: &str = r#"
def read(page: int) -> str:
    """
    Reads a page.

    Args:
        page: Its number.
    """
    return f"{page:04d} " * 2000
"#;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% else %}\
    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Tokens that are whole tool calls; each ends with a stop string.
fn more_tokens() -> Vec<(String, bool)> {
    let call = |page| format!("<tool_call>{{\"name\": \"read\", \"arguments\": {{\"page\": {page}}}}}</tool_call>");
    (0..90).map(|page: usize| (call(page), false)).collect()
}

/// The dummy model has one layer with a gated delta net and one with attention, so both states and KV cache are kept between turns. It measures
/// memory and time of its process, so no other test may run there: scripts/test.sh runs it separately.
#[test]
#[ignore = "runs alone in its process, a minute or two"]
fn a_trajectory_of_100_000_tokens_computes_each_of_them_once() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pages.py");
    fs::write(&file, TOOL).unwrap();
    let tokenizer = Arc::new(bytes_and(&mut Dice(5), TEMPLATE, &more_tokens()));
    let mut spec = ModelSpec::preset("micro").unwrap().with_widths(16, 16).map_attention(|_, attention| {
        (attention.num_heads, attention.num_kv_heads) = (1, 1);
    });
    let heads = DeltaHeads { num_key_heads: 1, num_value_heads: 1, key_dim: 8, value_dim: 8, conv_width: 4 };
    spec.layers[0].mixer = Mixer::DeltaNet(DeltaNetSpec { hidden: spec.hidden_size, heads });
    let eos_token_ids = tokenizer.eos_token_id().into_iter().collect();
    let max_position_embeddings = 1 << 17;
    let spec = ModelSpec { vocab_size: tokenizer.vocab_size(), eos_token_ids, max_position_embeddings, ..spec };
    let token_ids = tokenizer.encode("<|im_start|>user\nread all<|im_end|>\n<|im_start|>assistant\n", false).unwrap();
    let prompt = Prompt { id: 0, text: String::new(), token_ids, columns: Arc::default() };
    let completion = format!("max_completion_length={MAX_COMPLETION}");
    let keys = [
        "model_name_or_path=m",
        "train_file=t",
        "reward_funcs=length",
        "device=cpu",
        "dtype=float32",
        &format!("tools=[\"{}:read\"]", file.display()),
        "tool_call_parser=hermes",
        &completion,
        "max_prompt_length=100",
        "max_num_batched_tokens=512",
        "stop=[\"</tool_call>\"]",
        "num_generations=2",
        "per_device_train_batch_size=2",
        "max_steps=1",
        "gradient_checkpointing=full",
        "eval_steps=none",
        "save_steps=none",
    ];
    let mut trainer = assembled(&keys, spec, tokenizer, vec![prompt]);
    let before = resident_bytes().unwrap();
    let batch = trainer.rollout().unwrap();
    let sequences = records::sequences(&batch.groups, &[], false, None);
    let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.completion().len()).collect();
    let num_turns: Vec<usize> = batch.groups[0].completions.iter().map(|completion| completion.turns().len()).collect();
    assert!(lengths.iter().any(|&length| length >= MAX_COMPLETION - ANSWER), "{lengths:?} tokens");
    assert!(num_turns.iter().any(|&turns| turns >= MAX_COMPLETION / (2 * ANSWER)), "{num_turns:?} turns");
    let rollout_bytes = peak_resident_bytes().unwrap().saturating_sub(before);
    let metrics = trainer.update(batch).unwrap().reduce(&crate::ranks::SingleRank::default()).unwrap();
    let (kept, recomputed) = (metrics["tools/kept_tokens"], metrics["tools/recomputed_tokens"]);
    let (difference, bytes) = (metrics["sampling/sampling_logp_difference/max"], peak_resident_bytes().unwrap());
    let (generate_s, train_s) = (metrics["timing_s/generate"], metrics["timing_s/forward_backward"]);
    println!(
        "{lengths:?} tokens in {num_turns:?} turns: {generate_s:.1} s, {} MiB more than before; training {train_s:.1} s, {} MiB in all; \
         {kept} tokens of earlier turns kept, {recomputed} computed again; log-probabilities differ by {difference:.1e}",
        rollout_bytes >> 20,
        bytes >> 20,
    );
    assert!(recomputed == 0.0 && kept > MAX_COMPLETION as f64, "{kept} {recomputed}");
    assert!(difference < 1e-3, "{difference}");
    assert!(rollout_bytes < 1 << 30, "{rollout_bytes} bytes");
}
