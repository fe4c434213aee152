//! Closed batches: the ranks of a tensor-parallel group gather all their requests before the first is computed.

use std::sync::Arc;

use super::limits::StepLimits;
use super::request::{ModelIds, Request, refuse};
use crate::error::Result;
use crate::ranks::{Collective, all_gather_json};
use crate::types::{RolloutGroup, SamplingParams, Trajectory};

/// The rank of the tensor-parallel group that submitted a request, and the index of the request on that rank.
pub(super) type Owner = (usize, usize);

/// A request as ranks exchange it: prompt id, prompt token ids, first step, completions.
type SentRequest = (u64, Vec<u32>, u64, Vec<Trajectory>);

/// Gathers the groups of all ranks and returns, identically on each rank, the requests and how many groups to complete in total. Requests are in rank
/// order, but groups beyond a rank's own number to complete come last. Collective.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank together, if ranks disagree on the parameters, or if a request is not
/// supported by an engine with these `limits` and a model with these `ids`.
pub(super) fn exchange<'g>(
    groups: impl IntoIterator<Item = &'g RolloutGroup>,
    num_groups: usize,
    params: &SamplingParams,
    (ids, limits): (ModelIds, &StepLimits),
    tp: &dyn Collective,
) -> Result<(Vec<(Owner, Request)>, usize)> {
    let shared_params = Arc::new(params.clone());
    let sent = groups.into_iter().map(|RolloutGroup { prompt, first_step, completions }| {
        (prompt.id, &prompt.token_ids, first_step, completions) // the fields of [`SentRequest`]
    });
    let own = (format!("{params:?}"), num_groups, sent.collect::<Vec<_>>());
    let all: Vec<(String, usize, Vec<SentRequest>)> = all_gather_json(tp, "gather requests", &own)?;
    let (mut requests, mut surplus, mut num_groups) = (Vec::new(), Vec::new(), 0);
    let params_of_first = all[0].0.clone();
    for (rank, (theirs, to_complete, groups)) in all.into_iter().enumerate() {
        if theirs != params_of_first {
            return refuse(
                format!(
                    "equal sampling parameters on all ranks of an engine: rank 0 has {params_of_first}, rank {rank} \
                     differs"
                ),
                theirs,
            );
        }
        num_groups += to_complete;
        let request = |(index, (prompt_id, token_ids, first_step, begun))| {
            let params = Arc::clone(&shared_params);
            ((rank, index), Request { prompt_id, token_ids, first_step, first_sample: 0, params, begun, adapter: None })
        };
        let mut groups = groups.into_iter().enumerate().map(request);
        requests.extend(groups.by_ref().take(to_complete));
        surplus.extend(groups);
    }
    requests.extend(surplus);
    params.check()?; // also when there are no requests
    requests.iter().try_for_each(|(_, request)| request.check(ids, 0, limits))?;
    if num_groups > requests.len() {
        let expected = format!("a number of groups to complete of at most {}, the number of requests", requests.len());
        return refuse(expected, num_groups.to_string());
    }
    Ok((requests, num_groups))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;
    use crate::types::{Prompt, RoutedExperts};

    const IDS: ModelIds = ModelIds { vocab_size: 10, num_experts: 4, experts_per_token: 2 };
    const LIMITS: StepLimits = StepLimits {
        num_blocks: 99,
        block_size: 4,
        max_num_seqs: 9,
        max_decode_rows: 9,
        max_num_batched_tokens: 99,
        max_model_length: 64,
        has_states: false,
        num_stages: 1,
        runs_ahead: false,
    };

    fn fresh(id: u64, token_ids: &[u32]) -> RolloutGroup {
        let token_ids = token_ids.to_vec();
        RolloutGroup::new(Prompt { id, text: String::new(), token_ids, columns: Arc::default() })
    }

    #[test]
    fn all_ranks_get_the_prompts_of_all_in_rank_order() {
        let lists = testing::threads(3, |tp| {
            let own: Vec<_> = (0..tp.rank() as u64).map(|n| fresh(n, &[n as u32, 9])).collect();
            let in_order = exchange(&own, own.len(), &SamplingParams::default(), (IDS, &LIMITS), tp.as_ref()).unwrap();
            assert_eq!(in_order.1, 3);
            let two = [fresh(0, &[1]), fresh(1, &[2])];
            let (requests, num_groups) =
                exchange(&two, 1, &SamplingParams::default(), (IDS, &LIMITS), tp.as_ref()).unwrap();
            let owners: Vec<_> = requests.iter().map(|(owner, _)| *owner).collect();
            assert_eq!((owners, num_groups), (vec![(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)], 3));
            in_order.0
        });
        let owners: Vec<_> = lists[0].iter().map(|(owner, request)| (*owner, request.token_ids.clone())).collect();
        assert_eq!(owners, [((1, 0), vec![0, 9]), ((2, 0), vec![0, 9]), ((2, 1), vec![1, 9])]);
        assert!(lists.iter().all(|list| *list == lists[0]));
    }

    #[test]
    fn an_invalid_request_of_one_rank_is_an_error_on_all() {
        let messages = testing::threads(2, |tp| {
            let seed = tp.rank() as u64;
            let params = SamplingParams { seed, ..SamplingParams::default() };
            let seeds = exchange(&[], 0, &params, (IDS, &LIMITS), tp.as_ref()).unwrap_err().to_string();
            let own = [fresh(4, &[3 + 7 * tp.rank() as u32])];
            let ids =
                exchange(&own, 1, &SamplingParams::default(), (IDS, &LIMITS), tp.as_ref()).unwrap_err().to_string();
            (seeds, ids)
        });
        for (seeds, ids) in messages {
            assert!(seeds.contains("seed: 0") && seeds.contains("seed: 1"), "{seeds}");
            assert!(ids.contains("below 10, got 10 in prompt 4"), "{ids}");
        }
    }

    #[test]
    fn unfinished_groups_to_continue_are_validated() {
        let tp = crate::ranks::SingleRank::default();
        let params = SamplingParams { num_generations: 2, step: 5, ..SamplingParams::default() };
        let refusal = |group, count| exchange(&[group], count, &params, (IDS, &LIMITS), &tp).unwrap_err().to_string();
        let of_tokens = |token_ids: Vec<u32>| {
            let mut begun = Trajectory::default();
            begun.push_context(&token_ids, 3);
            begun
        };
        let begun = |completions| RolloutGroup { first_step: 3, completions, ..fresh(1, &[1]) };
        assert!(refusal(begun(vec![of_tokens(vec![4])]), 1).contains("num_generations = 2"));
        assert!(refusal(begun(vec![of_tokens(vec![10]), of_tokens(vec![])]), 1).contains("below 10, got 10"));
        assert!(refusal(fresh(1, &[1]), 2).contains("at most 1, the number of requests"));
        let routed = |per_token, experts: &[u16]| {
            let routed_experts = RoutedExperts { per_token, experts: experts.to_vec().into() };
            vec![Trajectory { routed_experts, ..of_tokens(vec![4]) }; 2]
        };
        let expected = "2 recorded experts per token, with indices below 4, got";
        for (per_token, experts, got) in
            [(2, &[0, 4], "2 per token, with index 4 in prompt 1"), (1, &[0, 3], "1 per token in prompt 1")]
        {
            let message = refusal(begun(routed(per_token, experts)), 1);
            assert!(message.contains(&format!("{expected} {got}")), "{message}");
        }
        let groups = [begun(routed(2, &[0, 3])), fresh(2, &[1])];
        let (requests, _) = exchange(&groups, 1, &params, (IDS, &LIMITS), &tp).unwrap();
        assert_eq!(requests.iter().map(|(_, request)| request.first_step).collect::<Vec<_>>(), [3, 0]);
    }
}
