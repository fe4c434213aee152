//! Acceptance rates of draft tokens, by the length of the match that they were found by.

use super::drafts::Drafts;

/// Lower bounds of the classes of match length, in tokens.
const BOUNDS: [usize; 7] = [3, 4, 5, 7, 9, 13, 21];
/// When a class reaches this many checks, its counts are halved, so that newer checks weigh more.
const MANY: u32 = 256;
/// Weight of the prior estimate of a class, as a number of checks.
const PRIOR: f64 = 4.0;

/// Counts of checked and accepted draft tokens, by class of match length.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Acceptance {
    classes: [Class; BOUNDS.len() + 1],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Class {
    checked: u32,
    drawn: u32,
}

fn class_of(matched: usize) -> usize {
    BOUNDS.partition_point(|&bound| bound <= matched)
}

impl Acceptance {
    /// Records whether a draft token after `matched` equal tokens was accepted.
    pub(super) fn note(&mut self, matched: usize, is_drawn: bool) {
        let class = &mut self.classes[class_of(matched)];
        if class.checked == MANY {
            (class.checked, class.drawn) = (class.checked / 2, class.drawn / 2);
        }
        class.checked += 1;
        class.drawn += u32::from(is_drawn);
    }

    /// Records that the first `num_drawn` draft tokens were accepted and that the next one, if there is one, was rejected.
    pub(super) fn note_all(&mut self, drafts: &Drafts, num_drawn: usize) {
        (0..num_drawn).for_each(|row| self.note(drafts.matched + row, true));
        if num_drawn < drafts.token_ids.len() {
            self.note(drafts.matched + num_drawn, false);
        }
    }

    /// Returns for each draft token the probability that it and all draft tokens before it are accepted. The values never rise.
    pub(super) fn of_rows(&self, drafts: &Drafts) -> Vec<f64> {
        let mut all = 1.0;
        let row = |row| {
            all *= self.probability(drafts.matched + row);
            all
        };
        (0..drafts.token_ids.len()).map(row).collect()
    }

    fn probability(&self, matched: usize) -> f64 {
        let Class { checked, drawn } = self.classes[class_of(matched)];
        let guess = matched as f64 / (matched as f64 + 2.0);
        (f64::from(drawn) + PRIOR * guess) / (f64::from(checked) + PRIOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_is_estimated_by_match_length() {
        let mut acceptance = Acceptance::default();
        let drafts = |matched, count| Drafts { token_ids: vec![0; count], matched };
        assert_eq!(acceptance.of_rows(&drafts(2, 2)), [0.5, 0.5 * 0.6]);
        for _ in 0..1000 {
            acceptance.note_all(&drafts(2, 3), 1); // the second token, after a match of 3, is rejected; the third is not checked
        }
        let rows = acceptance.of_rows(&drafts(2, 3));
        assert!(rows[0] > 0.97 && rows[1] < 0.03 && rows[2] < rows[1], "{rows:?}");
        assert!(acceptance.of_rows(&drafts(9, 1))[0] > 0.8, "nothing is known of others");
        for _ in 0..1000 {
            acceptance.note_all(&drafts(2, 1), 0);
        }
        assert!(acceptance.of_rows(&drafts(2, 1))[0] < 0.03, "the newest count");
    }
}
