//! KL divergences of sampled sequences from the reference model, for rewards with a KL penalty.

use std::ops::Range;

use crate::config::KlEstimator;
use crate::error::Result;
use crate::grpo::kl_of_sequence;
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};
use crate::train::{ExpertSources, GatheredSequences, Sequence, gather_sequences};

/// The KL divergence of one sequence from the reference model, estimated on its own tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Divergence {
    /// Sum over the sequence's scored tokens.
    pub sum: f64,
    /// Number of scored tokens; 0 for a masked sequence.
    pub num_tokens: f64,
}

impl Divergence {
    /// Estimates the divergence from a sequence's log-probabilities under the policy and the reference model.
    fn of(sequence: &Sequence, estimator: KlEstimator) -> Self {
        let scored = sequence.old_logprobs.as_ref().zip(sequence.ref_logprobs.as_ref());
        scored.map_or_else(Self::default, |(logprobs, ref_logprobs)| Self {
            sum: kl_of_sequence(estimator, logprobs, ref_logprobs),
            num_tokens: logprobs.len() as f64,
        })
    }
}

/// The sequences of all ranks in rank order; each has its index as its `place`.
pub(super) struct Numbered {
    pub all: Vec<Sequence>,
    /// Indices of this rank's sequences.
    pub own: Range<usize>,
    pub experts: ExpertSources,
}

/// Gathers the sequences of all ranks; collective over `group`.
pub(super) fn gather_numbered(own: &[Sequence], group: &dyn Collective) -> Result<Numbered> {
    let rank = group.rank() as u32;
    let of_rank: Vec<Sequence> = own.iter().map(|sequence| Sequence { place: rank, ..sequence.clone() }).collect();
    let GatheredSequences { sequences: mut all, experts } = gather_sequences(&of_rank, group)?;
    let first = all.partition_point(|sequence| sequence.place < rank);
    all.iter_mut().zip(0..).for_each(|(sequence, index)| sequence.place = index);
    Ok(Numbered { all, own: first..first + own.len(), experts })
}

/// Returns the divergences of the sequences at `own`, given those of `num_sequences` that each rank has scored; collective over `group`.
pub(super) fn exchange(
    scored: &[Sequence],
    estimator: KlEstimator,
    (num_sequences, own): (usize, Range<usize>),
    group: &dyn Collective,
) -> Result<Vec<Divergence>> {
    let mut sums = vec![0.0; 2 * num_sequences];
    for sequence in scored {
        let (at, Divergence { sum, num_tokens }) = (2 * sequence.place as usize, Divergence::of(sequence, estimator));
        sums[at..at + 2].copy_from_slice(&[sum, num_tokens]);
    }
    if num_sequences > 0 {
        all_reduce_f64(group, &mut sums, ReduceOp::Sum)?; // only one rank has each value, so nothing is rounded
    }
    let of_own = &sums[2 * own.start..2 * own.end];
    Ok(of_own.chunks_exact(2).map(|pair| Divergence { sum: pair[0], num_tokens: pair[1] }).collect())
}

/// Returns the divergences of this rank's sequences on a rank that does not train, while the training ranks call
/// [`Learner::divergences`](super::Learner::divergences); collective over `group`.
pub fn await_divergences(own: &[Sequence], estimator: KlEstimator, group: &dyn Collective) -> Result<Vec<Divergence>> {
    let numbered = gather_numbered(own, group)?;
    numbered.experts.fetch(own, &[], group)?;
    exchange(&[], estimator, (numbered.all.len(), numbered.own), group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;

    #[test]
    fn kl_values_return_to_the_rank_that_owns_the_sequence() {
        let own = |rank: usize| -> Vec<Sequence> {
            (0..rank + 1).map(|index| Sequence::of_tokens(vec![1, rank as u32, index as u32], 1)).collect()
        };
        let found = testing::worlds(3, |world| {
            let group = world.group();
            let Numbered { mut all, own: range, .. } = gather_numbered(&own(world.rank()), &*group).unwrap();
            for (index, sequence) in all.iter_mut().enumerate() {
                assert_eq!(sequence.place as usize, index);
                sequence.old_logprobs = Some(vec![-1.0, -2.0]);
                sequence.ref_logprobs = (index != 4).then(|| vec![-1.0 - index as f32, -2.5]); // 4 is masked
            }
            let scored: Vec<Sequence> = all.iter().filter(|it| it.place % 3 == world.rank() as u32).cloned().collect();
            exchange(&scored, KlEstimator::K1, (all.len(), range), &*group).unwrap()
        });
        let sums: Vec<Vec<f64>> = found.iter().map(|of_rank| of_rank.iter().map(|it| it.sum).collect()).collect();
        assert_eq!(sums, [vec![0.5], vec![1.5, 2.5], vec![3.5, 0.0, 5.5]]);
        assert_eq!(found[2][1].num_tokens, 0.0);
        assert_eq!(found[2][2].num_tokens, 2.0);
    }
}
