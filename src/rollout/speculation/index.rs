//! An index of token n-grams in a group's texts: its prompt, its completions, and earlier completions of the same prompt.
//!
//! Like an LZ77 compressor, the index links the positions after equal pairs of tokens to a list, the newest first. A look-up compares the newest
//! positions in the list of a text's last pair, and takes the one with the longest match backwards.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::drafts::Drafts;

/// Maximum number of tokens that are compared backwards.
const MOST_MATCHED: usize = 32;
/// Maximum number of positions that a look-up compares.
const MOST_PLACES: usize = 16;
/// Maximum number of indexed positions. Later tokens are not found by a look-up, but can still follow a match as draft tokens.
const MOST_KNOWN: usize = 1 << 20;
const NONE: u32 = u32::MAX;

/// Texts, and lists of the positions that follow each pair of tokens.
#[derive(Debug, Default)]
pub(super) struct DraftIndex {
    texts: Vec<Vec<u32>>,
    newest: HashMap<u64, u32, BuildHasherDefault<PairHasher>>, // newest place of each pair
    places: Vec<KnownPlace>,
}

/// The position of a token after a pair.
#[derive(Debug)]
struct KnownPlace {
    text: u32,
    position: u32,
    /// The previous position after the same pair.
    before: u32,
}

/// A fast hash of a pair of tokens, equal in every process.
#[derive(Debug, Default)]
pub(super) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

impl DraftIndex {
    /// Starts a text after `context` and returns its number. Tokens of the context take part in matches, but are not proposed as draft tokens.
    pub(super) fn begin(&mut self, context: &[u32]) -> usize {
        self.texts.push(context[context.len().saturating_sub(MOST_MATCHED)..].to_vec());
        self.texts.len() - 1
    }

    /// Appends tokens to a text and indexes them.
    pub(super) fn extend(&mut self, text: usize, token_ids: &[u32]) {
        for &token in token_ids {
            let own = &mut self.texts[text];
            let pair = pair(own);
            own.push(token);
            let position = own.len() as u32 - 1;
            let Some(pair) = pair.filter(|_| self.places.len() < MOST_KNOWN) else { continue };
            let before = self.newest.insert(pair, self.places.len() as u32).unwrap_or(NONE);
            self.places.push(KnownPlace { text: text as u32, position, before });
        }
    }

    /// Whether the newest `len` tokens of a text are the first of `token_ids`.
    pub(super) fn begins(&self, text: usize, len: usize, token_ids: &[u32]) -> bool {
        let own = &self.texts[text];
        token_ids.starts_with(&own[own.len() - len..])
    }

    /// Returns up to `most` draft tokens: the tokens after the longest earlier match with the end of the text. If several matches are equally long,
    /// the newest is used.
    pub(super) fn drafts(&self, text: usize, most: usize) -> Drafts {
        let own = &self.texts[text];
        let mut next = pair(own).and_then(|pair| self.newest.get(&pair)).copied().unwrap_or(NONE);
        let mut best: Option<(usize, &KnownPlace)> = None;
        for _ in 0..MOST_PLACES {
            let Some(place) = self.places.get(next as usize) else { break };
            let before = &self.texts[place.text as usize][..place.position as usize];
            let pairs = before.iter().rev().zip(own.iter().rev()).take(MOST_MATCHED);
            let matched = pairs.take_while(|(a, b)| a == b).count();
            if best.is_none_or(|(most, _)| matched > most) {
                best = Some((matched, place));
            }
            if matched == MOST_MATCHED {
                break;
            }
            next = place.before;
        }
        let Some((matched, place)) = best else { return Drafts::default() };
        let (source, start) = (&self.texts[place.text as usize], place.position as usize);
        let mut token_ids = Vec::with_capacity(most);
        while token_ids.len() < most {
            let at = start + token_ids.len();
            match source.get(at) {
                Some(&token) => token_ids.push(token),
                // A text that repeats itself continues with its own draft tokens.
                None if place.text as usize == text => token_ids.push(token_ids[at - source.len()]),
                None => break,
            }
        }
        Drafts { token_ids, matched }
    }
}

/// The last two tokens of a text as one key.
fn pair(text: &[u32]) -> Option<u64> {
    let (_, &[first, second]) = text.split_last_chunk::<2>()?;
    Some(u64::from(first) << 32 | u64::from(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(texts: &[&[u32]]) -> DraftIndex {
        let mut index = DraftIndex::default();
        for tokens in texts {
            let text = index.begin(&[]);
            index.extend(text, tokens);
        }
        index
    }

    #[test]
    fn drafts_follow_the_longest_repeated_suffix() {
        let index = index(&[&[1, 2, 3, 4, 5], &[9, 2, 3, 6, 7], &[1, 2, 3]]);
        let drafts = |most| index.drafts(2, most);
        assert_eq!(drafts(9), Drafts { token_ids: vec![4, 5], matched: 3 });
        assert_eq!(drafts(1).token_ids, [4]);
        assert_eq!(index.drafts(0, 9), Drafts::default(), "4 5 did not occur before");
    }

    #[test]
    fn the_newest_of_equally_long_matches_is_used() {
        let index = index(&[&[1, 2, 3], &[1, 2, 4], &[8, 1, 2]]);
        assert_eq!(index.drafts(2, 2), Drafts { token_ids: vec![4], matched: 2 });
    }

    #[test]
    fn a_repeating_text_is_drafted_as_repetition() {
        let index = index(&[&[5, 6, 7, 5, 6]]);
        assert_eq!(index.drafts(0, 7), Drafts { token_ids: vec![7, 5, 6, 7, 5, 6, 7], matched: 2 });
    }

    #[test]
    fn context_tokens_match_but_are_not_proposed() {
        let mut index = DraftIndex::default();
        let first = index.begin(&[1, 2]);
        assert_eq!(index.drafts(first, 4), Drafts::default());
        index.extend(first, &[3]);
        let second = index.begin(&[0, 1, 2]);
        assert_eq!(index.drafts(second, 4), Drafts { token_ids: vec![3], matched: 2 });
    }
}
