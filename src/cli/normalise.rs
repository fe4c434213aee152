//! Rewrites the user's arguments into the form that clap parses.

use clap::{Command, CommandFactory};

use super::args::Cli;
use crate::config::{Config, SftConfig};
use crate::error::Error;

/// Makes `train` the default command, turns `--a.b c` of a configuration key into the override `a.b=c` (`--key` alone into `key=true`), and accepts
/// hyphens for underscores in names.
pub fn normalise(argv: Vec<String>) -> Vec<String> {
    let has_config = has_config(&argv);
    let mut rest = argv.into_iter().peekable();
    let mut out: Vec<String> = rest.next().into_iter().collect();
    let Some(first) = rest.peek() else {
        out.push("--help".into());
        return out;
    };
    let mut program = Cli::command();
    program.build();
    let mut command = &program;
    let is_meta = ["-h", "--help", "-V", "--version"].contains(&first.as_str());
    if !is_meta && (first.starts_with('-') || first.contains(['=', '.'])) {
        out.push("train".into());
        command = program.find_subcommand("train").unwrap_or(command);
    }
    while let Some(inner) = rest.peek().and_then(|word| command.find_subcommand(word)) {
        command = inner;
        out.extend(rest.next());
    }
    let takes_keys = takes_keys(command, has_config);
    while let Some(argument) = rest.next() {
        if takes_keys && argument == "--" {
            continue; // keys behind it are read as those before it
        }
        let Some(option) = argument.strip_prefix("--") else {
            out.push(argument);
            continue;
        };
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value.to_owned())));
        let name = name.replace('-', "_");
        if takes_keys && !has_option(command, &name) {
            let name = key_of(name);
            // An option or an override that follows is not this one's value: `--flag key=value`.
            let is_value = |next: &String| !next.starts_with("--") && !is_override(next);
            let value = value.or_else(|| rest.next_if(is_value));
            out.push(format!("{name}={}", value.as_deref().unwrap_or("true")));
        } else {
            out.push(format!("--{name}{}", value.map(|value| format!("={value}")).unwrap_or_default()));
        }
    }
    out
}

/// Renames the key in an error to the option that the user typed, as some commands pass options on as configuration keys. `argv` is normalised.
pub fn name_options(argv: &[String], error: Error) -> Error {
    let Error::InvalidValue { key, got, expected } = error else { return error };
    let mut program = Cli::command();
    program.build();
    let mut command = &program;
    for word in argv.iter().skip(1) {
        let Some(inner) = command.find_subcommand(word) else { break };
        command = inner;
    }
    let last = key.rsplit('.').next().unwrap_or(&key).to_owned();
    let mut options = [key.replace('.', "_"), last].into_iter();
    let names_keys = takes_keys(command, has_config(argv));
    let option = options.find(|name| !names_keys && has_option(command, name));
    Error::InvalidValue { key: option.map_or(key, |name| format!("--{name}")), got, expected }
}

/// Whether a command accepts overrides of configuration keys; `eval` does so only with `--config`.
fn takes_keys(command: &Command, has_config: bool) -> bool {
    let has_overrides = command.get_arguments().any(|known| known.get_id() == "overrides");
    has_overrides && (has_config || command.get_name() != "eval")
}

fn has_config(argv: &[String]) -> bool {
    argv.iter().any(|word| word == "--config" || word.starts_with("--config="))
}

/// Whether an option belongs to the command; otherwise it is a configuration key.
fn has_option(command: &Command, name: &str) -> bool {
    command.get_arguments().any(|known| {
        known.get_long() == Some(name) || known.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
    })
}

/// The configuration key that an option means: `--zero_stage` is `zero.stage`, `--tp` is `tensor_parallel_size`, `--pp` is `pipeline_parallel_size`.
fn key_of(option: String) -> String {
    let dotted = option.replacen('_', ".", 1);
    match option.as_str() {
        "tp" => "tensor_parallel_size".to_owned(),
        "pp" => "pipeline_parallel_size".to_owned(),
        _ if Config::keys().contains(&dotted) => dotted,
        _ => option,
    }
}

/// Whether a word is an override `key=value`.
fn is_override(word: &str) -> bool {
    let key = word.split_once('=').map(|(key, _)| key);
    key.is_some_and(|key| Config::keys().iter().chain(&SftConfig::keys()).any(|known| known == key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(line: &str) -> String {
        normalise(line.split(' ').map(str::to_owned).collect()).join(" ")
    }

    #[test]
    fn train_is_the_default_command_and_dotted_options_are_overrides() {
        assert_eq!(
            normalised("colo-grpo --nproc 8 --config a.toml --zero.stage 3 --learning_rate=1e-5 beta=0.1"),
            "colo-grpo train --nproc 8 --config a.toml zero.stage=3 learning_rate=1e-5 beta=0.1"
        );
        assert_eq!(
            normalised("colo-grpo plan --log-completions --max-steps 3 --learnign_rate 1 --nproc-per-node=2"),
            "colo-grpo plan log_completions=true max_steps=3 learnign_rate=1 --nproc_per_node=2"
        );
        assert_eq!(normalised("colo-grpo --log_completions beta=1"), "colo-grpo train log_completions=true beta=1");
        assert_eq!(normalised("colo-grpo --nproc 2 -- beta=1"), "colo-grpo train --nproc 2 beta=1");
        assert_eq!(normalised("colo-grpo"), "colo-grpo --help");
        assert_eq!(normalised("colo-grpo run.toml beta=1"), "colo-grpo train run.toml beta=1"); // which says --config
        assert_eq!(
            normalised("colo-grpo bench step --preset tiny --nproc 2 --tp 2 --zero-stage 3 --residency-optimizer swap"),
            "colo-grpo bench step --preset tiny --nproc 2 tensor_parallel_size=2 zero.stage=3 residency.optimizer=swap"
        );
        assert_eq!(normalised("colo-grpo bench train --zero-stage 3"), "colo-grpo bench train --zero_stage 3");
        assert_eq!(normalised("colo-grpo eval --top-p 1 --tempreature 2"), "colo-grpo eval --top_p 1 --tempreature 2");
        assert_eq!(
            normalised("colo-grpo eval --config a.json --max-eval-samples 4 top_p=1 -n 2"),
            "colo-grpo eval --config a.json max_eval_samples=4 top_p=1 -n 2"
        );
        assert_eq!(
            normalised("colo-grpo plan --gpu-memory-gib 79 --preset tiny --nproc 8 --beta 1"),
            "colo-grpo plan --gpu_memory_gib 79 --preset tiny --nproc 8 beta=1"
        );
        for line in ["colo-grpo --help", "colo-grpo help bench step", "colo-grpo -V", "colo-grpo trian --nproc 2"] {
            assert_eq!(normalised(line), line);
        }
    }

    #[test]
    fn errors_name_the_option_as_typed() {
        for (line, key, expected) in [
            ("colo-grpo eval --answer_pattern (", "reward.answer_pattern", "--answer_pattern"),
            ("colo-grpo eval --config a.json temperature=-1", "temperature", "temperature"),
            ("colo-grpo generate --tp 3", "tensor_parallel_size", "--tensor_parallel_size"),
            ("colo-grpo bench train --zero_stage 4", "zero.stage", "--zero_stage"),
            ("colo-grpo eval --data x", "kv_cache_bytes", "kv_cache_bytes"),
            ("colo-grpo train zero.stage=4", "zero.stage", "zero.stage"),
            ("colo-grpo plan tensor_parallel_size=3", "tensor_parallel_size", "tensor_parallel_size"),
        ] {
            let argv: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let named = name_options(&argv, Error::invalid_value(key, 3, "another"));
            assert_eq!(named.to_string(), format!("{expected} = 3: expected another"), "{line}");
        }
    }

    #[test]
    fn clap_accepts_the_command_line_definition() {
        let mut command = Cli::command();
        command.build();
        command.debug_assert();
    }

    #[test]
    fn names_of_options_have_no_dashes() {
        let mut program = Cli::command();
        program.build();
        let mut commands = vec![&program];
        while let Some(command) = commands.pop() {
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(
                    !option.contains('-'),
                    "{}: --{option}, which normalise() makes unreachable",
                    command.get_name()
                );
            }
            commands.extend(command.get_subcommands());
        }
    }
}
