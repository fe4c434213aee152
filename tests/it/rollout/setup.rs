//! A model in memory, options for its engine, and the training forward pass with the same weights.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::internal::bench::LengthSpread;
use colo_grpo::internal::config::{KvCacheDtype, RolloutQuantization, StateDtype};
use colo_grpo::internal::data::Tokenizer;
use colo_grpo::internal::model::{
    BlockContext, BlockParams, EmbeddingParams, HeadParams, ModelSpec, PackedMixer, ParamTable, Routes, Scoring,
    SequenceMixer, Unit, WeightFiles, block_forward, head_forward, init_unit,
};
use colo_grpo::internal::ops::embedding;
use colo_grpo::internal::ops::router::Routing;
use colo_grpo::internal::ranks::{Collective, SingleRank};
use colo_grpo::internal::rollout::{
    Engine, EngineOptions, EngineRanks, EngineStats, EngineWeights, SpeculationOptions,
};
use colo_grpo::internal::types::{Prompt, RolloutGroup, RoutedExperts, SamplingParams};
use tch::{Device, Kind, Tensor};

const VOCAB: usize = 96;

/// A model in memory with a tokenizer of the words w0, w1, ..
pub struct Model {
    pub spec: Arc<ModelSpec>,
    pub tokenizer: Arc<Tokenizer>,
    pub embedding: EmbeddingParams,
    pub blocks: Vec<BlockParams>,
    pub head: HeadParams,
    pub draft_head: Option<BlockParams>,
    /// Distribution of the lengths at which completions end at the latest, if lengths are drawn.
    pub spread: Option<LengthSpread>,
}

impl Model {
    /// A model with random weights, large enough that the context affects the logits.
    pub fn random(spec: ModelSpec, seed: u64) -> Self {
        Self::new(spec, |table, unit| {
            let layout = table.unit(unit);
            let flat = init_unit(layout, seed, Kind::Float).unwrap();
            for param in layout.params.iter().filter(|param| param.decay) {
                let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(12.0);
            }
            flat
        })
    }

    pub fn micro() -> Self {
        Self::random(ModelSpec::preset("micro").unwrap(), 1)
    }

    pub fn golden(name: &str) -> Self {
        let spec = ModelSpec::from_folder(golden(name)).unwrap();
        let files = WeightFiles::open(golden(name), Arc::new(spec.clone())).unwrap();
        Self::new(spec, |table, unit| files.read_unit(table.unit(unit), Kind::Float).unwrap())
    }

    /// Loads a model from a folder, with its draft head if it has one.
    pub fn of_folder(folder: &Path) -> Self {
        let spec = ModelSpec::from_folder(folder).unwrap().with_draft_head();
        let files = WeightFiles::open(folder, Arc::new(spec.clone())).unwrap();
        Self::new(spec, |table, unit| files.read_unit(table.unit(unit), Kind::Float).unwrap())
    }

    /// A model whose engine ranks hold whole experts.
    pub fn expert_parallel(name: &str) -> Self {
        let files = WeightFiles::open(golden(name), Self::golden(name).spec).unwrap();
        let spec = ModelSpec::from_folder(golden(name)).unwrap().with_expert_parallel(true).unwrap();
        Self::new(spec, |table, unit| files.read_unit(table.unit(unit), Kind::Float).unwrap())
    }

    fn new(spec: ModelSpec, unit: impl Fn(&ParamTable, Unit) -> Tensor) -> Self {
        tch::set_num_threads(1);
        let spec = Arc::new(ModelSpec { eos_token_ids: Vec::new(), ..spec });
        let table = ParamTable::new(spec.clone(), 1);
        let block = |layer| {
            let of = Unit::Block(layer);
            BlockParams::view(&spec, table.unit(of), &unit(&table, of))
        };
        Self {
            tokenizer: Arc::new(words(spec.vocab_size)),
            embedding: EmbeddingParams::view(table.unit(Unit::Embedding), &unit(&table, Unit::Embedding)),
            blocks: (0..spec.num_layers()).map(block).collect(),
            head: HeadParams::view(table.unit(Unit::Head), &unit(&table, Unit::Head)),
            draft_head: spec
                .draft_head
                .map(|_| BlockParams::view(&spec, table.unit(Unit::DraftHead), &unit(&table, Unit::DraftHead))),
            spec,
            spread: None,
        }
    }

    /// Makes completions end at randomly drawn lengths.
    pub fn spreading(self) -> Self {
        Self { spread: Some(LengthSpread { shortest: 2, longest: 20, long_tailed: true }), ..self }
    }

    pub fn output_table(&self) -> &Tensor {
        self.head.lm_head.as_ref().unwrap_or(&self.embedding.table)
    }

    pub fn weights(&self, tp: &dyn Collective) -> EngineWeights<'_> {
        let rows = self.spec.vocab_range(tp.rank(), tp.size());
        EngineWeights {
            embedding: self.embedding.table.shallow_clone(),
            blocks: self.blocks.iter().map(|block| block.tp_slice(tp.rank(), tp.size()).unwrap()).collect(),
            draft_head: self.draft_head.as_ref().map(|head| head.tp_slice(tp.rank(), tp.size()).unwrap()),
            final_norm: self.head.final_norm.shallow_clone(),
            lm_head: self.output_table().narrow(0, rows.start as i64, rows.len() as i64),
            stored: None,
            num_adapters: 0,
            version: 1,
            policy: PhantomData,
        }
    }

    /// The weights of one rank of an engine with pipeline stages.
    pub fn weights_of(&self, ranks: &EngineRanks) -> EngineWeights<'_> {
        let (stage, whole) = (ranks.stage(), self.weights(ranks.tp.as_ref()));
        let rows = |table: Tensor, is_here: bool| if is_here { table } else { table.narrow(0, 0, 0) };
        EngineWeights {
            embedding: rows(whole.embedding, stage.is_first()),
            blocks: whole.blocks.into_iter().skip(stage.layers.start).take(stage.layers.len()).collect(),
            final_norm: rows(whole.final_norm, stage.is_last()),
            lm_head: rows(whole.lm_head, stage.is_last()),
            ..whole
        }
    }

    pub fn engine_in_stages(&self, options: EngineOptions, ranks: EngineRanks) -> Engine {
        self.limited(Engine::in_stages(self.spec.clone(), self.tokenizer.clone(), options, ranks).unwrap())
    }

    fn limited(&self, mut engine: Engine) -> Engine {
        if let Some(spread) = self.spread {
            engine.limit_completions(spread.limit());
        }
        engine
    }

    pub fn engine(&self, options: EngineOptions, tp: Arc<dyn Collective>) -> Engine {
        self.limited(Engine::new(self.spec.clone(), self.tokenizer.clone(), options, tp).unwrap())
    }

    /// Generates with a new engine.
    pub fn generate_on(
        &self,
        tp: Arc<dyn Collective>,
        options: EngineOptions,
        prompts: &[Prompt],
        params: &SamplingParams,
    ) -> (Vec<RolloutGroup>, EngineStats) {
        let mut engine = self.engine(options, tp.clone());
        let mut rollout = engine.wake(self.weights(tp.as_ref()), 1).unwrap();
        let groups = rollout.generate(prompts, params, |_| ()).unwrap();
        (groups, *rollout.stats())
    }

    pub fn generate(
        &self,
        options: EngineOptions,
        prompts: &[Prompt],
        params: &SamplingParams,
    ) -> (Vec<RolloutGroup>, EngineStats) {
        self.generate_on(alone(), options, prompts, params)
    }

    /// Log-probabilities of the tokens after `prompt_len`, from the training forward pass.
    pub fn logprobs(&self, token_ids: &[u32], prompt_len: usize, temperature: f64) -> Vec<f32> {
        let attention = PackedMixer::new(&self.spec, &[0, token_ids.len() as i64 - 1], Device::Cpu);
        let fed = 0..token_ids.len() - 1;
        self.next_logprobs(token_ids, fed, temperature, &attention).split_off(prompt_len - 1)
    }

    /// Experts of all tokens except the last, from the training forward pass.
    pub fn routed_experts(&self, token_ids: &[u32]) -> RoutedExperts {
        let (fed, chosen) = (token_ids.len() - 1, Chosen::default());
        let attention = PackedMixer::new(&self.spec, &[0, fed as i64], Device::Cpu);
        self.next_logprobs_by(token_ids, 0..fed, 1.0, &attention, Some(&chosen));
        let mut routed = RoutedExperts::default();
        if chosen.0.borrow().is_empty() {
            return routed; // a dense model
        }
        for position in 0..fed {
            let of_layer = |experts: &Tensor| Vec::<i64>::try_from(experts.get(position as i64)).unwrap();
            let own: Vec<u16> = chosen.0.borrow().iter().flat_map(of_layer).map(|expert| expert as u16).collect();
            routed.push(position, &own);
        }
        routed
    }

    /// Log-probability of the token after each of those at `fed`; `attention` determines which tokens their queries see.
    pub fn next_logprobs(
        &self,
        token_ids: &[u32],
        fed: Range<usize>,
        temperature: f64,
        attention: &dyn SequenceMixer,
    ) -> Vec<f32> {
        self.next_logprobs_by(token_ids, fed, temperature, attention, None)
    }

    /// The residual stream after the last block for all tokens.
    pub fn hidden(&self, token_ids: &[u32], attention: &dyn SequenceMixer) -> Tensor {
        self.hidden_by(token_ids, 0..token_ids.len(), attention, None)
    }

    fn hidden_by(
        &self,
        token_ids: &[u32],
        fed: Range<usize>,
        attention: &dyn SequenceMixer,
        routes: Option<&dyn Routes>,
    ) -> Tensor {
        let (first, num_fed) = (fed.start as i64, fed.len() as i64);
        let ids = Tensor::from_slice(&token_ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>());
        let spec = &*self.spec;
        let ropes = spec.ropes();
        let ropes = ropes.rows(&Tensor::arange_start(first, first + num_fed, (Kind::Int64, Device::Cpu)), Kind::Float);
        let ropes = ropes.unwrap();
        let context = BlockContext::new(spec, &ropes, None, routes);
        let rows = embedding::forward(&ids.narrow(0, first, num_fed), &self.embedding.table).unwrap();
        let mut x = spec.scale_embedding(rows, self.embedding.table.kind()).unwrap();
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block_forward(&context, layer, block, &x, attention, None).unwrap().0;
        }
        x
    }

    fn next_logprobs_by(
        &self,
        token_ids: &[u32],
        fed: Range<usize>,
        temperature: f64,
        attention: &dyn SequenceMixer,
        routes: Option<&dyn Routes>,
    ) -> Vec<f32> {
        let (first, num_fed) = (fed.start as i64, fed.len() as i64);
        let ids = Tensor::from_slice(&token_ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>());
        let spec = &*self.spec;
        let x = self.hidden_by(token_ids, fed, attention, routes);
        let targets = ids.narrow(0, first + 1, num_fed);
        let scoring = Scoring {
            targets: &targets,
            top: colo_grpo::internal::ops::head::TopTokens::Nothing,
            temperature: temperature * spec.logits_scaling,
            norm: spec.norm(),
            exact: None,
        };
        let scored = head_forward(&self.head, self.output_table(), &x, &scoring, false).unwrap();
        Vec::<f32>::try_from(scored.logprobs).unwrap()
    }
}

/// Records the experts that routers choose.
#[derive(Debug, Default)]
struct Chosen(RefCell<Vec<Tensor>>);

impl Routes for Chosen {
    fn choose(&self, _layer: usize, own: Tensor) -> Result<Tensor, Error> {
        Ok(own)
    }

    fn observe(&self, _layer: usize, _routing: &Routing, own: &Tensor) -> Result<(), Error> {
        self.0.borrow_mut().push(own.shallow_clone());
        Ok(())
    }

    fn d_probs(&self, _layer: usize) -> Result<Option<Tensor>, Error> {
        Ok(None)
    }
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub fn words(count: usize) -> Tokenizer {
    let vocab: serde_json::Map<_, _> = (0..count).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

pub fn alone() -> Arc<dyn Collective> {
    Arc::new(SingleRank::default())
}

pub fn options() -> EngineOptions {
    EngineOptions {
        kv_cache_bytes: 4 << 20,
        block_size: 8,
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        max_model_length: 128,
        kind: Kind::Float,
        residual: Kind::Float,
        device: Device::Cpu,
        quantization: RolloutQuantization::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        state_dtype: StateDtype::Float32,
        strict: false,
        exact: false,
        records_experts: true,
        speculation: SpeculationOptions::NONE,
    }
}

pub fn prompt(id: u64, token_ids: Vec<u32>) -> Prompt {
    Prompt { id, text: String::new(), token_ids, columns: Arc::default() }
}

/// Prompts of 3 to 20 tokens.
pub fn prompts(count: u64) -> Vec<Prompt> {
    let tokens = |id: u64| (0..3 + id * 5 % 18).map(|n| ((id * 31 + n * n * 7 + 5) % VOCAB as u64) as u32).collect();
    (0..count).map(|id| prompt(id, tokens(id))).collect()
}

pub fn greedy() -> SamplingParams {
    SamplingParams { num_generations: 1, temperature: 0.0, max_completion_length: 24, ..SamplingParams::default() }
}

pub fn sampled() -> SamplingParams {
    SamplingParams { num_generations: 4, max_completion_length: 20, ..SamplingParams::default() }
}

pub fn token_ids(groups: &[RolloutGroup]) -> Vec<Vec<&[u32]>> {
    groups.iter().map(|group| group.completions.iter().map(|completion| &completion.token_ids[..]).collect()).collect()
}
