//! Decides whether draft tokens pay off, and for how many rows, from measured step times and estimated acceptance probabilities. It does not read a
//! clock itself.
//!
//! A step without draft tokens is launched while the previous one still runs. With draft tokens the host must first know the sampled tokens, so the
//! same number of rows takes longer. Both times are measured by number of rows, and their difference is the cost of drafting.

use std::collections::{BTreeMap, VecDeque};

use crate::rollout::limits::step_rows;

/// Number of recent times that are kept per number of rows; their median is used.
const REMEMBERED: usize = 5;
/// Number of first times per number of rows that are ignored, because these steps capture graphs and choose GEMM kernels.
const PREPARING: usize = 2;
/// Number of steps after which a time is too old to use, because contexts have grown.
const LASTING: u64 = 4096;
/// Maximum number of recent sequences whose acceptance probabilities are averaged.
const MOST_LOOKS: usize = 64;
/// Minimum number of recent sequences for an estimate of the gain.
const LEAST_LOOKS: usize = 8;
/// Number of steps of one size between two decisions.
const DECIDED_FOR: u64 = 8;
/// Number of steps after drafting was turned on for which every step is decided anew.
const TRIED_FOR: u64 = 16;
/// Minimum expected gain, as a ratio of throughputs, for which drafting is turned on. It is turned off when the gain is at most 1.
const LEAST_GAIN: f64 = 1.02;
const MILLION: f64 = 1e6;

/// Measurements of a run's steps and draft tokens. All ranks of an engine hold the same values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Controller {
    ahead: StepTimes,
    waiting: StepTimes,
    num_steps: u64,
    /// Acceptance probabilities, in millionths, of recent sequences' draft tokens; the newest is last.
    looks: VecDeque<Vec<u32>>,
    is_on: bool,
    /// Steps since drafting was turned on.
    on_for: u64,
    /// Step size of the last decision, and number of steps since that decision.
    decided: (usize, u64),
}

/// Times of decode steps by number of rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct StepTimes(BTreeMap<usize, RecentTimes>);

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct RecentTimes {
    num_seen: usize,
    newest: VecDeque<u64>, // nanoseconds
    last_step: u64,
}

/// The time of one decode step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::rollout) struct StepTime {
    /// Whether the step was launched only after the results of all earlier steps were known.
    pub(in crate::rollout) waited: bool,
    pub(in crate::rollout) rows: usize,
    /// Time between the results of the previous step and of this one, in nanoseconds.
    pub(in crate::rollout) nanos: u64,
}

impl StepTimes {
    fn known(&self, now: u64) -> BTreeMap<usize, f64> {
        let of = |(&rows, times): (&usize, &RecentTimes)| {
            let mut newest: Vec<u64> = times.newest.iter().copied().collect();
            newest.sort_unstable();
            let median = newest.get(newest.len() / 2).filter(|_| now - times.last_step < LASTING)?;
            Some((rows, *median as f64))
        };
        self.0.iter().filter_map(of).collect()
    }
}

/// Times of both kinds of steps by number of rows. A missing time is taken from the other kind, corrected by the gap.
struct KnownTimes {
    ahead: BTreeMap<usize, f64>,
    waiting: BTreeMap<usize, f64>,
}

impl KnownTimes {
    /// Fills missing times; `gap` is the cost of waiting.
    fn new(ahead: BTreeMap<usize, f64>, waiting: BTreeMap<usize, f64>, gap: f64) -> Self {
        let joined = |own: &BTreeMap<usize, f64>, other: &BTreeMap<usize, f64>, gap: f64| {
            let mut all: BTreeMap<usize, f64> = other.iter().map(|(&rows, time)| (rows, time + gap)).collect();
            all.extend(own);
            all
        };
        Self { ahead: joined(&ahead, &waiting, -gap), waiting: joined(&waiting, &ahead, gap) }
    }

    fn waiting(&self, rows: usize) -> Option<f64> {
        estimate(&self.waiting, rows)
    }

    fn ahead(&self, rows: usize) -> Option<f64> {
        estimate(&self.ahead, rows)
    }
}

/// The time of a step with this many rows, interpolated between measured ones. Beyond the largest measured size the time is assumed constant, so that
/// larger sizes are tried.
fn estimate(all: &BTreeMap<usize, f64>, rows: usize) -> Option<f64> {
    let rows = step_rows(rows, usize::MAX);
    let below = all.range(..=rows).next_back();
    let above = all.range(rows..).next();
    match (below, above) {
        (Some((&few, &short)), Some((&many, &long))) if many > few => {
            Some(short + (long - short) * (rows - few) as f64 / (many - few) as f64)
        }
        (Some((_, &time)), _) | (None, Some((_, &time))) => Some(time),
        (None, None) => None,
    }
}

impl Controller {
    /// Records the time of a step.
    pub(super) fn note(&mut self, StepTime { waited, rows, nanos }: StepTime) {
        self.num_steps += 1;
        let times = if waited { &mut self.waiting } else { &mut self.ahead };
        let times = times.0.entry(step_rows(rows, usize::MAX)).or_default();
        times.last_step = self.num_steps;
        times.num_seen += 1;
        if times.num_seen > PREPARING {
            times.newest.push_back(nanos);
            times.newest.drain(..times.newest.len().saturating_sub(REMEMBERED));
        }
    }

    /// Records the acceptance probabilities of one sequence's draft tokens. The list is empty if the look-up found no match.
    pub(super) fn look(&mut self, probabilities: &[f64]) {
        self.looks.push_back(probabilities.iter().map(|probability| (probability * MILLION) as u32).collect());
        self.looks.drain(..self.looks.len().saturating_sub(MOST_LOOKS));
    }

    /// Returns the number of draft rows to add to the next step of `num_seqs` rows. `probabilities` are the draft tokens' acceptance probabilities,
    /// the highest first.
    pub(super) fn num_rows(&self, num_seqs: usize, probabilities: &[f64], most_rows: usize) -> usize {
        let times = self.known();
        let gain = |num_drafts: usize| {
            let tokens = num_seqs as f64 + probabilities[..num_drafts].iter().sum::<f64>();
            times.waiting(num_seqs + num_drafts).map_or(0.0, |time| tokens / time)
        };
        let most = probabilities.len().min(most_rows.saturating_sub(num_seqs));
        let best = sizes(num_seqs, most).map(|num_drafts| (gain(num_drafts), num_drafts));
        best.fold((0.0, 0), |best, other| if other.0 > best.0 { other } else { best }).1
    }

    /// Whether steps of `num_seqs` sequences should have draft tokens. Such a step waits for the previous step's tokens, so this is true if draft
    /// tokens are expected to gain more time than the wait costs.
    pub(super) fn pays(&mut self, num_seqs: usize, most_rows: usize) -> bool {
        let (size, (before, num_steps)) = (step_rows(num_seqs, usize::MAX), self.decided);
        self.on_for = if self.is_on { self.on_for + 1 } else { 0 };
        let is_tried = self.is_on && self.on_for < TRIED_FOR;
        let stays = size == before && num_steps < DECIDED_FOR && !is_tried;
        self.decided = if stays { (size, num_steps + 1) } else { (size, 0) };
        if self.decided.1 == 0 {
            let gain = self.expected_gain(num_seqs, most_rows).unwrap_or(0.0);
            self.is_on = gain > if self.is_on { 1.0 } else { LEAST_GAIN };
        }
        self.is_on
    }

    /// Expected throughput with draft tokens, divided by the throughput without; `None` while too few steps are measured.
    fn expected_gain(&self, num_seqs: usize, most_rows: usize) -> Option<f64> {
        let times = self.known();
        let without = num_seqs as f64 / times.ahead(num_seqs)?;
        if self.looks.len() < LEAST_LOOKS {
            return None;
        }
        let mut probabilities: Vec<u32> = self.looks.iter().flatten().copied().collect();
        probabilities.sort_unstable_by(|a, b| b.cmp(a));
        let mut sums = vec![0.0];
        sums.extend(probabilities.iter().scan(0.0, |sum, &one| {
            *sum += f64::from(one) / MILLION;
            Some(*sum)
        }));
        let per_look = num_seqs as f64 / self.looks.len() as f64; // sequences per recorded sequence
        let with = sizes(num_seqs, most_rows.saturating_sub(num_seqs)).filter_map(|num_drafts| {
            let seen = ((num_drafts as f64 / per_look) as usize).min(probabilities.len());
            let tokens = num_seqs as f64 + per_look * sums[seen];
            Some(tokens / times.waiting(num_seqs + num_drafts)?)
        });
        Some(with.fold(0.0, f64::max) / without)
    }

    fn known(&self) -> KnownTimes {
        let [ahead, waiting] = [&self.ahead, &self.waiting].map(|times| times.known(self.num_steps));
        let mut gaps: Vec<f64> = waiting.iter().filter_map(|(rows, time)| Some(time - ahead.get(rows)?)).collect();
        gaps.sort_unstable_by(f64::total_cmp);
        let gap = gaps.get(gaps.len() / 2).copied().unwrap_or(0.0).max(0.0);
        KnownTimes::new(ahead, waiting, gap)
    }
}

/// The numbers of draft rows to consider, at most `most`: zero, those that fill the step's own size, and those that fill sizes of 8, 16, 24, 32, 48, 64,
/// 96 and so on. A size of decode steps that was not used before has to be prepared, so draft rows do not lead to others.
fn sizes(num_seqs: usize, most: usize) -> impl Iterator<Item = usize> {
    let all = num_seqs + most;
    let bucket = |rows| step_rows(rows, usize::MAX);
    let own = bucket(num_seqs);
    let is_used = move |size: usize| size == own || size >> size.trailing_zeros() <= 3; // 2^n or 3 x 2^n
    let doubled =
        std::iter::successors(Some(8usize), |size| size.checked_mul(2)).take_while(move |&size| size < 2 * all.max(8));
    let filled = doubled.flat_map(|size| [size, size + size / 2]).filter(move |&size| size > num_seqs);
    let filled = [num_seqs, own].into_iter().chain(filled).map(move |size| size.min(all));
    filled.filter(move |&size| is_used(bucket(size))).map(move |size| size - num_seqs)
}

/// The number of at most `num_drafts` draft rows that a step of `num_seqs` sequences gets: the largest of [`sizes`].
pub(super) fn fitting(num_seqs: usize, num_drafts: usize) -> usize {
    sizes(num_seqs, num_drafts).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A simulated device: the time of a step by its number of rows and the cost of waiting, in milliseconds, and the acceptance probability of draft
    /// tokens.
    struct Device {
        time: fn(usize) -> f64,
        gap: f64,
        probability: f64,
    }

    /// Step time of a large model on a large GPU, in milliseconds: limited by memory bandwidth up to 64 rows, then by power.
    fn large(rows: usize) -> f64 {
        5.6 + rows as f64 * if rows <= 64 { 0.0095 } else { 0.025 }
    }

    impl Device {
        fn drafts(&self) -> Vec<f64> {
            (1..8).map(|row| self.probability.powi(row)).collect()
        }

        /// Simulates `num_steps` steps. Returns their milliseconds, the number of tokens, and the draft rows of the last step.
        fn run(&self, controller: &mut Controller, num_seqs: usize, num_steps: usize) -> (f64, f64, usize) {
            let (mut time, mut tokens, mut rows) = (0.0, 0.0, 0);
            for _ in 0..num_steps {
                let waited = controller.pays(num_seqs, 256);
                rows = 0;
                if waited {
                    let mut all = self.drafts().repeat(num_seqs);
                    all.sort_unstable_by(|a, b| b.total_cmp(a));
                    rows = controller.num_rows(num_seqs, &all, 256);
                    tokens += all[..rows].iter().sum::<f64>();
                }
                controller.look(&self.drafts());
                let step = (self.time)(num_seqs + rows) + if waited { self.gap } else { 0.0 };
                (time, tokens) = (time + step, tokens + num_seqs as f64);
                controller.note(StepTime { waited, rows: num_seqs + rows, nanos: (step * 1e6) as u64 });
            }
            (time, tokens, rows)
        }
    }

    #[test]
    fn drafting_is_used_for_small_batches_only() {
        let device = Device { time: large, gap: 0.3, probability: 0.7 };
        let rows = |num_seqs| device.run(&mut Controller::default(), num_seqs, 300).2;
        assert_eq!([1, 8, 256].map(rows), [7, 56, 0]);
        let (time, tokens, _) = device.run(&mut Controller::default(), 8, 1000);
        assert!(tokens / time > 2.0 * 8.0 / large(8), "{}", tokens / time);
    }

    #[test]
    fn drafts_lead_to_few_sizes_of_steps() {
        let of = |num_seqs, most| {
            sizes(num_seqs, most).map(|drafts| step_rows(num_seqs + drafts, usize::MAX)).collect::<BTreeSet<_>>()
        };
        for (num_seqs, most, expected) in [
            (1, 7, vec![1, 8]),
            (3, 2, vec![4, 8]),
            (20, 40, vec![24, 32, 48, 64]),
            (60, 100, vec![64, 96, 128]),
            (100, 20, vec![112, 128]),
            (140, 116, vec![144, 192, 256]),
        ] {
            assert_eq!(of(num_seqs, most).into_iter().collect::<Vec<_>>(), expected, "{num_seqs} {most}");
        }
        assert!((1..256).all(|num_seqs| sizes(num_seqs, 7 * num_seqs).all(|drafts| drafts <= 7 * num_seqs)));
        assert_eq!([(60, 100), (1, 7), (5, 0)].map(|(num_seqs, drafts)| fitting(num_seqs, drafts)), [68, 7, 0]);
    }

    #[test]
    fn rejected_drafts_are_soon_given_up() {
        for num_seqs in [1, 8, 64, 200, 256] {
            let device = Device { time: large, gap: 0.3, probability: 0.02 };
            let (time, tokens, rows) = device.run(&mut Controller::default(), num_seqs, 2000);
            assert_eq!(rows, 0, "{num_seqs}");
            let without = 2000.0 * large(num_seqs);
            assert!(time / tokens < 1.01 * without / (2000.0 * num_seqs as f64), "{num_seqs}: {time} {without}");
        }
    }

    #[test]
    fn the_controller_counts_waits_longer_than_a_step() {
        let device = Device { time: |_| 0.4, gap: 2.0, probability: 0.7 };
        let (time, tokens, rows) = device.run(&mut Controller::default(), 4, 2000);
        assert_eq!(rows, 0);
        assert!(tokens / time > 0.99 * 4.0 / 0.4);
    }

    #[test]
    fn the_controller_adapts_to_changed_acceptance() {
        let mut controller = Controller::default();
        let device = |probability| Device { time: large, gap: 0.3, probability };
        for (probability, drafts) in [(0.7, true), (0.01, false), (0.8, true)] {
            let rows = device(probability).run(&mut controller, 8, 300).2;
            assert_eq!(rows > 0, drafts, "{probability}");
        }
        // While sequences end, the remaining ones get more draft tokens.
        let rows = [200, 64, 8, 1].map(|num_seqs| device(0.7).run(&mut controller, num_seqs, 100).2);
        assert!(rows[0] < 57 && rows[2] == 56 && rows[3] == 7, "{rows:?}");
    }

    #[test]
    fn the_controller_drafts_nothing_before_the_first_measurement() {
        let mut controller = Controller::default();
        let pays = |controller: &mut Controller| (0..=DECIDED_FOR).any(|_| controller.pays(1, 64));
        assert!(!pays(&mut controller));
        (0..9).for_each(|_| controller.look(&[0.9, 0.8]));
        assert!(!pays(&mut controller), "no step was timed");
        (0..3).for_each(|_| controller.note(StepTime { waited: false, rows: 1, nanos: 1000 }));
        assert!(pays(&mut controller));
        assert_eq!(controller.num_rows(1, &[0.9, 0.8], 64), 2);
        assert_eq!(controller.num_rows(1, &[0.9, 0.8], 2), 1);
        assert_eq!(controller.num_rows(1, &[], 64), 0);
    }
}
