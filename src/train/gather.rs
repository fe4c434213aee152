//! Gathers the sequences of a generation batch on every rank, and recorded experts only on the ranks that train on them. Tokens and log-probabilities
//! take a few bytes per token, but recorded experts take hundreds.
//!
//! Every rank gathers all tokens, a few megabytes, so that it can compute the same partition and the loss's denominators without another collective.

use super::sequence::Sequence;
use crate::error::{Error, Result};
use crate::ranks::{Collective, all_gather_bytes};
use crate::torch;
use crate::types::RoutedExperts;

/// Which ranks hold the recorded experts of the gathered sequences.
#[derive(Debug)]
pub struct ExpertSources {
    of_sequences: Vec<ExpertSource>,
}

/// Owner and size of one sequence's recorded experts.
#[derive(Debug, Clone, Copy)]
struct ExpertSource {
    rank: usize,
    /// Index among the sequences of the owner rank.
    index: usize,
    per_token: usize,
    num_experts: usize,
    /// Bytes per expert id in transfer.
    width: usize,
}

/// The sequences of all ranks.
#[derive(Debug)]
pub struct GatheredSequences {
    /// The sequences, without recorded experts.
    pub sequences: Vec<Sequence>,
    /// The owners of each sequence's recorded experts.
    pub experts: ExpertSources,
}

/// Gathers the sequences of all ranks, sorted by their `place` and then by rank. Recorded experts stay where they are until [`ExpertSources::fetch`]
/// is called. Collective over `group`.
///
/// # Errors
/// The errors of [`Collective`].
pub fn gather_sequences(own: &[Sequence], group: &dyn Collective) -> Result<GatheredSequences> {
    if group.size() == 1 {
        let source = |(index, it): (usize, &Sequence)| ExpertSource { index, ..ExpertSource::of(&it.routed_experts) };
        let of_sequences = own.iter().enumerate().map(source).collect();
        let bare = |it: &Sequence| Sequence { routed_experts: RoutedExperts::default(), ..it.clone() };
        let sequences = own.iter().map(bare).collect();
        return Ok(GatheredSequences { sequences, experts: ExpertSources { of_sequences } });
    }
    let words: Vec<u32> = own.iter().flat_map(encode).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut all = Vec::new();
    for (rank, bytes) in all_gather_bytes(group, &bytes)?.iter().enumerate() {
        let mut words = &words_of(bytes)[..];
        for index in 0.. {
            if words.is_empty() {
                break;
            }
            let (sequence, source) = decode(&mut words).ok_or_else(|| torn(group))?;
            all.push((sequence, ExpertSource { rank, index, ..source }));
        }
    }
    all.sort_by_key(|(sequence, _)| sequence.place); // a stable sort
    let (sequences, of_sequences) = all.into_iter().unzip();
    Ok(GatheredSequences { sequences, experts: ExpertSources { of_sequences } })
}

impl ExpertSources {
    /// Returns the recorded experts of the sequences `wanted`, by index among all. `own` are the sequences that this rank contributed. Collective
    /// over the group that gathered them: ranks that need none must call it too, because others may need theirs.
    ///
    /// # Errors
    /// The errors of [`Collective`].
    pub fn fetch(&self, own: &[Sequence], wanted: &[usize], group: &dyn Collective) -> Result<Vec<RoutedExperts>> {
        let kept = |source: &ExpertSource| own[source.index].routed_experts.clone();
        if self.of_sequences.iter().all(|source| source.num_experts == 0) {
            return Ok(vec![RoutedExperts::default(); wanted.len()]);
        }
        let bytes: Vec<u8> = wanted.iter().flat_map(|&index| (index as u32).to_le_bytes()).collect();
        let wanted_by: Vec<Vec<ExpertSource>> = all_gather_bytes(group, &bytes)?
            .iter()
            .map(|indexes| words_of(indexes).iter().map(|&index| self.of_sequences[index as usize]).collect())
            .collect();
        let sent = |from: usize, to: usize| wanted_by[to].iter().filter(move |it| it.rank == from && from != to);
        let ranks = 0..group.size();
        let pairs = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
        let part = pairs.map(|(from, to)| sent(from, to).map(ExpertSource::num_bytes).sum()).max().unwrap_or(0);
        let own_part = |(to, mut bytes): (usize, &mut [u8])| {
            for source in sent(group.rank(), to) {
                let (head, rest) = std::mem::take(&mut bytes).split_at_mut(source.num_bytes());
                source.write(&own[source.index].routed_experts.experts, head);
                bytes = rest;
            }
        };
        let input = torch::filled_on(part * group.size(), group.device(), |bytes: &mut [u8]| {
            bytes.chunks_mut(part).enumerate().for_each(own_part);
        })?;
        let mut output = input.f_zeros_like()?;
        if part > 0 {
            group.all_to_all(&input, &mut output)?;
        }
        drop(input);
        torch::read_bytes(&output, |bytes| {
            let mut parts: Vec<&[u8]> = bytes.chunks(part.max(1)).collect();
            let take = |source: &ExpertSource| match source {
                _ if source.rank == group.rank() => kept(source),
                _ if source.num_experts == 0 => RoutedExperts::default(),
                _ => {
                    let (own, rest) = parts[source.rank].split_at(source.num_bytes());
                    parts[source.rank] = rest;
                    source.read(own)
                }
            };
            wanted_by[group.rank()].iter().map(take).collect()
        })
    }
}

impl ExpertSource {
    /// The source of one of this rank's sequences; rank and index are filled in later.
    fn of(RoutedExperts { per_token, experts }: &RoutedExperts) -> Self {
        let all_bits = experts.iter().fold(0, |bits, expert| bits | expert);
        let width = if all_bits > u16::from(u8::MAX) { 2 } else { 1 };
        Self { rank: 0, index: 0, per_token: *per_token, num_experts: experts.len(), width }
    }

    fn num_bytes(&self) -> usize {
        self.num_experts * self.width
    }

    fn write(&self, experts: &[u16], bytes: &mut [u8]) {
        match self.width {
            1 => bytes.iter_mut().zip(experts).for_each(|(byte, &expert)| *byte = expert as u8),
            _ => {
                let pairs = bytes.chunks_exact_mut(2).zip(experts);
                pairs.for_each(|(pair, expert)| pair.copy_from_slice(&expert.to_le_bytes()));
            }
        }
    }

    fn read(&self, bytes: &[u8]) -> RoutedExperts {
        let experts: Vec<u16> = match self.width {
            1 => bytes.iter().map(|&expert| u16::from(expert)).collect(),
            _ => bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect(),
        };
        RoutedExperts { per_token: self.per_token, experts: experts.into() }
    }
}

/// Encodes a sequence as words: number of tokens, prompt length, advantage, flags, place, token ids; the loss mask if there is context; each of the
/// log-probabilities that exist; ages of tokens, if any; its teacher's own prompt after its length and the tokens to skip; number of experts per
/// token and in all, and bytes per expert.
fn encode(sequence: &Sequence) -> Vec<u32> {
    let Sequence { rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, .. } = sequence;
    let logprobs = [rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs];
    let flags = logprobs.iter().rev().fold(u32::from(sequence.masked), |flags, it| 2 * flags + u32::from(it.is_some()));
    let has_context = sequence.loss_mask.contains(&false);
    let flags = flags | u32::from(has_context) << 5 | u32::from(sequence.token_ages.is_some()) << 6;
    let flags = flags | u32::from(sequence.teacher_prompt.is_some()) << 7;
    let teacher = sequence
        .teacher_prompt
        .iter()
        .flat_map(|ids| [ids.len() as u32, sequence.teacher_skips as u32].into_iter().chain(ids.iter().copied()));
    let mask = sequence.loss_mask.iter().filter(|_| has_context).map(|is_scored| u32::from(*is_scored));
    let Sequence { token_ids, prompt_len, advantage, place, .. } = sequence;
    let head = [token_ids.len() as u32, *prompt_len as u32, advantage.to_bits(), flags, *place];
    let bits = logprobs.into_iter().flatten().flatten().map(|logprob| logprob.to_bits());
    let ExpertSource { per_token, num_experts, width, .. } = ExpertSource::of(&sequence.routed_experts);
    let source = [per_token as u32, num_experts as u32, width as u32];
    let ages = sequence.token_ages.iter().flatten().copied();
    head.into_iter()
        .chain(token_ids.iter().copied())
        .chain(mask)
        .chain(bits)
        .chain(ages)
        .chain(teacher)
        .chain(source)
        .collect()
}

/// Decodes and removes one sequence that [`encode`] wrote; `None` if it is truncated.
fn decode(words: &mut &[u32]) -> Option<(Sequence, ExpertSource)> {
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
    let (mut teacher_prompt, mut teacher_skips) = (None, 0);
    if flags >> 7 & 1 == 1 {
        let &[num_ids, skips] = take(2)? else { return None };
        (teacher_prompt, teacher_skips) = (Some(take(num_ids as usize)?.to_vec()), skips as usize);
    }
    let &[per_token, num_experts, width] = take(3)? else { return None };
    let [per_token, num_experts, width] = [per_token, num_experts, width].map(|word| word as usize);
    let source = ExpertSource { rank: 0, index: 0, per_token, num_experts, width };
    let [rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs] = logprobs;
    let masked = flags >> 4 & 1 == 1;
    let head = Sequence { advantage, masked, place, token_ages, ..Sequence::of_tokens(token_ids, prompt_len) };
    let head = Sequence { teacher_prompt, teacher_skips, ..head };
    let sequence = Sequence { loss_mask, rollout_logprobs, old_logprobs, ref_logprobs, teacher_logprobs, ..head };
    Some((sequence, source))
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

fn torn(group: &dyn Collective) -> Error {
    Error::Collective {
        op: "all_gather",
        group: group.name().to_owned(),
        rank: group.ranks()[group.rank()],
        message: "the sequences received from a rank are incomplete".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pack::tests::sequence;
    use super::*;
    use crate::ranks::testing;

    fn routed(per_token: usize, experts: Vec<u16>) -> RoutedExperts {
        RoutedExperts { per_token, experts: experts.into() }
    }

    #[test]
    fn gathered_sequences_are_unchanged() {
        let full = Sequence {
            masked: true,
            place: 7,
            old_logprobs: Some(vec![-0.5, f32::MIN_POSITIVE]),
            ref_logprobs: Some(vec![-1.0, -2.0]),
            teacher_logprobs: Some(vec![-3.0, -0.0]),
            token_ages: Some(vec![3, 0]),
            teacher_prompt: Some(vec![5, 6, 7]),
            teacher_skips: 1,
            ..sequence(4, 2)
        };
        let turns =
            Sequence { loss_mask: vec![true, false, true], rollout_logprobs: Some(vec![-1.0, -2.0]), ..sequence(5, 2) };
        for sent in [sequence(7, 3), full, turns, Sequence { rollout_logprobs: None, ..sequence(2, 1) }] {
            let words = encode(&sent);
            let mut left = &words[..];
            assert_eq!((decode(&mut left).map(|(sequence, _)| sequence).as_ref(), left.len()), (Some(&sent), 0));
            let cut = |len: usize| decode(&mut &words[..len]);
            assert!((0..words.len()).all(|len| cut(len).is_none()));
        }
    }

    /// Ranks contribute one, two and three sequences, with experts of one byte, of two bytes, or none. Each rank requests sequences of other ranks in
    /// another order; the last requests none.
    #[test]
    fn recorded_experts_reach_the_ranks_that_need_them() {
        let experts = |rank: usize, index: usize| match (rank, index) {
            (0, _) => routed(2, vec![0, 4095, 7, 7]),
            (1, 0) => RoutedExperts::default(),
            (2, 2) => routed(3, vec![1, 2, 65_535]),
            _ => routed(2, vec![255, rank as u16, index as u16, 0]),
        };
        let place = |rank: usize, index: usize| (10 - rank + 5 * index) as u32;
        let brought = |rank: usize| -> Vec<Sequence> {
            let sequence =
                |index| Sequence { place: place(rank, index), routed_experts: experts(rank, index), ..sequence(4, 2) };
            (0..=rank).map(sequence).collect()
        };
        let found = testing::threads(3, |group| {
            let own = brought(group.rank());
            let GatheredSequences { sequences: all, experts: sources } = gather_sequences(&own, &*group).unwrap();
            assert!(all.is_sorted_by_key(|sequence| sequence.place));
            assert!(all.iter().all(|sequence| sequence.routed_experts.num_tokens() == 0));
            let at = |rank, index| all.iter().position(|sequence| sequence.place == place(rank, index)).unwrap();
            let wanted: &[(usize, usize)] =
                [&[(2, 2), (1, 0), (0, 0), (2, 0)][..], &[(2, 1), (0, 0), (1, 1)], &[]][group.rank()];
            let indexes: Vec<usize> = wanted.iter().map(|&(rank, index)| at(rank, index)).collect();
            let fetched = sources.fetch(&own, &indexes, &*group).unwrap();
            assert_eq!(fetched, wanted.iter().map(|&(rank, index)| experts(rank, index)).collect::<Vec<_>>());
            // Then request experts that only this rank holds, and none at all.
            let kept = sources.fetch(&own, &[at(group.rank(), 0)], &*group).unwrap();
            assert_eq!(kept, [experts(group.rank(), 0)]);
            sources.fetch(&own, &[], &*group).unwrap().len()
        });
        assert_eq!(found, [0, 0, 0]);
    }

    #[test]
    fn recorded_experts_stay_on_a_single_rank() {
        let alone = crate::ranks::SingleRank::default();
        let own = [Sequence { place: 1, routed_experts: routed(1, vec![3, 4]), ..sequence(3, 1) }, sequence(4, 1)];
        let GatheredSequences { sequences: all, experts: sources } = gather_sequences(&own, &alone).unwrap();
        let tokens: Vec<usize> = all.iter().map(|sequence| sequence.token_ids.len()).collect();
        assert_eq!(tokens, [3, 4]);
        let fetched = sources.fetch(&own, &[1, 0], &alone).unwrap();
        assert_eq!(fetched, [RoutedExperts::default(), own[0].routed_experts.clone()]);
    }
}
