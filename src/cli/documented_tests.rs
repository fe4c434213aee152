//! Checks README.md and docs/: every `colo-grpo ..` command parses, every configuration key exists and accepts the value shown, and scripts have the
//! options shown. Nothing is run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, CommandFactory};

use super::args::Cli;
use super::normalise::normalise;
use crate::config::{Config, SftConfig};

/// A command as shown on a page.
struct ShownCommand {
    words: Vec<String>,
    /// Whether it appears within a sentence, where required arguments may be omitted.
    is_inline: bool,
}

fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let markdown = |folder: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
    };
    let mut paths = [markdown("docs"), markdown("docs/benchmarks"), vec![root.join("README.md")]].concat();
    paths.sort();
    let name = |path: &Path| path.strip_prefix(root).unwrap().display().to_string();
    paths.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

/// The fenced blocks of a page, each with its language, and the rest of the page.
fn blocks(page: &str) -> (Vec<(String, String)>, String) {
    let (mut fenced, mut rest, mut open): (Vec<(String, String)>, String, bool) = (Vec::new(), String::new(), false);
    for line in page.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            open = !open;
            if open {
                fenced.push((language.trim().to_owned(), String::new()));
            }
            continue;
        }
        let text = if open { &mut fenced.last_mut().unwrap().1 } else { &mut rest };
        text.push_str(line);
        text.push('\n');
    }
    (fenced, rest)
}

/// The simple commands of a shell line, without comments and redirections. A `|` within a word separates alternatives, of which the first is used;
/// `[` and `]` around words mark them as optional.
fn simple_commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut chars = line.chars().peekable();
    let (mut word, mut in_word, mut quote) = (String::new(), false, None);
    loop {
        let next = chars.next();
        match (next, quote) {
            (Some('\\'), Some('"') | None) => word.extend(chars.next()),
            (Some(c), Some(open)) if c == open => quote = None,
            (Some(c), Some(_)) => word.push(c),
            (Some(c @ ('"' | '\'')), None) => quote = Some(c),
            (None | Some(' ' | '\n' | ';' | '>' | '&'), _) => {
                if in_word {
                    let alternative = word.split('|').next().unwrap().to_owned();
                    commands.last_mut().unwrap().push(alternative);
                }
                (word, in_word) = (String::new(), false);
                match next {
                    None => break,
                    Some(';' | '&') => commands.push(Vec::new()),
                    Some('>') => break,
                    _ => {}
                }
                continue;
            }
            (Some('#'), None) if !in_word => break,
            (Some('|'), None) if !in_word => commands.push(Vec::new()),
            (Some(c), None) => word.push(c),
        }
        in_word = true;
    }
    let optional = |word: &String| {
        let word = word.strip_prefix('[').unwrap_or(word);
        word.strip_suffix(']').filter(|inner| !inner.contains('[')).unwrap_or(word).to_owned()
    };
    commands.iter().map(|words| words.iter().map(optional).collect()).collect()
}

/// All commands shown on a page.
fn shown(page: &str) -> Vec<ShownCommand> {
    let (fenced, rest) = blocks(page);
    let lines = fenced.into_iter().flat_map(|(_, text)| {
        let joined = text.replace("\\\n", " ");
        joined.lines().map(|line| line.trim_start_matches(['$', ' ']).to_owned()).collect::<Vec<_>>()
    });
    let in_fences = lines.flat_map(|line| simple_commands(&line)).map(|words| ShownCommand { words, is_inline: false });
    let code = regex::Regex::new("`([^`]+)`").unwrap();
    let spans: Vec<String> = code.captures_iter(&rest).map(|found| found[1].replace('\n', " ")).collect();
    let inline =
        spans.iter().flat_map(|span| simple_commands(span)).map(|words| ShownCommand { words, is_inline: true });
    in_fences.chain(inline).filter(|shown| !shown.words.is_empty()).collect()
}

/// Whether a word is a placeholder for a value of the reader's.
fn is_placeholder(word: &str) -> bool {
    word == ".."
        || word.starts_with('$')
        || word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

/// The arguments of this program in a command, beginning with its name; also if the program is an argument of a script.
fn arguments(words: &[String]) -> Option<Vec<String>> {
    let place = words.iter().position(|word| word == "colo-grpo" || word.ends_with("/colo-grpo"))?;
    if words[0] == "docker" {
        return None; // the name of an image
    }
    let is_script = words[..place].iter().any(|word| word.starts_with("scripts/") || !word.is_ascii());
    let rest = &words[place..];
    (!is_script && rest.len() > 1).then(|| rest.to_vec())
}

/// The matches of the innermost subcommand, with its name.
fn innermost(mut matches: ArgMatches) -> (String, ArgMatches) {
    let mut name = String::new();
    while let Some((inner, of_inner)) = matches.remove_subcommand() {
        (name, matches) = (inner, of_inner);
    }
    (name, matches)
}

/// Errors in the `key=value` words of a command: unknown keys and invalid values.
fn wrong_keys(words: &[String], is_sft: bool, file: &Path) -> Vec<String> {
    let is_given = |word: &&String| {
        word.split_once('=').is_some_and(|(key, value)| key != "key" && !is_placeholder(value) && !value.contains('$'))
    };
    let given: Vec<String> = words.iter().filter(is_given).cloned().collect();
    // A value of the wrong type is quoted as it was written; one that does not go with another key is not.
    let names = |error: &str, word: &String| {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        error.contains(&format!("{key} = \"{value}\": expected"))
    };
    let loaded =
        if is_sft { SftConfig::load(Some(file), &given).err() } else { Config::load(Some(file), &given).err() };
    let said = loaded.map(|error| error.to_string()).unwrap_or_default();
    let known: BTreeSet<String> =
        if is_sft { SftConfig::keys() } else { Config::keys().to_vec() }.into_iter().collect();
    let is_wrong = |word: &&String| {
        let key = word.split('=').next().unwrap();
        key != "key" && (!known.contains(key) || names(&said, word))
    };
    words.iter().filter(is_wrong).map(|word| format!("{word} ({said})")).collect()
}

/// The error of a command of this program, if it is wrong.
fn wrong_command(arguments: &[String], is_inline: bool) -> Option<String> {
    let is_open = is_inline || arguments.iter().any(|word| word == "..");
    let mut words: Vec<String> = Vec::new();
    for word in arguments {
        let is_value = words.last().is_some_and(|before| before.starts_with('-'));
        if word != ".." || is_value {
            words.push(word.clone());
        }
    }
    if words[1..].iter().take(1).any(|word| is_placeholder(word)) {
        return None; // any command
    }
    let parsed = Cli::command().try_get_matches_from(normalise(words.clone()));
    let matches = match parsed {
        Ok(matches) => matches,
        Err(error) => {
            let is_own = match error.get(ContextKind::InvalidValue) {
                Some(ContextValue::String(value)) => is_placeholder(value),
                _ => false,
            };
            return match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
                ErrorKind::ValueValidation | ErrorKind::InvalidValue if is_own => None,
                ErrorKind::MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if is_open => {
                    None
                }
                _ => Some(error.to_string()),
            };
        }
    };
    let (name, matches) = innermost(matches);
    let overrides = matches.try_get_many::<String>("overrides").ok().flatten();
    let overrides: Vec<String> = overrides.map(|words| words.cloned().collect()).unwrap_or_default();
    let is_sft = name == "sft";
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let given = matches.try_get_one::<PathBuf>("config").ok().flatten().map(|path| root.join(path));
    let usual = root.join(if is_sft { "configs/sft.toml" } else { "configs/tiny-cpu.toml" });
    let file = given.filter(|path| path.exists() && path.extension().is_some_and(|end| end == "toml")).unwrap_or(usual);
    let wrong = wrong_keys(&overrides, is_sft, &file);
    (!wrong.is_empty()).then(|| wrong.join("; "))
}

/// The first option of a command that neither the script nor the scripts it calls know, or that the script does not exist.
fn wrong_script(words: &[String]) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = words.iter().position(|word| word.starts_with("scripts/"))?;
    let Ok(mut text) = std::fs::read_to_string(root.join(&words[place])) else {
        return Some(format!("no file {}", words[place])).filter(|_| !words[place].contains('*'));
    };
    let called = regex::Regex::new(r"\b\w+\.(?:py|sh)\b").unwrap();
    let others: BTreeSet<String> = called.find_iter(&text).map(|found| found.as_str().to_owned()).collect();
    others
        .iter()
        .for_each(|name| text.push_str(&std::fs::read_to_string(root.join("scripts").join(name)).unwrap_or_default()));
    let options = words[place + 1..].iter().filter(|word| word.starts_with("--") && word.len() > 2);
    let unknown = options.map(|word| word.split('=').next().unwrap()).find(|option| !text.contains(option))?;
    Some(format!("{} has no {unknown}", words[place]))
}

#[test]
fn commands_in_the_documentation_parse() {
    let mut wrong = Vec::new();
    let mut num_commands = 0;
    for (page, text) in pages() {
        for ShownCommand { words, is_inline } in shown(&text) {
            let of_program = arguments(&words).and_then(|arguments| {
                num_commands += 1;
                wrong_command(&arguments, is_inline)
            });
            let found = of_program.into_iter().chain(wrong_script(&words));
            wrong.extend(found.map(|error| format!("{page}: {}\n    {error}", words.join(" "))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(num_commands > 100, "{num_commands} commands: the reader of pages finds too few");
}

/// Keys of a TOML table as dotted names.
fn dotted(table: &toml::Table, prefix: &str, found: &mut Vec<String>) {
    for (key, value) in table {
        let name = format!("{prefix}{key}");
        match value {
            toml::Value::Table(inner) if !Config::keys().contains(&name) => dotted(inner, &format!("{name}."), found),
            _ => found.push(name),
        }
    }
}

#[test]
fn keys_in_the_documentation_exist() {
    // Tables whose names are the user's own, keys of a table `[rewards.NAME]`, and names of other programs.
    let is_own =
        |name: &str| ["rewards.", "chat_template_kwargs.", "environment_args."].iter().any(|own| name.starts_with(own));
    let others = ["key", "x", "batch", "command", "vllm_mode", "teacher_model_kind"];
    let known: BTreeSet<String> = Config::keys().iter().cloned().chain(SftConfig::keys()).collect();
    let inline = regex::Regex::new(r"`([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*) ?= ?[^`=\n]+`").unwrap();
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        let (fenced, rest) = blocks(&text);
        let mut names: Vec<String> = inline.captures_iter(&rest).map(|found| found[1].to_owned()).collect();
        for (_, block) in fenced.iter().filter(|(language, _)| language == "toml") {
            let table: toml::Table = toml::from_str(block).unwrap_or_else(|error| panic!("{page}: {error}\n{block}"));
            if !["dependencies", "env"].iter().any(|table_of_cargo| table.contains_key(*table_of_cargo)) {
                dotted(&table, "", &mut names);
            }
        }
        let is_wrong = |name: &String| !known.contains(name) && !is_own(name) && !others.contains(&name.as_str());
        wrong.extend(names.into_iter().filter(is_wrong).map(|name| format!("{page}: {name}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Commands that these tests must find, and commands that they must accept.
#[test]
fn the_check_of_documented_commands_finds_wrong_ones() {
    let check = |line: &str, is_inline: bool| {
        let words = simple_commands(line).swap_remove(0);
        let of_program = arguments(&words).and_then(|arguments| wrong_command(&arguments, is_inline));
        of_program.or_else(|| wrong_script(&words))
    };
    for line in [
        "colo-grpo --nproc 2 --config run.toml learning_rat=1",
        "colo-grpo --config run.toml optim=adam_9bit",
        "colo-grpo trane --config run.toml",
        "colo-grpo export --model runs/a",
        "colo-grpo eval --modle DIR --data FILE",
        "colo-grpo bench train --sequences many",
        "OMP_NUM_THREADS=1 target/debug/colo-grpo serve --model a --prot 8000",
        "scripts/soak.py target/release/colo-grpo runs/soak --speed 3",
    ] {
        assert!(check(line, false).is_some(), "{line}");
    }
    for line in [
        "colo-grpo --nproc 2 --config run.toml learning_rate=1e-6 'optim=adamw_8bit' # more",
        "colo-grpo sft --nproc 8 --config sft.toml key=value",
        "colo-grpo bench train --sequences N [--quantization nf4] | tee log",
        "colo-grpo COMMAND --help",
        r"colo-grpo completions bash\|zsh > file",
        "scripts/soak.py target/release/colo-grpo runs/soak kills --size 1",
    ] {
        assert_eq!(check(line, false), None, "{line}");
    }
    assert_eq!(check("colo-grpo export --model runs/a", true), None);
}
