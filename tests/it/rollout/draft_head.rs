//! Draft tokens from the model's own draft head: they change no token, and the engine's head computes the same as the trained one.

use colo_grpo::internal::config::Speculation;
use colo_grpo::internal::model::{BlockContext, ModelSpec, PackedMixer, ParamName, block_forward, draft_input};
use colo_grpo::internal::ops::embedding;
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::{EngineOptions, SpeculationOptions, kv_block_bytes};
use colo_grpo::internal::types::{Prompt, SamplingParams};
use tch::{Device, Kind, Tensor};

use super::setup::{Model, alone, golden, greedy, options, prompt, prompts, sampled, token_ids};
use super::speculation::{assert_equal, in_parts};
use crate::ranks;

fn with_head(name: &str) -> ModelSpec {
    ModelSpec::from_folder(golden(name)).unwrap().with_draft_head()
}

fn by_head(num_tokens: usize, options: &EngineOptions) -> EngineOptions {
    EngineOptions { speculation: SpeculationOptions { method: Speculation::Mtp, num_tokens }, ..options.clone() }
}

#[test]
fn draft_head_proposals_change_no_token() {
    for name in ["qwen3_5", "qwen3_next", "qwen3_5_moe"] {
        let model = Model::random(with_head(name), 5).spreading();
        let few_blocks = EngineOptions {
            kv_cache_bytes: 24 * kv_block_bytes(&model.spec, 1, 8, Kind::Float),
            max_num_batched_tokens: 11,
            ..options()
        };
        let penalised = SamplingParams { repetition_penalty: 1.3, top_k: 9, ..sampled() };
        for (options, params) in [(options(), sampled()), (few_blocks, penalised), (options(), greedy())] {
            let (expected, _) = model.generate(options.clone(), &prompts(7), &params);
            let (got, stats) = model.generate(by_head(3, &options), &prompts(7), &params);
            assert_equal(&got, &expected, 1e-4, &format!("{name} {params:?}"));
            assert!(stats.num_draft_tokens > stats.num_generated_tokens / 4, "{stats:?}");
        }
    }
}

/// Unfinished groups of a session also get draft tokens in the next session.
#[test]
fn a_draft_head_continues_kept_sequences() {
    let model = Model::random(with_head("qwen3_5"), 5).spreading();
    let (expected, _) = model.generate(options(), &prompts(6), &sampled());
    let mut engine = model.engine(by_head(2, &options()), alone()).keeping_sequences();
    let complete = in_parts(&model, &mut engine);
    assert_equal(&complete, &expected, 1e-4, "kept");
}

#[test]
fn two_ranks_use_a_draft_head_like_one() {
    ranks::run(2, "rollout::draft_head::two_ranks_use_a_draft_head_like_one", |world: World| {
        let model = Model::random(with_head("qwen3_5"), 5).spreading();
        let own = &prompts(8)[world.rank() * 4..(world.rank() + 1) * 4];
        let (expected, alone) = model.generate(by_head(3, &options()), &prompts(8), &sampled());
        let (got, stats) = model.generate_on(world.group(), by_head(3, &options()), own, &sampled());
        assert_eq!(token_ids(&got), token_ids(&expected[world.rank() * 4..(world.rank() + 1) * 4]));
        assert_eq!(stats.num_accepted_tokens, alone.num_accepted_tokens);
    });
}

/// Logits of a whole text, computed by the operations of training: the model's for the token after each position, and the draft head's, which begin
/// one token later.
fn logits_of(model: &Model, token_ids: &[u32]) -> [Tensor; 2] {
    let (spec, head) = (model.spec.draft_spec().unwrap(), model.draft_head.as_ref().unwrap());
    let ids: Vec<i64> = token_ids.iter().map(|&id| i64::from(id)).collect();
    let (ids, len) = (Tensor::from_slice(&ids), ids.len() as i64);
    let hidden = model.hidden(token_ids, &PackedMixer::new(&model.spec, &[0, len], Device::Cpu));
    let (hidden, _) = spec.norm().forward(&hidden, &model.head.final_norm).unwrap();
    let embedded = embedding::forward(&ids.narrow(0, 1, len - 1), &model.embedding.table).unwrap();
    let (x, _) = draft_input(&spec, head, &embedded, &hidden.narrow(0, 0, len - 1)).unwrap();
    let positions = Tensor::arange(len - 1, (Kind::Int64, Device::Cpu));
    let ropes = spec.ropes().rows(&positions, Kind::Float).unwrap();
    let mixer = PackedMixer::new(&spec, &[0, len - 1], Device::Cpu);
    let x = block_forward(&BlockContext::new(&spec, &ropes, None, None), 0, head, &x, &mixer, None).unwrap().0;
    let (x, _) = spec.norm().forward(&x, head.norm(ParamName::FinalNorm).unwrap()).unwrap();
    [hidden, x].map(|x| x.matmul(&model.output_table().tr()))
}

/// The draft head's greedy tokens for the positions from the third token on.
fn expected_drafts(model: &Model, token_ids: &[u32]) -> Vec<u32> {
    let [_, of_head] = logits_of(model, token_ids);
    Vec::<i64>::try_from(of_head.argmax(1, false)).unwrap().into_iter().map(|id| id as u32).collect()
}

/// Mean acceptance rate of single draft tokens in a rollout at temperature 1.
#[derive(Debug)]
pub struct DraftAgreement {
    pub num_drafts: usize,
    /// Share of accepted tokens if draft and sample use the same noise.
    pub coupled: f64,
    /// 1 - TV of the probabilities of model and draft head: the rate of rejection sampling.
    pub by_rejection: f64,
    /// (1 - TV) / (1 + TV), the lower bound of `coupled`.
    pub least: f64,
}

impl DraftAgreement {
    pub fn of(model: &Model, prompts: &[Prompt], options: &EngineOptions, params: &SamplingParams) -> Self {
        let (groups, stats) = model.generate(by_head(1, options), prompts, params);
        let (mut num_drafts, mut by_rejection, mut least) = (0, 0.0, 0.0);
        for group in &groups {
            for completion in &group.completions {
                let tokens = [&group.prompt.token_ids[..], &completion.token_ids].concat();
                let probabilities = logits_of(model, &tokens).map(|logits| logits.softmax(1, Kind::Double));
                let [own, of_head] = probabilities;
                let own = own.narrow(0, 1, of_head.size()[0]);
                let equal = own.minimum(&of_head).sum_dim_intlist([1i64].as_slice(), false, Kind::Double);
                let equal: Vec<f64> = Vec::try_from(equal).unwrap();
                for &share in &equal[group.prompt.token_ids.len() - 1..tokens.len() - 2] {
                    num_drafts += 1;
                    by_rejection += share;
                    least += share / (2.0 - share);
                }
            }
        }
        let of_drafts = |sum: f64| sum / num_drafts as f64;
        Self {
            num_drafts: stats.num_draft_tokens,
            coupled: stats.num_accepted_tokens as f64 / stats.num_draft_tokens as f64,
            by_rejection: of_drafts(by_rejection),
            least: of_drafts(least),
        }
    }

    pub fn check(&self) {
        let noise = 4.0 * (0.25 / self.num_drafts as f64).sqrt();
        assert!(self.coupled > self.least - noise && self.coupled < self.by_rejection + noise, "{self:?}");
    }
}

#[test]
fn coupled_draft_sampling_accepts_at_the_theoretical_rate() {
    let model = Model::random(ModelSpec { vocab_size: 5, ..with_head("qwen3_5") }, 3);
    let asked: Vec<_> =
        (0..8).map(|id| prompt(id, (0..3 + 2 * id).map(|n| ((n * n + id) % 5) as u32).collect())).collect();
    let params = SamplingParams { num_generations: 4, max_completion_length: 60, ..SamplingParams::default() };
    let agreement = DraftAgreement::of(&model, &asked, &options(), &params);
    println!("{agreement:?}");
    agreement.check();
    assert!(agreement.least > 0.2 && agreement.by_rejection < 0.95, "{agreement:?}");
}

/// With one draft token per step, it is accepted exactly where the trained head predicts the token: hidden states, positions and keys equal those of
/// training.
#[test]
fn an_engine_drafts_the_tokens_of_the_trained_head() {
    let spec = ModelSpec { vocab_size: 5, ..with_head("qwen3_5") };
    let model = Model::random(spec, 3);
    let params = SamplingParams { max_completion_length: 90, ..greedy() };
    let asked: Vec<_> =
        (0..6).map(|id| prompt(id, (0..3 + 2 * id).map(|n| ((n * n + id) % 5) as u32).collect())).collect();
    for options in [options(), EngineOptions { max_num_batched_tokens: 4, ..options() }] {
        let (groups, stats) = model.generate(by_head(1, &options), &asked, &params);
        let (mut expected, mut num_drafts) = (0, 0);
        for group in &groups {
            let tokens = [&group.prompt.token_ids[..], &group.completions[0].token_ids].concat();
            let drafts = expected_drafts(&model, &tokens);
            let mut newest = group.prompt.token_ids.len(); // the place of the token that a step begins with
            while newest + 2 < tokens.len() {
                num_drafts += 1;
                let is_drawn = drafts[newest - 1] == tokens[newest + 1];
                expected += usize::from(is_drawn);
                newest += 1 + usize::from(is_drawn);
            }
        }
        assert_eq!((stats.num_accepted_tokens, stats.num_draft_tokens), (expected, num_drafts));
        assert!(expected > 40 && expected + 40 < num_drafts, "{expected} of {num_drafts}");
    }
}
