//! Tests the divergence over a teacher's most probable tokens against TRL's `SDPOTrainer`.

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::super::{
    Denominators, Distillation, LossConfig, LossInput, LossOutput, TopDivergence, TopLogprobs, policy_loss,
};
use crate::config::LossType;

/// All rows of a JSON value by token, concatenated.
fn packed(value: &Value) -> Vec<f64> {
    let rows = value.as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
    rows.map(|number| number.as_f64().unwrap()).collect()
}

/// The policy's log-probabilities of all tokens, and the tokens that the teacher scored.
struct Scored {
    log_p: Tensor,     // [C, V]
    targets: Tensor,   // [C, 1] i64
    top_ids: Tensor,   // [C, K] i64
    sequences: Tensor, // [C] i64
}

impl Scored {
    fn loss(&self, teacher: [&Tensor; 2], old: Option<&Tensor>, distillation: Distillation) -> LossOutput {
        let logprobs = self.log_p.gather(1, &self.targets, false).squeeze_dim(1);
        let top = self.log_p.gather(1, &self.top_ids, false);
        let config = LossConfig {
            loss_type: LossType::Grpo,
            importance_sampling_correction: false,
            distillation: Some(distillation),
            ..LossConfig::default()
        };
        let input = LossInput {
            logprobs: &logprobs,
            old_logprobs: old,
            ref_logprobs: None,
            teacher_logprobs: Some(teacher[0]),
            top: Some(TopLogprobs { logprobs: &top, teacher_logprobs: teacher[1] }),
            rollout_logprobs: None,
            advantages: &Tensor::zeros([3], (Kind::Double, Device::Cpu)),
            bnpo_divisors: None,
            sequence_of_token: &self.sequences,
            entropy: None,
            entropy_term: None,
        };
        let of = Denominators { num_sequences: 3.0, num_tokens: 8.0, num_update_tokens: 8.0, num_sequence_tokens: 8.0 };
        policy_loss(&input, &config, &of).unwrap()
    }

    /// The gradient with respect to the logits, as the head's backward computes it. `[C, V]`
    fn dlogits(&self, output: &LossOutput) -> Tensor {
        let dtop = output.dtop.as_ref().unwrap();
        let direct = self.log_p.zeros_like().scatter_add(1, &self.top_ids, dtop);
        let direct = direct.scatter_add(1, &self.targets, &output.dlogprobs.unsqueeze(1));
        &direct - self.log_p.exp() * direct.sum_dim_intlist(1, true, Kind::Double)
    }
}

#[test]
fn top_k_distillation_loss_equals_trl() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/distillation.json")).unwrap();
    let count = |key: &str| golden[key].as_i64().unwrap();
    let doubles = |key: &str, width: i64| Tensor::from_slice(&packed(&golden[key])).reshape([-1, width]);
    let ids = |key: &str, width: i64| doubles(key, width).to_kind(Kind::Int64);
    let lengths: Vec<i64> = golden["lengths"].as_array().unwrap().iter().map(|it| it.as_i64().unwrap()).collect();
    let sequences: Vec<i64> = (0..).zip(&lengths).flat_map(|(row, &len)| (0..len).map(move |_| row)).collect();
    let scored = Scored {
        log_p: doubles("logits", count("vocabulary")).log_softmax(-1, None::<Kind>),
        targets: ids("ids", 1),
        top_ids: ids("top_ids", count("num_top")),
        sequences: Tensor::from_slice(&sequences),
    };
    let (old, teacher) = (doubles("old_logprobs", 1).squeeze_dim(1), doubles("teacher_logprobs", 1).squeeze_dim(1));
    let top = doubles("top_logprobs", count("num_top"));
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let (alpha, adds_tail) = (case["alpha"].as_f64().unwrap(), case["add_tail"].as_bool().unwrap());
        let clip_max = case["is_clip"].as_f64();
        let top_of = TopDivergence { alpha, adds_tail, num_tokens: 4 };
        let distillation = Distillation { weight: 1.0, clip_max, top: Some(top_of) };
        let output = scored.loss([&teacher, &top], Some(&old), distillation);
        let what = format!("{alpha}, {adds_tail}, {clip_max:?}");
        let near = |got: f64, name: &str| {
            let expected = case[name].as_f64().unwrap();
            assert!((got - expected).abs() < 1e-12 * expected.abs().max(1.0), "{what}: {name} {got}, not {expected}");
        };
        near(output.loss.double_value(&[]), "loss");
        let stats = output.stats.read().unwrap();
        let metric = stats.entries().iter().find(|(name, _)| *name == "distillation/kl").unwrap().1.value();
        if clip_max.is_none() {
            near(metric, "metric"); // TRL's is of what the ratio multiplied
        }
        let expected = Tensor::from_slice(&packed(&case["dlogits"])).reshape([-1, count("vocabulary")]);
        let largest = (scored.dlogits(&output) - &expected).abs().max().double_value(&[]);
        assert!(largest < 1e-10, "{what}: a gradient is {largest} off");
        assert!(expected.abs().max().double_value(&[]) > 1e-2);
    }
}

#[test]
fn a_teacher_that_equals_the_policy_gives_no_gradient() {
    tch::manual_seed(3);
    let log_p = Tensor::randn([8, 9], (Kind::Float, Device::Cpu)).log_softmax(-1, None::<Kind>);
    let (top, top_ids) = log_p.topk(4, 1, true, true);
    let targets = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 5, 6, 7]).unsqueeze(1);
    let sequences = Tensor::from_slice(&[0i64, 0, 0, 1, 1, 2, 2, 2]);
    let scored = Scored { log_p, targets, top_ids, sequences };
    let teacher = scored.log_p.gather(1, &scored.targets, false).squeeze_dim(1);
    for (alpha, adds_tail) in [(1.0, false), (1.0, true), (0.0, false), (0.0, true), (0.5, false), (0.3, true)] {
        let top_of = TopDivergence { alpha, adds_tail, num_tokens: 4 };
        let distillation = Distillation { weight: 1.0, clip_max: None, top: Some(top_of) };
        let output = scored.loss([&teacher, &top], None, distillation);
        let largest = output.dtop.unwrap().abs().max().double_value(&[]);
        let bound = if [0.0, 1.0].contains(&alpha) { 0.0 } else { 1e-7 };
        assert!(largest <= bound && output.loss.double_value(&[]).abs() <= 1e-6, "{alpha}, {adds_tail}: {largest}");
    }
}
