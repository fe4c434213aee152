//! Loads a model's folder into an engine that serves it.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tch::Kind;

use super::Served;
use crate::cuda;
use crate::data::Tokenizer;
use crate::dist::World;
use crate::error::Result;
use crate::memory;
use crate::model::{AdapterFiles, ModelSource, ModelSpec, ParamTable, UnitLayout, WeightFiles};
use crate::phase;
use crate::rollout::{Engine, EngineOptions, kv_block_bytes};

/// Tokens per KV block.
const KV_BLOCK_SIZE: usize = 16;
/// Most sequences decoded at once.
const MAX_NUM_SEQS: usize = 256;

/// The model that is served, and its engine's settings.
#[derive(Debug, Clone, Copy)]
pub struct ServeOptions<'a> {
    /// A model's folder, or one of LoRA adapters.
    pub model: &'a Path,
    /// The adapters' model folder, where they do not name it.
    pub base_model: Option<&'a Path>,
    /// Variables that the chat template is given.
    pub template_variables: &'a Map<String, Value>,
    /// Ranks that share one engine.
    pub tensor_parallel_size: usize,
    /// Longest prompt and completion together in tokens; `None` is the model's context.
    pub max_model_length: Option<usize>,
    /// Type of weights, activations and cache.
    pub kind: Kind,
    /// Type of the residual stream.
    pub residual: Kind,
}

/// A model that is served, with what its prompts are made of.
#[derive(Debug)]
pub struct ModelService {
    /// Weights and engine.
    pub served: Served,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Longest prompt and completion together, in tokens.
    pub max_model_length: usize,
}

impl ModelService {
    /// Loads model, adapters and tokenizer, and makes an engine whose KV cache takes up to a quarter of the free memory; collective
    /// over the world.
    ///
    /// # Errors
    /// What is wrong with the folders or the machine.
    pub fn load(options: &ServeOptions<'_>, world: &Arc<World>) -> Result<Self> {
        let ServeOptions { tensor_parallel_size: tp_size, kind, residual, .. } = *options;
        let source = ModelSource::new(options.model, options.base_model)?;
        let folder = &source.base;
        let spec = Arc::new(ModelSpec::from_folder(folder)?);
        spec.validate_tp(tp_size)?;
        let tokenizer = Arc::new(Tokenizer::from_folder(folder)?.with_template_variables(options.template_variables)?);
        tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
        let mesh = world.mesh(tp_size, world.size())?;
        let device = world.device();
        let max_model_length = options.max_model_length.unwrap_or(usize::MAX).min(spec.max_position_embeddings);
        let longest_blocks = max_model_length.div_ceil(KV_BLOCK_SIZE);
        let available = match device.is_cuda() {
            true => cuda::available_bytes()?.saturating_sub(spec.num_params() * kind.elt_size_in_bytes()),
            false => memory::available_host_bytes()? / world.local_size(),
        };
        let block_bytes = kv_block_bytes(&spec, tp_size, KV_BLOCK_SIZE, kind);
        let engine_options = EngineOptions {
            kv_cache_bytes: (MAX_NUM_SEQS * longest_blocks * block_bytes).min(available / 4),
            block_size: KV_BLOCK_SIZE,
            max_num_seqs: MAX_NUM_SEQS,
            max_num_batched_tokens: 8192,
            max_model_length,
            kind,
            residual,
            device,
            strict: false,
            spread_lengths: None,
            records_experts: false,
        };
        let engine = Engine::new(spec.clone(), tokenizer.clone(), engine_options, mesh.tp.clone())?;
        let files = WeightFiles::open(folder, spec.clone())?;
        let table = Arc::new(ParamTable::new(spec.clone(), 1));
        let read = |layout: &UnitLayout| {
            phase::beat();
            files.read_unit(layout, kind)
        };
        let mut served = Served::new(world.clone(), &mesh, table, engine, &read)?;
        if let Some(folder) = &source.adapters {
            let files = AdapterFiles::open(folder, spec)?;
            served = served.with_adapters(files.lora().clone(), &|layout| files.read_unit(layout, kind))?;
        }
        Ok(Self { served, tokenizer, max_model_length })
    }
}
