//! Micro-batches, the unit of one forward and backward pass: sequences concatenated without padding, or each shared prompt once with its completions
//! after it.
//!
//! Shapes: T tokens, C scored tokens, N sequences of a micro-batch.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::activations::MicroBatchShape;
use super::sequence::{Sequence, TeacherTop};
use crate::error::Result;
use crate::model::ModelSpec;
use crate::ops::attention::{Bounds, SharedBounds};
use crate::ops::head::TopScores;
use crate::torch;

/// Packed sequences, with what scoring and the loss need.
#[derive(Debug)]
pub struct MicroBatch {
    /// Token ids.
    pub token_ids: Tensor, // [T] i64
    /// Position of each token in its sequence.
    pub positions: Tensor, // [T] i64
    /// The offsets of the sequences.
    pub bounds: Bounds,
    /// The row before each scored token; its hidden state predicts the token. The last row of a shared prompt appears once for each of its
    /// completions.
    pub scored_rows: Tensor, // [C] i64
    /// The values of `scored_rows` on the host.
    pub(super) host_scored_rows: Vec<i64>, // [C]
    /// Token ids of the scored tokens.
    pub targets: Tensor, // [C] i64
    /// Sequence of each scored token, from 0 to N - 1.
    pub sequence_of_token: Tensor, // [C] i64
    /// The advantage of each sequence.
    pub advantages: Tensor, // [N] f32
    /// Divisors for the loss type `bnpo`, if every sequence has one.
    pub bnpo_divisors: Option<Tensor>, // [N] f64
    /// The sampler's log-probabilities; `None` if any sequence has none.
    pub rollout_logprobs: Option<Tensor>, // [C] f32
    /// Log-probabilities of the policy before the first update on this batch, if every sequence has them.
    pub old_logprobs: Option<Tensor>, // [C] f32
    /// The reference model's log-probabilities, if every sequence has them.
    pub ref_logprobs: Option<Tensor>, // [C] f32
    /// A teacher's log-probabilities; `None` if any sequence has none.
    pub teacher_logprobs: Option<Tensor>, // [C] f32
    /// A teacher's most probable tokens with their log-probabilities, if every sequence has them.
    pub teacher_top: Option<TopScores>, // [C, K] i64 and f32
    /// Age of each scored token, in generation steps since it was sampled, if every sequence has them.
    pub token_ages: Option<Tensor>, // [C] i64
    /// The experts that the sampler chose in all layers, -1 where none is recorded, if any sequence has some.
    pub routed_experts: Option<Tensor>, // [T, R] i16
    /// For each packed sequence, its index in the input.
    pub sequences: Vec<usize>, // [N]
}

impl MicroBatch {
    /// A micro-batch of one token without scored tokens. A rank runs it only to take part in the collectives of its peers; no loss is called and no
    /// gradient changes.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn empty(device: Device) -> Result<Self> {
        let mut micro_batch = Self::new(&[], &[], device)?;
        micro_batch.token_ids = Tensor::f_zeros([1], (Kind::Int64, device))?;
        micro_batch.positions = micro_batch.token_ids.shallow_clone();
        micro_batch.bounds = Bounds::Separate(vec![0, 1]);
        Ok(micro_batch)
    }

    /// Whether this micro-batch has no scored tokens.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Tokens that run through the network (T).
    pub fn num_tokens(&self) -> usize {
        self.token_ids.size()[0] as usize
    }

    /// FLOPs of a forward and backward as counted for model FLOP utilisation: 6 per token and active parameter (4 if the weights are frozen, without
    /// gradient); 12 for every pair of tokens, layer and element of the queries' width in causal attention; 21 for every token, layer and element of
    /// a gated delta net's state. Recomputation is not counted.
    pub fn training_flop(&self, spec: &ModelSpec, is_frozen: bool) -> f64 {
        if self.is_empty() {
            return 0.0;
        }
        let of_token = if is_frozen { 4.0 } else { 6.0 } * spec.num_active_params() as f64;
        let of_token = of_token + spec.training_flop_per_token() as f64;
        of_token * self.num_tokens() as f64 + spec.training_flop_per_pair() as f64 * self.bounds.attended_pairs()
    }

    /// Number of sequences that contain each row: the rows of a shared prompt count for each of its completions. [T]
    pub(super) fn repeats(&self) -> Vec<f64> {
        let mut repeats = vec![1.0; self.num_tokens()];
        if let Bounds::Shared(SharedBounds { prompts, groups, completions }) = &self.bounds {
            for (prompt, group) in prompts.windows(2).zip(groups.windows(2)) {
                let starts = &completions[..completions.len() - 1];
                let sharing = starts.iter().filter(|&&start| (group[0]..group[1]).contains(&start)).count();
                repeats[prompt[0] as usize..prompt[1] as usize].fill(sharing as f64);
            }
        }
        repeats
    }

    /// Number of tokens over its sequences; a shared prompt counts for each.
    pub fn num_sequence_tokens(&self) -> f64 {
        self.repeats().iter().sum()
    }

    /// The sizes that activation memory depends on.
    pub fn shape(&self) -> MicroBatchShape {
        MicroBatchShape {
            tokens: self.num_tokens(),
            scored_tokens: self.targets.numel(),
            num_sequences: self.bounds.num_sequences(),
            shares_prompts: matches!(self.bounds, Bounds::Shared(_)),
            num_top: self.teacher_top.as_ref().map_or(0, |top| top.ids.size()[1] as usize),
        }
    }

    /// Packs groups of indexes into `all`. The sequences of a group share one prompt, which is computed once. Groups of one sequence each are
    /// concatenated.
    pub(super) fn new(all: &[Sequence], groups: &[Vec<usize>], device: Device) -> Result<Self> {
        let rows = match groups.iter().any(|group| group.len() > 1) {
            true => RowContents::shared(all, groups),
            false => RowContents::separate(all, groups),
        };
        let sequences = groups.concat();
        let completions = || sequences.iter().map(|&index| &all[index]);
        let target = |sequence: &Sequence, at: usize| i64::from(sequence.completion()[at]);
        let targets: Vec<i64> =
            completions().flat_map(|sequence| sequence.scored().map(move |at| target(sequence, at))).collect();
        let sequence_of_token: Vec<i64> = completions()
            .enumerate()
            .flat_map(|(n, sequence)| std::iter::repeat_n(n as i64, sequence.num_scored()))
            .collect();
        let advantages: Vec<f32> = completions().map(|sequence| sequence.advantage).collect();
        let divisors: Option<Vec<f64>> = completions().map(|sequence| sequence.bnpo_divisor).collect();
        let logprobs = |field: fn(&Sequence) -> Option<&Vec<f32>>| {
            let values: Option<Vec<&[f32]>> =
                completions().map(|sequence| field(sequence).map(Vec::as_slice)).collect();
            values.map(|values| torch::tensor_on(&values.concat(), device)).transpose()
        };
        let tensor = |values: &[i64]| torch::tensor_on(values, device);
        let ages: Option<Vec<&Vec<u32>>> = completions().map(|sequence| sequence.token_ages.as_ref()).collect();
        let ages = ages.map(|ages| tensor(&ages.into_iter().flatten().map(|&age| i64::from(age)).collect::<Vec<_>>()));
        Ok(Self {
            token_ids: tensor(&rows.token_ids)?,
            positions: tensor(&rows.positions)?,
            bounds: rows.bounds,
            scored_rows: tensor(&rows.scored)?,
            host_scored_rows: rows.scored,
            targets: tensor(&targets)?,
            sequence_of_token: tensor(&sequence_of_token)?,
            advantages: torch::tensor_on(&advantages, device)?,
            bnpo_divisors: divisors.map(|divisors| torch::tensor_on(&divisors, device)).transpose()?,
            rollout_logprobs: logprobs(|sequence| sequence.rollout_logprobs.as_ref())?,
            old_logprobs: logprobs(|sequence| sequence.old_logprobs.as_ref())?,
            ref_logprobs: logprobs(|sequence| sequence.ref_logprobs.as_ref())?,
            teacher_logprobs: logprobs(|sequence| sequence.teacher_logprobs.as_ref())?,
            teacher_top: teacher_top(&sequences, all, device)?,
            token_ages: ages.transpose()?,
            routed_experts: routed_experts(all, &rows.sources, device)?,
            sequences,
        })
    }
}

/// The teacher's most probable tokens of all scored tokens; `None` unless every sequence has them.
fn teacher_top(sequences: &[usize], all: &[Sequence], device: Device) -> Result<Option<TopScores>> {
    let tops: Option<Vec<&TeacherTop>> = sequences.iter().map(|&index| all[index].teacher_top.as_ref()).collect();
    let Some(tops) = tops.filter(|tops| !tops.is_empty()) else { return Ok(None) };
    let shape = [-1, tops[0].num_top as i64];
    let ids: Vec<i64> = tops.iter().flat_map(|top| ids(&top.ids)).collect();
    let logprobs: Vec<f32> = tops.iter().flat_map(|top| &top.logprobs).copied().collect();
    Ok(Some(TopScores {
        ids: torch::tensor_on(&ids, device)?.f_view(shape)?,
        logprobs: torch::tensor_on(&logprobs, device)?.f_view(shape)?,
    }))
}

/// The recorded experts of each row, -1 where a sequence has none; `None` if no sequence has any.
fn routed_experts(all: &[Sequence], sources: &[(usize, Range<usize>)], device: Device) -> Result<Option<Tensor>> {
    let per_token = sources.iter().map(|(sequence, _)| all[*sequence].routed_experts.per_token).max().unwrap_or(0);
    if per_token == 0 {
        return Ok(None);
    }
    let num_rows: usize = sources.iter().map(|(_, positions)| positions.len()).sum();
    let experts = torch::filled_on(num_rows * per_token, device, |mut rows: &mut [i16]| {
        for (sequence, positions) in sources {
            let known = all[*sequence].routed_experts.within(positions.clone());
            let (own, others) = rows.split_at_mut(positions.len() * per_token);
            let (recorded, unknown) = own.split_at_mut(known.len());
            recorded.iter_mut().zip(known).for_each(|(expert, &known)| *expert = known as i16);
            unknown.fill(-1);
            rows = others;
        }
    })?;
    Ok(Some(experts.f_view([-1, per_token as i64])?))
}

/// The contents of each row of a micro-batch.
struct RowContents {
    token_ids: Vec<i64>, // [T]
    positions: Vec<i64>, // [T]
    bounds: Bounds,
    scored: Vec<i64>, // [C]
    /// Sequence and positions of consecutive rows.
    sources: Vec<(usize, Range<usize>)>,
}

impl RowContents {
    fn separate(all: &[Sequence], groups: &[Vec<usize>]) -> Self {
        let (mut token_ids, mut positions, mut scored, mut cu_seqlens) = (vec![], vec![], vec![], vec![0]);
        let mut sources = Vec::new();
        for &index in groups.iter().flatten() {
            let sequence = &all[index];
            let (start, len) = (token_ids.len() as i64, sequence.token_ids.len() as i64);
            token_ids.extend(ids(&sequence.token_ids));
            positions.extend(0..len);
            sources.push((index, 0..sequence.token_ids.len()));
            let before_completion = start + sequence.prompt_len as i64 - 1;
            scored.extend(sequence.scored().map(|at| before_completion + at as i64));
            cu_seqlens.push(start + len);
        }
        Self { token_ids, positions, bounds: Bounds::Separate(cu_seqlens), scored, sources }
    }

    fn shared(all: &[Sequence], groups: &[Vec<usize>]) -> Self {
        let (mut token_ids, mut positions, mut scored, mut prompts) = (vec![], vec![], vec![], vec![0]);
        let mut sources = Vec::new();
        for group in groups {
            let prompt = all[group[0]].prompt();
            token_ids.extend(ids(prompt));
            positions.extend(0..prompt.len() as i64);
            sources.push((group[0], 0..prompt.len()));
            prompts.push(token_ids.len() as i64);
        }
        let (mut bounds, mut completions) = (vec![token_ids.len() as i64], vec![token_ids.len() as i64]);
        for (group, prompt_end) in groups.iter().zip(&prompts[1..]) {
            for &index in group {
                let (start, completion) = (token_ids.len() as i64, all[index].completion());
                let (first, len) = (all[index].prompt_len as i64, completion.len() as i64);
                token_ids.extend(ids(completion));
                positions.extend(first..first + len);
                sources.push((index, first as usize..all[index].token_ids.len()));
                let row_before = |at: usize| if at == 0 { prompt_end - 1 } else { start + at as i64 - 1 };
                scored.extend(all[index].scored().map(row_before));
                completions.push(start + len);
            }
            bounds.push(token_ids.len() as i64);
        }
        let bounds = Bounds::Shared(SharedBounds { prompts, groups: bounds, completions });
        Self { token_ids, positions, bounds, scored, sources }
    }
}

fn ids(tokens: &[u32]) -> impl Iterator<Item = i64> + '_ {
    tokens.iter().map(|&id| i64::from(id))
}

#[cfg(test)]
mod tests {
    use super::super::pack::tests::sequence;
    use super::*;

    fn ints(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn completion_tokens_are_scored_by_the_previous_row() {
        let micro_batch = MicroBatch::new(&[sequence(3, 1), sequence(4, 2)], &[vec![0], vec![1]], Device::Cpu).unwrap();
        assert_eq!(ints(&micro_batch.token_ids), [300, 301, 302, 400, 401, 402, 403]);
        assert_eq!(ints(&micro_batch.positions), [0, 1, 2, 0, 1, 2, 3]);
        assert_eq!(micro_batch.bounds, Bounds::Separate(vec![0, 3, 7]));
        assert_eq!(ints(&micro_batch.scored_rows), [0, 1, 4, 5]);
        assert_eq!(ints(&micro_batch.targets), [301, 302, 402, 403]);
        assert_eq!(ints(&micro_batch.sequence_of_token), [0, 0, 1, 1]);
        assert_eq!(Vec::<f32>::try_from(&micro_batch.advantages).unwrap(), [3.0, 4.0]);
        let rollout_logprobs = micro_batch.rollout_logprobs.as_ref().unwrap();
        assert_eq!(Vec::<f32>::try_from(rollout_logprobs).unwrap(), [-3.0, -3.0, -4.0, -4.0]);
        assert!(micro_batch.old_logprobs.is_none());
    }

    #[test]
    fn a_shared_prompt_is_packed_once_before_its_completions() {
        let all = [sequence(4, 2), sequence(5, 2), sequence(3, 1)];
        let micro_batch = MicroBatch::new(&all, &[vec![0, 1], vec![2]], Device::Cpu).unwrap();
        assert_eq!(ints(&micro_batch.token_ids), [400, 401, 300, 402, 403, 502, 503, 504, 301, 302]);
        assert_eq!(ints(&micro_batch.positions), [0, 1, 0, 2, 3, 2, 3, 4, 1, 2]);
        let bounds = SharedBounds { prompts: vec![0, 2, 3], groups: vec![3, 8, 10], completions: vec![3, 5, 8, 10] };
        assert_eq!(micro_batch.bounds, Bounds::Shared(bounds));
        assert_eq!(ints(&micro_batch.scored_rows), [1, 3, 1, 5, 6, 2, 8]);
        assert_eq!(ints(&micro_batch.targets), [402, 403, 502, 503, 504, 301, 302]);
        assert_eq!(ints(&micro_batch.sequence_of_token), [0, 0, 1, 1, 1, 2, 2]);
    }

    /// Two turns with two tokens of context between them.
    #[test]
    fn context_tokens_have_rows_but_no_scores() {
        let loss_mask = vec![true, false, false, true, true];
        let logprobs = Some(vec![-1.0, -2.0, -3.0]);
        let turns = Sequence { loss_mask, rollout_logprobs: logprobs, ..sequence(7, 2) };
        let alone = MicroBatch::new(&[turns.clone(), sequence(3, 1)], &[vec![0], vec![1]], Device::Cpu).unwrap();
        assert_eq!(alone.num_tokens(), 10);
        assert_eq!(ints(&alone.scored_rows), [1, 4, 5, 7, 8]);
        assert_eq!(ints(&alone.targets), [702, 705, 706, 301, 302]);
        assert_eq!(ints(&alone.sequence_of_token), [0, 0, 0, 1, 1]);
        let logprobs = Vec::<f32>::try_from(alone.rollout_logprobs.as_ref().unwrap()).unwrap();
        assert_eq!(logprobs, [-1.0, -2.0, -3.0, -3.0, -3.0]);

        let other = Sequence { loss_mask: vec![false, true], rollout_logprobs: Some(vec![-4.0]), ..sequence(4, 2) };
        let shared = MicroBatch::new(&[turns, other], &[vec![0, 1]], Device::Cpu).unwrap();
        assert_eq!(ints(&shared.scored_rows), [1, 4, 5, 7], "the second's first token is context");
        assert_eq!(ints(&shared.targets), [702, 705, 706, 403]);
        assert_eq!(shared.shape().scored_tokens, 4);
    }

    #[test]
    fn an_empty_micro_batch_scores_nothing() {
        let empty = MicroBatch::empty(Device::Cpu).unwrap();
        assert!(empty.is_empty());
        assert_eq!((empty.num_tokens(), empty.targets.numel()), (1, 0));
    }
}
