//! Speculative decoding on a GPU: with `strict`, completions equal those without draft tokens bit for bit; otherwise up to near ties.

use colo_grpo::internal::config::Speculation;
use colo_grpo::internal::rollout::{DraftInjection, EngineOptions, EngineStats, SpeculationOptions};
use colo_grpo::internal::types::{Prompt, RolloutGroup, SamplingParams};

use super::{Model, SMALL, completions, prompts};
use crate::rollout::speculation::{DraftKind, drafting};

fn generate(
    model: &Model,
    options: &EngineOptions,
    injection: Option<DraftInjection>,
    prompts: &[Prompt],
    params: &SamplingParams,
) -> (Vec<RolloutGroup>, EngineStats) {
    let mut engine = model.engine(options);
    injection.into_iter().for_each(|injection| engine.inject_drafts(injection));
    let mut served = model.served_by(engine);
    served.with_engine(|rollout| Ok((rollout.generate(prompts, params, |_| ())?, *rollout.stats()))).unwrap()
}

/// Token ids and bits of log-probabilities of all completions.
fn bits(groups: &[RolloutGroup]) -> Vec<(Vec<u32>, Vec<u32>)> {
    completions(groups).map(|(ids, logprobs)| (ids.to_vec(), logprobs.map(f32::to_bits).collect())).collect()
}

fn cases() -> [SamplingParams; 3] {
    let params = SamplingParams { num_generations: 3, max_completion_length: 60, ..SamplingParams::default() };
    [
        params.clone(),
        SamplingParams { temperature: 0.0, repetition_penalty: 1.2, ..params.clone() },
        SamplingParams { top_p: 0.9, top_k: 50, repetition_penalty: 1.3, ..params },
    ]
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_draft_tokens_change_no_bit_of_strict_steps() {
    let model = Model::new(SMALL);
    let strict = EngineOptions { strict: true, ..model.options(256) };
    for params in cases() {
        let (expected, without) = generate(&model, &strict, None, &prompts(5, 120), &params);
        for kind in DraftKind::ALL {
            let injection = kind.of(&expected, model.spec.vocab_size);
            let (got, stats) = generate(&model, &drafting(strict.clone()), injection, &prompts(5, 120), &params);
            assert_eq!(bits(&got), bits(&expected), "{kind:?} {params:?}");
            match kind {
                DraftKind::Right => assert!(3 * stats.num_steps < without.num_steps, "{stats:?} {without:?}"),
                DraftKind::Wrong => assert_eq!(stats.num_accepted_tokens, 0),
                DraftKind::Mixed | DraftKind::Ngram => {}
            }
        }
    }
}

/// Steps with other numbers of rows round differently, so that a few near ties are decided differently and the text after them changes.
#[test]
#[ignore = "needs a GPU"]
fn gpu_draft_tokens_change_few_completions_without_strict() {
    let model = Model::new(SMALL);
    let options = model.options(256);
    let params = cases()[0].clone();
    let (expected, _) = generate(&model, &options, None, &prompts(9, 120), &params);
    let (again, _) =
        generate(&model, &EngineOptions { max_num_seqs: 5, ..options.clone() }, None, &prompts(9, 120), &params);
    let differing = |got: &[RolloutGroup]| {
        completions(got).zip(completions(&expected)).filter(|((own, _), (others, _))| own != others).count()
    };
    let of_batch = differing(&again);
    for injection in [Some(DraftInjection::new(|_, _, _, most| vec![3; most])), None] {
        let (got, stats) = generate(&model, &drafting(options.clone()), injection, &prompts(9, 120), &params);
        let of_drafts = differing(&got);
        println!("{of_drafts} of 27 completions differ with drafts, {of_batch} in another batch; {stats:?}");
        assert!(of_drafts <= 2 * of_batch + 6, "{of_drafts} differ, {of_batch} in another batch");
    }
}

/// With `auto`, an engine switches between normal steps and steps with draft tokens. Tokens of strict steps do not change.
#[test]
#[ignore = "needs a GPU"]
fn gpu_automatic_speculation_changes_no_bit_of_strict_steps() {
    let model = Model::new(SMALL);
    let strict = EngineOptions { strict: true, ..model.options(512) };
    let speculation = SpeculationOptions { method: Speculation::Auto, num_tokens: 7 };
    // Greedy completions of random weights repeat themselves.
    let params = SamplingParams {
        num_generations: 1,
        temperature: 0.0,
        max_completion_length: 300,
        ..SamplingParams::default()
    };
    let (expected, without) = generate(&model, &strict, None, &prompts(4, 60), &params);
    let auto = EngineOptions { speculation, ..strict };
    let (got, stats) = generate(&model, &auto, None, &prompts(4, 60), &params);
    println!("auto: {stats:?}; without: {without:?}");
    assert_eq!(bits(&got), bits(&expected));
}
