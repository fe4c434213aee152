//! Initializes static values of libraries, such as regular expressions and tables. Libraries create them at first use. If a thread is stopped at its
//! limit
//! while it creates one, all other threads would wait for it forever. Readers of untrusted files therefore create them beforehand.

use std::sync::Once;

use minijinja::Environment;
use tokenizers::Tokenizer;

/// A tokenizer definition that uses all static values of the tokenizers library.
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "added_tokens": [{"id": 1, "content": "b", "single_word": true, "lstrip": true, "rstrip": true, "normalized": false, "special": false}],
    "normalizer": {"type": "ByteLevel"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
}"#;

/// Initializes the static values of the tokenizers library.
pub(super) fn of_tokenizers() {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let tokenizer = Tokenizer::from_bytes(TOKENIZER).expect("a tokenizer");
        let ids = tokenizer.encode_fast("a b c", false).expect("a text").get_ids().to_vec();
        tokenizer.decode(&ids, false).expect("a text");
    });
}

/// Initializes the static values of the template library and of filters. `environment` creates an environment like that of templates.
pub(super) fn of_templates(environment: impl FnOnce() -> Environment<'static>) {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let source = "{{ 5 }}{% for i in [1, 'a' ~ 2] %}{{ i|string }}{% endfor %}{{ 'a b'|wordcount }}";
        assert_eq!(environment().render_str(source, ()).expect("a template"), "51a22");
    });
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::chat::ChatTemplate;
    use super::super::tokenizer::read_within;
    use crate::untrusted::ThreadLimits;
    use crate::untrusted::testing::{alone, ends_if_it_hangs};

    /// Increasing memory limits in steps of `step_bytes`. With the last one, everything succeeds.
    fn budgets(step_bytes: usize, num_steps: usize) -> impl Iterator<Item = ThreadLimits> {
        let steps = (1..=num_steps).map(move |step| step * step_bytes).chain([1 << 30]);
        steps.map(|memory_bytes| ThreadLimits { stack_bytes: 4 << 20, memory_bytes, cpu_s: 60 })
    }

    #[test]
    fn a_killed_reader_thread_does_not_block_others() {
        alone("data::statics::tests::tokenizer_threads_killed_at_any_point_block_nothing");
        alone("data::statics::tests::template_threads_killed_at_any_point_block_nothing");
    }

    #[test]
    #[ignore = "in a process of its own"]
    fn tokenizer_threads_killed_at_any_point_block_nothing() {
        ends_if_it_hangs();
        // Nothing is read as a whole before the end: that would make what a thread which stops could keep.
        let read = |limits| read_within(super::TOKENIZER.as_bytes().to_vec(), Default::default(), limits).map(drop);
        let outcomes: Vec<_> = budgets(2 << 10, 200).map(read).collect();
        assert!(outcomes[0].is_err() && outcomes[outcomes.len() - 1].is_ok(), "{outcomes:?}");
    }

    #[test]
    #[ignore = "in a process of its own"]
    fn template_threads_killed_at_any_point_block_nothing() {
        ends_if_it_hangs();
        let source = "{% for n in [1, 250, 7.5] %}{{ n }}{{ n|tojson }}{{ 'a' ~ n }}{% endfor %}{{ 'abc'.upper()|trim }}\
            {{ 'a b c'|wordcount }}";
        let rendered = |limits| ChatTemplate::within(limits, source, BTreeMap::new())?.render(&[], true);
        let outcomes: Vec<_> = budgets(256, 400).map(rendered).collect();
        let whole = outcomes[outcomes.len() - 1].as_ref().unwrap();
        assert!(outcomes[0].is_err() && whole == "11a1250250a2507.57.5a7.5ABC3", "{whole}");
    }
}
