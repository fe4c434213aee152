//! The model and data of training tests: a small model whose weights depend only on the parameter, and eight sequences.

use std::sync::Arc;

use colo_grpo::internal::config::GradientCheckpointing;
use colo_grpo::internal::memory::HostPool;
use colo_grpo::internal::model::{
    AttentionSpec, DeltaNetSpec, DenseSpec, ExpertsSpec, Family, Format, Mixer, Mlp, ModelSpec, ParamTable, Plain,
    QkNorm, Unit, UnitLayout,
};
use colo_grpo::internal::ops::delta_net::DeltaHeads;
use colo_grpo::internal::ops::router::{RouterOptions, RouterScores};
use colo_grpo::internal::ranks::Mesh;
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, MicroBatch, NetworkOptions, Optim, OptimizerHome, PackOptions, Policy, PolicyOptions,
    Scores, Sequence, StepOutcome, TokenGradients, TrainedModel, pack, pad_to_agreed_count,
};
use tch::{Device, Kind, Tensor};

use super::autograd;

pub const LR: f64 = 1e-3;
pub const MAX_GRAD_NORM: f64 = 0.5;
pub const TEMPERATURE: f64 = 0.8;
pub const ENTROPY_COEF: f64 = 0.05;
/// AdamW options. `eps` is larger than the f32 rounding errors of the gradients; otherwise Adam would step by the sign of noise.
pub const ADAM: AdamOptions = AdamOptions { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
pub const BUDGET: usize = 40;

/// Options of a training test.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub stage: u8,
    pub kind: Kind,
    pub residual: Kind,
    pub tied: bool,
    /// Whether two of three layers have experts.
    pub experts: bool,
    /// Whether two of three layers have gated delta nets.
    pub delta_nets: bool,
    /// Whether the model has a draft head, whose loss has weight 1.
    pub draft_head: bool,
    /// Whether one layer has no rotary embedding, and embedding, scores, sublayers and logits have multipliers.
    pub factors: bool,
    /// Whether two of three layers have windows and sinks, and all have a norm over all heads and an output gate.
    pub windows: bool,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key/value heads.
    pub num_kv_heads: usize,
    /// For how many tokens of a micro-batch ranks that share it compute attention in two parts of their heads, if not as usual.
    pub halved_from: Option<i64>,
    /// Weight of the load balancing loss.
    pub aux_loss_coef: f64,
    pub recompute: GradientCheckpointing,
    pub budget: usize,
    pub gradients: GradientOptions,
    /// Whether the last backward before a step is announced to the policy.
    pub announced: bool,
    pub share_prompts: bool,
    /// Whether some tokens of the longer completions are context, which was not sampled.
    pub has_turns: bool,
    /// Number of ranks that have sequences; the others have none.
    pub num_sharers: usize,
    pub optim: Optim,
    /// The format of GEMMs in blocks, such as FP8.
    pub format: &'static dyn Format,
}

impl Run {
    pub fn new(stage: u8, kind: Kind) -> Self {
        let recompute = GradientCheckpointing::None;
        let gradients = GradientOptions::default();
        Self {
            stage,
            kind,
            residual: kind,
            tied: false,
            experts: false,
            delta_nets: false,
            draft_head: false,
            factors: false,
            windows: false,
            num_heads: 4,
            num_kv_heads: 2,
            halved_from: None,
            aux_loss_coef: 0.0,
            recompute,
            budget: BUDGET,
            gradients,
            share_prompts: false,
            has_turns: false,
            announced: false,
            num_sharers: usize::MAX,
            optim: Optim::AdamW,
            format: &Plain,
        }
    }

    /// The model's shape. With 8-bit moments it is wider: all of its matrices except `O` have 4,096 elements.
    fn spec(&self) -> ModelSpec {
        let mut narrow = spec(self.tied).map_attention(|_, attention| {
            (attention.num_heads, attention.num_kv_heads) = (self.num_heads, self.num_kv_heads);
        });
        let hidden = narrow.hidden_size;
        if self.experts {
            let experts = ExpertsSpec {
                expert: DenseSpec::new(hidden, 16),
                num_experts: 5,
                own: 5,
                is_parallel: false,
                router: RouterOptions {
                    num_experts_per_tok: 2,
                    norm_topk_prob: !self.tied,
                    scores: RouterScores::Softmax,
                },
                gates_shared: true,
                has_biases: false,
                shared: None,
            };
            for layer in [0, 2] {
                narrow.layers[layer].mlp = Mlp::Experts(experts);
            }
        }
        if self.delta_nets {
            let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 6, value_dim: 4, conv_width: 3 };
            for layer in [0, 2] {
                narrow.layers[layer].mixer = Mixer::DeltaNet(DeltaNetSpec { hidden, heads });
            }
        }
        if self.factors {
            (narrow.embedding_multiplier, narrow.logits_scaling) = (1.5, 3.0);
            narrow = narrow.map_blocks(|_, block| block.residual_scale = 0.7).map_attention(|layer, attention| {
                attention.scale = 0.4;
                attention.rope = attention.rope.filter(|_| layer != 1);
            });
        }
        if self.windows {
            narrow = narrow.map_attention(|layer, attention| {
                attention.window = [None, Some(4), Some(7)][layer];
                (attention.qk_norm, attention.output_gate) = (Some(QkNorm::All), true);
                attention.sinks = layer > 0;
            });
        }
        narrow.draft_head = self.draft_head.then(|| narrow.layers[1]);
        match self.optim {
            Optim::AdamW8bit => narrow.with_widths(48, 90).map_attention(|_, attention| {
                attention.head_dim = 12;
                attention.scale = AttentionSpec::usual_scale(12);
            }),
            Optim::AdamW | Optim::Muon(_) => narrow,
        }
    }

    pub fn options(&self, mesh: &Mesh) -> PolicyOptions {
        PolicyOptions {
            stage: self.stage,
            network: NetworkOptions {
                kind: self.kind,
                residual: self.residual,
                device: mesh.world.device(),
                format: self.format,
            },
            gradient_checkpointing: self.recompute,
            optim: self.optim,
            adam: ADAM,
            gradients: self.gradients,
        }
    }

    pub fn table(&self, shards: usize) -> Arc<ParamTable> {
        Arc::new(ParamTable::new(Arc::new(self.spec()), shards))
    }

    pub fn policy(&self, mesh: &Mesh) -> Policy {
        self.policy_in(mesh, OptimizerHome::Resident)
    }

    pub fn policy_in(&self, mesh: &Mesh, home: OptimizerHome) -> Policy {
        let source = |layout: &UnitLayout| Ok(initial(layout));
        let policy = Policy::with_home(self.table(mesh.shard.size()), mesh, self.options(mesh), home, &source).unwrap();
        self.halved(policy)
    }

    /// The policy with this run's number of tokens from which heads are halved.
    pub fn halved(&self, policy: Policy) -> Policy {
        match self.halved_from {
            Some(num_tokens) => policy.halving_heads_from(num_tokens),
            None => policy,
        }
    }

    /// A host memory pool for the optimizer state.
    pub fn pool(&self, mesh: &Mesh) -> HostPool {
        let table = self.table(mesh.shard.size());
        let model =
            TrainedModel { optim: self.optim, ..TrainedModel::whole(&table, self.stage, self.kind, self.gradients) };
        HostPool::new("train_test", model.bytes().optimizer, mesh.world.device(), &mut |_, _| ()).unwrap()
    }

    pub fn autograd(&self) -> autograd::Model {
        let table = ParamTable::new(Arc::new(self.spec()), 1);
        // Starts from the weights as the policy's kind rounds them.
        let sources: Vec<Tensor> = table.units.iter().map(|layout| initial(layout).to_kind(self.kind)).collect();
        autograd::Model::new(table, |index| sources[index].shallow_clone())
    }

    /// Eight sequences of different lengths; some neighbors have the same prompt.
    pub fn sequences(&self) -> Vec<Sequence> {
        let lengths = [(3, 4), (3, 9), (3, 2), (7, 12), (7, 1), (5, 6), (5, 10), (1, 8)];
        let id = |i: usize, salt: usize| ((i * i + 5 * salt + 3 * i) % 47) as u32;
        let sequence = |(n, (prompt_len, completion_len)): (usize, (usize, usize))| {
            let prompt = (0..prompt_len).map(|i| id(i, prompt_len));
            let completion = (prompt_len..prompt_len + completion_len).map(|i| id(i, n));
            let advantage = 1.5 - 0.6 * n as f32;
            let is_scored = |at: usize| !self.has_turns || completion_len < 3 || (at + n) % 5 < 3; // some begin with context
            let loss_mask = (0..completion_len).map(is_scored).collect();
            Sequence { advantage, loss_mask, ..Sequence::of_tokens(prompt.chain(completion).collect(), prompt_len) }
        };
        lengths.into_iter().enumerate().map(sequence).collect()
    }

    pub fn own_sequences(&self, mesh: &Mesh) -> Vec<Sequence> {
        let (rank, num_groups) = (mesh.sequence_group().rank, mesh.sequence_group().size);
        let sharers = self.num_sharers.min(num_groups);
        let all = self.sequences().into_iter().enumerate();
        let mut own: Vec<Sequence> =
            all.filter(|(n, _)| rank < sharers && n % sharers == rank).map(|(_, sequence)| sequence).collect();
        own.push(Sequence { masked: true, advantage: 100.0, ..self.sequences()[0].clone() });
        own
    }

    pub fn micro_batches(&self, mesh: &Mesh) -> Vec<MicroBatch> {
        let options =
            PackOptions { max_tokens: self.budget, share_prompts: self.share_prompts, device: mesh.world.device() };
        let mut micro_batches = pack(&self.own_sequences(mesh), &options).unwrap();
        pad_to_agreed_count(&mut micro_batches, &*mesh.world).unwrap();
        micro_batches
    }

    /// Divisor of the loss. It makes gradients so large that they are clipped.
    pub fn denominator(&self) -> f64 {
        10.0
    }

    /// Gradients of the loss: the sum over tokens of (-advantage * logprob + coefficient * entropy) / denominator.
    pub fn loss(&self, micro_batch: &MicroBatch, scores: &Scores) -> TokenGradients {
        let advantages = micro_batch.advantages.index_select(0, &micro_batch.sequence_of_token);
        let dentropy = scores.entropy.ones_like() * (ENTROPY_COEF / self.denominator());
        let dlogprobs = (advantages.to_kind(Kind::Double) / -self.denominator()).to_kind(scores.logprobs.kind());
        TokenGradients { dlogprobs, dentropy: Some(dentropy), dtop: None, daux_loss: self.aux_loss_coef }
    }

    pub fn step(&self, policy: &mut Policy, mesh: &Mesh) -> StepOutcome {
        self.accumulate(policy, mesh);
        policy.optimizer_step(LR, MAX_GRAD_NORM).unwrap()
    }

    pub fn accumulate(&self, policy: &mut Policy, mesh: &Mesh) {
        let micro_batches = self.micro_batches(mesh);
        for (index, micro_batch) in micro_batches.iter().enumerate() {
            if self.announced && index + 1 == micro_batches.len() {
                policy.finish_gradients_with_next_backward();
            }
            let mut loss = |scores: &Scores| Ok(self.loss(micro_batch, scores));
            policy.forward_backward(micro_batch, TEMPERATURE, &mut loss).unwrap();
        }
    }
}

/// A shape like Qwen2 if `tied`, or else like Qwen3.
pub fn spec(tied: bool) -> ModelSpec {
    let spec = ModelSpec::preset("micro").unwrap().with_widths(24, 40).with_num_layers(3);
    let spec = spec.map_attention(|_, attention| {
        attention.head_dim = 6;
        attention.scale = AttentionSpec::usual_scale(6);
        attention.qkv_bias = tied;
        attention.qk_norm = (!tied).then_some(QkNorm::Head);
    });
    ModelSpec {
        family: if tied { Family::Qwen2 } else { Family::Qwen3 },
        vocab_size: 47,
        tie_word_embeddings: tied,
        router_aux_loss_coef: 0.0,
        max_position_embeddings: 64,
        eos_token_ids: vec![0],
        ..spec
    }
}

/// Initial weights that depend only on the parameter, not on its shard: matrices around 0, norms around 1.
pub fn initial(layout: &UnitLayout) -> Tensor {
    let flat = Tensor::zeros([layout.len as i64], (Kind::Double, Device::Cpu));
    for (n, param) in layout.params.iter().enumerate() {
        let phase = match layout.unit {
            Unit::Embedding => 0.0,
            Unit::Block(layer) => 1.0 + layer as f64,
            Unit::DraftHead => 8.0,
            Unit::Head => 9.0,
        };
        let wave =
            (Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 1.7 + 10.0 * phase + n as f64).sin();
        let values = if param.decay { wave * 0.3 } else { wave * 0.1 + 1.0 };
        flat.narrow(0, param.offset as i64, param.numel() as i64).copy_(&values);
    }
    flat
}

/// Every parameter's elements without padding, in table order; collective at stage 3.
pub fn weights(policy: &Policy) -> Vec<Vec<f64>> {
    unpadded(policy.table(), |unit| policy.unit_weights(unit).unwrap())
}

pub fn unpadded(table: &ParamTable, flat: impl Fn(Unit) -> Tensor) -> Vec<Vec<f64>> {
    let unit_params = |layout: &UnitLayout| {
        let flat = flat(layout.unit).to_device(Device::Cpu).to_kind(Kind::Double);
        let params = layout.params.iter();
        params.map(|param| Vec::try_from(layout.view(param.name, &flat).unwrap().reshape([-1])).unwrap()).collect()
    };
    table.units.iter().flat_map(|layout| -> Vec<Vec<f64>> { unit_params(layout) }).collect()
}

pub fn max_difference(a: &[Vec<f64>], b: &[Vec<f64>]) -> f64 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(a, b)| a.iter().zip(b));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
