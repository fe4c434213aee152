//! Tests of prompts that are longer than one step can hold.

use super::*;

/// Other sequences decode between the chunks of a long prompt, four steps per chunk; prompts that fit into one step together are computed first.
#[test]
fn other_sequences_decode_between_chunks_of_a_long_prefill() {
    let limits = StepLimits { max_num_batched_tokens: 8, ..ROOMY };
    let (long, short): (Vec<u32>, Vec<u32>) = ((1..=40).collect(), (1..=6).collect());
    let rules = StopRules { eos_token_ids: &[], decode: &|_| Ok(String::new()) };
    let kinds_of_steps = |prompts: &[Vec<u32>]| {
        let (mut scheduler, mut cache) = (scheduler(limits, std::slice::from_ref(&short), 2), Cache::new());
        let mut next = |scheduler: &mut Scheduler| {
            let step = scheduler.schedule().unwrap();
            let tokens = scheduler.sequences.iter().map(|sequence| sequence.token_ids.clone()).collect();
            let sampled = Model { cache: &mut cache, tokens }.run(&step, scheduler);
            scheduler.postprocess(&step, &sampled, &rules).unwrap();
            scheduler.check_integrity().unwrap();
            if step.is_decode { 'd' } else { 'p' }
        };
        assert_eq!(next(&mut scheduler), 'p');
        for prompt in prompts {
            scheduler.submit(request(prompt, 1, Vec::new()), None);
        }
        let mut kinds = String::from(next(&mut scheduler));
        while !scheduler.prefilling.is_empty() {
            kinds.push(next(&mut scheduler));
        }
        kinds
    };
    assert_eq!(kinds_of_steps(&[long]), "pddddpddddpddddpddddp");
    assert_eq!(kinds_of_steps(&[short.clone(), short.clone(), short.clone()]), "ppp");
}
