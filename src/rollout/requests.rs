//! What all ranks of a tensor-parallel group bring to generate together.

use crate::dist::{Collective, all_gather_bytes};
use crate::error::{Error, Result};
use crate::types::{SamplingParams, UnfinishedCompletion, UnfinishedGroup};

/// A prompt, and what has been sampled of its completions, as every rank of the group knows it.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    pub(super) prompt_id: u64,
    pub(super) token_ids: Vec<u32>,
    /// Step at which it is, or was, first scheduled.
    pub(super) step: u64,
    /// None if nothing is sampled yet.
    pub(super) completions: Vec<UnfinishedCompletion>,
    /// Rank of the group that brought it, and its index there.
    pub(super) owner: (usize, usize),
}

/// A request on its way: prompt's id and tokens, first step, completions.
type Sent = (u64, Vec<u32>, u64, Vec<UnfinishedCompletion>);

/// All ranks' groups in rank order, each rank's surplus behind all others, and how many to complete in all; the same
/// everywhere. Collective.
///
/// # Errors
/// [`Error::InvalidArgument`], on every rank together, when ranks disagree on the parameters or on what may be sampled
/// from: an id outside the vocabulary, or parameters out of range.
pub(super) fn exchange(
    groups: &[UnfinishedGroup],
    num_groups: usize,
    params: &SamplingParams,
    vocab_size: usize,
    tp: &dyn Collective,
) -> Result<(Vec<Request>, usize)> {
    let sent = groups.iter().map(|UnfinishedGroup { prompt, first_step, completions }| {
        let step = if completions.is_empty() { &params.step } else { first_step };
        (prompt.id, &prompt.token_ids, step, completions) // a [`Sent`]
    });
    let own: Vec<_> = sent.collect();
    let own = serde_json::to_vec(&(format!("{params:?}"), num_groups, own)).map_err(|error| unreadable(&error))?;
    let (mut requests, mut surplus, mut num_groups) = (Vec::new(), Vec::new(), 0);
    let mut params_of_first = None;
    for (rank, bytes) in all_gather_bytes(tp, &own)?.iter().enumerate() {
        let (theirs, to_complete, groups): (String, usize, Vec<Sent>) =
            serde_json::from_slice(bytes).map_err(|error| unreadable(&error))?;
        let first = params_of_first.get_or_insert_with(|| theirs.clone());
        if *first != theirs {
            return refuse(format!("the sampling parameters of rank 0 ({first}) on rank {rank}"), theirs);
        }
        num_groups += to_complete;
        let request = |(index, (prompt_id, token_ids, step, completions))| {
            let owner = (rank, index);
            Request { prompt_id, token_ids, step, completions, owner }
        };
        let mut groups = groups.into_iter().enumerate().map(request);
        requests.extend(groups.by_ref().take(to_complete));
        surplus.extend(groups);
    }
    requests.extend(surplus);
    check_params(params)?;
    for request in &requests {
        let sampled = request.completions.iter().flat_map(|completion| &completion.token_ids);
        if let Some(id) = request.token_ids.iter().chain(sampled).find(|&&id| id as usize >= vocab_size) {
            return refuse(format!("token ids below {vocab_size}"), format!("{id} in prompt {}", request.prompt_id));
        }
        if !request.completions.is_empty() && request.completions.len() != params.num_generations {
            let expected = format!("num_generations = {} completions to go on with", params.num_generations);
            return refuse(expected, format!("{} of prompt {}", request.completions.len(), request.prompt_id));
        }
    }
    if num_groups > requests.len() {
        return refuse(
            format!("at most the {} groups that there are to complete", requests.len()),
            num_groups.to_string(),
        );
    }
    Ok((requests, num_groups))
}

fn check_params(params: &SamplingParams) -> Result<()> {
    let checks = [
        (params.num_generations >= 1, "num_generations of at least 1", params.num_generations.to_string()),
        (
            params.max_completion_length >= 1,
            "max_completion_length of at least 1",
            params.max_completion_length.to_string(),
        ),
        (
            is_within(params.temperature, 0.0..=f32::MAX),
            "a temperature of 0 (greedy) or more",
            params.temperature.to_string(),
        ),
        (is_within(params.top_p, f32::MIN_POSITIVE..=1.0), "top_p in (0, 1]", params.top_p.to_string()),
        (params.min_p.is_none_or(|p| is_within(p, 0.0..=1.0)), "min_p in [0, 1]", format!("{:?}", params.min_p)),
        (
            is_within(params.repetition_penalty, f32::MIN_POSITIVE..=f32::MAX),
            "a repetition_penalty above 0",
            params.repetition_penalty.to_string(),
        ),
        (
            params.spread_lengths.is_none_or(|spread| (1..=spread.longest).contains(&spread.shortest)),
            "spread_lengths of at least 1, the shortest first",
            format!("{:?}", params.spread_lengths),
        ),
        (params.stop.iter().all(|stop| !stop.is_empty()), "stop strings with text", format!("{:?}", params.stop)),
    ];
    match checks.into_iter().find(|(holds, ..)| !holds) {
        Some((_, expected, got)) => refuse(expected.to_owned(), got),
        None => Ok(()),
    }
}

fn is_within(value: f32, range: std::ops::RangeInclusive<f32>) -> bool {
    range.contains(&value)
}

fn refuse<T>(expected: String, got: String) -> Result<T> {
    Err(Error::InvalidArgument { op: "RolloutEngine::generate", expected, got })
}

fn unreadable(error: &serde_json::Error) -> Error {
    Error::InvalidArgument { op: "requests::exchange", expected: "prompts as JSON".into(), got: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dist::testing;
    use crate::types::Prompt;

    fn fresh(id: u64, token_ids: &[u32]) -> UnfinishedGroup {
        let token_ids = token_ids.to_vec();
        UnfinishedGroup::new(Prompt { id, text: String::new(), token_ids, columns: Arc::default() })
    }

    #[test]
    fn every_rank_gets_all_prompts_in_rank_order() {
        let lists = testing::threads(3, |tp| {
            let own: Vec<_> = (0..tp.rank() as u64).map(|n| fresh(n, &[n as u32, 9])).collect();
            let in_order = exchange(&own, own.len(), &SamplingParams::default(), 10, tp.as_ref()).unwrap();
            assert_eq!(in_order.1, 3);
            let two = [fresh(0, &[1]), fresh(1, &[2])];
            let (requests, num_groups) = exchange(&two, 1, &SamplingParams::default(), 10, tp.as_ref()).unwrap();
            let owners: Vec<_> = requests.iter().map(|request| request.owner).collect();
            assert_eq!((owners, num_groups), (vec![(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], 3));
            in_order.0
        });
        let owners: Vec<_> = lists[0].iter().map(|request| (request.owner, request.token_ids.clone())).collect();
        assert_eq!(owners, [((1, 0), vec![0, 9]), ((2, 0), vec![0, 9]), ((2, 1), vec![1, 9])]);
        assert!(lists.iter().all(|list| *list == lists[0]));
    }

    #[test]
    fn one_rank_s_mistake_is_every_rank_s_error() {
        let messages = testing::threads(2, |tp| {
            let seed = tp.rank() as u64;
            let params = SamplingParams { seed, ..SamplingParams::default() };
            let seeds = exchange(&[], 0, &params, 10, tp.as_ref()).unwrap_err().to_string();
            let own = [fresh(4, &[3 + 7 * tp.rank() as u32])];
            let ids = exchange(&own, 1, &SamplingParams::default(), 10, tp.as_ref()).unwrap_err().to_string();
            (seeds, ids)
        });
        for (seeds, ids) in messages {
            assert!(seeds.contains("seed: 0") && seeds.contains("seed: 1"), "{seeds}");
            assert!(ids.contains("below 10, got 10 in prompt 4"), "{ids}");
        }
    }

    #[test]
    fn groups_to_go_on_with_are_checked() {
        let tp = crate::dist::SingleRank::default();
        let params = SamplingParams { num_generations: 2, step: 5, ..SamplingParams::default() };
        let refusal = |group, count| exchange(&[group], count, &params, 10, &tp).unwrap_err().to_string();
        let of_tokens = |token_ids: Vec<u32>| UnfinishedCompletion {
            rollout_logprobs: vec![-1.0; token_ids.len()],
            token_ids,
            finish_reason: None,
        };
        let begun = |completions| UnfinishedGroup { first_step: 3, completions, ..fresh(1, &[1]) };
        assert!(refusal(begun(vec![of_tokens(vec![4])]), 1).contains("num_generations = 2"));
        assert!(refusal(begun(vec![of_tokens(vec![10]), of_tokens(vec![])]), 1).contains("below 10, got 10"));
        assert!(refusal(fresh(1, &[1]), 2).contains("at most the 1 groups"));
        let groups = [begun(vec![of_tokens(vec![4]); 2]), fresh(2, &[1])];
        let (requests, _) = exchange(&groups, 1, &params, 10, &tp).unwrap();
        assert_eq!(requests.iter().map(|request| request.step).collect::<Vec<_>>(), [3, 5]);
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        let base = SamplingParams::default();
        let wrong = [
            (SamplingParams { num_generations: 0, ..base.clone() }, "num_generations"),
            (SamplingParams { temperature: -1.0, ..base.clone() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..base.clone() }, "top_p"),
            (SamplingParams { min_p: Some(1.5), ..base.clone() }, "min_p"),
            (SamplingParams { repetition_penalty: 0.0, ..base.clone() }, "repetition_penalty"),
            (SamplingParams { stop: vec![String::new()], ..base.clone() }, "stop"),
        ];
        for (params, key) in wrong {
            assert!(check_params(&params).unwrap_err().to_string().contains(key), "{key}");
        }
        check_params(&SamplingParams { temperature: 0.0, min_p: Some(0.0), ..base }).unwrap();
    }
}
