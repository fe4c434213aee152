//! The prompts of all ranks of a tensor-parallel group, which they generate from together.

use crate::dist::{Collective, all_gather_bytes};
use crate::error::{Error, Result};
use crate::types::{Prompt, SamplingParams};

/// A prompt as every rank of the group knows it.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    pub(super) prompt_id: u64,
    pub(super) token_ids: Vec<u32>,
    /// Rank of the group that brought it, and its index there.
    pub(super) owner: (usize, usize),
}

/// All ranks' prompts in rank order, the same list everywhere. Collective.
///
/// # Errors
/// [`Error::InvalidArgument`], on every rank together, when ranks disagree on the parameters or on what may be sampled
/// from: an id outside the vocabulary, or parameters out of range.
pub(super) fn exchange(
    prompts: &[Prompt],
    params: &SamplingParams,
    vocab_size: usize,
    tp: &dyn Collective,
) -> Result<Vec<Request>> {
    let own: Vec<(u64, &[u32])> = prompts.iter().map(|prompt| (prompt.id, prompt.token_ids.as_slice())).collect();
    let own = serde_json::to_vec(&(format!("{params:?}"), own)).map_err(|error| unreadable(&error))?;
    let mut requests = Vec::new();
    let mut params_of_first = None;
    for (rank, bytes) in all_gather_bytes(tp, &own)?.iter().enumerate() {
        let (theirs, prompts): (String, Vec<(u64, Vec<u32>)>) =
            serde_json::from_slice(bytes).map_err(|error| unreadable(&error))?;
        let first = params_of_first.get_or_insert_with(|| theirs.clone());
        if *first != theirs {
            return refuse(format!("the sampling parameters of rank 0 ({first}) on rank {rank}"), theirs);
        }
        requests.extend(prompts.into_iter().enumerate().map(|(index, (prompt_id, token_ids))| Request {
            prompt_id,
            token_ids,
            owner: (rank, index),
        }));
    }
    check_params(params)?;
    for request in &requests {
        if let Some(id) = request.token_ids.iter().find(|&&id| id as usize >= vocab_size) {
            return refuse(format!("token ids below {vocab_size}"), format!("{id} in prompt {}", request.prompt_id));
        }
    }
    Ok(requests)
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

    fn prompt(id: u64, token_ids: &[u32]) -> Prompt {
        Prompt { id, text: String::new(), token_ids: token_ids.to_vec(), columns: Arc::default() }
    }

    #[test]
    fn every_rank_gets_all_prompts_in_rank_order() {
        let lists = testing::threads(3, |tp| {
            let own: Vec<Prompt> = (0..tp.rank() as u64).map(|n| prompt(n, &[n as u32, 9])).collect();
            exchange(&own, &SamplingParams::default(), 10, tp.as_ref()).unwrap()
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
            let seeds = exchange(&[], &params, 10, tp.as_ref()).unwrap_err().to_string();
            let own = [prompt(4, &[3 + 7 * tp.rank() as u32])];
            let ids = exchange(&own, &SamplingParams::default(), 10, tp.as_ref()).unwrap_err().to_string();
            (seeds, ids)
        });
        for (seeds, ids) in messages {
            assert!(seeds.contains("seed: 0") && seeds.contains("seed: 1"), "{seeds}");
            assert!(ids.contains("below 10, got 10 in prompt 4"), "{ids}");
        }
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
