//! min-p, top-k and top-p: which candidate tokens may be sampled. Each filter keeps the first candidates in falling order of value, ties by the
//! lowest id. So a rank can drop candidates that cannot survive before the ranks exchange them.
//!
//! Exactly `top_k` candidates survive top-k, ties going to the lowest ids. transformers and vLLM keep all tied candidates. A fixed number breaks ties
//! equally on a CPU, a GPU and a split vocabulary, and limits what ranks exchange.

use crate::types::SamplingParams;

/// A token id that may be sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    /// Logit after penalty and temperature.
    pub(super) value: f32,
    /// Logit after temperature alone.
    pub(super) raw: f32,
}

impl Candidate {
    /// Log-probability under the distribution without penalty, at the same temperature.
    pub(super) fn logprob(&self, log_sum_exp: f64) -> f32 {
        (f64::from(self.raw) - log_sum_exp) as f32
    }
}

/// Whether any of the filters is enabled.
pub(super) fn is_active(params: &SamplingParams) -> bool {
    params.top_k > 0 || params.top_p < 1.0 || params.min_p.is_some_and(|min_p| min_p > 0.0)
}

/// Sorts candidates and keeps the first `count`.
pub(super) fn keep_first(candidates: &mut Vec<Candidate>, count: usize) {
    if count > 0 && count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, before);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(before);
}

/// Sorts a rank's candidates and drops those that the filters over the whole vocabulary cannot keep: candidates beyond the rank's own top k, or below
/// min-p of its own maximum.
pub(super) fn cut_shard(candidates: &mut Vec<Candidate>, params: &SamplingParams) {
    keep_first(candidates, params.top_k);
    cut_min_p(candidates, params);
}

/// Sorts the candidates of all ranks and applies the filters in this order: min-p keeps those with p >= min_p * max p (arXiv 2407.01082); top-k keeps
/// the first k; top-p keeps the fewest whose share of the remaining mass reaches top_p (arXiv 1904.09751).
pub(super) fn cut(candidates: &mut Vec<Candidate>, params: &SamplingParams) {
    candidates.sort_unstable_by(before);
    cut_min_p(candidates, params);
    if params.top_k > 0 {
        candidates.truncate(params.top_k);
    }
    if params.top_p < 1.0 {
        let Some(max) = candidates.first().map(|first| f64::from(first.value)) else { return };
        let mass = |candidate: &Candidate| (f64::from(candidate.value) - max).exp();
        let target = f64::from(params.top_p) * candidates.iter().map(mass).sum::<f64>();
        let mut before = 0.0;
        let kept = candidates.iter().take_while(|candidate| {
            let is_needed = before < target;
            before += mass(candidate);
            is_needed
        });
        let kept = kept.count();
        candidates.truncate(kept.max(1));
    }
}

fn cut_min_p(sorted: &mut Vec<Candidate>, params: &SamplingParams) {
    let (Some(min_p), Some(first)) = (params.min_p, sorted.first()) else { return };
    let least = first.value + min_p.ln();
    sorted.truncate(sorted.partition_point(|candidate| candidate.value >= least));
}

/// Orders candidates by falling value, then rising id.
fn before(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.value.total_cmp(&a.value).then(a.id.cmp(&b.id))
}
