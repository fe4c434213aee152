//! Loads a model's folder into an engine for generation.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::Served;
use crate::config::{Device, EngineShape, Quantization, Speculation};
use crate::console;
use crate::cuda;
use crate::data::Tokenizer;
use crate::error::{Error, Result};
use crate::memory;
use crate::model::{
    AdapterFiles, BaseRounding, ModelSource, ModelSpec, ParamTable, Stages, UnitLayout, Use, WeightFiles, model_within,
};
use crate::phase;
use crate::ranks::World;
use crate::rollout::{
    Engine, EngineFormats, EngineOptions, EngineRanks, SpeculationOptions, cache_kind, fullest_stage, kv_block_bytes,
    weight_copy_bytes,
};

/// Tokens per block of the KV cache.
const KV_BLOCK_SIZE: usize = 16;
/// Largest number of sequences decoded at the same time.
const MAX_NUM_SEQS: usize = 256;

/// The model to serve, and the settings of its engine.
#[derive(Debug, Clone, Copy)]
pub struct ServeOptions<'a> {
    /// A model's folder, or a folder of LoRA adapters.
    pub model: &'a Path,
    /// Folder of the adapters' base model, if the adapters do not name it.
    pub base_model: Option<&'a Path>,
    /// Adapters that requests choose by index in this list.
    pub adapters: &'a [NamedAdapter],
    /// How the base's weights are quantized when they are loaded; `None` means the same quantization as during training of the adapters.
    pub quantization: Option<Quantization>,
    /// Variables of the chat template.
    pub template_variables: &'a Map<String, Value>,
    /// How the model is split over the ranks of an engine.
    pub division: EngineDivision<'a>,
    /// Largest number of tokens of prompt and completion together; `None` means the model's context length.
    pub max_model_length: Option<usize>,
    /// Data type of weights, activations and KV cache.
    pub kind: Kind,
    /// Data type of the residual stream.
    pub residual: Kind,
    /// Formats of the weights in GEMMs, and of stored keys, values and states.
    pub formats: EngineFormats,
    /// How draft tokens are produced for speculative decoding.
    pub speculation: SpeculationOptions,
}

/// How a model is split over the ranks of an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineDivision<'a> {
    /// Numbers of tensor-parallel ranks and pipeline stages of an engine.
    pub shape: EngineShape,
    /// Number of layers in each pipeline stage; if empty, stages are balanced by estimated time.
    pub pipeline_partition: &'a [usize],
    /// Whether each rank holds some whole experts (expert parallelism) instead of a slice of each.
    pub enable_expert_parallel: bool,
}

/// A model's shape and its split into pipeline stages.
pub struct DividedModel {
    pub spec: Arc<ModelSpec>,
    pub stages: Stages,
}

impl EngineDivision<'_> {
    /// Splits the model in `folder`, using only its `config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::BadFile`] for a `config.json` that cannot be read or is not supported; [`Error::InvalidValue`] for a split
    /// that the model does not allow.
    pub fn of_model(&self, folder: &Path, on_gpu: bool) -> Result<DividedModel> {
        let EngineShape { tensor_parallel_size, pipeline_parallel_size } = self.shape;
        let spec = ModelSpec::from_folder(folder)?.with_expert_parallel(self.enable_expert_parallel)?;
        spec.validate_tp(tensor_parallel_size)?;
        let device = if on_gpu { Device::Cuda } else { Device::Cpu };
        spec.check_with([("pipeline_parallel_size", pipeline_parallel_size.into()), ("device", device.name().into())])?;
        let stages = Stages::new(&spec, pipeline_parallel_size, self.pipeline_partition)?;
        Ok(DividedModel { spec: Arc::new(spec), stages })
    }
}

/// Adapters that are served under their own name in addition to the base model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedAdapter {
    /// Name by which requests choose the adapters.
    pub name: String,
    /// A folder of LoRA adapters, or a repository name on the Hub.
    pub folder: PathBuf,
}

/// A loaded model with its engine and tokenizer.
#[derive(Debug)]
pub struct ModelService {
    /// Weights and engine.
    pub served: Served,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Largest number of tokens of prompt and completion together.
    pub max_model_length: usize,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
}

impl ModelService {
    /// Loads model, adapters and tokenizer, and creates an engine whose KV cache takes up to a quarter of the free memory. Collective
    /// over the world.
    ///
    /// # Errors
    /// What is wrong with the folders or the machine.
    pub fn load(options: &ServeOptions<'_>, world: &Arc<World>) -> Result<Self> {
        let ServeOptions { division: division @ EngineDivision { shape, .. }, kind, residual, .. } = *options;
        let source = ModelSource::new(options.model, options.base_model)?;
        let folder = &source.base;
        let DividedModel { mut spec, stages } = division.of_model(folder, world.device().is_cuda())?;
        if options.speculation.method == Speculation::Mtp {
            spec = Arc::new(spec.as_ref().clone().with_draft_head());
        }
        let tokenizer = Arc::new(Tokenizer::from_folder(folder)?.with_template_variables(options.template_variables)?);
        tokenizer.check_against(spec.vocab_size, &spec.eos_token_ids)?;
        tokenizer.notice().filter(|_| world.rank() == 0).iter().for_each(console::say);
        let mesh = world.mesh(shape, world.size())?;
        let device = world.device();
        let max_model_length = options.max_model_length.unwrap_or(usize::MAX).min(spec.max_position_embeddings);
        let longest_blocks = max_model_length.div_ceil(KV_BLOCK_SIZE);
        let EngineFormats { quantization, kv_cache_dtype, state_dtype } = options.formats;
        let (fullest, tp_size) = (fullest_stage(&spec, &stages), shape.tensor_parallel_size);
        quantization.format().check(Use::Engine { tp_size }, &spec, device.is_cuda())?;
        let copy_bytes = weight_copy_bytes(quantization.format(), &fullest, tp_size);
        let available = match device.is_cuda() {
            true => cuda::available_bytes()?.saturating_sub(spec.num_params() * kind.elt_size_in_bytes() + copy_bytes),
            false => memory::available_host_bytes()? / world.local_size(),
        };
        let block_bytes = kv_block_bytes(&fullest, tp_size, KV_BLOCK_SIZE, cache_kind(kv_cache_dtype, kind));
        let engine_options = EngineOptions {
            kv_cache_bytes: (MAX_NUM_SEQS * longest_blocks * block_bytes).min(available / 4),
            block_size: KV_BLOCK_SIZE,
            max_num_seqs: MAX_NUM_SEQS,
            max_num_batched_tokens: 8192,
            max_model_length,
            kind,
            residual,
            quantization,
            kv_cache_dtype,
            state_dtype,
            device,
            strict: false,
            exact: false,
            records_experts: false,
            speculation: options.speculation,
        };
        let ranks = EngineRanks::new(&mesh, stages);
        let engine = Engine::in_stages(spec.clone(), tokenizer.clone(), engine_options, ranks)?;
        let files = WeightFiles::open(folder, spec.clone())?;
        let table = Arc::new(ParamTable::new(spec.clone(), 1));
        let adapters = source.adapters.as_ref().map(|folder| AdapterFiles::open(folder, spec.clone())).transpose()?;
        let named = (options.adapters.iter())
            .map(|adapter| AdapterFiles::open(&adapter.folder_beside(&source)?, spec.clone()))
            .collect::<Result<Vec<_>>>()?;
        for files in adapters.iter().chain(&named) {
            files.lora().check_engine(&spec, quantization.format(), Use::Engine { tp_size })?;
        }
        let quantization = base_quantization(options.quantization, adapters.as_ref(), &named, world.rank() == 0);
        let rounding = BaseRounding::new(&spec, quantization)?;
        let read = |layout: &UnitLayout| {
            phase::beat();
            let flat = files.read_unit(layout, kind)?;
            rounding.apply(&spec, layout, &flat)?;
            Ok(flat)
        };
        let mut served = Served::new(world.clone(), table, engine, &read)?;
        if let Some(files) = &adapters {
            served = served.with_adapters(files.lora().clone(), &|layout| files.read_unit(layout, kind))?;
        }
        for files in &named {
            served = served.with_choice(files.lora().clone(), &|layout| read_finite(files, layout, kind))?;
        }
        let eos_token_ids = tokenizer.eos_token_ids(&spec.eos_token_ids);
        Ok(Self { served, tokenizer, max_model_length, eos_token_ids })
    }
}

/// The quantization of the base model: as requested, or else as during training of its adapters. Prints a message if the adapters were trained with a
/// quantized base. With adapters chosen by requests, the default is no quantization, because the base model itself is served, too.
fn base_quantization(
    asked: Option<Quantization>,
    adapters: Option<&AdapterFiles>,
    named: &[AdapterFiles],
    speaks: bool,
) -> Quantization {
    let is_rounded = |files: &AdapterFiles| files.base_quantization() != Quantization::None;
    let quantization = asked.unwrap_or(adapters.map_or(Quantization::None, AdapterFiles::base_quantization));
    let trained = adapters.into_iter().chain(named).find(|files| is_rounded(files));
    if let Some(files) = trained.filter(|_| speaks) {
        let stored = files.base_quantization();
        let (key, name) = (stored.name(), stored.name().to_uppercase());
        let how = match quantization == stored {
            true => format!("the base is rounded to {name} here as well; --quantization none uses it as stored"),
            false => format!(
                "here the base is used as stored, so probabilities differ from training; --quantization {key} rounds it"
            ),
        };
        console::say(format_args!("{} was trained on its base in {name}: {how}", files.path().display()));
    }
    quantization
}

impl NamedAdapter {
    /// The folder of the adapters. An error if `--model` names adapters itself, or the folder contains no adapters.
    fn folder_beside(&self, model: &ModelSource) -> Result<PathBuf> {
        let refuse =
            |expected: String| Err(Error::invalid_value("--adapter", self.folder.display().to_string(), expected));
        if model.adapters.is_some() {
            let expected = "a base model as --model, as --model names adapters itself; name each folder of adapters \
                            with --adapter NAME=FOLDER";
            return refuse(expected.to_owned());
        }
        match ModelSource::new(&self.folder, Some(&model.base))?.adapters {
            Some(folder) => Ok(folder),
            None => {
                let within =
                    model_within(&self.folder).map(|model| format!("; the adapters are in {}", model.display()));
                let within = within.unwrap_or_default();
                refuse(format!("a folder of LoRA adapters, which has an adapter_config.json{within}"))
            }
        }
    }
}

/// Reads one unit of adapters. A value that is not finite is an error: it would affect rows of other adapters, because 0 times it is not 0.
fn read_finite(files: &AdapterFiles, layout: &UnitLayout, kind: Kind) -> Result<Tensor> {
    let unit = files.read_unit(layout, kind)?;
    if unit.isfinite().all().int64_value(&[]) == 0 {
        return Err(Error::bad_file(
            files.path(),
            format!("the adapters of the {} contain values that are not finite", layout.unit),
        ));
    }
    Ok(unit)
}
