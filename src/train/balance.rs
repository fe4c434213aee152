//! A generation batch's sequences spread over ranks by cost: every rank learns the whole batch and takes its part.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::pack::{Sequence, prompt_groups};
use crate::dist::{Collective, all_gather_bytes};
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::types::RoutedExperts;

/// Attention's products reach about half of the rate of the others.
const ATTENTION_WEIGHT: f64 = 2.0;

/// The sequences of all ranks by their places, those of one place in rank order; collective over `group`.
///
/// # Errors
/// The errors of [`Collective`].
pub fn gather_sequences(own: &[Sequence], group: &dyn Collective) -> Result<Vec<Sequence>> {
    if group.size() == 1 {
        return Ok(own.to_vec());
    }
    let words: Vec<u32> = own.iter().flat_map(encode).collect();
    let mut bytes = Vec::with_capacity(4 * words.len());
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    let mut all = Vec::new();
    for bytes in all_gather_bytes(group, &bytes)? {
        let of_rank: Vec<u32> =
            bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
        let mut words = &of_rank[..];
        while !words.is_empty() {
            all.push(decode(&mut words).ok_or_else(|| torn(group))?);
        }
    }
    all.sort_by_key(|sequence| sequence.place); // a stable sort
    Ok(all)
}

/// The part of `all` that this rank trains on: the largest differencing method (Karmarkar and Karp, 1982) on the costs of
/// groups with one prompt, which stay together, or of single sequences. Masked ones have no cost; the first rank has them, last,
/// to count them. All ranks
/// find the same parts; no part is more than the costliest group dearer than another.
pub fn balanced_share(
    all: &[Sequence],
    spec: &ModelSpec,
    share_prompts: bool,
    rank: usize,
    num_ranks: usize,
) -> Vec<Sequence> {
    let (masked, unmasked): (Vec<usize>, Vec<usize>) = (0..all.len()).partition(|&index| all[index].masked);
    let groups = prompt_groups(all, unmasked, share_prompts);
    let costs: Vec<f64> = groups.iter().map(|group| cost(all, group, spec)).collect();
    let own = partition(&costs, num_ranks).swap_remove(rank);
    let own = own.into_iter().flat_map(|group| &groups[group]);
    own.chain(masked.iter().filter(|_| rank == 0)).map(|&index| all[index].clone()).collect()
}

/// Forward and backward of a group in tokens without attention: products take 6 operations a token and weight, attention
/// 12 a layer, head width and pair of query and key.
fn cost(all: &[Sequence], group: &[usize], spec: &ModelSpec) -> f64 {
    let of_token = 6 * spec.num_active_params() + spec.training_flop_per_token();
    let pair_cost = ATTENTION_WEIGHT * spec.training_flop_per_pair() as f64 / of_token as f64;
    let prompt_len = all[group[0]].prompt_len as f64;
    let of_prompt = prompt_len + pair_cost * prompt_len * prompt_len / 2.0;
    let of_completion = |index: &usize| {
        let len = all[*index].completion_len() as f64;
        len + pair_cost * len * (prompt_len + len / 2.0)
    };
    of_prompt + group.iter().map(of_completion).sum::<f64>()
}

/// Parts of a differencing: (cost, members) of each, dearest first.
type Partition = Vec<(f64, Vec<usize>)>;

/// Indexes into `costs` of each of `num_parts` parts, in ascending order. Repeatedly joins the two partial partitions that
/// are most uneven, the dearest part of one with the cheapest of the other.
fn partition(costs: &[f64], num_parts: usize) -> Vec<Vec<usize>> {
    let uneven = |parts: &Partition| ordered(parts[0].0 - parts[num_parts - 1].0);
    let mut partitions: Vec<Partition> = (0..costs.len())
        .map(|index| {
            let mut parts = vec![(0.0, Vec::new()); num_parts];
            parts[0] = (costs[index], vec![index]);
            parts
        })
        .collect();
    let mut most_uneven: BinaryHeap<(u64, Reverse<usize>)> =
        partitions.iter().enumerate().map(|(at, parts)| (uneven(parts), Reverse(at))).collect();
    while let Some((_, Reverse(first))) = most_uneven.pop() {
        let Some((_, Reverse(second))) = most_uneven.pop() else {
            let parts = partitions.swap_remove(first);
            return parts.into_iter().map(|(_, members)| sorted(members)).collect();
        };
        let cheap = std::mem::take(&mut partitions[second]);
        for (part, (cost, members)) in partitions[first].iter_mut().zip(cheap.into_iter().rev()) {
            part.0 += cost;
            part.1.extend(members);
        }
        partitions[first].sort_by(|a, b| b.0.total_cmp(&a.0));
        most_uneven.push((uneven(&partitions[first]), Reverse(first)));
    }
    vec![Vec::new(); num_parts]
}

/// A number's order as bits; costs are not negative.
fn ordered(cost: f64) -> u64 {
    cost.max(0.0).to_bits()
}

fn sorted(mut members: Vec<usize>) -> Vec<usize> {
    members.sort_unstable();
    members
}

/// Words: tokens, prompt length, advantage, flags, place, ids, the loss mask if there is context, each of the log-probabilities
/// that there are, the ages of tokens if there are any, experts two a word.
fn encode(sequence: &Sequence) -> Vec<u32> {
    let Sequence { rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, .. } = sequence;
    let logprobs = [rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs];
    let flags = logprobs.iter().rev().fold(u32::from(sequence.masked), |flags, it| 2 * flags + u32::from(it.is_some()));
    let has_context = sequence.loss_mask.contains(&false);
    let flags = flags | u32::from(has_context) << 5 | u32::from(sequence.token_ages.is_some()) << 6;
    let mask = sequence.loss_mask.iter().filter(|_| has_context).map(|is_scored| u32::from(*is_scored));
    let Sequence { token_ids, prompt_len, advantage, place, .. } = sequence;
    let head = [token_ids.len() as u32, *prompt_len as u32, advantage.to_bits(), flags, *place];
    let bits = logprobs.into_iter().flatten().flatten().map(|logprob| logprob.to_bits());
    let RoutedExperts { per_token, experts } = &sequence.routed_experts;
    let pairs = experts.chunks(2).map(|pair| pair.iter().rev().fold(0, |word, &it| word << 16 | u32::from(it)));
    let routed = [*per_token as u32, experts.len() as u32].into_iter().chain(pairs);
    let ages = sequence.token_ages.iter().flatten().copied();
    head.into_iter().chain(token_ids.iter().copied()).chain(mask).chain(bits).chain(ages).chain(routed).collect()
}

/// Takes off what [`encode`] wrote of a sequence; `None` if it is cut short.
fn decode(words: &mut &[u32]) -> Option<Sequence> {
    let mut take = |count: usize| {
        let (taken, rest) = words.split_at_checked(count)?;
        *words = rest;
        Some(taken)
    };
    let &[num_tokens, prompt_len, advantage, flags, place] = take(5)? else { return None };
    let (num_tokens, prompt_len, advantage) = (num_tokens as usize, prompt_len as usize, f32::from_bits(advantage));
    let token_ids = take(num_tokens)?.to_vec();
    let loss_mask: Vec<bool> = match flags >> 5 & 1 {
        0 => vec![true; num_tokens - prompt_len],
        _ => take(num_tokens - prompt_len)?.iter().map(|&word| word == 1).collect(),
    };
    let num_scored = loss_mask.iter().filter(|is_scored| **is_scored).count();
    let mut logprobs = [const { None }; 4];
    for (bit, field) in logprobs.iter_mut().enumerate() {
        if flags >> bit & 1 == 1 {
            *field = Some(take(num_scored)?.iter().map(|&bits| f32::from_bits(bits)).collect());
        }
    }
    let token_ages = if flags >> 6 & 1 == 1 { Some(take(num_scored)?.to_vec()) } else { None };
    let &[per_token, num_experts] = take(2)? else { return None };
    let pairs = take((num_experts as usize).div_ceil(2))?;
    let mut experts = Vec::with_capacity(2 * pairs.len());
    pairs.iter().for_each(|&pair| experts.extend_from_slice(&[pair as u16, (pair >> 16) as u16]));
    experts.truncate(num_experts as usize);
    let routed_experts = RoutedExperts { per_token: per_token as usize, experts };
    let [rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs] = logprobs;
    let masked = flags >> 4 & 1 == 1;
    let head = Sequence { advantage, masked, place, token_ages, ..Sequence::of_tokens(token_ids, prompt_len) };
    Some(Sequence { loss_mask, rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, routed_experts, ..head })
}

fn torn(group: &dyn Collective) -> Error {
    Error::Collective {
        op: "all_gather",
        group: group.name().to_owned(),
        rank: group.ranks()[group.rank()],
        message: "a rank's sequences arrived cut short".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pack::tests::sequence;
    use super::*;

    #[test]
    fn parts_are_even_and_hold_everything_once() {
        assert_eq!(partition(&[8.0, 7.0, 6.0, 5.0, 4.0], 2), [[1, 3, 4].to_vec(), [0, 2].to_vec()]); // 16 and 14
        let costs: Vec<f64> = (0..61).map(|i| f64::from(i * i * 7 % 113 + 1)).collect();
        for num_parts in [1, 2, 3, 8] {
            let parts = partition(&costs, num_parts);
            assert_eq!(sorted(parts.concat()), (0..61).collect::<Vec<_>>());
            let sums = parts.iter().map(|part| part.iter().map(|&index| costs[index]).sum::<f64>());
            let (low, high) = sums.fold((f64::MAX, 0.0f64), |(low, high), sum| (low.min(sum), high.max(sum)));
            assert!(high / low < 1.01, "{num_parts} parts of {low} to {high}");
        }
        assert_eq!(partition(&[1.0], 3), [vec![0], vec![], vec![]]);
        assert_eq!(partition(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
    }

    #[test]
    fn sequences_survive_the_way() {
        let full = Sequence {
            masked: true,
            place: 7,
            old_logprobs: Some(vec![-0.5, f32::MIN_POSITIVE]),
            ref_logprobs: Some(vec![-1.0, -2.0]),
            teacher_logprobs: Some(vec![-3.0, -0.0]),
            token_ages: Some(vec![3, 0]),
            routed_experts: RoutedExperts { per_token: 2, experts: vec![0, 4095, 7, 7] },
            ..sequence(4, 2)
        };
        let turns =
            Sequence { loss_mask: vec![true, false, true], rollout_logprobs: Some(vec![-1.0, -2.0]), ..sequence(5, 2) };
        let odd =
            Sequence { routed_experts: RoutedExperts { per_token: 3, experts: vec![1, 2, 65_535] }, ..sequence(1, 1) };
        for sent in [sequence(7, 3), full, turns, odd, Sequence { rollout_logprobs: None, ..sequence(2, 1) }] {
            let words = encode(&sent);
            let mut left = &words[..];
            assert_eq!((decode(&mut left).as_ref(), left.len()), (Some(&sent), 0));
            let cut = |len: usize| decode(&mut &words[..len]);
            assert!((0..words.len()).all(|len| cut(len).is_none()));
        }
    }
}
