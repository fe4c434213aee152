//! Documentation of every key from its declaration: the page docs/config.md and a starter file.

mod defaults;

use std::fmt::Write;

use crate::config::{Config, ConflictKind, KeyDoc, SftConfig, TABLE, Term, described, toml_value};

/// Width of comments in the starter file, in columns.
const WIDTH: usize = 78;

/// The text of docs/config.md.
pub(super) fn reference_page() -> String {
    let (grpo, supervised) = (described::<Config>(), described::<SftConfig>());
    let mut same: Vec<String> = supervised.iter().filter(|key| means_the_same(key, &grpo)).map(table_or_key).collect();
    same.dedup();
    let own = supervised.iter().filter(|key| !means_the_same(key, &grpo));
    format!(
        "# Configuration keys\n\n\
         Made from the program by `colo-grpo config --markdown`. Keys stand in TOML or YAML files and as `key=value` on the \
         command line;\nnested keys may stand in tables. There a list of names or paths needs no quotation marks, which a shell takes away: \
         `reward_funcs=[format,code]`. The names are those of TRL's `GRPOConfig` where it has them; values \
         that only TRL has and\nwhose meaning is clear are taken too (`max_steps = -1`, `resume_from_checkpoint = true`), with \
         a warning that says what they are\nread as. `colo-grpo config` prints all keys with their defaults as a file to \
         start from.\n\n\
         ## Defaults that are not TRL's\n\nEvery default of a key that TRL 1.16 has under this or another name is TRL's, but \
         for these:\n\n{}\n\
         ## GRPO (`colo-grpo --config FILE key=value ..`)\n{}\n\
         ## Supervised (`colo-grpo sft --config FILE key=value ..`)\n\n{}{}\n\
         As above: {}.\n\n\
         ## What does not go together\n\nA run that has both features of a row is refused with the row's reason. Elsewhere any two keys go \
         together, within the bounds that numbers\nset one another and what a chip lacks.\n{}",
        defaults::table(&grpo),
        grpo.iter().map(row).collect::<String>(),
        HEAD,
        own.map(row).collect::<String>(),
        same.join(", "),
        [ConflictKind::Unread, ConflictKind::Wrong, ConflictKind::Unserved].map(refused).concat(),
    )
}

/// The part of the table of exclusions with one kind of reason.
fn refused(part: ConflictKind) -> String {
    let title = match part {
        ConflictKind::Unread => "A key that nothing would read, or that another one contradicts",
        ConflictKind::Wrong => "A run that would not be what its keys ask for",
        ConflictKind::Unserved => "A run that the program cannot make",
    };
    let rows = TABLE.iter().filter(|row| row.refused == part).map(|row| {
        let with: Vec<_> = row.with.iter().map(Term::described).collect();
        format!("| {} | {} | {} |\n", row.feature.described(), with.join(", "), row.why)
    });
    format!("\n### {title}\n\n| feature | not with | why |\n|---|---|---|\n{}", rows.collect::<String>())
}

/// Every key with its default as a TOML file; with `is_sft` the keys of supervised fine-tuning.
pub(super) fn reference_toml(is_sft: bool) -> String {
    let keys = if is_sft { described::<SftConfig>() } else { described::<Config>() };
    keys.iter().map(entry).collect()
}

fn means_the_same(key: &KeyDoc, others: &[KeyDoc]) -> bool {
    let meaning = |key: &KeyDoc| (key.key.clone(), key.default.clone(), key.expected.clone(), key.text.clone());
    others.iter().any(|other| meaning(other) == meaning(key))
}

/// The name of a key, or of its table: supervised runs share whole tables with GRPO runs.
fn table_or_key(key: &KeyDoc) -> String {
    key.key.split_once('.').map_or_else(|| format!("`{}`", key.key), |(table, _)| format!("`{table}.*`"))
}

const HEAD: &str = "| key | default | value | what it is |\n|---|---|---|---|\n";

fn row(key: &KeyDoc) -> String {
    let mut text = key.section.map(|section| format!("\n### {section}\n\n{HEAD}")).unwrap_or_default();
    let default = key.default.as_ref().map_or("required".to_owned(), |value| match value.as_str() {
        Some(word) => format!("`{word}`"),
        None => format!("`{}`", toml_value(value)),
    });
    let cells = [format!("`{}`", shown(key)), default, key.expected.clone(), key.text.clone()];
    let _ = writeln!(text, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
    text
}

fn shown(key: &KeyDoc) -> String {
    let key = key.key.replace(".*.", ".NAME.");
    key.strip_suffix(".*").map_or(key.clone(), |table| format!("{table}.NAME"))
}

fn entry(key: &KeyDoc) -> String {
    let mut text = key.section.map(|section| format!("# ---- {section} ----\n\n")).unwrap_or_default();
    let told = format!("{} ({}{})", key.text, if key.default.is_none() { "required: " } else { "" }, key.expected);
    for line in wrapped(&told) {
        let _ = writeln!(text, "# {line}");
    }
    let name = shown(key);
    let _ = match &key.default {
        Some(default) if name == key.key => writeln!(text, "{name} = {}\n", toml_value(default)),
        Some(default) => writeln!(text, "#{name} = {}\n", toml_value(default)),
        None => writeln!(text, "#{name} =\n"),
    };
    text
}

fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line from the start");
        if line.is_empty() {
            line.push_str(word);
        } else if line.len() + 1 + word.len() <= WIDTH {
            *line += " ";
            *line += word;
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUIRED: &str = "model_name_or_path = 'model'\ntrain_file = 'train.jsonl'\nreward_funcs = ['format']\n";

    #[test]
    fn the_page_of_configuration_keys_is_up_to_date() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/config.md")).unwrap();
        assert!(page == reference_page(), "write it again: colo-grpo config --markdown > docs/config.md");
    }

    #[test]
    fn the_printed_starter_configuration_holds_the_defaults() {
        let text = reference_toml(false);
        let read = |text: &str| Config::from_toml(text).unwrap();
        let whole = REQUIRED.to_owned() + &text.replace("train_file = \"none\"\n", "");
        assert_eq!(read(&whole), read(REQUIRED));
        assert!(text.contains("#model_name_or_path =\n") && text.contains("#rewards.NAME.workers = 1\n"));
        let comments = text.lines().filter(|line| line.starts_with('#'));
        comments.for_each(|line| assert!(line.len() <= WIDTH + 2, "{line}"));
        assert!(described::<SftConfig>().iter().all(|key| !key.text.is_empty()));
    }

    #[test]
    fn numbers_below_the_documented_minimum_are_refused() {
        let keys = described::<Config>();
        let numbers: Vec<_> = keys.iter().filter(|key| key.expected.contains("a whole number")).collect();
        assert!(numbers.len() > 30);
        for KeyDoc { key, expected, .. } in numbers {
            let words: Vec<&str> = expected.split([' ', ':']).collect();
            let least = words.iter().find_map(|word| word.parse::<i64>().ok()).unwrap();
            let below = if least == 0 { -2 } else { least - 1 }; // -1 of some keys has a meaning in TRL
            let text = format!("{REQUIRED}{} = {below}\n", key.replace(".*.", ".mine."));
            let said = Config::from_toml(&text).unwrap_err().to_string();
            assert!(said.contains(&format!("expected {expected}")), "{said}");
        }
    }
}
