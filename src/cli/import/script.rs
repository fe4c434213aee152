//! Shell scripts that start verl, TRL or open-r1. Nothing is run: words are split as a shell does, and variables that the script itself
//! sets to plain text are filled in.

use std::collections::HashMap;

use serde_json::Value;

use super::expand::{self, MAX_ADDED_BYTES};

/// Flags that say where and how the launcher starts the trainer, with the number of processes among them.
const PROCESSES: &[&str] = &["num_processes", "nproc_per_node", "nproc-per-node"];

/// The keys that a script sets, and the file that it reads first.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Script {
    /// `key=value`, the value as JSON: Hydra's overrides, or flags of the trainer.
    pub overrides: Vec<String>,
    /// The trainer's `--config`.
    pub config: Option<String>,
    /// The launcher's number of processes.
    pub nproc: Option<u64>,
}

/// Reads a script; `home` is the value of HOME. The last command that starts a trainer counts. A script that starts none sets nothing.
///
/// # Errors
/// A message where its variables make it too long.
pub(super) fn read(text: &str, home: Option<String>) -> Result<Script, String> {
    let mut variables: HashMap<_, _> = home.map(|home| ("HOME".to_owned(), home)).into_iter().collect();
    let (mut script, mut num_added_bytes) = (Script::default(), 0);
    for words in commands(text) {
        let mut command = Vec::with_capacity(words.len());
        for word in words {
            let filled = expand::expanded(&word, &variables);
            num_added_bytes += filled.len().saturating_sub(word.len());
            if num_added_bytes > MAX_ADDED_BYTES {
                return Err(format!("its variables make it longer by more than {MAX_ADDED_BYTES} bytes"));
            }
            command.push(filled);
        }
        for (name, value) in command.iter().filter_map(|word| word.split_once('=')).filter(|(name, _)| is_name(name)) {
            match name.contains('.') {
                true => script.overrides.push(format!("{}={}", name.trim_start_matches('+'), parsed(value))),
                false => _ = variables.insert(name.to_owned(), value.to_owned()),
            }
        }
        if let Some(trainer) = start_of_trainer(&command) {
            script = flags(&command[..trainer], &command[trainer..]);
        }
    }
    Ok(script)
}

fn is_name(name: &str) -> bool {
    let name = name.trim_start_matches('+');
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
}

/// The place of the first word after `trl grpo`, or after a Python file or a module of Python whose name has grpo in it.
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

/// Keys of the trainer's flags: `--key value`, `--key=value`, `--switch`, and lists as several words. `trl grpo` takes accelerate's flags too.
fn flags(launcher: &[String], trainer: &[String]) -> Script {
    let mut script = Script::default();
    for (words, is_trainer) in [(launcher, false), (trainer, true)] {
        let starts: Vec<_> = (0..words.len()).filter(|at| words[*at].starts_with("--")).collect();
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
                (name, [value]) => script.overrides.push(format!("{name}={}", parsed(value))),
                (name, values) => {
                    let values: Value = values.iter().map(|value| parsed(value)).collect();
                    script.overrides.push(format!("{name}={values}"));
                }
            }
        }
    }
    script
}

/// A value of Hydra as JSON: `True`, `null`, lists with single quotes.
fn parsed(text: &str) -> Value {
    let is_deep = text.matches(['[', '{']).count() > 16;
    let value = if is_deep { None } else { serde_yaml_ng::from_str::<Value>(text).ok() };
    match value {
        Some(Value::Null) => Value::Array(Vec::new()), // nothing is set
        Some(value) => value,
        None => text.into(),
    }
}

/// Words of each command, outside of comments and without their quotes; a backslash before the end of a line joins it with the next.
/// `${..}` and `$(..)` are of one word, whatever is between the brackets.
fn commands(text: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), String::new(), None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if let Some(group) = expand::group(chars.as_str()).filter(|_| c == '$' && quote != Some('\'')) {
            word.push(c);
            word.extend(group.chars().filter(|c| !['"', '\''].contains(c)));
            chars = chars.as_str()[group.len()..].chars();
            continue;
        }
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\\') => {
                if let Some(next) = chars.next().filter(|next| *next != '\n') {
                    word.push(next);
                }
            }
            (None, '"' | '\'') => quote = Some(c),
            (None, '#') if word.is_empty() => chars = chars.as_str().trim_start_matches(|c| c != '\n').chars(),
            (None, c) if c.is_whitespace() || matches!(c, ';' | '&' | '|') => {
                words.extend(Some(std::mem::take(&mut word)).filter(|it| !it.is_empty()));
                if c == '\n' || !c.is_whitespace() {
                    commands.push(std::mem::take(&mut words));
                }
            }
            (None, c) => word.push(c),
        }
    }
    words.extend(Some(word).filter(|it| !it.is_empty()));
    commands.push(words);
    commands.retain(|words| !words.is_empty());
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, home: Option<String>) -> Script {
        super::read(text, home).unwrap()
    }

    #[test]
    fn variables_that_double_one_another_are_refused() {
        let text = format!("A=aa\n{}trl grpo --run_name $A\n", "A=$A${A}\n".repeat(60));
        let error = super::read(&text, None).unwrap_err();
        assert!(error.contains("its variables make it longer by more than"), "{error}");
    }

    #[test]
    fn flags_are_read_as_trl_reads_them() {
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
            config: None,
            nproc: Some(4),
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
            assert_eq!(read(line, None), Script { overrides: vec!["seed=3".into()], config: None, nproc }, "{line}");
        }
    }

    #[test]
    fn overrides_are_read_as_a_shell_and_hydra_do() {
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
    fn a_script_computes_with_its_variables() {
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
