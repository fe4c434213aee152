use super::*;
use crate::ranks::SingleRank;

const VOCAB: usize = 13;

/// Samples with a vocabulary that is split at `bounds`, as the ranks of a group would.
fn sample(bounds: &[usize], logits: &[f32], draws: &[Draw]) -> Result<Vec<Sampled>> {
    let tp = SingleRank::default();
    let sampler = |vocab: Range<usize>| Sampler { vocab, tp: &tp };
    let offers = bounds.windows(2).map(|bound| {
        let columns = |row: &[f32]| row[bound[0]..bound[1]].to_vec();
        let shard: Vec<f32> = logits.chunks(VOCAB).flat_map(columns).collect();
        decode(&encode(&sampler(bound[0]..bound[1]).offers(&shard, draws)))
    });
    let offers: Vec<_> = offers.collect();
    let of_draw = |index: usize| offers.iter().map(move |offers| &offers[index]);
    let whole = sampler(0..VOCAB);
    draws.iter().enumerate().map(|(index, draw)| whole.decide(draw, of_draw(index))).collect()
}

fn logits(row: u64) -> Vec<f32> {
    let mut logits = vec![0.0; VOCAB];
    RandomKey::new(7, 0).fill_normal(row, 0, &mut logits);
    logits.iter().map(|logit| logit * 2.0).collect()
}

fn draws(params: &SamplingParams, count: u64) -> Vec<Draw<'_>> {
    (0..count)
        .map(|prompt_id| Draw {
            row: 0,
            params,
            step: 0,
            prompt_id,
            sample: 3,
            token_ids: &[1, 5, 5],
            drafts: &[],
            allowed: None,
        })
        .collect()
}

/// softmax in f64 of the allowed logits.
fn softmax(values: &[f64]) -> Vec<f64> {
    let total: f64 = values.iter().map(|value| value.exp()).sum();
    values.iter().map(|value| value.exp() / total).collect()
}

/// Checks that samples follow `expected`: the chi-square is below its 99.99 % point for at most 12 degrees of freedom, and an id of probability 0 is
/// never sampled.
fn assert_distribution(params: &SamplingParams, expected: &[f64]) {
    let count = 20_000;
    let sampled = sample(&[0, VOCAB], &logits(0), &draws(params, count)).unwrap();
    let mut counts = [0.0; VOCAB];
    sampled.iter().for_each(|sampled| counts[sampled.token_id as usize] += 1.0);
    let mut chi_square = 0.0;
    for (id, (&got, &p)) in counts.iter().zip(expected).enumerate() {
        let want = p * count as f64;
        assert!(want > 0.0 || got == 0.0, "id {id} was drawn {got} times");
        chi_square += if want > 0.0 { (got - want).powi(2) / want } else { 0.0 };
    }
    assert!(chi_square < 39.1, "{chi_square}: {counts:?} against {expected:?}");
}

#[test]
fn samples_follow_the_softmax_at_the_temperature() {
    for temperature in [0.7, 1.0, 1.5] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        let values: Vec<f64> = logits(0).iter().map(|&logit| f64::from(logit) / f64::from(temperature)).collect();
        assert_distribution(&params, &softmax(&values));
    }
}

/// A reference for the filters by their definitions, on probabilities: min-p, then top-k, then top-p of what remains.
fn filtered(values: &[f64], params: &SamplingParams) -> Vec<f64> {
    let p = softmax(values);
    let max = p.iter().copied().fold(0.0, f64::max);
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
    order.retain(|&id| p[id] >= f64::from(params.min_p.unwrap_or(0.0)) * max);
    order.truncate(if params.top_k > 0 { params.top_k } else { usize::MAX });
    let mass: f64 = order.iter().map(|&id| p[id]).sum();
    let mut before = 0.0;
    order.retain(|&id| {
        let keep = before < f64::from(params.top_p) * mass;
        before += p[id];
        keep
    });
    let kept: f64 = order.iter().map(|&id| p[id]).sum();
    (0..p.len()).map(|id| if order.contains(&id) { p[id] / kept } else { 0.0 }).collect()
}

#[test]
fn top_k_top_p_and_min_p_match_their_definitions() {
    let base = SamplingParams { temperature: 1.3, ..SamplingParams::default() };
    let cases = [
        SamplingParams { top_k: 4, ..base.clone() },
        SamplingParams { top_p: 0.8, ..base.clone() },
        SamplingParams { top_p: 1e-6, ..base.clone() },
        SamplingParams { min_p: Some(0.1), ..base.clone() },
        SamplingParams { top_k: 6, top_p: 0.7, min_p: Some(0.05), ..base.clone() },
    ];
    for params in cases {
        let values: Vec<f64> = logits(0).iter().map(|&logit| f64::from(logit) / 1.3).collect();
        assert_distribution(&params, &filtered(&values, &params));
    }
}

#[test]
fn repetition_penalty_applies_once_and_not_to_logprobs() {
    let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() };
    let raw = logits(0);
    let penalised = |(id, &logit): (usize, &f32)| {
        let factor = if [1, 5].contains(&id) { if logit > 0.0 { 0.5 } else { 2.0 } } else { 1.0 };
        f64::from(logit) * factor
    };
    assert_distribution(&params, &softmax(&raw.iter().enumerate().map(penalised).collect::<Vec<_>>()));
    let p = softmax(&raw.iter().map(|&logit| f64::from(logit)).collect::<Vec<_>>());
    for sampled in sample(&[0, VOCAB], &raw, &draws(&params, 50)).unwrap() {
        assert!((f64::from(sampled.logprob) - p[sampled.token_id as usize].ln()).abs() < 1e-6);
    }
}

#[test]
fn sampling_from_a_sharded_vocabulary_gives_equal_tokens() {
    let base = SamplingParams::default();
    let cases = [
        base.clone(),
        SamplingParams { temperature: 0.0, ..base.clone() },
        SamplingParams { temperature: 0.6, repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { top_k: 3, ..base.clone() },
        SamplingParams { top_p: 0.9, min_p: Some(0.02), ..base.clone() },
    ];
    let logits: Vec<f32> = (0..40).flat_map(logits).collect();
    for params in cases {
        let draw = |row| Draw {
            row,
            params: &params,
            step: 0,
            prompt_id: 9,
            sample: row,
            token_ids: &[1, 2],
            drafts: &[],
            allowed: None,
        };
        let rows: Vec<Draw> = (0..40).map(draw).collect();
        let whole = sample(&[0, VOCAB], &logits, &rows).unwrap();
        for bounds in [&[0, 6, VOCAB][..], &[0, 3, 6, 9, VOCAB]] {
            let split = sample(bounds, &logits, &rows).unwrap();
            for (whole, split) in whole.iter().zip(&split) {
                assert_eq!(whole.token_id, split.token_id, "{params:?}");
                assert!((whole.logprob - split.logprob).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn requests_of_one_step_may_have_different_sampling_parameters() {
    let base = SamplingParams::default();
    let all = [
        SamplingParams { temperature: 0.0, ..base.clone() },
        SamplingParams { temperature: 0.6, repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { top_k: 3, ..base.clone() },
        SamplingParams { seed: 7, ..base },
    ];
    let logits: Vec<f32> = (0..4).flat_map(logits).collect();
    let draw = |row: usize| Draw {
        row,
        params: &all[row],
        step: 0,
        prompt_id: 9,
        sample: 0,
        token_ids: &[1, 2],
        drafts: &[],
        allowed: None,
    };
    let together = sample(&[0, 6, VOCAB], &logits, &[0, 1, 2, 3].map(draw)).unwrap();
    for (row, together) in together.iter().enumerate() {
        assert_eq!(sample(&[0, 6, VOCAB], &logits, &[draw(row)]).unwrap()[0], *together, "row {row}");
    }
}

/// With forbidden ids, samples, penalties and filters behave as if the distribution had only the allowed ids.
#[test]
fn masked_ids_have_no_influence_on_sampling() {
    let base = SamplingParams { top_logprobs: VOCAB, ..SamplingParams::default() };
    let ids = [1, 2, 5, 9, 11];
    let (allowed, raw) = (TokenMask::of_ids(&ids, VOCAB + 3), logits(0));
    let masked = |id: usize| if ids.contains(&(id as u32)) { f64::from(raw[id]) } else { f64::NEG_INFINITY };
    let p = softmax(&(0..VOCAB).map(masked).collect::<Vec<_>>());
    for params in [
        base.clone(),
        SamplingParams { temperature: 0.0, ..base.clone() },
        SamplingParams { top_k: 3, ..base.clone() },
        SamplingParams { top_p: 0.7, min_p: Some(0.1), repetition_penalty: 1.5, ..base },
    ] {
        let draws: Vec<Draw> =
            draws(&params, 200).into_iter().map(|draw| Draw { allowed: Some(&allowed), ..draw }).collect();
        let whole = sample(&[0, VOCAB], &raw, &draws).unwrap();
        assert!(params.temperature == 0.0 || whole.iter().any(|sampled| *sampled != whole[0]));
        for sampled in &whole {
            assert!(ids.contains(&sampled.token_id));
            assert!((f64::from(sampled.logprob) - p[sampled.token_id as usize].ln()).abs() < 1e-6);
            assert_eq!(sampled.top.len(), ids.len(), "no other has a probability");
        }
        // One of the shards has no allowed id.
        for (whole, split) in whole.iter().zip(sample(&[0, 6, 9, VOCAB], &raw, &draws).unwrap()) {
            assert_eq!(whole.token_id, split.token_id);
        }
    }
}

#[test]
fn top_logprobs_come_from_the_raw_distribution() {
    let raw = logits(0);
    for (temperature, count) in [(1.0, 1), (0.5, 4), (0.0, 3), (1.7, 20)] {
        let params = SamplingParams { temperature, top_logprobs: count, top_k: 2, ..SamplingParams::default() };
        let scale = if temperature == 0.0 { 1.0 } else { f64::from(temperature) };
        let p = softmax(&raw.iter().map(|&logit| f64::from(logit) / scale).collect::<Vec<_>>());
        let mut order: Vec<usize> = (0..VOCAB).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]));
        for bounds in [&[0, VOCAB][..], &[0, 3, 6, 9, VOCAB]] {
            let sampled = sample(bounds, &raw, &draws(&params, 1)).unwrap().remove(0);
            let top: Vec<usize> = sampled.top.iter().map(|top| top.token_id as usize).collect();
            assert_eq!(top, order[..count.min(VOCAB)]);
            for top in &sampled.top {
                assert!((f64::from(top.logprob) - p[top.token_id as usize].ln()).abs() < 1e-5);
                assert!(top.token_id != sampled.token_id || top.logprob == sampled.logprob);
            }
        }
    }
}

#[test]
fn greedy_sampling_takes_the_lowest_id_among_equal_logits() {
    let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let mut logits = vec![0.0; VOCAB];
    (logits[4], logits[9]) = (2.0, 2.0);
    for bounds in [&[0, VOCAB][..], &[0, 6, VOCAB]] {
        assert_eq!(sample(bounds, &logits, &draws(&params, 1)).unwrap()[0].token_id, 4);
    }
}

#[test]
fn nan_logits_are_an_error() {
    let mut logits = logits(0);
    logits[3] = f32::NAN;
    let params = SamplingParams::default();
    let failed = sample(&[0, 6, VOCAB], &logits, &draws(&params, 1));
    assert!(matches!(failed, Err(Error::NonFinite { .. })));
}
