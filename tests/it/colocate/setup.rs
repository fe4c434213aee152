//! A colocated micro model on a test's ranks: policy, engine and, if requested, a reference model.

use std::ops::Range;
use std::sync::Arc;

use colo_grpo::Result;
use colo_grpo::internal::bench::LengthSpread;
use colo_grpo::internal::colocate::Colocated;
use colo_grpo::internal::config::{
    GradientCheckpointing, KvCacheDtype, LrSchedulerType, RolloutQuantization, StateDtype,
};
use colo_grpo::internal::grpo::{EntropyControl, LossConfig};
use colo_grpo::internal::memory::HostPool;
use colo_grpo::internal::model::{ModelSpec, ParamTable, Plain, UnitLayout, init_unit};
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::rollout::{Engine, EngineOptions, SpeculationOptions, kv_block_bytes};
use colo_grpo::internal::serve::EngineSlices;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, OptimizerHome, Policy, PolicyOptions, Reference, Schedule,
    TrainedModel,
};
use colo_grpo::internal::update::{Learner, UpdateOptions};
use tch::{Device, Kind, Tensor};

use crate::rollout::words;

pub const TEMPERATURE: f32 = 0.9;
const NUM_BLOCKS: usize = 256;
const BLOCK_SIZE: usize = 8;

/// The configuration of the model and engine.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub stage: u8,
    pub kind: Kind,
    pub with_reference: bool,
    /// Whether the engine keeps its memory, including unfinished sequences.
    pub keeps: bool,
    /// Whether completions end at randomly drawn lengths.
    pub draws_lengths: bool,
}

impl Setup {
    pub fn new(stage: u8) -> Self {
        Self { stage, kind: Kind::Float, with_reference: false, keeps: false, draws_lengths: false }
    }

    /// Builds the model on this process only.
    pub fn alone(self) -> Colocated {
        let world = Arc::new(World::single());
        let mesh = world.mesh(1, 1).unwrap();
        self.build(&world, &mesh)
    }

    /// Builds policy and engine; collective over the world. Optimizer state is swapped to the host.
    pub fn build(self, world: &Arc<World>, mesh: &Mesh) -> Colocated {
        tch::set_num_threads(1);
        let (spec, device, kind) = (Arc::new(ModelSpec::preset("micro").unwrap()), world.device(), self.kind);
        let table = Arc::new(ParamTable::new(spec.clone(), mesh.shard.size()));
        let network = NetworkOptions { kind, residual: kind, device, format: &Plain };
        let options = PolicyOptions {
            stage: self.stage,
            network,
            gradient_checkpointing: GradientCheckpointing::None,
            // `eps` is above the rounding of gradients: below it Adam steps by the sign of noise.
            optim: Optim::AdamW,
            adam: AdamOptions { beta1: 0.9, beta2: 0.99, eps: 1e-5, weight_decay: 0.0 },
            gradients: GradientOptions::default(),
        };
        let bytes = TrainedModel::whole(&table, self.stage, kind, options.gradients).bytes().optimizer;
        let home = OptimizerHome::Swap(HostPool::new("optimizer_host", bytes, device, &mut |_, _| ()).unwrap());
        let policy = Policy::with_home(table.clone(), mesh, options, home, &weights).unwrap();
        let reference = self.with_reference.then(|| Reference::new(table.clone(), mesh, network, &weights).unwrap());
        let tp = mesh.tp.clone();
        let tp_size = tp.size();
        let options = EngineOptions {
            kv_cache_bytes: kv_cache_bytes(tp_size),
            block_size: if device.is_cuda() { 2 * BLOCK_SIZE } else { BLOCK_SIZE }, // kernels take 16 tokens' multiples
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_length: 128,
            kind,
            residual: kind,
            device,
            quantization: RolloutQuantization::None,
            kv_cache_dtype: KvCacheDtype::Auto,
            state_dtype: StateDtype::Float32,
            strict: false,
            exact: false,
            records_experts: false,
            speculation: SpeculationOptions::NONE,
        };
        let mut engine = Engine::new(spec.clone(), Arc::new(words(spec.vocab_size)), options, tp).unwrap();
        if self.draws_lengths {
            engine.limit_completions(LengthSpread { shortest: 2, longest: 16, long_tailed: true }.limit());
        }
        let engine = if self.keeps { engine.keeping_sequences() } else { engine };
        let slices = match self.stage == 3 && mesh.shard.size() > 1 {
            true => EngineSlices::gathered(&table, engine.ranks(), kind, device).unwrap(),
            false => EngineSlices::in_place(engine.ranks()),
        };
        Colocated::new(Learner::new(world.clone(), mesh.clone(), policy, reference), engine, slices)
    }
}

/// Random weights, large enough that the context affects the logits.
fn weights(layout: &UnitLayout) -> Result<Tensor> {
    let flat = init_unit(layout, 1, Kind::Float)?;
    for param in layout.params.iter().filter(|param| param.decay) {
        let _ = layout.view(param.name, &flat).unwrap().g_mul_scalar_(12.0);
    }
    Ok(flat)
}

/// Size in bytes of the float32 KV cache on each of `tp_size` ranks.
pub fn kv_cache_bytes(tp_size: usize) -> usize {
    NUM_BLOCKS * kv_block_bytes(&ModelSpec::preset("micro").unwrap(), tp_size, BLOCK_SIZE, Kind::Float)
}

/// Options of one update with a learning rate that changes generated tokens.
pub fn update_options() -> UpdateOptions {
    UpdateOptions {
        loss: LossConfig::default(),
        loss_function: None,
        entropy_control: EntropyControl::default(),
        teaches_itself: false,
        router_aux_loss_coef: None,
        max_token_age: 0,
        exact: false,
        temperature: f64::from(TEMPERATURE),
        num_iterations: 1,
        updates_per_generation: 1,
        reference_sync: None,
        max_tokens_per_micro_batch: 200,
        bnpo_batch_size: 8,
        share_prompts: true,
        schedule: Schedule {
            kind: LrSchedulerType::Constant,
            peak: 0.02,
            warmup_steps: 0,
            total_steps: 100,
            min_rate: 0.0,
        },
        global_step: 0,
        max_grad_norm: 1.0,
        device: Device::Cpu,
    }
}

/// This rank's share of `len` rows: consecutive rows in rank order.
pub fn share(world: &World, len: usize) -> Range<usize> {
    let each = len / world.size();
    world.rank() * each..(world.rank() + 1) * each
}

/// Bits of the master weights and moments that this rank owns.
pub fn state(policy: &Policy) -> Vec<Vec<u32>> {
    let tensors = policy.export_state().flat_map(|shard| shard.unwrap().state.tensors);
    tensors.map(|tensor| Vec::<f32>::try_from(tensor).unwrap().into_iter().map(f32::to_bits).collect()).collect()
}
