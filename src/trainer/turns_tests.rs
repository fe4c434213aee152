//! Tests tokens and log-probabilities of trajectories with many turns, from the engine to the update, with random tokenizers and chat templates.

use std::fmt::Write;
use std::fs;
use std::sync::Arc;

use tch::Kind;

use super::Trainer;
use super::construction::{self, TrainerParts};
use super::preflight::{OpenModel, Preflight};
use super::records;
use super::rows::TrainingRows;
use crate::config::Config;
use crate::cuda::Placement;
use crate::data::fixtures::{Dice, bytes_and};
use crate::data::{Dataset, Tokenizer};
use crate::model::{ModelSource, ModelSpec, init_unit};
use crate::plan::Room;
use crate::ranks::World;
use crate::reward::{RewardFunction, RewardInput, RewardPool};
use crate::rollout::tap;
use crate::tools::ToolProcess;
use crate::train::Sequence;
use crate::types::Prompt;

/// Number of trajectories in a test that takes seconds.
const NUM_TRAJECTORIES: usize = 40;
/// Maximum number of trajectories with one tokenizer and template.
const MAX_TOGETHER: usize = 200;
/// Maximum difference of a token's log-probability between sampler and trainer, in nats, in float32.
const MAX_DIFFERENCE: f64 = 1e-4;

const TOOL: &str = r#"
import random

def f(x: int) -> str:
    """
    Answers with letters that hardly any tokenizer cuts as the model did.

    Args:
        x: A number.
    """
    if x % 7 == 0:
        raise ValueError("seven")
    letters = random.Random(x).choices("abcdef <>|\u00e9\u4e2d\n", k=1 + x % 23)
    return "".join(letters)
"#;

/// A random chat template: turns between random pieces of text, such as line ends, brackets and special tokens.
fn template(dice: &mut Dice) -> String {
    let pieces = ["\\n", " ", "<|im_start|>", "<|sep|>", "[", "]", ": ", "ab", "\u{e9}", "</", ">"];
    let mut text =
        || -> String { (0..dice.roll(5)).map(|_| pieces[dice.roll(pieces.len() as u64) as usize]).collect() };
    let [before, after, tool, end, begin] = [(); 5].map(|()| text());
    format!(
        "{{% for m in messages %}}{{% if m.role == 'tool' %}}{{{{ '{tool}' }}}}{{{{ m.content }}}}<|im_end|>{{% else %}}\
         {{{{ '{before}' }}}}{{{{ m.role }}}}{{{{ '{after}' }}}}{{{{ m.content }}}}<|im_end|>{{% endif %}}{{{{ '{end}' }}}}{{% endfor %}}\
         {{% if add_generation_prompt %}}{{{{ '{before}' }}}}assistant{{{{ '{after}' }}}}{{{{ '{begin}' }}}}{{% endif %}}"
    )
}

/// Single tokens that end a turn, are whole tool calls, or begin a malformed call.
fn more_tokens() -> Vec<(String, bool)> {
    let ends = (0..30).map(|number| (format!("<|end{number}|>"), true));
    let calls = (0..90).map(|x| {
        let name = if x % 10 == 9 { "g" } else { "f" };
        (format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{\"x\": {x}}}}}</tool_call>"), false)
    });
    let torn = (0..210).map(|number| (format!("<tool_call>{{{number}"), false));
    ends.chain(calls).chain(torn).collect()
}

fn prompts(dice: &mut Dice, tokenizer: &Tokenizer, count: u64) -> Vec<Prompt> {
    let prompt = |id: u64| {
        let mut text = String::from("<|im_start|>");
        (0..1 + dice.roll(20)).for_each(|_| write!(text, "{} ", dice.roll(1000)).unwrap());
        let token_ids = tokenizer.encode(&text, false).unwrap();
        Prompt { id, text, token_ids, columns: Arc::default() }
    };
    (0..count).map(prompt).collect()
}

fn trainer(dice: &mut Dice, file: &std::path::Path, num_trajectories: usize) -> Trainer {
    let template = template(dice);
    let tokenizer = Arc::new(bytes_and(dice, &template, &more_tokens()));
    let mut eos_token_ids: Vec<u32> = (0..30).map(|n| tokenizer.token_id(&format!("<|end{n}|>")).unwrap()).collect();
    eos_token_ids.extend(tokenizer.eos_token_id());
    let spec = ModelSpec {
        vocab_size: tokenizer.vocab_size(),
        eos_token_ids,
        max_position_embeddings: 4096,
        ..ModelSpec::preset("micro").unwrap()
    };
    let keys = [
        "model_name_or_path=m",
        "train_file=t",
        "reward_funcs=length",
        "device=cpu",
        "dtype=float32",
        &format!("tools=[\"{}:f\"]", file.display()),
        "tool_call_parser=hermes",
        "max_tool_calling_iterations=31",
        "max_tool_response_length=12", // so that 32 turns stay short
        "max_completion_length=3600",
        "max_model_length=4000",
        "max_prompt_length=300",
        "kv_cache_bytes=16777216",
        "num_generations=4",
        &format!("per_device_train_batch_size={num_trajectories}"),
        "max_steps=1",
        "learning_rate=1e-9",
        "eval_steps=none",
        "save_steps=none",
        &format!("seed={}", dice.roll(1000)),
    ];
    assembled(&keys, spec, tokenizer.clone(), prompts(dice, &tokenizer, num_trajectories as u64 / 4))
}

/// A trainer of a random-weight model on these prompts; its reward depends on completions' lengths.
pub(super) fn assembled(keys: &[&str], spec: ModelSpec, tokenizer: Arc<Tokenizer>, prompts: Vec<Prompt>) -> Trainer {
    let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
    let config = Config::load(None, &keys).unwrap();
    let world = Arc::new(World::single());
    let placement = Placement::in_world(config.model.device, config.model.dtype, world.device()).unwrap();
    let room = Room::common(placement, &world).unwrap();
    let model = OpenModel { spec: Arc::new(spec), tokenizer, has_adapters: false };
    let preflight = Preflight::of_model(&config, model, placement, world.world_size(), room).unwrap();
    let length: RewardFunction = Arc::new(|input: &RewardInput<'_>| Ok((input.completion.len() % 7) as f32));
    let tools = ToolProcess::start(&config).unwrap();
    let parts = TrainerParts {
        preflight,
        weights: &|layout| {
            let flat = init_unit(layout, 3, Kind::Float)?;
            for param in layout.params.iter().filter(|param| param.decay) {
                let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(8.0); // so that the context matters
            }
            Ok(flat)
        },
        rewards: RewardPool::with_functions(&config, &[("length", length)]).unwrap(),
        tools,
        rows: TrainingRows::made(Dataset::new(prompts)),
        source: ModelSource { base: config.model.model_name_or_path.clone(), adapters: None },
        checkpoint: None,
        claim: None,
        writes_files: false,
    };
    construction::assemble(config, world, parts).unwrap()
}

/// The turns in the trained sequences, in the format of the engine's events.
fn trained_turns(sequences: &[Sequence]) -> Vec<tap::SampledTurn> {
    let mut turns = Vec::new();
    for sequence in sequences {
        let mut logprobs = sequence.rollout_logprobs.as_ref().unwrap().iter();
        let tokens = sequence.completion().iter().zip(&sequence.loss_mask);
        for run in tokens.collect::<Vec<_>>().chunk_by(|a, b| a.1 == b.1).filter(|run| *run[0].1) {
            turns.push(run.iter().map(|(id, _)| (**id, logprobs.next().unwrap().to_bits())).collect());
        }
        assert!(logprobs.next().is_none());
    }
    turns
}

/// Set `COLO_GRPO_TRAJECTORIES=10000` for that many trajectories. The trained tokens and their log-probabilities must equal the sampled ones bit for
/// bit, and the trainer must compute the same log-probabilities for all of them.
#[test]
fn multi_turn_training_tokens_equal_the_sampled_tokens() {
    let wanted =
        std::env::var("COLO_GRPO_TRAJECTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(NUM_TRAJECTORIES);
    let together = wanted.min(MAX_TOGETHER);
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fuzz.py");
    fs::write(&file, TOOL).unwrap();
    let (mut dice, mut num_trajectories, mut num_turns, mut num_tokens, mut most) = (Dice(11), 0, 0, 0, 0);
    let (mut difference, mut num_other, mut kept) = (0.0_f64, 0, 0.0);
    while num_trajectories < wanted {
        let mut trainer = trainer(&mut dice, &file, together);
        let batch = trainer.rollout().unwrap();
        let mut sampled = tap::take();
        let sequences = records::sequences(&batch.groups, &[], false, None);
        assert_eq!(sequences.len(), together);
        let mut trained = trained_turns(&sequences);
        sampled.sort_unstable();
        trained.sort_unstable();
        assert!(sampled == trained, "tokens differ between what was sampled and what is trained on");
        let completions = batch.groups.iter().flat_map(|group| &group.completions);
        most = completions.map(|completion| completion.turns().len()).max().unwrap_or(0).max(most);
        num_trajectories += sequences.len();
        num_turns += trained.len();
        num_tokens += trained.iter().map(Vec::len).sum::<usize>();
        let tokenizer = trainer.generation.turns.as_ref().unwrap().tokenizer();
        let is_other = |turn: &&tap::SampledTurn| {
            let ids: Vec<u32> = turn.iter().map(|(id, _)| *id).collect();
            tokenizer.encode(&tokenizer.decode_all(&ids).unwrap(), false).unwrap() != ids
        };
        num_other += trained.iter().filter(is_other).count();
        let metrics = trainer.update(batch).unwrap().reduce(&crate::ranks::SingleRank::default()).unwrap();
        difference = difference.max(metrics["sampling/sampling_logp_difference/max"]);
        kept += metrics["tools/kept_tokens"];
    }
    println!(
        "{num_trajectories} trajectories, {num_turns} turns, at most {most}, {num_tokens} sampled tokens: 0 differ; {num_other} turns would \
         have other tokens if they were tokenized again; {kept} tokens of earlier turns were kept; log-probabilities differ by {difference:.1e}"
    );
    assert!(difference < MAX_DIFFERENCE, "{difference}");
    assert!(most > 16 && most <= 32 && num_turns > 4 * num_trajectories && num_other > num_trajectories && kept > 0.0);
}
