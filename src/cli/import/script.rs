//! Overrides in a shell script that starts verl. Nothing is run: words are split as a shell does, and variables that the script itself
//! sets to plain text are filled in.

use std::collections::HashMap;

use serde_json::Value;

/// `key=value` of every dotted key, the value as JSON; `home` is the value of HOME.
pub(super) fn overrides(text: &str, home: Option<String>) -> Vec<String> {
    let mut variables: HashMap<_, _> = home.map(|home| ("HOME".to_owned(), home)).into_iter().collect();
    let mut found = Vec::new();
    for word in words(text) {
        let Some((name, value)) = word.split_once('=') else { continue };
        let is_name = |name: &str| {
            let rest = name.strip_prefix("export ").unwrap_or(name);
            !rest.is_empty() && rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
        };
        let name = name.trim_start_matches('+');
        if !is_name(name) {
            continue;
        }
        let value = filled_in(value, &variables);
        if name.contains('.') {
            found.push(format!("{name}={}", parsed(&value)));
        } else {
            variables.insert(name.to_owned(), value);
        }
    }
    found
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

/// Words outside of comments, without their quotes; a backslash before the end of a line joins it with the next.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.push(c),
            (None, '\\') => {
                if let Some(next) = chars.next().filter(|next| *next != '\n') {
                    word.push(next);
                }
            }
            (None, '"' | '\'') => quote = Some(c),
            (None, '#') if word.is_empty() => while chars.next_if(|c| *c != '\n').is_some() {},
            (None, c) if c.is_whitespace() || c == ';' => {
                words.extend(Some(std::mem::take(&mut word)).filter(|it| !it.is_empty()))
            }
            (None, c) => word.push(c),
        }
    }
    words.extend(Some(word).filter(|it| !it.is_empty()));
    words
}

/// `$NAME` and `${NAME}` of known variables replaced; others stay as they are.
fn filled_in(text: &str, variables: &HashMap<String, String>) -> String {
    let mut names: Vec<_> = variables.keys().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len())); // $AB before $A
    names.into_iter().fold(text.to_owned(), |text, name| {
        let value = &variables[name];
        text.replace(&format!("${{{name}}}"), value).replace(&format!("${name}"), value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(overrides(text, Some("/home/me".into())), expected);
        assert_eq!(overrides("echo hello", None), [""; 0]);
    }
}
