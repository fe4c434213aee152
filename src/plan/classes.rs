//! The classes of memory in a plan, and their cost per parameter and token.

use tch::{Device, Kind};

use super::choices::Choices;
use super::{ClassBytes, PlanInput, Role, engine_options, human};
use crate::config::{GradientCheckpointing, OptimizerName, OptimizerResidency, ReferenceResidency};
use crate::model::{head_chunk_tokens, trial_bytes};
use crate::rollout::{
    draft_input_bytes, engine_buffer_bytes, engine_sum_bytes, engine_table_bytes, state_page_bytes, weight_copy_bytes,
};
use crate::train::{ActivationBytes, Moment, TrainBytes, WORKSPACE_BYTES, reference_bytes};

/// The class of the reference model's weights, only in a plan with a reference model.
pub(super) const REFERENCE: &str = "reference weights";

/// The class of the teacher's weights, only in a plan with a teacher.
pub(super) const TEACHER: &str = "teacher weights";

/// The class of activations: of blocks, of the head, and on the host if `activation_offload` moves them there.
pub(super) const ACTIVATIONS: &str = "activations";

/// All classes except the KV cache, which gets the remaining memory. Training's classes are those of its peak.
pub(super) fn classes(choices: Choices, fullest: Moment, input: &PlanInput<'_>) -> Vec<ClassBytes> {
    let bytes = input.model().bytes();
    let weights = bytes.weights + bytes.engine_adapters;
    let mut classes = vec![
        ClassBytes {
            class: "policy weights",
            train_bytes: weights + fullest.gathered,
            rollout_bytes: weights,
            host_bytes: 0,
        },
        optimizer(choices.optimizer, fullest, &bytes, input.config.optimizer.optim),
        in_training("gradients", fullest.gradients),
        ClassBytes {
            host_bytes: input.model().offloaded_bytes(choices.gradient_checkpointing, input.micro_batch_tokens()),
            ..in_training(ACTIVATIONS, fullest.activations + input.recorded_bytes())
        },
    ];
    for (class, table) in input.frozen() {
        let weights = reference_bytes(table, input.kind);
        let on_host = choices.reference == ReferenceResidency::Host;
        let [device, host_bytes] = if on_host { [0, weights] } else { [weights, 0] };
        classes.push(ClassBytes { class, train_bytes: device, rollout_bytes: device, host_bytes });
    }
    if input.starts_from_adapters && input.config.keeps_initial_adapters() {
        classes.push(resident("reference adapters", input.model().adapter_bytes()));
    }
    let whole = input.generator_params * input.kind.elt_size_in_bytes();
    let of_format = input.model().format.workspace_bytes(&input.table.spec);
    let mut products = Vec::new();
    if input.room.swap_bytes.is_some() {
        // On a GPU.
        products.push(resident("workspace of GEMMs", WORKSPACE_BYTES + of_format));
        if input.config.exact && input.kind == Kind::BFloat16 {
            products.push(resident("testing exact GEMMs, in a first run", exact_trial_bytes(input)));
        }
    }
    held(input.role, classes, engine(input), products, whole + bytes.engine_adapters)
}

/// The classes that a rank of a role holds, from those of training, of the engine, of GEMMs and of an engine's own weights.
fn held(
    role: Role,
    training: Vec<ClassBytes>,
    engine: Vec<ClassBytes>,
    products: Vec<ClassBytes>,
    weights: usize,
) -> Vec<ClassBytes> {
    match role {
        Role::Both => training.into_iter().chain(engine).chain(products).collect(),
        Role::Trains => {
            let held = training.into_iter().chain(products).map(|class| ClassBytes { rollout_bytes: 0, ..class });
            held.filter(|class| class.train_bytes + class.host_bytes > 0).collect()
        }
        Role::Generates => {
            let engine = engine.into_iter().chain(products).map(|class| ClassBytes { train_bytes: 0, ..class });
            std::iter::once(in_rollout("weights", weights)).chain(engine).collect()
        }
    }
}

/// GEMMs with as many rows as a micro-batch or an engine step, and with as many rows as have logits at once.
fn exact_trial_bytes(input: &PlanInput<'_>) -> usize {
    let (spec, config) = (&input.table.spec, input.config);
    let rows = input.micro_batch_tokens().max(config.max_num_batched_tokens);
    trial_bytes(spec, rows, head_chunk_tokens(spec.vocab_size, true).max(config.max_num_seqs))
}

fn optimizer(residency: OptimizerResidency, fullest: Moment, bytes: &TrainBytes, optim: OptimizerName) -> ClassBytes {
    let state = bytes.optimizer;
    let (train_bytes, rollout_bytes, host_bytes) = match residency {
        OptimizerResidency::Resident => (state, state, 0),
        OptimizerResidency::Swap => (state, 0, state),
        OptimizerResidency::Stream => (fullest.buckets, 0, state),
    };
    let class = match optim {
        OptimizerName::AdamW => "master weights, Adam m and v",
        OptimizerName::AdamW8bit => "master weights, 8-bit Adam m and v",
        OptimizerName::Muon => "master weights, momentum",
    };
    ClassBytes { class, train_bytes: train_bytes + fullest.orthogonalized, rollout_bytes, host_bytes }
}

/// The engine's memory besides its KV cache and its GEMMs.
fn engine(input: &PlanInput<'_>) -> Vec<ClassBytes> {
    let mut classes = Vec::new();
    if input.engine_weight_bytes > 0 {
        classes.push(in_rollout("engine weights (gathered slices)", input.engine_weight_bytes));
    }
    let format = input.config.rollout_quantization.format();
    let copy = weight_copy_bytes(format, input.engine_layers, input.config.tensor_parallel_size);
    if copy > 0 {
        classes.push(of_engine("engine weights (rounded copy)", copy, input));
    }
    let config = input.config;
    let device = if input.room.swap_bytes.is_some() { Device::Cuda(0) } else { Device::Cpu };
    let page_bytes = state_page_bytes(
        input.engine_layers,
        config.tensor_parallel_size,
        input.kind,
        config.mamba_ssm_cache_dtype,
        device,
    );
    let num_drafts = engine_options(config, 0, 0, input.kind, device).speculation.most_drafts();
    let draft_bytes =
        draft_input_bytes(input.engine_layers, config.tensor_parallel_size, input.kind, num_drafts, device);
    let states = config.max_num_seqs * (page_bytes + draft_bytes);
    if states > 0 {
        classes.push(of_engine("states of gated delta nets", states, input));
    }
    if input.room.swap_bytes.is_some() {
        let (spec, tp_size) = (&input.table.spec, input.config.tensor_parallel_size);
        let options = engine_options(input.config, input.max_model_length(), 0, input.kind, Device::Cpu);
        let buffers = engine_buffer_bytes(spec, &options, tp_size);
        classes.push(of_engine("engine buffers", buffers, input));
        classes.push(resident("engine tables", engine_table_bytes(spec, &options, tp_size)));
        classes.push(resident("sums over the tensor-parallel group", engine_sum_bytes(spec, &options, tp_size)));
        classes.retain(|class| class.rollout_bytes > 0);
    }
    classes
}

fn resident(class: &'static str, bytes: usize) -> ClassBytes {
    ClassBytes { class, train_bytes: bytes, rollout_bytes: bytes, host_bytes: 0 }
}

/// Memory that an engine also holds while training, if it is configured to keep its memory.
pub(super) fn of_engine(class: &'static str, bytes: usize, input: &PlanInput<'_>) -> ClassBytes {
    if input.config.keeps_kv_cache() { resident(class, bytes) } else { in_rollout(class, bytes) }
}

fn in_rollout(class: &'static str, rollout_bytes: usize) -> ClassBytes {
    ClassBytes { class, train_bytes: 0, rollout_bytes, host_bytes: 0 }
}

fn in_training(class: &'static str, train_bytes: usize) -> ClassBytes {
    ClassBytes { class, train_bytes, rollout_bytes: 0, host_bytes: 0 }
}

/// The bytes per parameter and per token on this rank, as text.
pub(super) fn formula(keep: GradientCheckpointing, fullest: Moment, input: &PlanInput<'_>) -> String {
    let (model, tokens) = (input.model(), input.micro_batch_tokens().max(1));
    let (bytes, spec) = (model.bytes(), &input.table.spec);
    let experts = match spec.num_expert_layers() {
        0 => String::new(),
        _ => format!(
            "parameters: {:.1} M, of which a token is computed with {:.1} M\n",
            spec.num_params() as f64 / 1e6,
            spec.num_active_params() as f64 / 1e6
        ),
    };
    let activations = ActivationBytes::new(&model, keep, input.micro_batch(tokens));
    let at_once = activations.pass + activations.head.max(activations.most_of_block_backward());
    let parameters = input.table.total as f64;
    let each = |bytes: usize| bytes as f64 / parameters;
    format!(
        "{experts}bytes a parameter between uses: {:.2} weights + {:.2} gradients + {:.2} optimizer, x {:.1} M\n\
         the column train is the peak of training, with {} of gradients (at the optimizer step {}) and {} of gathered weights\n\
         bytes a token of a micro-batch: {:.0} until its backward + {:.0} in the layer that is computed, x {tokens} tokens",
        each(bytes.weights),
        each(bytes.gradients),
        each(bytes.optimizer),
        parameters / 1e6,
        human(fullest.gradients),
        human(bytes.gradients),
        human(fullest.gathered),
        activations.saved[spec.num_layers()] as f64 / tokens as f64,
        at_once as f64 / tokens as f64,
    )
}
