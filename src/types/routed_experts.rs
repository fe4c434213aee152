//! Which experts a sampler's tokens went to.

use std::ops::Range;
use std::sync::Arc;

/// Experts of the first tokens of a sequence, in the order of layers and choices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutedExperts {
    /// Experts of a token in all layers; 0 where there are none.
    pub per_token: usize,
    /// Token by token: hundreds of bytes each, so that copies of a sequence share them.
    pub experts: Arc<Vec<u16>>, // [tokens, per_token]
}

impl RoutedExperts {
    /// The experts of the token at `position`, where they are known.
    pub fn of(&self, position: usize) -> Option<&[u16]> {
        self.experts.get(position * self.per_token..(position + 1) * self.per_token).filter(|own| !own.is_empty())
    }

    /// The experts of the tokens at `positions`, up to the first that are not known.
    pub fn within(&self, positions: Range<usize>) -> &[u16] {
        let known = self.num_tokens();
        &self.experts[positions.start.min(known) * self.per_token..positions.end.min(known) * self.per_token]
    }

    /// Tokens whose experts are known.
    pub fn num_tokens(&self) -> usize {
        self.experts.len().checked_div(self.per_token).unwrap_or(0)
    }

    /// The experts of the first `num_tokens` tokens, no more than are known.
    pub(crate) fn first(&self, num_tokens: usize) -> Self {
        Self { per_token: self.per_token, experts: self.experts[..num_tokens * self.per_token].to_vec().into() }
    }

    /// Appends the experts of the token at `position`, if it is the next one.
    pub fn push(&mut self, position: usize, own: &[u16]) {
        if self.num_tokens() == position {
            self.per_token = own.len();
            Arc::make_mut(&mut self.experts).extend_from_slice(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncating_recorded_experts_keeps_the_first_tokens() {
        let mut routed = RoutedExperts::default();
        assert_eq!((routed.of(0), routed.num_tokens()), (None, 0));
        routed.push(0, &[3, 1]);
        routed.push(2, &[9, 9]); // not the next one
        routed.push(1, &[0, 4]);
        routed.push(1, &[9, 9]);
        assert_eq!((routed.of(0), routed.of(1), routed.of(2)), (Some(&[3, 1][..]), Some(&[0, 4][..]), None));
        assert_eq!((routed.num_tokens(), routed.per_token), (2, 2));
        let within = |start: usize, end: usize| routed.within(start..end);
        assert_eq!((within(0, 1), within(1, 5), within(4, 5)), (&[3, 1][..], &[0, 4][..], &[][..]));
    }
}
