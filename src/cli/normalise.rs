//! What a user types, in the form that the parser of arguments takes.

use crate::config::{Config, SftConfig};
use crate::reward;

const SUBCOMMANDS: &[&str] = &[
    "train",
    "sft",
    "generate",
    "eval",
    "init",
    "export",
    "plan",
    "config",
    "report",
    "bench",
    reward::code::SANDBOX_COMMAND,
    "help",
];
/// The options of commands that take overrides; every other `--name` is a configuration key.
const RUN_OPTIONS: &[&str] =
    &["config", "nproc", "nproc_per_node", "num_processes", "master_addr", "master_port", "help", "version"];

/// The further options of `bench step`, which takes overrides too.
const STEP_OPTIONS: &[&str] = &[
    "model_preset",
    "preset",
    "config_json",
    "prompts",
    "group",
    "prompt_len",
    "completion_len",
    "completion_spread",
    "steps",
];

/// Makes `train` the default, turns `--a.b c` of a configuration key into the override `a.b=c` (`--key` alone into
/// `key=true`), and takes hyphens for underscores in names.
pub fn normalise(argv: Vec<String>) -> Vec<String> {
    let mut rest = argv.into_iter().peekable();
    let mut out: Vec<String> = rest.next().into_iter().collect();
    let Some(first) = rest.peek() else {
        out.push("--help".into());
        return out;
    };
    let meta = ["-h", "--help", "-V", "--version"].contains(&first.as_str());
    let named = SUBCOMMANDS.contains(&first.as_str());
    let mut takes_overrides = !meta && (!named || ["train", "sft", "plan"].contains(&first.as_str()));
    let mut own_options = RUN_OPTIONS.to_vec();
    if !meta && !named {
        out.push("train".into());
    } else if first == "bench" {
        out.extend(rest.next());
        takes_overrides = rest.peek().is_some_and(|bench| bench == "step");
        own_options.extend(STEP_OPTIONS);
    }
    while let Some(argument) = rest.next() {
        let Some(option) = argument.strip_prefix("--") else {
            out.push(argument);
            continue;
        };
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value.to_owned())));
        let name = name.replace('-', "_");
        if takes_overrides && !own_options.contains(&name.as_str()) {
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

/// The configuration key that an option names: `--zero_stage` is `zero.stage`, `--tp` the tensor-parallel size.
fn key_of(option: String) -> String {
    let dotted = option.replacen('_', ".", 1);
    match option.as_str() {
        "tp" => "tensor_parallel_size".to_owned(),
        _ if Config::keys().contains(&dotted) => dotted,
        _ => option,
    }
}

/// Whether a word is `key=value` of a configuration key.
fn is_override(word: &str) -> bool {
    let key = word.split_once('=').map(|(key, _)| key);
    key.is_some_and(|key| Config::keys().iter().chain(&SftConfig::keys()).any(|known| known == key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Cli;

    fn normalised(line: &str) -> String {
        normalise(line.split(' ').map(str::to_owned).collect()).join(" ")
    }

    #[test]
    fn train_is_the_default_and_dotted_options_are_overrides() {
        assert_eq!(
            normalised("colo-grpo --nproc 8 --config a.toml --zero.stage 3 --learning_rate=1e-5 beta=0.1"),
            "colo-grpo train --nproc 8 --config a.toml zero.stage=3 learning_rate=1e-5 beta=0.1"
        );
        assert_eq!(
            normalised("colo-grpo plan --log-completions --max-steps 3 --learnign_rate 1 --nproc-per-node=2"),
            "colo-grpo plan log_completions=true max_steps=3 learnign_rate=1 --nproc_per_node=2"
        );
        assert_eq!(normalised("colo-grpo --log_completions beta=1"), "colo-grpo train log_completions=true beta=1");
        assert_eq!(normalised("colo-grpo"), "colo-grpo --help");
        assert_eq!(
            normalised("colo-grpo bench step --preset tiny --nproc 2 --tp 2 --zero-stage 3 --residency-optimizer swap"),
            "colo-grpo bench step --preset tiny --nproc 2 tensor_parallel_size=2 zero.stage=3 residency.optimizer=swap"
        );
        assert_eq!(normalised("colo-grpo bench train --zero-stage 3"), "colo-grpo bench train --zero_stage 3");
        assert_eq!(normalised("colo-grpo eval --top-p 1 -n 2"), "colo-grpo eval --top_p 1 -n 2");
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        let mut command = Cli::command();
        command.build();
        let names: Vec<String> = command.get_subcommands().map(|known| known.get_name().to_owned()).collect();
        assert_eq!(names, SUBCOMMANDS);
        let train = command.find_subcommand("train").unwrap();
        let longs = train.get_arguments().flat_map(|known| known.get_long_and_visible_aliases().unwrap_or_default());
        longs.for_each(|long| assert!(RUN_OPTIONS.contains(&long), "{long}"));
        command.debug_assert();
    }
}
