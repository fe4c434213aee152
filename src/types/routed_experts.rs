//! Records which experts the sampler's router chose for each token.

use std::ops::Range;
use std::sync::Arc;

/// The chosen experts of the first tokens of a sequence, ordered by token, layer and choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutedExperts {
    /// Number of experts per token over all layers; 0 if none are recorded.
    pub per_token: usize,
    /// Expert indices, token by token. Copies of a sequence share them, as they take hundreds of bytes per token.
    pub experts: Arc<Vec<u16>>, // [tokens, per_token]
}

impl RoutedExperts {
    /// The recorded experts of the token at `position`, if there are any.
    pub fn of(&self, position: usize) -> Option<&[u16]> {
        self.experts.get(position * self.per_token..(position + 1) * self.per_token).filter(|own| !own.is_empty())
    }

    /// The recorded experts of the tokens at `positions`, up to the first token without a record.
    pub fn within(&self, positions: Range<usize>) -> &[u16] {
        let known = self.num_tokens();
        &self.experts[positions.start.min(known) * self.per_token..positions.end.min(known) * self.per_token]
    }

    /// Number of tokens whose experts are recorded.
    pub fn num_tokens(&self) -> usize {
        self.experts.len().checked_div(self.per_token).unwrap_or(0)
    }

    /// The recorded experts of the first `num_tokens` tokens, or of fewer if fewer are recorded.
    pub(crate) fn first(&self, num_tokens: usize) -> Self {
        Self { per_token: self.per_token, experts: self.experts[..num_tokens * self.per_token].to_vec().into() }
    }

    /// Appends the experts of the token at `position`. A token that is computed again keeps those that it had.
    ///
    /// # Panics
    /// If the experts of a token before it are not known.
    pub fn push(&mut self, position: usize, own: &[u16]) {
        let num_known = self.num_tokens();
        assert!(position <= num_known, "experts of token {position} behind those of {num_known} tokens");
        if position == num_known {
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
        routed.push(1, &[0, 4]);
        routed.push(1, &[9, 9]); // is known
        assert_eq!((routed.of(0), routed.of(1), routed.of(2)), (Some(&[3, 1][..]), Some(&[0, 4][..]), None));
        assert_eq!((routed.num_tokens(), routed.per_token), (2, 2));
        let within = |start: usize, end: usize| routed.within(start..end);
        assert_eq!((within(0, 1), within(1, 5), within(4, 5)), (&[3, 1][..], &[0, 4][..], &[][..]));
    }

    #[test]
    #[should_panic = "experts of token 2 behind those of 1 tokens"]
    fn no_token_is_left_out() {
        let mut routed = RoutedExperts::default();
        routed.push(0, &[3, 1]);
        routed.push(2, &[9, 9]);
    }
}
