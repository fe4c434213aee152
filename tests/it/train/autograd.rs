//! The reference for training tests: the decoder, implemented separately for libtorch's autograd in f64, one sequence at a time
//! with dense attention; and AdamW on whole tensors as in its paper. Only the layout of weights is shared with the trainer.

use colo_grpo::internal::model::{
    AttentionSpec, BlockParams, BlockSpec, EmbeddingParams, HeadParams, Matrix, Mixer, ModelSpec, ParamName,
    ParamTable, Piece, QkNorm, RopeSpec, Unit,
};
use colo_grpo::internal::train::{AdamOptions, Sequence};
use colo_grpo::internal::types::RoutedExperts;
use tch::{Device, Kind, Tensor};

use super::delta_net;

/// A model with one autograd leaf per unit, and the optimizer moments.
pub struct Model {
    pub table: ParamTable,
    pub units: Vec<Tensor>, // [len], leaves
    moments: Vec<[Tensor; 2]>,
    num_updates: i32,
    /// Size of the noise on router logits when experts are chosen, as a function of token and position: simulates an inexact sampler.
    pub router_noise: f64,
}

impl Model {
    pub fn new(table: ParamTable, source: impl Fn(usize) -> Tensor) -> Self {
        Self::of_kind(Kind::Double, table, source)
    }

    /// A model in another data type than f64. `source` returns the weights.
    pub fn of_kind(kind: Kind, table: ParamTable, source: impl Fn(usize) -> Tensor) -> Self {
        let units: Vec<Tensor> = (0..table.units.len()).map(|index| leaf(&source(index).to_kind(kind))).collect();
        let moments = units.iter().map(|unit| [unit.zeros_like(), unit.zeros_like()].map(|zeros| zeros.detach()));
        let moments = moments.collect();
        Self { table, units, moments, num_updates: 0, router_noise: 0.0 }
    }

    /// Log-probabilities and entropies of a sequence's scored tokens.
    pub fn scores(&self, sequence: &Sequence, temperature: f64) -> (Tensor, Tensor) {
        let (logprobs, entropy, _) = self.scores_and_routes(sequence, temperature);
        (logprobs, entropy)
    }

    /// The residual stream after the last block.
    fn hidden(&self, sequence: &Sequence, routes: &mut Vec<[Tensor; 2]>) -> Tensor {
        let spec = &self.table.spec;
        let ids: Vec<i64> = sequence.token_ids.iter().map(|&id| i64::from(id)).collect();
        let ids = Tensor::from_slice(&ids).to_device(self.units[0].device());
        let flat = |unit| (self.table.unit(unit), &self.units[self.table.index(unit)]);
        let (layout, table) = flat(Unit::Embedding);
        let mut x = EmbeddingParams::view(layout, table).table.index_select(0, &ids) * spec.embedding_multiplier;
        for layer in 0..spec.num_layers() {
            let (layout, block) = flat(Unit::Block(layer));
            let mut experts =
                Experts { noise: self.router_noise, routes: &mut *routes, token_ids: &sequence.token_ids };
            x = block_forward((spec, layer), &BlockParams::view(spec, layout, block), &x, &mut experts);
        }
        x
    }

    /// Log-probabilities and entropies like [`Model::scores`]; and for every layer with experts, the chosen experts (0 or 1) and the probabilities,
    /// [T, E].
    pub fn scores_and_routes(&self, sequence: &Sequence, temperature: f64) -> (Tensor, Tensor, Vec<[Tensor; 2]>) {
        let mut routes = Vec::new();
        let spec = &self.table.spec;
        let ids: Vec<i64> = sequence.token_ids.iter().map(|&id| i64::from(id)).collect();
        let ids = Tensor::from_slice(&ids).to_device(self.units[0].device());
        let flat = |unit| (self.table.unit(unit), &self.units[self.table.index(unit)]);
        let (layout, table) = flat(Unit::Embedding);
        let table = EmbeddingParams::view(layout, table).table;
        let x = self.hidden(sequence, &mut routes);
        let (layout, head) = flat(Unit::Head);
        let head = HeadParams::view(layout, head);
        let x = norm(&x, &head.final_norm, spec.rms_norm_eps);
        let logits = x.matmul(&head.lm_head.unwrap_or(table).tr()) / (temperature * spec.logits_scaling);
        let (first, count) = (sequence.prompt_len as i64, sequence.completion_len() as i64);
        let wide = if logits.kind() == Kind::BFloat16 { Kind::Float } else { logits.kind() };
        let log_p = logits.narrow(0, first - 1, count).log_softmax(-1, wide);
        let logprobs = log_p.gather(1, &ids.narrow(0, first, count).unsqueeze(1), false).squeeze_dim(1);
        let entropy = -(log_p.exp() * &log_p).sum_dim_intlist(1, false, None);
        let scored = Tensor::from_slice(&sequence.loss_mask).to_device(ids.device());
        (logprobs.masked_select(&scored), entropy.masked_select(&scored), routes)
    }

    /// The sum of -ln p of a sequence's scored tokens under the draft head, which does not affect the rest of the model.
    pub fn draft_loss(&self, sequence: &Sequence, temperature: f64) -> Tensor {
        let spec = &self.table.spec;
        let (draft, eps) = (spec.draft_spec().unwrap(), spec.rms_norm_eps);
        let ids: Vec<i64> = sequence.token_ids.iter().map(|&id| i64::from(id)).collect();
        let (ids, len) = (Tensor::from_slice(&ids), ids.len() as i64);
        let flat = |unit| (self.table.unit(unit), &self.units[self.table.index(unit)]);
        let (layout, words) = flat(Unit::Embedding);
        let words = EmbeddingParams::view(layout, &words.detach()).table;
        let (layout, own) = flat(Unit::Head);
        let own = HeadParams::view(layout, &own.detach());
        let hidden = norm(&self.hidden(sequence, &mut Vec::new()).detach(), &own.final_norm, eps);
        let (layout, w) = flat(Unit::DraftHead);
        let w = BlockParams::view(spec, layout, w);
        let of = |name| w.norm(name).unwrap();
        let embedded = norm(&words.index_select(0, &ids.narrow(0, 1, len - 1)), of(ParamName::DraftEmbeddingNorm), eps);
        let before = norm(&hidden.narrow(0, 0, len - 1), of(ParamName::DraftHiddenNorm), eps);
        let x = Tensor::cat(&[embedded, before], 1).matmul(&of(ParamName::DraftProjection).tr());
        let mut experts = Experts { noise: 0.0, routes: &mut Vec::new(), token_ids: &sequence.token_ids[1..] };
        let x = norm(&block_forward((&draft, 0), &w, &x, &mut experts), of(ParamName::FinalNorm), eps);
        let log_p = (x.matmul(&own.lm_head.unwrap_or(words).tr()) / temperature).log_softmax(-1, Kind::Double);
        // Row i is of token i + 1 and predicts token i + 2.
        let scored = (sequence.prompt_len..sequence.token_ids.len()).zip(&sequence.loss_mask);
        let scored: Vec<i64> =
            scored.filter(|(at, is_scored)| **is_scored && *at > 1).map(|(at, _)| at as i64).collect();
        let scored = Tensor::from_slice(&scored);
        let log_p = log_p.index_select(0, &(&scored - 2)).gather(1, &ids.index_select(0, &scored).unsqueeze(1), false);
        -log_p.sum(Kind::Double)
    }

    /// The experts of all tokens except the last, in a sampler's format.
    pub fn routed_experts(&self, sequence: &Sequence) -> RoutedExperts {
        let (_, _, routes) = self.scores_and_routes(sequence, 1.0);
        let k = self.table.spec.experts().unwrap().router.num_experts_per_tok as i64;
        let mut routed = RoutedExperts::default();
        for position in 0..sequence.token_ids.len() - 1 {
            let of_layer = |[chosen, _]: &[Tensor; 2]| -> Vec<i64> {
                Vec::try_from(chosen.get(position as i64).topk(k, 0, true, true).1).unwrap()
            };
            let own: Vec<u16> = routes.iter().flat_map(of_layer).map(|expert| expert as u16).collect();
            routed.push(position, &own);
        }
        routed
    }

    /// Makes one step with the gradient of `loss`. Returns the gradient's norm.
    pub fn step(&mut self, loss: Tensor, lr: f64, max_grad_norm: f64, adam: &AdamOptions) -> f64 {
        let gradients = Tensor::run_backward(&[loss], &self.units, false, false);
        let is_head: Vec<bool> = self.table.units.iter().map(|layout| layout.unit == Unit::DraftHead).collect();
        let norm_of = |head: bool| {
            let own = gradients.iter().zip(&is_head).filter(|(_, is_head)| **is_head == head);
            own.map(|(g, _)| g.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt()
        };
        let (norm, of_head) = (norm_of(false), norm_of(true));
        self.num_updates += 1;
        for (index, gradient) in gradients.iter().enumerate() {
            let norm = if is_head[index] { of_head } else { norm };
            let clip = if max_grad_norm > 0.0 { (max_grad_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
            let [m, v] = &mut self.moments[index];
            let g = gradient * clip;
            *m = &*m * adam.beta1 + &g * (1.0 - adam.beta1);
            *v = &*v * adam.beta2 + g.square() * (1.0 - adam.beta2);
            let m_hat = &*m / (1.0 - adam.beta1.powi(self.num_updates));
            let v_hat = &*v / (1.0 - adam.beta2.powi(self.num_updates));
            let decayed = self.units[index].detach() * (1.0 - lr * adam.weight_decay * self.decay(index));
            self.units[index] = leaf(&(decayed - m_hat / (v_hat.sqrt() + adam.eps) * lr));
        }
        norm
    }

    /// A tensor that is 1 for elements with weight decay and 0 for others.
    fn decay(&self, index: usize) -> Tensor {
        let layout = &self.table.units[index];
        let decay = Tensor::zeros([layout.len as i64], (Kind::Double, Device::Cpu));
        for param in layout.params.iter().filter(|param| param.shape.len() > 1) {
            let _ = decay.narrow(0, param.offset as i64, param.numel() as i64).fill_(1.0);
        }
        decay
    }
}

/// Router noise, token ids and chosen experts.
struct Experts<'a> {
    noise: f64,
    routes: &'a mut Vec<[Tensor; 2]>,
    token_ids: &'a [u32],
}

fn block_forward((spec, layer): (&ModelSpec, usize), w: &BlockParams, x: &Tensor, routes: &mut Experts<'_>) -> Tensor {
    let BlockSpec { mixer, residual_scale, .. } = spec.layers[layer];
    // A norm that is absent leaves what it is given.
    let normed =
        |name, x: &Tensor| w.norm(name).map_or_else(|| x.shallow_clone(), |weight| norm(x, weight, spec.rms_norm_eps));
    let mixer_input = normed(ParamName::InputNorm, x);
    let mixed = match mixer {
        Mixer::DeltaNet(_) => delta_net::mix(spec, w, &mixer_input),
        Mixer::Attention(own) => attend(spec, own, w, &mixer_input),
    };
    let h = x + normed(ParamName::MixerPostNorm, &mixed) * residual_scale;
    let mlp_input = normed(ParamName::PostNorm, &h);
    let (gate_up, down) = (w.linear(Matrix::GateUp).weight(), w.linear(Matrix::Down).weight());
    let mlp = match w.router() {
        Some(router) => experts(spec, &mlp_input, [router, gate_up, down], routes),
        None => mlp(&mlp_input, gate_up, down),
    };
    &h + normed(ParamName::MlpPostNorm, &mlp) * residual_scale
}

fn attend(spec: &ModelSpec, own: AttentionSpec, w: &BlockParams, x: &Tensor) -> Tensor {
    let (len, eps) = (x.size()[0], spec.rms_norm_eps);
    let (kv_heads, group, head_dim) = (own.num_kv_heads as i64, own.heads_per_group() as i64, own.head_dim as i64);
    let [Piece { weight, bias, .. }] = &w.linear(Matrix::Qkv).pieces[..] else {
        panic!("a whole block is in one piece")
    };
    let mut qkv = x.matmul(&weight.tr());
    if let Some(bias) = bias {
        qkv += bias;
    }
    let qkv = qkv.view([len, kv_heads, group + 2, head_dim]);
    let per_query = |t: Tensor| t.expand([len, kv_heads, group, head_dim], false).reshape([len, -1, head_dim]);
    let mut q = qkv.narrow(2, 0, group).reshape([len, -1, head_dim]); // [T, H, hd]
    let mut k = qkv.narrow(2, group, 1).reshape([len, -1, head_dim]); // [T, Hkv, hd]
    let v = per_query(qkv.narrow(2, group + 1, 1));
    if let (Some(q_norm), Some(k_norm)) = (w.norm(ParamName::QNorm), w.norm(ParamName::KNorm)) {
        let over_all = |heads: &Tensor, weight| norm(&heads.reshape([len, -1]), weight, eps).view_as(heads);
        (q, k) = match own.qk_norm {
            Some(QkNorm::All) => (over_all(&q, q_norm), over_all(&k, k_norm)),
            _ => (norm(&q, q_norm, eps), norm(&k, k_norm, eps)),
        };
    }
    let (q, k) = (rope(own, &q), per_query(rope(own, &k).unsqueeze(2)));
    let scores = Tensor::einsum("thd,shd->hts", &[&q, &k], None::<i64>) * own.scale;
    let future = Tensor::ones([len, len], (Kind::Bool, x.device())).triu(1);
    let p = scores.masked_fill(&future, f64::NEG_INFINITY).softmax(-1, None);
    let attended = Tensor::einsum("hts,shd->thd", &[&p, &v], None::<i64>).reshape([len, -1]);
    attended.matmul(&w.linear(Matrix::O).weight().tr())
}

fn mlp(x: &Tensor, gate_up: &Tensor, down: &Tensor) -> Tensor {
    let gate_up = x.matmul(&gate_up.tr()).view([x.size()[0], -1, 2]);
    (gate_up.select(2, 0).silu() * gate_up.select(2, 1)).matmul(&down.tr())
}

/// Computes experts for each token and each of its choices.
fn experts(spec: &ModelSpec, x: &Tensor, weights: [&Tensor; 3], told: &mut Experts<'_>) -> Tensor {
    let ([router, gate_up, down], shape) = (weights, spec.experts().unwrap());
    let (k, num_experts) = (shape.router.num_experts_per_tok as i64, shape.num_experts as i64);
    let logits = x.matmul(&router.tr());
    let probs = logits.exp() / logits.exp().sum_dim_intlist(1, true, None);
    let mut chosen = vec![0.0; (x.size()[0] * num_experts) as usize];
    let token = |token: i64| {
        let own = probs.get(token);
        let place = (7 * token + 31 * i64::from(told.token_ids[token as usize])) as f64;
        let noise = (Tensor::arange(num_experts, (Kind::Double, Device::Cpu)) * 2.3 + place).sin() * told.noise;
        let (_, ids) = (own.detach().log() + noise.to_kind(own.kind()).to_device(own.device())).topk(k, -1, true, true);
        let top = own.index_select(0, &ids);
        let top = if shape.router.norm_topk_prob { &top / top.sum(None) } else { top };
        let choice = |choice: i64| {
            let expert = ids.int64_value(&[choice]);
            chosen[(token * num_experts + expert) as usize] = 1.0;
            mlp(&x.narrow(0, token, 1), &gate_up.get(expert), &down.get(expert)) * top.get(choice)
        };
        (0..k).map(choice).reduce(|a, b| a + b).unwrap()
    };
    let y = Tensor::cat(&(0..x.size()[0]).map(token).collect::<Vec<_>>(), 0);
    told.routes.push([Tensor::from_slice(&chosen).view([-1, num_experts]), probs]);
    y
}

pub fn norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    x * (x.square().mean_dim(-1, true, None) + eps).rsqrt() * weight
}

fn rope(own: AttentionSpec, x: &Tensor /* [T, H, hd] */) -> Tensor {
    let Some(RopeSpec { theta, .. }) = own.rope else { return x.shallow_clone() };
    let half = own.head_dim as i64 / 2;
    let inv_freq: Vec<f64> = (0..half).map(|i| theta.powf(-(i as f64) / half as f64)).collect();
    let positions = Tensor::arange(x.size()[0], (Kind::Double, x.device()));
    let angle = positions.view([-1, 1, 1]) * Tensor::from_slice(&inv_freq).to_device(x.device()); // [T, 1, hd / 2]
    let (cos, sin) = (angle.cos().to_kind(x.kind()), angle.sin().to_kind(x.kind()));
    let (a, b) = (x.narrow(2, 0, half), x.narrow(2, half, half));
    Tensor::cat(&[&a * &cos - &b * &sin, b * cos + a * sin], 2)
}

fn leaf(values: &Tensor) -> Tensor {
    values.detach().copy().set_requires_grad(true)
}
