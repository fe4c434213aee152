//! Expansion of shell variables: `$NAME`, `${NAME:-default}`, `${NAME:+other}`, integer arithmetic in `$((1024 * 2))`, and paths in `$(pwd)`,
//! `$(dirname ..)` and `$(basename ..)`. Nothing is executed: other commands in `$(..)` and unset variables stay as they are. `$(pwd)` is `.`, as the
//! imported configuration is used in the script's current folder.

use std::collections::HashMap;

/// Maximum number of bytes that expansion may add, as each variable may double the one before.
pub(super) const MAX_ADDED_BYTES: usize = 4 << 20;
/// Maximum length of `${..}` and `$((..))` that is searched for its end.
const MAX_GROUP_BYTES: usize = 4096;
/// Maximum number of open brackets of one kind, so that many unclosed ones do not take quadratic time.
const MAX_OPEN: usize = 32;
/// Maximum nesting of defaults and parentheses.
const MAX_DEPTH: usize = 16;

/// Replaces every known variable in the text; stops early if the text would become too long.
pub(super) fn expanded(text: &str, variables: &HashMap<String, String>) -> String {
    at_depth(text, variables, 0)
}

/// Whether a text still contains a shell variable or command.
pub(super) fn has_variable(text: &str) -> bool {
    let starts = |part: &str| part.starts_with(|c: char| c.is_ascii_alphabetic() || "_{(".contains(c));
    text.split('$').skip(1).any(starts)
}

/// The bracketed group at the start of `text`, which follows a `$`, up to the matching bracket.
pub(super) fn group(text: &str) -> Option<&str> {
    let (open, close) = match text.as_bytes().first()? {
        b'{' => ('{', '}'),
        b'(' => ('(', ')'),
        _ => return None,
    };
    let mut depth = 0_usize;
    for (at, c) in text.char_indices().take_while(|(at, _)| *at < MAX_GROUP_BYTES) {
        depth = if c == open { depth + 1 } else { depth - usize::from(c == close) };
        match depth {
            0 => return Some(&text[..=at]),
            1..=MAX_OPEN => (),
            _ => return None,
        }
    }
    None
}

fn at_depth(text: &str, variables: &HashMap<String, String>, depth: usize) -> String {
    let (mut done, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, after)) = rest.split_once('$') {
        done += before;
        if done.len() > text.len() + MAX_ADDED_BYTES {
            break;
        }
        match expansion(after, variables, depth) {
            Some((value, behind)) => (done, rest) = (done + &value, behind),
            None => (done, rest) = (done + "$", after),
        }
    }
    done + rest
}

/// Evaluates the variable, default or sum at the start of `text`, which follows a `$`, and returns the value and the rest of the text; `None` if it
/// needs to execute a command, or the variable is not set.
fn expansion<'a>(text: &'a str, variables: &HashMap<String, String>, depth: usize) -> Option<(String, &'a str)> {
    let Some(group) = group(text).filter(|_| depth < MAX_DEPTH) else {
        let (name, behind) = text.split_at(name_end(text));
        return Some((variables.get(name)?.clone(), behind));
    };
    let (inner, behind) = (&group[1..group.len() - 1], &text[group.len()..]);
    let value = match group.starts_with('(') {
        true if inner.starts_with('(') => {
            Sum { rest: &at_depth(inner, variables, depth + 1), variables }.whole()?.to_string()
        }
        true => path_of(&at_depth(inner, variables, depth + 1))?,
        false => {
            let (name, default) = inner.split_at(name_end(inner));
            let default = default.strip_prefix("[0]").unwrap_or(default);
            let value = variables.get(name).filter(|value| !default.starts_with(':') || !value.is_empty());
            let default = default.strip_prefix(':').unwrap_or(default);
            if let Some(other) = default.strip_prefix('+') {
                let other = value.map(|_| at_depth(other, variables, depth + 1));
                return Some((other.unwrap_or_default(), behind));
            }
            match (value, default.strip_prefix(['-', '='])) {
                (Some(value), Some(_)) => value.clone(),
                (Some(value), None) if default.is_empty() => value.clone(),
                (None, Some(default)) if !name.is_empty() => at_depth(default, variables, depth + 1),
                _ => return None,
            }
        }
    };
    Some((value, behind))
}

/// The path that a command substitution such as `$(dirname FILE)` or `$(cd DIR && pwd)` stands for, found without running it; `None` for other commands.
fn path_of(command: &str) -> Option<String> {
    let words: Vec<&str> =
        command.split_whitespace().filter(|word| !word.starts_with('-') && !word.contains('>')).collect();
    let path = match words.as_slice() {
        ["pwd"] => ".",
        ["cd", path, "&&", "pwd"] | ["realpath" | "readlink", path] => path,
        ["dirname", path] => path.rsplit_once('/').map_or(".", |(folder, _)| folder),
        ["basename", path] => path.trim_end_matches('/').rsplit('/').next()?,
        _ => return None,
    };
    Some(path.to_owned())
}

fn name_end(text: &str) -> usize {
    text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len())
}

/// Parser of integer arithmetic with + - * / % and parentheses.
struct Sum<'a> {
    rest: &'a str,
    variables: &'a HashMap<String, String>,
}

impl Sum<'_> {
    fn whole(mut self) -> Option<i64> {
        let sum = self.sum(0)?;
        self.rest.trim().is_empty().then_some(sum)
    }

    fn operator(&mut self, among: &str) -> Option<char> {
        self.rest = self.rest.trim_start();
        let operator = self.rest.chars().next().filter(|c| among.contains(*c))?;
        self.rest = &self.rest[1..];
        Some(operator)
    }

    fn sum(&mut self, depth: usize) -> Option<i64> {
        let mut sum = self.product(depth)?;
        while let Some(operator) = self.operator("+-") {
            let other = self.product(depth)?;
            sum = if operator == '+' { sum.checked_add(other)? } else { sum.checked_sub(other)? };
        }
        Some(sum)
    }

    fn product(&mut self, depth: usize) -> Option<i64> {
        let mut product = self.factor(depth)?;
        while let Some(operator) = self.operator("*/%") {
            let other = self.factor(depth)?;
            product = match operator {
                '*' => product.checked_mul(other)?,
                '/' => product.checked_div(other)?,
                _ => product.checked_rem(other)?,
            };
        }
        Some(product)
    }

    fn factor(&mut self, depth: usize) -> Option<i64> {
        if depth > MAX_DEPTH {
            return None;
        }
        match self.operator("(-") {
            Some('(') => {
                let sum = self.sum(depth + 1)?;
                self.operator(")").map(|_| sum)
            }
            Some(_) => self.factor(depth + 1)?.checked_neg(),
            None => {
                let (word, behind) = self.rest.split_at(name_end(self.rest));
                self.rest = behind;
                word.parse().ok().or_else(|| self.variables.get(word)?.trim().parse().ok())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> String {
        let variables = [("N", "5"), ("EMPTY", ""), ("DIR", "/data")].map(|(name, value)| (name.into(), value.into()));
        expanded(text, &variables.into())
    }

    #[test]
    fn shell_variables_and_their_defaults_are_expanded() {
        for (text, expected) in [
            ("$N-${N}x$Nx", "5-5x$Nx"),
            ("${M:-7}${M-8}${N:-9}${N:=1}", "7855"),
            ("${EMPTY:-a}${EMPTY-b}|", "a|"),
            ("${MODEL:-${ROOT:-${DIR}/verl}/models}/q", "/data/verl/models/q"),
            ("${M}$(date)${N:0:1}${N%x}$1$$@$", "${M}$(date)${N:0:1}${N%x}$1$$@$"),
            (
                "$(pwd)/rows|$(dirname ${DIR}/run.sh)|$(basename $DIR/m/)|$(cd $(dirname a/b.sh) && pwd)",
                "./rows|/data|m|a",
            ),
            ("${N:+n$N}${M:+m}${EMPTY:+e}|", "n5|"),
            ("${", "${"),
            ("${:-x}", "${:-x}"),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn shell_arithmetic_is_evaluated_as_in_bash() {
        for (text, expected) in [
            ("$((1024 * 2))", "2048"),
            ("a$(( N*3 ))b", "a15b"),
            ("$(( ($N + ${N}) * 2 - -1 ))", "21"),
            ("$((7/2)) $((7%4)) $((-7/2))", "3 3 -3"),
            ("$((1/0))", "$((1/0))"),
            ("$((9223372036854775807 + 1))", "$((9223372036854775807 + 1))"),
            ("$((M + 1))", "$((M + 1))"),
            ("$((2 **))", "$((2 **))"),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
        let deep = format!("$(({}1{}))", "(".repeat(1000), ")".repeat(1000));
        assert_eq!(of(&deep), deep);
    }

    #[test]
    fn unexpanded_shell_variables_are_detected() {
        for (text, expected) in [("${M}/a", true), ("a/$M", true), ("$(pwd)", true), ("5$", false), ("^a$|^b", false)] {
            assert_eq!(has_variable(text), expected, "{text}");
        }
    }

    #[test]
    fn unclosed_brackets_are_parsed_in_linear_time() {
        let open = "${".repeat(500_000);
        assert_eq!(of(&open), open);
    }
}
