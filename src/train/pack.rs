//! Packs sequences into micro-batches under a token budget.

use std::cmp::Reverse;

use tch::Device;

use super::micro_batch::MicroBatch;
use super::sequence::Sequence;
use crate::error::{Error, Result};
use crate::ranks::{Collective, ReduceOp};
use crate::torch;

/// How sequences become micro-batches.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    /// Token budget of a micro-batch. A longer sequence becomes a micro-batch of its own.
    pub max_tokens: usize,
    /// Whether neighbours with the same prompt compute it once. Not for a model whose attention window is shorter than a sequence.
    pub share_prompts: bool,
    /// Device of the micro-batches.
    pub device: Device,
}

/// Packs all sequences that are not masked by first-fit decreasing: the longest first (ties by index), each into the first micro-batch with space
/// under the budget. Neighbours that share a prompt stay together. If they exceed the budget, they are split, and the prompt is computed again for
/// each part. The result depends only on lengths, order and prompts.
///
/// # Errors
/// `InvalidArgument` for a sequence without prompt or completion, or with a wrong number of log-probabilities.
pub fn pack(sequences: &[Sequence], options: &PackOptions) -> Result<Vec<MicroBatch>> {
    sequences.iter().enumerate().try_for_each(|(index, sequence)| check(index, sequence))?;
    let packed = (0..sequences.len()).filter(|&index| !sequences[index].masked).collect();
    let groups = prompt_groups(sequences, packed, options.share_prompts);
    let groups: Vec<Vec<usize>> =
        groups.into_iter().flat_map(|group| within_budget(sequences, group, options.max_tokens)).collect();
    let lengths: Vec<usize> = groups.iter().map(|group| num_tokens(sequences, group)).collect();
    let bins = first_fit_decreasing(&lengths, options.max_tokens);
    let micro_batch = |bin: Vec<usize>| {
        let groups: Vec<Vec<usize>> = bin.into_iter().map(|group| groups[group].clone()).collect();
        MicroBatch::new(sequences, &groups, options.device)
    };
    bins.into_iter().map(micro_batch).collect()
}

/// Appends empty micro-batches until every rank of `group` has as many as the rank with the most. With sharded weights or gradients each micro-batch
/// is collective, so the counts must agree.
///
/// # Errors
/// The errors of [`Collective`].
pub fn pad_to_agreed_count(micro_batches: &mut Vec<MicroBatch>, group: &dyn Collective) -> Result<()> {
    let device = group.device();
    let mut count = torch::tensor_on(&[micro_batches.len() as i64], device)?;
    group.all_reduce(&mut count, ReduceOp::Max)?;
    let count = torch::i64_vec(&count)?[0] as usize;
    while micro_batches.len() < count {
        micro_batches.push(MicroBatch::empty(device)?);
    }
    Ok(())
}

/// Groups neighbours among `indexes` that share a prompt; without sharing each sequence is its own group.
pub(super) fn prompt_groups(all: &[Sequence], indexes: Vec<usize>, share_prompts: bool) -> Vec<Vec<usize>> {
    let same = |a: &usize, b: &usize| share_prompts && all[*a].prompt() == all[*b].prompt();
    indexes.chunk_by(same).map(<[usize]>::to_vec).collect()
}

/// Tokens of a group: its prompt once, plus its completions.
fn num_tokens(all: &[Sequence], group: &[usize]) -> usize {
    all[group[0]].prompt_len + group.iter().map(|&index| all[index].completion_len()).sum::<usize>()
}

/// Splits the group into as few parts as fit the budget, each with the prompt.
fn within_budget(all: &[Sequence], group: Vec<usize>, max_tokens: usize) -> Vec<Vec<usize>> {
    let mut parts: Vec<Vec<usize>> = Vec::new();
    for index in group {
        match parts.last_mut() {
            Some(part) if num_tokens(all, part) + all[index].completion_len() <= max_tokens => part.push(index),
            _ => parts.push(vec![index]),
        }
    }
    parts
}

/// Bins of indexes into `lengths`, each in ascending order; bins are in the order in which they were opened, longest first.
fn first_fit_decreasing(lengths: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    let mut indexes: Vec<usize> = (0..lengths.len()).collect();
    indexes.sort_by_key(|&index| (Reverse(lengths[index]), index));
    let mut bins: Vec<(usize, Vec<usize>)> = Vec::new();
    for index in indexes {
        let length = lengths[index];
        match bins.iter_mut().find(|(tokens, _)| tokens + length <= max_tokens) {
            Some((tokens, bin)) => {
                *tokens += length;
                bin.push(index);
            }
            None => bins.push((length, vec![index])),
        }
    }
    let sorted = |(_, mut bin): (usize, Vec<usize>)| {
        bin.sort_unstable();
        bin
    };
    bins.into_iter().map(sorted).collect()
}

fn check(index: usize, sequence: &Sequence) -> Result<()> {
    let wrong = |expected: &str, got: String| Error::InvalidArgument {
        op: "pack",
        expected: format!("{expected} in sequence {index}"),
        got,
    };
    let (len, prompt_len) = (sequence.token_ids.len(), sequence.prompt_len);
    if prompt_len == 0 || prompt_len >= len {
        return Err(wrong(
            "at least one prompt and one completion token",
            format!("a prompt of {prompt_len} among {len} tokens"),
        ));
    }
    let num_scored = sequence.num_scored();
    if num_scored == 0 || sequence.loss_mask.len() != len - prompt_len {
        let got = format!(
            "{num_scored} scored in a mask of {} for {} completion tokens",
            sequence.loss_mask.len(),
            len - prompt_len
        );
        return Err(wrong("a loss mask for all completion tokens that scores at least one", got));
    }
    let Sequence { rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, token_ages, .. } = sequence;
    let logprobs = [rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs];
    if let Some(logprobs) = logprobs.into_iter().flatten().find(|logprobs| logprobs.len() != num_scored) {
        return Err(wrong("a log-probability per scored token", format!("{} of {num_scored}", logprobs.len())));
    }
    match token_ages.as_ref().filter(|ages| ages.len() != num_scored) {
        Some(ages) => Err(wrong("an age per scored token", format!("{} of {num_scored}", ages.len()))),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn sequence(len: usize, prompt_len: usize) -> Sequence {
        Sequence {
            advantage: len as f32,
            rollout_logprobs: Some(vec![-(len as f32); len - prompt_len]),
            ..Sequence::of_tokens((0..len as u32).map(|id| 100 * len as u32 + id).collect(), prompt_len)
        }
    }

    const SEPARATE: PackOptions = PackOptions { max_tokens: 8, share_prompts: false, device: Device::Cpu };
    const SHARED: PackOptions = PackOptions { share_prompts: true, ..SEPARATE };

    fn packed(sequences: &[Sequence], options: &PackOptions) -> Vec<(Vec<usize>, usize)> {
        let micro_batches = pack(sequences, options).unwrap();
        micro_batches.iter().map(|it| (it.sequences.clone(), it.num_tokens())).collect()
    }

    #[test]
    fn packing_respects_the_token_budget_and_keeps_all_sequences() {
        let bins = first_fit_decreasing(&[3, 9, 4, 4, 12, 2, 6, 1], 10);
        // 12 alone, although over budget; 9 + 1; 6 + 4; 4 + 3 + 2
        assert_eq!(bins, [vec![4], vec![1, 7], vec![2, 6], vec![0, 3, 5]]);
    }

    #[test]
    fn sequences_of_one_prompt_are_packed_together() {
        // Prompts of 3 and 2 tokens; completions of 2, 2, 4 and 1, 1.
        let with_prompt = |prompt: u32, prompt_len: usize, completion_len: usize| Sequence {
            token_ids: [vec![prompt; prompt_len], vec![9; completion_len]].concat(),
            ..sequence(prompt_len + completion_len, prompt_len)
        };
        let all = [
            with_prompt(1, 3, 2),
            with_prompt(1, 3, 2),
            with_prompt(1, 3, 4),
            with_prompt(2, 2, 1),
            with_prompt(2, 2, 1),
        ];
        assert_eq!(packed(&all, &SHARED), [(vec![0, 1], 7), (vec![2], 7), (vec![3, 4], 4)]);
        assert_eq!(packed(&all, &PackOptions { max_tokens: 15, ..SHARED }), [(vec![0, 1, 2, 3, 4], 15)]);
        assert_eq!(packed(&all, &SEPARATE), [(vec![2], 7), (vec![0, 3], 8), (vec![1, 4], 8)]);
        let masked = [all[0].clone(), Sequence { masked: true, ..all[3].clone() }, all[1].clone()];
        assert_eq!(packed(&masked, &SHARED), [(vec![0, 2], 7)], "what is left out parts nobody");
    }

    #[test]
    fn masked_sequences_are_not_packed() {
        let masked = Sequence { masked: true, ..sequence(5, 2) };
        assert_eq!(packed(&[masked.clone(), sequence(3, 1)], &SEPARATE), [(vec![1], 3)]);
        assert!(packed(&[masked], &SEPARATE).is_empty());
    }

    #[test]
    fn invalid_sequences_are_refused_by_packing() {
        let refused = |bad| pack(&[bad], &SEPARATE).unwrap_err().to_string();
        for bad in [Sequence { prompt_len: 0, ..sequence(3, 1) }, Sequence { prompt_len: 3, ..sequence(3, 1) }] {
            assert!(refused(bad).contains("one completion token"));
        }
        let short = Sequence { ref_logprobs: Some(vec![0.0]), ..sequence(3, 1) };
        assert!(refused(short).contains("1 of 2"));
        for loss_mask in [vec![false, false], vec![true]] {
            assert!(refused(Sequence { loss_mask, ..sequence(3, 1) }).contains("scores at least one"));
        }
        let context_scored = Sequence { loss_mask: vec![true, false], ..sequence(3, 1) };
        assert!(refused(context_scored).contains("2 of 1"));
    }
}
