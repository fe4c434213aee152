//! Sequences into micro-batches under a token budget.
//!
//! Shapes: T tokens, C scored (completion) tokens, N sequences of a micro-batch.

use tch::{Device, Kind, Tensor};

use crate::dist::{Collective, ReduceOp};
use crate::error::{Error, Result};
use crate::torch;

/// A prompt with one completion, as the trainer sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sequence {
    /// Prompt and completion ids.
    pub token_ids: Vec<u32>,
    /// Number of prompt ids; at least 1 and less than `token_ids.len()`.
    pub prompt_len: usize,
    /// Advantage of every completion token.
    pub advantage: f32,
    /// Takes part in nothing: not packed at all.
    pub masked: bool,
    /// The sampler's log-probabilities, one per completion token.
    pub rollout_logprobs: Option<Vec<f32>>,
    /// The trainer's log-probabilities before the first update on this batch.
    pub old_logprobs: Option<Vec<f32>>,
    /// The reference model's log-probabilities.
    pub ref_logprobs: Option<Vec<f32>>,
}

impl Sequence {
    /// Number of completion tokens.
    pub fn completion_len(&self) -> usize {
        self.token_ids.len() - self.prompt_len
    }
}

/// Sequences laid end to end, with what scoring and the loss need of them.
#[derive(Debug)]
pub struct MicroBatch {
    /// Ids.
    pub token_ids: Tensor, // [T] i64
    /// Position of each token in its sequence.
    pub positions: Tensor, // [T] i64
    /// Where each sequence begins, and T.
    pub cu_seqlens: Vec<i64>, // [N + 1]
    /// Row of the token before each completion token: its hidden state predicts it.
    pub scored_rows: Tensor, // [C] i64
    /// The completion tokens.
    pub targets: Tensor, // [C] i64
    /// Sequence of each completion token, 0 to N.
    pub sequence_of_token: Tensor, // [C] i64
    /// Advantages.
    pub advantages: Tensor, // [N] f32
    /// The sampler's log-probabilities, if every sequence has them.
    pub rollout_logprobs: Option<Tensor>, // [C] f32
    /// Log-probabilities before the first update, if every sequence has them.
    pub old_logprobs: Option<Tensor>, // [C] f32
    /// The reference model's log-probabilities, if every sequence has them.
    pub ref_logprobs: Option<Tensor>, // [C] f32
    /// Index of each sequence in what was packed.
    pub sequences: Vec<usize>, // [N]
}

/// Packs all sequences that are not masked, first-fit decreasing: longest first (ties by index), each into the first
/// micro-batch with room for it under `max_tokens`; one longer than that is a micro-batch of its own. The result depends
/// on lengths and order only.
///
/// # Errors
/// `InvalidArgument` for a sequence without prompt or completion, or whose log-probabilities do not fit it.
pub fn pack(sequences: &[Sequence], max_tokens: usize, device: Device) -> Result<Vec<MicroBatch>> {
    sequences.iter().enumerate().try_for_each(|(index, sequence)| check(index, sequence))?;
    let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.token_ids.len()).collect();
    let packed = (0..sequences.len()).filter(|&index| !sequences[index].masked).collect();
    let bins = first_fit_decreasing(packed, &lengths, max_tokens);
    Ok(bins.into_iter().map(|bin| MicroBatch::new(sequences, bin, device)).collect())
}

/// Appends empty micro-batches until every rank of `group` has as many as the one with most: sharded weights and
/// gradients make each micro-batch collective.
pub fn pad_to_agreed_count(micro_batches: &mut Vec<MicroBatch>, group: &dyn Collective) -> Result<()> {
    let device = group.device();
    let mut count = Tensor::from_slice(&[micro_batches.len() as i64]).to_device(device);
    group.all_reduce(&mut count, ReduceOp::Max)?;
    let count = torch::i64_vec(&count)?[0] as usize;
    micro_batches.resize_with(count, || MicroBatch::empty(device));
    Ok(())
}

impl MicroBatch {
    /// One token that nothing is scored on: it runs through the network so that this rank joins its peers' collectives,
    /// calls no loss and adds nothing to any gradient.
    pub fn empty(device: Device) -> Self {
        let mut micro_batch = Self::new(&[], Vec::new(), device);
        micro_batch.token_ids = Tensor::zeros([1], (Kind::Int64, device));
        micro_batch.positions = micro_batch.token_ids.shallow_clone();
        micro_batch.cu_seqlens = vec![0, 1];
        micro_batch
    }

    /// Whether nothing is scored on it.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Tokens that run through the network (T).
    pub fn num_tokens(&self) -> usize {
        self.token_ids.size()[0] as usize
    }

    fn new(sequences: &[Sequence], bin: Vec<usize>, device: Device) -> Self {
        let (mut token_ids, mut positions, mut cu_seqlens) = (Vec::new(), Vec::new(), vec![0]);
        let (mut scored_rows, mut targets, mut sequence_of_token) = (Vec::new(), Vec::new(), Vec::new());
        for (n, &index) in bin.iter().enumerate() {
            let sequence = &sequences[index];
            let (start, len) = (token_ids.len() as i64, sequence.token_ids.len() as i64);
            let prompt_len = sequence.prompt_len as i64;
            token_ids.extend(sequence.token_ids.iter().map(|&id| i64::from(id)));
            positions.extend(0..len);
            cu_seqlens.push(start + len);
            scored_rows.extend(start + prompt_len - 1..start + len - 1);
            targets.extend_from_slice(&token_ids[(start + prompt_len) as usize..]);
            sequence_of_token.extend(std::iter::repeat_n(n as i64, sequence.completion_len()));
        }
        let advantages: Vec<f32> = bin.iter().map(|&index| sequences[index].advantage).collect();
        let logprobs = |field: fn(&Sequence) -> Option<&Vec<f32>>| {
            let values: Option<Vec<&[f32]>> =
                bin.iter().map(|&index| field(&sequences[index]).map(Vec::as_slice)).collect();
            values.map(|values| Tensor::from_slice(&values.concat()).to_device(device))
        };
        Self {
            token_ids: Tensor::from_slice(&token_ids).to_device(device),
            positions: Tensor::from_slice(&positions).to_device(device),
            cu_seqlens,
            scored_rows: Tensor::from_slice(&scored_rows).to_device(device),
            targets: Tensor::from_slice(&targets).to_device(device),
            sequence_of_token: Tensor::from_slice(&sequence_of_token).to_device(device),
            advantages: Tensor::from_slice(&advantages).to_device(device),
            rollout_logprobs: logprobs(|sequence| sequence.rollout_logprobs.as_ref()),
            old_logprobs: logprobs(|sequence| sequence.old_logprobs.as_ref()),
            ref_logprobs: logprobs(|sequence| sequence.ref_logprobs.as_ref()),
            sequences: bin,
        }
    }
}

/// Bins of indexes into `lengths`, each in ascending order; the bins in the order they were opened, longest first.
fn first_fit_decreasing(mut indexes: Vec<usize>, lengths: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    indexes.sort_by_key(|&index| (std::cmp::Reverse(lengths[index]), index));
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
            format!("{prompt_len} of {len} in the prompt"),
        ));
    }
    let logprobs = [&sequence.rollout_logprobs, &sequence.old_logprobs, &sequence.ref_logprobs];
    match logprobs.into_iter().flatten().find(|logprobs| logprobs.len() != len - prompt_len) {
        Some(logprobs) => {
            Err(wrong("a log-probability per completion token", format!("{} of {}", logprobs.len(), len - prompt_len)))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(len: usize, prompt_len: usize) -> Sequence {
        Sequence {
            token_ids: (0..len as u32).map(|id| 100 * len as u32 + id).collect(),
            prompt_len,
            advantage: len as f32,
            masked: false,
            rollout_logprobs: Some(vec![-(len as f32); len - prompt_len]),
            old_logprobs: None,
            ref_logprobs: None,
        }
    }

    fn ints(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn bins_respect_the_budget_and_hold_everything_once() {
        let lengths = [3, 9, 4, 4, 12, 2, 6, 1];
        let bins = first_fit_decreasing((0..lengths.len()).collect(), &lengths, 10);
        // 12 alone though over budget; 9 + 1; 6 + 4; 4 + 3 + 2
        assert_eq!(bins, [vec![4], vec![1, 7], vec![2, 6], vec![0, 3, 5]]);
    }

    #[test]
    fn a_micro_batch_scores_each_completion_token_from_the_row_before_it() {
        let sequences = [sequence(3, 1), sequence(4, 2)];
        let packed = pack(&sequences, 16, Device::Cpu).unwrap();
        let [micro_batch] = &packed[..] else { panic!("{} micro-batches", packed.len()) };
        assert_eq!(ints(&micro_batch.token_ids), [300, 301, 302, 400, 401, 402, 403]);
        assert_eq!(ints(&micro_batch.positions), [0, 1, 2, 0, 1, 2, 3]);
        assert_eq!(micro_batch.cu_seqlens, [0, 3, 7]);
        assert_eq!(ints(&micro_batch.scored_rows), [0, 1, 4, 5]);
        assert_eq!(ints(&micro_batch.targets), [301, 302, 402, 403]);
        assert_eq!(ints(&micro_batch.sequence_of_token), [0, 0, 1, 1]);
        assert_eq!(Vec::<f32>::try_from(&micro_batch.advantages).unwrap(), [3.0, 4.0]);
        let rollout_logprobs = micro_batch.rollout_logprobs.as_ref().unwrap();
        assert_eq!(Vec::<f32>::try_from(rollout_logprobs).unwrap(), [-3.0, -3.0, -4.0, -4.0]);
        assert!(micro_batch.old_logprobs.is_none());
    }

    #[test]
    fn masked_sequences_are_left_out_and_an_empty_micro_batch_scores_nothing() {
        let masked = Sequence { masked: true, ..sequence(5, 2) };
        let packed = pack(&[masked.clone(), sequence(3, 1)], 4, Device::Cpu).unwrap();
        assert_eq!(packed.iter().map(|micro_batch| micro_batch.sequences.clone()).collect::<Vec<_>>(), [vec![1]]);
        assert!(pack(&[masked], 4, Device::Cpu).unwrap().is_empty());
        let empty = MicroBatch::empty(Device::Cpu);
        assert!(empty.is_empty());
        assert_eq!((empty.num_tokens(), empty.targets.numel()), (1, 0));
    }

    #[test]
    fn sequences_that_cannot_be_scored_are_refused() {
        for bad in [Sequence { prompt_len: 0, ..sequence(3, 1) }, Sequence { prompt_len: 3, ..sequence(3, 1) }] {
            assert!(pack(&[bad], 8, Device::Cpu).unwrap_err().to_string().contains("one completion token"));
        }
        let short = Sequence { ref_logprobs: Some(vec![0.0]), ..sequence(3, 1) };
        assert!(pack(&[short], 8, Device::Cpu).unwrap_err().to_string().contains("1 of 2"));
    }
}
