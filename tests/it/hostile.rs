//! Fuzzes every reader of untrusted files: valid files are damaged thousands of times
//! from a fixed seed. COLO_GRPO_HOSTILE multiplies the number of attempts. The fuzz targets in fuzz/ call the same functions and continue
//! from there.

#[path = "../../fuzz/targets.rs"]
mod targets;

/// Texts that damage inserts: numbers at the limits of their types, unclosed brackets and quotes, bytes that are not UTF-8.
const WORDS: [&[u8]; 24] = [
    b"18446744073709551615",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"-1",
    b"0",
    b"1e400",
    b"NaN",
    b"null",
    b"true",
    b"[",
    b"{",
    b"\"",
    b"[[[[[[[[[[[[[[[[",
    b"{\"a\":{\"a\":{\"a\":",
    b"}",
    b"]",
    b"\\",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"&a [*a,*a]",
    b"\\frac{",
    b"../",
];

/// A counter-based pseudo-random number generator (SplitMix64).
struct Numbers(u64);

impl Numbers {
    /// A random number below `end`, which must not be 0.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % end as u64) as usize
    }
}

/// A copy of a valid file with one to four kinds of damage at random places.
fn damaged(honest: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = honest.to_vec();
    for _ in 0..=numbers.below(4) {
        let at = numbers.below(bytes.len() + 1);
        let end = (at + numbers.below(12)).min(bytes.len());
        let word = WORDS[numbers.below(WORDS.len())];
        match numbers.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << numbers.below(8),
            1 => drop(bytes.splice(at..end, word.iter().copied())),
            2 => drop(bytes.splice(at..at, word.iter().copied())),
            3 => drop(bytes.drain(at..end)),
            4 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
            5 => bytes.truncate(at),
            // A number where a number stood.
            _ => {
                let digits = |byte: &u8| byte.is_ascii_digit();
                let Some(first) = bytes[at..].iter().position(digits).map(|offset| at + offset) else { continue };
                let len = bytes[first..].iter().take_while(|byte| digits(byte)).count();
                drop(bytes.splice(first..first + len, WORDS[numbers.below(8)].iter().copied()));
            }
        }
    }
    bytes
}

fn feed(target: fn(&[u8]) -> bool, honest: &[&[u8]], times: usize) {
    assert!(honest.iter().all(|bytes| target(bytes)), "an honest file is refused");
    let factor: usize = std::env::var("COLO_GRPO_HOSTILE").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1);
    let (mut numbers, mut num_read) = (Numbers(42), 0);
    for round in 0..times * factor {
        let bytes = damaged(honest[round % honest.len()], &mut numbers);
        let outcome = std::panic::catch_unwind(|| target(&bytes));
        num_read += usize::from(outcome.unwrap_or_else(|_| panic!("round {round}: {}", bytes.escape_ascii())));
    }
    println!("{num_read} of {} damaged files were read", times * factor);
    assert!((times / 100..times * factor * 99 / 100).contains(&num_read), "{num_read}: too little or too much damage");
}

#[test]
fn damaged_weights_and_indexes_are_read_or_refused() {
    let header = targets::honest_header();
    let index =
        br#"{"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}"#;
    feed(targets::weights, &[&header, index], 1500);
}

#[test]
fn damaged_configurations_are_read_or_refused() {
    let toml = b"seed = 3\nlearning_rate = 1e-6\nstop = [\"a\", \"b\"]\nreward.answer_pattern = \"([0-9]+)\"\n[zero]\nstage = 2\n";
    let yaml = b"---\nseed: 3\nstop: [a, b]\nzero:\n  stage: 2\nlora: {r: 8, alpha: 16.0}\nlearning_rate: 1e-6\n";
    let word = b"max_steps=100";
    let model = include_bytes!("../golden/llama3/config.json");
    feed(targets::config, &[toml, yaml, word, model], 4000);
}

#[test]
fn damaged_rows_are_read_or_refused() {
    let text = br#"{"prompt": "what is one plus two ?", "answer": "3"}"#;
    let chat =
        br#"{"prompt": [{"role": "user", "content": "what is one"}], "answer": 7, "extra": {"a": [1, 2.5, null]}}"#;
    let verl = b"{\"question\": \"one\", \"reward_model\": {\"ground_truth\": \"4\"}}\n\n{\"problem\": \"two\", \"solution\": 4}\n";
    let taught =
        br#"{"messages": [{"role": "user", "content": "what is one"}, {"role": "assistant", "content": "one"}]}"#;
    let both = br#"{"prompt": "what is one", "completion": "the answer is 1"}"#;
    feed(targets::rows, &[text, chat, verl, taught, both], 5000);
}

#[test]
fn damaged_answers_are_scored_or_refused() {
    let honest: [&[u8]; 4] = [
        b"so <answer> 1,234.50 </answer>\n\\frac{2469}{2}",
        b"\\boxed{\\frac{6}{8}} or \\boxed{-1.5e3}\n3/4",
        b"#### $1{,}000.\n#### 1000%",
        b"<answer>forty two</answer> \\boxed{{a}}\n42",
    ];
    feed(targets::answer, &honest, 6000);
}

#[test]
fn damaged_templates_are_rendered_or_refused() {
    let honest: [&[u8]; 3] = [
        b"{{ bos_token }}{% for m in messages %}{{ '<' ~ m.role + '>' + m['content'] | trim }}{% endfor %}",
        b"{%- set ns = namespace(n=0) -%}{% for m in messages[::-1] %}{% if not m.role == 'user' and ns.n < 3 %}\
          {% set ns.n = ns.n + 1 %}{% continue %}{% endif %}{{ '%s: %5d' % (m.content, ns.n) }}{% endfor %}",
        b"{% macro f(x, y=[1, {'a': 2.5}]) %}{{ x | tojson(indent=2) }}{{ y[-1].a * 2 }}{% endmacro %}{{ f(messages) }}\
          {{ strftime_now('%d %b') if false else 'a b'.rsplit(' ', 1) | join('-') }}",
    ];
    feed(targets::template, &honest, 2000);
}

#[test]
fn damaged_parquet_files_are_read_or_refused() {
    feed(targets::parquet, &[include_bytes!("../golden/rows.parquet"), &footer(3)], 3000);
}

#[test]
fn damaged_checkpoints_are_read_or_refused() {
    feed(targets::checkpoint, &[targets::honest_manifest().as_bytes(), targets::STATE.as_bytes()], 3000);
}

#[test]
fn damaged_replies_are_read_or_refused() {
    feed(targets::reply, &[br#"{"rewards": [1.0, null, 0.25]}"#, br#"{"rewards": [1e3, -2, 0]}"#], 5000);
}

/// The footer of a Parquet file without rows whose schema nests `num_groups` groups, with a number column in the innermost.
pub fn footer(num_groups: u32) -> Vec<u8> {
    let varint = |mut number: u32| {
        let mut bytes = Vec::new();
        while number >= 0x80 {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
        bytes
    };
    // Thrift's compact protocol: repetition, name, number of children; type, repetition, name.
    let group: &[u8] = &[0x35, 0, 0x18, 1, b'a', 0x15, 2, 0];
    let number: &[u8] = &[0x15, 2, 0x25, 0, 0x18, 1, b'b', 0];
    // Version 1, the schema, no rows, no row groups.
    let head = [&[0x15, 2, 0x19, 0xfc], &varint(num_groups + 1)[..]].concat();
    [&head, &group.repeat(num_groups as usize), number, &[0x16, 0, 0x19, 0x0c, 0]].concat()
}

/// Nesting depths and lengths that random damage does not reach.
#[test]
fn endless_files_are_refused() {
    let deep = |open: &str| open.repeat(200_000).into_bytes();
    for open in ["[", "{\"a\":", "a = [", "---\n[", "a.", "- "] {
        assert!(!targets::config(&deep(open)), "{open}");
        assert!(!targets::rows(&deep(open)), "{open}");
    }
    let (bomb, mut last) = (String::from("---\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"), 0);
    let bomb = (1..12).fold(bomb, |text, level| {
        let before = std::mem::replace(&mut last, level);
        format!("{text}a{level}: &a{level} [{}]\n", vec![format!("*a{before}"); 10].join(","))
    });
    assert!(!targets::config(bomb.as_bytes()));
    for (open, close) in [
        ("a = {\"b\"={b=", "1"),
        ("[[a.", "b]]"),
        ("a.", "a = 1"),
        ("---\n? ", "a"),
        ("---\n- ", "a"),
        ("---\na: {", ""),
    ] {
        assert!(!targets::config(&[deep(open), close.into()].concat()), "{open}");
    }
    let keys = |format: &dyn Fn(u32) -> String| (0..100_000).map(format).collect::<String>().into_bytes();
    assert!(!targets::config(&keys(&|index| format!("learning_rat_{index} = 1\n"))));
    assert!(!targets::config(&[b"---\n", &keys(&|index| format!("k{index}: 1\n"))[..]].concat()));
    for num_groups in [1_001, 20_000, 1_000_000] {
        assert!(!targets::parquet(&footer(num_groups)), "{num_groups}");
    }
    assert!(targets::parquet(&footer(900)), "a schema as wide as any");
    let manifest = targets::honest_manifest();
    assert!(!targets::checkpoint(br#"{"format": 1, "files": []}"#), "a manifest of no files vouches for nothing");
    assert!(!targets::checkpoint(manifest.replace("trainer_state.json", "a\\u0000b").as_bytes()));
    let long = format!("#### {}", "9".repeat(1 << 20));
    let nested = [deep("\\boxed{"), deep("}")].concat();
    for completion in [nested, deep("\\boxed{"), deep("\\fbox "), deep("<answer>"), deep("#### "), long.into_bytes()] {
        assert!(targets::answer(&completion), "a completion of any length is scored");
    }
}
