//! Keys that a shell script sets when it starts verl, TRL or open-r1. Nothing is executed.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::shell::{self, ShellCommand};

/// Flags that say how the launcher starts the trainer, including the number of processes.
const PROCESSES: &[&str] = &["num_processes", "nproc_per_node", "nproc-per-node"];
/// Hydra's flags for the folder and name of its file.
const HYDRA_PATH: &[&str] = &["--config-path", "-cp"];
const HYDRA_NAME: &[&str] = &["--config-name", "-cn"];
/// Note for a word from which no key is read.
const UNREAD: &str = "it sets no known key";

/// The keys that a script sets, and the configuration files that it names.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Script {
    /// `key=value` with JSON values: Hydra overrides, or flags of the trainer.
    pub overrides: Vec<String>,
    /// The trainer's option `--config`.
    pub config: Option<String>,
    /// verl's module, and Hydra's options `--config-path` and `--config-name`.
    pub hydra: Option<Hydra>,
    /// The number of processes given to the launcher.
    pub nproc: Option<u64>,
    /// Words that set something but are not in `overrides`, and why.
    pub unread: Vec<String>,
}

/// The file that Hydra reads.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Hydra {
    /// Module name, such as `verl.trainer.main_ppo`.
    pub module: Option<String>,
    pub path: Option<String>,
    pub name: Option<String>,
}

/// Parses a script; `file` is its path, `home` the value of HOME. The last command that starts a trainer is used; without one the result is empty.
///
/// # Errors
/// A message if its variables expand to too much text.
pub(super) fn read(text: &str, file: &Path, home: Option<String>) -> Result<Script, String> {
    let own = file.display().to_string();
    let known = [("HOME", home), ("PWD", Some(".".to_owned())), ("0", Some(own.clone())), ("BASH_SOURCE", Some(own))];
    let variables: HashMap<_, _> =
        known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    let (mut script, reached) = (Script::default(), shell::commands(text, variables)?);
    for ShellCommand { words, is_doubtful } in &reached.commands {
        if let Some(trainer) = start_of_trainer(words) {
            let before = std::mem::take(&mut script.unread);
            script = flags(&words[..trainer], &words[trainer..]);
            script.unread.splice(..0, before);
        } else if words.iter().any(|word| override_of(word).is_some_and(|(key, _)| key.contains('.'))) {
            overrides(words, *is_doubtful, &mut script);
        }
    }
    if script != Script::default() {
        script.unread.extend(reached.doubts);
    }
    Ok(script)
}

/// Parses a Hydra override `key=value`, which may begin with `+` or `++`.
fn override_of(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let name = name.trim_start_matches('+');
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
    is_name.then_some((name, value))
}

/// Reads the overrides of a command: all words after the module or file it starts, or from the first override on.
fn overrides(words: &[String], is_doubtful: bool, script: &mut Script) {
    let is_module = |pair: &[String]| ["-m", "--module"].contains(&pair[0].as_str());
    let module = words.windows(2).position(is_module).map(|at| at + 1);
    let start = module.or_else(|| words.iter().position(|word| word.ends_with(".py"))).map(|at| at + 1);
    let first = words.iter().position(|word| override_of(word).is_some_and(|(key, _)| key.contains('.')));
    // Of several starts in branches that nothing decides the first counts, otherwise the last.
    let is_doubtful = is_doubtful && (start.is_none() || !script.overrides.is_empty());
    if start.is_some() && !is_doubtful {
        *script = Script { unread: std::mem::take(&mut script.unread), ..Script::default() };
        script.hydra = module.map(|at| Hydra { module: Some(words[at].clone()), ..Hydra::default() });
    }
    let words = settings(&words[start.or(first).unwrap_or(0)..]);
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let (flag, inline) =
            word.split_once('=').map_or((&**word, None), |(flag, value)| (flag, Some(value.to_owned())));
        match override_of(word) {
            Some((key, value)) if is_doubtful => {
                script.unread.push(format!("{key}={value}: in a branch of the script whose condition is unknown here"));
            }
            Some((key, value)) => script.overrides.push(format!("{key}={}", parsed(value))),
            None if HYDRA_PATH.contains(&flag) => {
                script.hydra.get_or_insert_default().path = inline.or_else(|| rest.next().cloned());
            }
            None if HYDRA_NAME.contains(&flag) => {
                script.hydra.get_or_insert_default().name = inline.or_else(|| rest.next().cloned());
            }
            None => script.unread.push(format!("{word}: {UNREAD}")),
        }
    }
}

/// The words of a command without shell syntax: passed-on arguments and redirections.
fn settings(words: &[String]) -> Vec<String> {
    let mut is_target = false;
    let is_setting = |word: &&String| {
        let is_redirected = std::mem::replace(&mut is_target, word.ends_with('>'));
        let redirects = word.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with('>');
        !(is_redirected || redirects || word.is_empty() || ["$@", "$*"].contains(&word.as_str()))
    };
    words.iter().filter(is_setting).cloned().collect()
}

/// Index of the first word after `trl grpo`, or after a Python file or module whose name contains grpo.
fn start_of_trainer(command: &[String]) -> Option<usize> {
    let is_file =
        |word: &String| word.rsplit('/').next().is_some_and(|name| name.contains("grpo") && name.ends_with(".py"));
    let is_module = |flag: &str, module: &str| {
        let name = module.rsplit_once('.').map(|(_, name)| name);
        ["-m", "--module"].contains(&flag) && name.is_some_and(|name| name.contains("grpo"))
    };
    let is_program = |pair: &[String]| {
        (pair[0].rsplit('/').next() == Some("trl") && pair[1] == "grpo") || is_module(&pair[0], &pair[1])
    };
    let program = command.windows(2).position(is_program).map(|at| at + 2);
    program.or_else(|| command.iter().position(is_file).map(|at| at + 1))
}

/// Keys from the trainer's flags: `--key value`, `--key=value`, `--switch`, and lists as several words. `trl grpo` also accepts accelerate's flags.
fn flags(launcher: &[String], trainer: &[String]) -> Script {
    let mut script = Script::default();
    for (words, is_trainer) in [(launcher.to_vec(), false), (settings(trainer), true)] {
        let starts: Vec<_> = (0..words.len()).filter(|at| words[*at].starts_with("--")).collect();
        let before = &words[..starts.first().copied().unwrap_or(words.len())];
        script.unread.extend(before.iter().filter(|_| is_trainer).map(|word| format!("{word}: {UNREAD}")));
        for (index, start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(words.len());
            let (name, inline) = match words[*start][2..].split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (&words[*start][2..], None),
            };
            let values: Vec<_> = inline.into_iter().chain(words[start + 1..end].iter().map(String::as_str)).collect();
            match (name, values.as_slice()) {
                (name, [count, ..]) if PROCESSES.contains(&name) => script.nproc = count.parse().ok(),
                ("config", [file]) if is_trainer => script.config = Some((*file).to_owned()),
                _ if !is_trainer => (),
                (name, []) => script.overrides.push(format!("{name}=true")),
                (name, [value]) => match parsed(value) {
                    Value::Object(table) => {
                        script.overrides.extend(table.iter().map(|(key, value)| format!("{name}.{key}={value}")));
                    }
                    value => script.overrides.push(format!("{name}={value}")),
                },
                (name, values) => {
                    let values: Value = values.iter().map(|value| parsed(value)).collect();
                    script.overrides.push(format!("{name}={values}"));
                }
            }
        }
    }
    script
}

/// Converts a Hydra value to JSON: `True`, `null`, lists with single quotes.
fn parsed(text: &str) -> Value {
    let is_deep = text.matches(['[', '{']).count() > 16;
    let value = if is_deep { None } else { serde_yaml_ng::from_str::<Value>(text).ok() };
    match value {
        Some(Value::Null) => Value::Array(Vec::new()), // nothing is set
        Some(value) => value,
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, home: Option<String>) -> Script {
        super::read(text, Path::new("examples/run.sh"), home).unwrap()
    }

    #[test]
    fn exponentially_growing_variables_are_refused() {
        let text = format!("A=aa\n{}trl grpo --run_name $A\n", "A=$A${A}\n".repeat(60));
        let error = super::read(&text, Path::new("run.sh"), None).unwrap_err();
        assert!(error.contains("expanding its variables adds more than"), "{error}");
    }

    #[test]
    fn flags_are_parsed_as_by_trl() {
        let text = "set -e\nMODEL=Qwen/Qwen2.5-0.5B-Instruct\nACCELERATE_LOG_LEVEL=info accelerate launch --config_file zero3.yaml \\\n  \
                    --num_processes=7 src/open_r1/grpo.py --config recipes/demo.yaml --vllm_mode colocate\n\
                    trl grpo --model_name_or_path $MODEL --reward_funcs think_format_reward 'get_weather' --use_peft \\\n  \
                    --learning_rate 1e-5 --num_processes 4 --dataset_name=trl-lib/tldr && echo done --seed 3 # --seed 4\n";
        let expected = Script {
            overrides: [
                r#"model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct""#,
                r#"reward_funcs=["think_format_reward","get_weather"]"#,
                "use_peft=true",
                "learning_rate=0.00001",
                r#"dataset_name="trl-lib/tldr""#,
            ]
            .map(str::to_owned)
            .into(),
            nproc: Some(4),
            ..Script::default()
        };
        assert_eq!(read(text, None), expected);
        let open_r1 = read(text.split("trl grpo").next().unwrap(), None);
        assert_eq!(open_r1.overrides, [r#"vllm_mode="colocate""#]);
        assert_eq!((open_r1.config.as_deref(), open_r1.nproc), (Some("recipes/demo.yaml"), Some(7)));
        for (line, nproc) in [
            ("python -m trl.scripts.grpo --seed 3", None),
            ("accelerate launch --num_processes 2 -m trl.scripts.grpo --seed 3; git commit -m grpo --seed 4", Some(2)),
            ("torchrun --nproc_per_node=8 --module open_r1.grpo --seed 3", Some(8)),
        ] {
            assert_eq!(
                read(line, None),
                Script { overrides: vec!["seed=3".into()], nproc, ..Script::default() },
                "{line}"
            );
        }
    }

    #[test]
    fn overrides_are_parsed_as_by_a_shell_and_hydra() {
        let text = "#!/bin/bash\nset -x\nDATA=/data/gsm8k # where\nexport N=5\nPYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\\n    \
                    data.train_files=\"$DATA/train.parquet\" \\\n    data.val_files=\"['${DATA}/a.parquet','$HOME/b.parquet']\" \\\n    \
                    actor_rollout_ref.rollout.n=$N \\\n    actor_rollout_ref.actor.optim.lr=1e-6 \\\n    +data.shuffle=True \\\n    \
                    trainer.logger='[\"console\",\"wandb\"]' $@\n# data.seed=1\n";
        let expected = [
            r#"data.train_files="/data/gsm8k/train.parquet""#,
            r#"data.val_files=["/data/gsm8k/a.parquet","/home/me/b.parquet"]"#,
            "actor_rollout_ref.rollout.n=5",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "data.shuffle=true",
            r#"trainer.logger=["console","wandb"]"#,
        ];
        assert_eq!(read(text, Some("/home/me".into())).overrides, expected);
        assert_eq!(read("echo hello", None), Script::default());
    }

    #[test]
    fn arithmetic_with_script_variables_is_imported() {
        let text = "ROOT=${ROOT:-\"${HOME}/verl\"} # where\nMODEL=${MODEL:-\"${ROOT}/models/Qwen2.5-32B\"}\nlength=$((1024 * 2))\n\
                    batch=$((length * 3))\nLOG=$(date +%s; echo)\npython3 -m verl.trainer.main_ppo data.train_files=\"${ROOT}/a.parquet\" \\\n \
                    data.max_prompt_length=${length} \\\n data.max_response_length=\"$((length * 4))\" data.gen_batch_size=$batch \\\n \
                    actor_rollout_ref.model.path=$MODEL trainer.experiment_name=$LOG\n";
        let expected = [
            r#"data.train_files="/home/me/verl/a.parquet""#,
            "data.max_prompt_length=2048",
            "data.max_response_length=8192",
            "data.gen_batch_size=6144",
            r#"actor_rollout_ref.model.path="/home/me/verl/models/Qwen2.5-32B""#,
            r#"trainer.experiment_name="$(date +%s; echo)""#,
        ];
        assert_eq!(read(text, Some("/home/me".into())).overrides, expected);
    }
}
