use super::*;
use crate::ranks::testing;

const PROMPT: [u32; 4] = [7, 8, 9, 1];

fn speculator(method: Speculation) -> Speculator {
    Speculator::new(SpeculationOptions { method, num_tokens: 3 }).unwrap()
}

/// The prompt followed by a completion.
fn tokens(completion: &[u32]) -> Vec<u32> {
    [&PROMPT, completion].concat()
}

fn text(request: usize, sample: usize, token_ids: &[u32]) -> DraftedText<'_> {
    DraftedText { request, sample, token_ids, prompt_len: PROMPT.len() }
}

fn drafts(speculator: &mut Speculator, text: DraftedText, most_rows: usize) -> Vec<u32> {
    let request = DraftRequest { text, prompt_id: 0, key_sample: 0, most: 9 };
    speculator.drafts(&[request], most_rows).remove(0).token_ids
}

#[test]
fn drafts_come_from_the_prompt_and_other_completions() {
    let mut speculator = speculator(Speculation::Ngram);
    speculator.begin(0, &PROMPT);
    speculator.begin(1, &PROMPT); // another request of the same prompt
    speculator.observe(text(0, 0, &tokens(&[2, 3, 4, 5, 6])));
    assert_eq!(drafts(&mut speculator, text(1, 0, &tokens(&[2, 3])), 9), [4, 5, 6]);
    assert_eq!(drafts(&mut speculator, text(1, 0, &tokens(&[2, 3, 7, 8])), 9), [9, 1], "to the end of the prompt");
    assert_eq!(drafts(&mut speculator, text(0, 1, &tokens(&[2, 3])), 1).len(), 1, "one row is left");
    assert!(drafts(&mut speculator, text(0, 2, &tokens(&[5, 2])), 9).is_empty(), "this did not occur before");
}

#[test]
fn completions_are_remembered_until_their_prompt_repeats() {
    let mut speculator = speculator(Speculation::Ngram);
    speculator.begin(0, &PROMPT);
    speculator.observe(text(0, 0, &tokens(&[2, 3, 4, 5])));
    speculator.end(0, [[2, 3, 4, 5].as_slice()].into_iter());
    assert!(speculator.groups.is_empty() && speculator.prompts.is_empty());
    let mut speculator = speculator.close();
    speculator.begin(0, &PROMPT);
    assert!(speculator.groups.values().all(|group| group.texts.is_empty()), "nothing is indexed for what waits");
    assert_eq!(drafts(&mut speculator, text(0, 0, &tokens(&[2, 3])), 9), [4, 5]);
}

/// Each turn of an episode is a separate request.
#[test]
fn a_turn_goes_on_with_the_text_of_the_one_before() {
    let mut speculator = speculator(Speculation::Ngram);
    speculator.begin(0, &PROMPT);
    let turns: [&[u32]; 4] = [&[2, 3], &[2, 3, 4, 5], &[2, 3, 6], &[2, 3, 4, 5, 6, 7]];
    let mut numbers = Vec::new();
    for (request, completion) in (1..).zip(turns) {
        if request == 4 {
            speculator.end(0, std::iter::empty()); // no request of this prompt is active for a while
            assert!(speculator.groups.is_empty());
        }
        speculator.begin(request, &PROMPT);
        speculator.observe(text(request, 0, &tokens(completion)));
        numbers.extend(speculator.groups.values().map(|group| group.texts[&(request, 0)].number));
        speculator.end(request, [completion].into_iter());
    }
    assert_eq!(numbers, [1, 1, 2, 1], "the first text is the prompt");
    let earlier = speculator.earlier.of(prompt_key(&PROMPT));
    assert!(earlier.iter().map(|completion| &**completion).eq([turns[3], turns[2]]));
}

#[test]
fn drafting_pauses_until_drafts_would_be_accepted() {
    let mut speculator = speculator(Speculation::Ngram);
    speculator.begin(0, &PROMPT);
    speculator.observe(text(0, 0, &tokens(&[2, 3, 4, 5, 6])));
    let ends = tokens(&[2, 3]); // the whole text occurred before
    let wrong = Drafts { token_ids: vec![4], matched: ends.len() };
    (0..100).for_each(|_| speculator.note(&wrong, 0));
    assert!(drafts(&mut speculator, text(0, 1, &ends), 9).is_empty());
    (0..100).for_each(|_| speculator.note(&wrong, 1));
    assert!(!drafts(&mut speculator, text(0, 1, &ends), 9).is_empty());
}

#[test]
fn completions_are_compared_with_drafts_in_turn() {
    for group in [1, 4, 8, 16] {
        let of_step = |step| (0..256).filter(|at| is_looked_at(at / group, at % group, step)).count();
        assert_eq!([0, 1, 5, 16, 100].map(of_step), [256 / LOOK_EVERY; 5], "groups of {group}");
    }
}

#[test]
fn replayed_acceptance_has_the_requested_rate() {
    let mut speculator = speculator(Speculation::Ngram);
    assert!(!speculator.replays(1, 2, 3));
    speculator.inject(DraftInjection::replaying(0.7));
    let count = (0..10_000).filter(|&position| speculator.replays(5, 1, position)).count();
    assert!(count.abs_diff(7000) < 200, "{count}");
}

#[test]
fn ranks_with_different_draft_histories_reset_them() {
    let learned = |differs: bool| {
        let of_ranks = testing::threads(2, |all| {
            let mut speculator = speculator(Speculation::Auto);
            let tokens = [1 + u32::from(differs && all.rank() == 1)];
            speculator.begin(0, &PROMPT);
            speculator.end(0, [tokens.as_slice()].into_iter());
            let agreed = speculator.agree(all.as_ref()).unwrap();
            agreed.earlier.of(prompt_key(&PROMPT)).len()
        });
        (of_ranks[0], of_ranks[1])
    };
    assert_eq!((learned(false), learned(true)), ((1, 1), (0, 0)));
}
