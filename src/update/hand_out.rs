//! Distributes the scores of a micro-batch to its sequences.

use crate::error::Result;
use crate::ops::head::TopScores;
use crate::torch;
use crate::train::{MicroBatch, Scores, Sequence, TeacherTop};

/// Copies to each sequence of a micro-batch its own log-probabilities.
pub(super) fn hand_out(
    micro_batch: &MicroBatch,
    scores: &Scores,
    sequences: &mut [Sequence],
    field: impl Fn(&mut Sequence) -> &mut Option<Vec<f32>>,
) -> Result<()> {
    let logprobs = torch::f32_vec(&scores.logprobs)?;
    let mut rest = logprobs.as_slice();
    for &index in &micro_batch.sequences {
        let (own, others) = rest.split_at(sequences[index].num_scored());
        *field(&mut sequences[index]) = Some(own.to_vec());
        rest = others;
    }
    Ok(())
}

/// Copies to each sequence of a micro-batch the most probable tokens of its distributions, if these are scored.
pub(super) fn hand_out_top(micro_batch: &MicroBatch, scores: &Scores, sequences: &mut [Sequence]) -> Result<()> {
    let Some(TopScores { ids, logprobs }) = &scores.top else { return Ok(()) };
    let num_top = ids.size()[1] as usize;
    let (ids, logprobs) = (torch::i64_vec(&ids.f_reshape([-1])?)?, torch::f32_vec(&logprobs.f_reshape([-1])?)?);
    let mut start = 0;
    for &index in &micro_batch.sequences {
        let own = start..start + num_top * sequences[index].num_scored();
        start = own.end;
        let ids = ids[own.clone()].iter().map(|&id| id as u32).collect();
        sequences[index].teacher_top = Some(TeacherTop { num_top, ids, logprobs: logprobs[own].to_vec() });
    }
    Ok(())
}
