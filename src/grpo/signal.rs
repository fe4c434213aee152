//! Which groups have a learning signal.

use super::advantages::rewards_are_equal;
use super::moments::BatchStats;
use crate::types::RolloutGroup;

/// Whether a group has a learning signal: its rewards are not all equal ([`rewards_are_equal`]), and their mean lies in `range`, bounds included. A
/// group in which no completion has a reward counts as having one, since its rewards are unknown; its completions are masked.
///
/// ```
/// use std::sync::Arc;
/// use colo_grpo::data::{Prompt, RolloutGroup, Trajectory};
/// use colo_grpo::grpo::has_signal;
///
/// let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
/// let rewarded = |reward| Trajectory { reward: Some(reward), ..Trajectory::default() };
/// let group = RolloutGroup { completions: vec![rewarded(1.0), rewarded(0.0)], ..RolloutGroup::new(prompt) };
/// assert!(has_signal(&group, None) && !has_signal(&group, Some([0.6, 0.9])), "the mean is 0.5");
/// ```
pub fn has_signal(group: &RolloutGroup, range: Option<[f64; 2]>) -> bool {
    let mean = BatchStats::of_group(group).mean();
    let is_within = range.is_none_or(|[low, high]| mean.is_nan() || (low <= mean && mean <= high));
    is_within && !rewards_are_equal(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::fixtures::scored;

    #[test]
    fn dynamic_sampling_keeps_groups_with_unequal_rewards_in_range() {
        let signal = |rewards: &[Option<f32>], range| has_signal(&scored(rewards), range);
        let (equal, differ) = ([Some(0.3); 4], [Some(0.0), Some(0.0), Some(0.0), Some(1.0)]);
        assert!(!signal(&equal, None) && !signal(&equal, Some([0.0, 1.0])));
        assert!(signal(&differ, None) && signal(&differ, Some([0.25, 0.25])));
        assert!(!signal(&differ, Some([0.3, 1.0])) && !signal(&differ, Some([0.0, 0.2])));
        assert!(signal(&[None, None], Some([0.4, 0.6])), "unknown");
        assert!(!signal(&[Some(1.0), Some(1.0), None], None));
    }
}
