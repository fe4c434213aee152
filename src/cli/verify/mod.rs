//! `verify`: compares what trainer and engine compute from a model's files with transformers.

mod comparison;
mod peer;
mod texts;

use std::path::Path;
use std::sync::Arc;

use serde_json::Map;
use tch::{Device, Kind, Tensor};

use super::args::VerifyArgs;
use super::fetch;
use crate::console;
use crate::cuda::Placement;
use crate::data::Tokenizer;
use crate::error::{Error, ExitCode, Result};
use crate::memory::explain_out_of_memory;
use crate::model::{ModelSource, ModelSpec, ParamTable, Plain, UnitLayout, WeightFiles};
use crate::phase::{self, Phase};
use crate::ranks::{Backend, World};
use crate::rollout::{EngineFormats, SpeculationOptions};
use crate::serve::{EngineDivision, ModelService, ServeOptions};
use crate::torch;
use crate::train::{NetworkOptions, Reference};
use crate::types::{Prompt, SamplingParams, Trajectory};
use comparison::Comparison;
use peer::{Peer, PeerOutputs, PeerSequence, Question};

/// Default prompts: prose, digits, code, other scripts.
const PROMPTS: [&str; 4] = [
    "The capital of France is Paris. The capital of Italy is",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell \
     altogether in April and May? 48 / 2 = 24 clips were sold in May, so that",
    "def fibonacci(n: int) -> int:\n    \"\"\"The n-th number.\"\"\"\n    if n < 2:\n        return n\n",
    "问题：三加五等于多少？ Ответ: восемь. L'été, ça coûte 12,50 €. 🙂",
];

/// Maximum length of prompt and completion together, in tokens.
const MAX_LENGTH: usize = 4096;

/// A text with its token ids.
struct Tokenized {
    text: String,
    token_ids: Vec<u32>,
}

/// The engine's greedy completions.
struct Completed {
    spec: Arc<ModelSpec>,
    /// The prompts, and texts on which tokenizers often differ.
    texts: Vec<Tokenized>,
    prompts: Vec<Prompt>,
    completions: Vec<Trajectory>,
    /// Token ids of prompt and completion.
    sequences: Vec<Vec<u32>>,
}

/// The trainer's outputs for one sequence, f32 on the host.
struct TrainerOutputs {
    /// Logits of the whole model. `[T - 1, V]`
    logits: Tensor,
    /// Outputs of each block for the reference's input. `[T, D]` each
    blocks: Vec<Tensor>,
    /// Logits of the head for the reference's input. `[T - 1, V]`
    head: Tensor,
}

/// Runs the comparison and prints its table.
///
/// # Errors
/// [`Error::Environment`] without transformers; [`Error::Differs`]; errors of the model's files.
pub(super) fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let Placement { on_cuda, kind } = Placement::new(args.place.device, args.place.dtype)?;
    let peer = Peer::find(&args.python)?;
    let source = fetch::model(&args.model, None)?;
    if source.adapters.is_some() {
        let expected = "a whole model; colo-grpo export --merge makes one of adapters";
        return Err(Error::invalid_value("--model", args.model.display(), expected));
    }
    let (dtype, device) =
        (if kind == Kind::Float { "float32" } else { "bfloat16" }, if on_cuda { "cuda" } else { "cpu" });
    let world = Arc::new(World::single_on(if on_cuda { Backend::Nccl } else { Backend::Shm })?);
    console::say("verify, 1 of 3: the engine completes the prompts");
    let own = generate(args, &source, &world, kind).map_err(explain_out_of_memory)?;
    torch::release_memory(world.device())?; // the other process needs as much
    console::say("verify, 2 of 3: transformers computes the same tokens");
    let texts: Vec<String> = own.texts.iter().map(|it| it.text.clone()).collect();
    let theirs = peer.ask(&Question {
        model: &source.base,
        dtype,
        device,
        texts: &texts,
        sequences: &own.sequences,
        spec: &own.spec,
    })?;
    console::say("verify, 3 of 3: the trainer computes them, by itself and block by block");
    let trained = score(&source.base, &world, kind, &own, &theirs).map_err(explain_out_of_memory)?;
    let compared = Comparison::new(&own, &trained, &theirs)?;
    let (name, versions, fault) = (args.model.display(), &theirs.versions, compared.fault(args.tolerance));
    let verdict = match &fault {
        None => "verdict: the same model up to rounding".to_owned(),
        Some(fault) => format!("verdict: not the same model as in transformers: {fault}"),
    };
    console::print(format_args!(
        "{name} against transformers {} (torch {}), {dtype} on {device}: {} prompts, {} positions\n{}{verdict}\n",
        versions.transformers,
        versions.torch,
        own.prompts.len(),
        compared.num_positions(),
        compared.table(args.tolerance),
    ))?;
    match fault {
        None => Ok(ExitCode::Done),
        Some(message) => Err(Error::Differs { model: args.model.clone(), message }),
    }
}

/// The trainer's logits of the sequences, and its block outputs for the reference's inputs. Needs memory only for the weights.
fn score(
    folder: &Path,
    world: &World,
    kind: Kind,
    own: &Completed,
    theirs: &PeerOutputs,
) -> Result<Vec<TrainerOutputs>> {
    let spec = Arc::clone(&own.spec);
    let (table, files) = (Arc::new(ParamTable::new(spec.clone(), 1)), WeightFiles::open(folder, spec)?);
    let options = NetworkOptions { kind, residual: kind, device: world.device(), format: &Plain };
    let read = |layout: &UnitLayout| files.read_unit(layout, kind);
    let mut network = phase::scope(Phase::Load, || Reference::new(table, &world.mesh(1, 1)?, options, &read))?;
    let host = |tensor: &Tensor| Ok(tensor.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?);
    let mut one = |(sequence, theirs): (&Vec<u32>, &PeerSequence)| {
        let inputs = theirs.inputs.iter().map(|input| Ok(input.f_to_device(world.device())?));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let alone = network.forward_blocks(sequence, &inputs)?;
        let blocks = alone.blocks.iter().map(host).collect::<Result<_>>()?;
        Ok(TrainerOutputs { logits: host(&network.forward_logits(sequence)?)?, blocks, head: host(&alone.logits)? })
    };
    phase::scope(Phase::Score, || own.sequences.iter().zip(&theirs.sequences).map(&mut one).collect())
}

fn joined(prompt: &Prompt, completion: &Trajectory) -> Vec<u32> {
    [&prompt.token_ids[..], &completion.token_ids].concat()
}

/// The given prompts; without any, the default ones that fit into the model's context.
fn prompts(given: &[String], tokenizer: &Tokenizer, longest: usize) -> Result<Vec<Prompt>> {
    let texts: Vec<&str> = if given.is_empty() { PROMPTS.to_vec() } else { given.iter().map(String::as_str).collect() };
    let mut prompts = Vec::new();
    for text in texts {
        let token_ids = tokenizer.encode(text, true)?;
        if (1..=longest).contains(&token_ids.len()) {
            let id = prompts.len() as u64;
            prompts.push(Prompt { id, text: text.to_owned(), token_ids, columns: Arc::default() });
        } else if !given.is_empty() {
            let expected = format!("1 to {longest} tokens, got {}", token_ids.len());
            return Err(Error::invalid_value("--prompt", format!("'{text:.80}'"), expected));
        }
    }
    let expected =
        format!("a prompt of 1 to {longest} tokens: the default prompts are longer than the context of this model");
    if prompts.is_empty() { Err(Error::invalid_value("--prompt", "none", expected)) } else { Ok(prompts) }
}

/// The engine's greedy completion of each prompt.
fn generate(args: &VerifyArgs, source: &ModelSource, world: &Arc<World>, kind: Kind) -> Result<Completed> {
    let options = ServeOptions {
        model: &source.base,
        base_model: None,
        adapters: &[],
        quantization: None,
        template_variables: &Map::new(),
        division: EngineDivision { shape: 1.into(), pipeline_partition: &[], enable_expert_parallel: false },
        max_model_length: Some(MAX_LENGTH),
        kind,
        residual: kind,
        formats: EngineFormats::PLAIN,
        speculation: SpeculationOptions::NONE,
    };
    let ModelService { mut served, tokenizer, max_model_length, .. } =
        phase::scope(Phase::Load, || ModelService::load(&options, world))?;
    let longest = max_model_length.saturating_sub(args.max_completion_length);
    let prompts = prompts(&args.prompt, &tokenizer, longest)?;
    let params = SamplingParams {
        num_generations: 1,
        temperature: 0.0,
        max_completion_length: args.max_completion_length,
        ..SamplingParams::default()
    };
    let mut groups =
        served.with_engine(|rollout| phase::scope(Phase::Generate, || rollout.generate(&prompts, &params, |_| ())))?;
    groups.sort_by_key(|group| group.prompt.id);
    let completions: Vec<Trajectory> = groups.into_iter().flat_map(|group| group.completions).collect();
    let sequences = prompts.iter().zip(&completions).map(|(prompt, it)| joined(prompt, it)).collect();
    let given = prompts.iter().map(|prompt| prompt.text.clone());
    // A text for which the tokenizer has no tokens cannot be compared.
    let tokenized = |text: String| Some(Tokenized { token_ids: tokenizer.encode(&text, true).ok()?, text });
    let texts = given.chain(tokenizer.hard_texts()).filter_map(tokenized).collect();
    Ok(Completed { spec: Arc::clone(served.spec()), texts, prompts, completions, sequences })
}
