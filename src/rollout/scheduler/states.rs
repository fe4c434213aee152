//! Assigns pages for the states of gated delta nets. Every running sequence has a page, from its admission until its blocks are released. A group's
//! prompt is computed in the first member's page, and copied for the others. A sequence that is kept for a later rollout, or for its next turn, keeps
//! its page.

use crate::error::{Error, Result};

/// The free pages among pages `0 .. num_pages`. `num_pages` is 0 for a model without states.
#[derive(Debug)]
pub(super) struct StateSlots {
    num_pages: usize,
    free: Vec<u32>,
}

impl StateSlots {
    pub(super) fn new(num_pages: usize) -> Self {
        Self { num_pages, free: (0..num_pages as u32).rev().collect() }
    }

    /// Marks the pages of sequences kept from an earlier rollout as used. Call it before any allocation.
    pub(super) fn adopt(&mut self, kept: impl Iterator<Item = u32>) {
        let kept: Vec<u32> = kept.collect();
        self.free.retain(|page| !kept.contains(page));
    }

    /// Number of sequences that can be admitted.
    pub(super) fn num_free(&self) -> usize {
        if self.are_used() { self.free.len() } else { usize::MAX }
    }

    /// Whether sequences have states.
    pub(super) fn are_used(&self) -> bool {
        self.num_pages > 0
    }

    /// Takes a page for a sequence that is admitted.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop();
        assert!(page.is_some() || !self.are_used(), "more sequences run than there are pages of states");
        page
    }

    pub(super) fn give_back(&mut self, page: &mut Option<u32>) {
        self.free.extend(page.take());
    }

    /// Checks that free + held == total and that no page is held twice.
    pub(super) fn check_integrity(&self, held: impl Iterator<Item = u32>) -> Result<()> {
        let mut pages: Vec<u32> = self.free.iter().copied().chain(held).collect();
        pages.sort_unstable();
        if pages.iter().copied().eq(0..self.num_pages as u32) {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            op: "StateSlots::check_integrity",
            expected: format!("each of {} pages free or held by one sequence", self.num_pages),
            got: format!("{pages:?}"),
        })
    }
}
