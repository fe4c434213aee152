//! Values that libraries make at their first use and keep for the process: expressions, tables. A thread that stops at its limit while it
//! makes one would keep all others from it for ever. So they are made before stranger's files are read, by the reader that needs them.

use std::sync::Once;

use minijinja::Environment;
use tokenizers::Tokenizer;

/// A tokenizer that uses all such values of the tokenizers library.
const TOKENIZER: &str = r#"{
    "version": "1.0",
    "added_tokens": [{"id": 1, "content": "b", "single_word": true, "lstrip": true, "rstrip": true, "normalized": false, "special": false}],
    "normalizer": {"type": "ByteLevel"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
}"#;

/// Makes those of the tokenizers library.
pub(super) fn of_tokenizers() {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let tokenizer = Tokenizer::from_bytes(TOKENIZER).expect("a tokenizer");
        let ids = tokenizer.encode_fast("a b c", false).expect("a text").get_ids().to_vec();
        tokenizer.decode(&ids, false).expect("a text");
    });
}

/// Makes those of the template library and of filters, with an environment as templates have it.
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

    /// Budgets of memory, each of which breaks a little later than the one before. The last is enough for everything.
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
