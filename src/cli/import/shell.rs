//! Parses the commands of a shell script without executing any: words, variables, arrays, and the branches of `if` and `case`.

use std::collections::HashMap;

use super::expand::{self, MAX_ADDED_BYTES};

/// A command that the script reaches.
#[derive(Debug, PartialEq)]
pub(super) struct ShellCommand {
    pub words: Vec<String>,
    /// Whether it is unknown if its branch is taken.
    pub is_doubtful: bool,
}

/// The open branches, outermost first.
enum ShellBranch {
    /// An `if`: whether the current branch is taken, and whether an earlier one was.
    If { is_taken: Option<bool>, was_taken: Option<bool>, in_condition: bool },
    /// A `case`: its subject, whether the current branch is taken, and whether an earlier one was.
    Case { subject: Option<String>, is_taken: Option<bool>, was_taken: Option<bool>, expects_pattern: bool },
    /// A loop, whose body may run or not.
    Loop,
}

impl ShellBranch {
    fn is_taken(&self) -> Option<bool> {
        match self {
            Self::If { is_taken, .. } | Self::Case { is_taken, .. } => *is_taken,
            Self::Loop => None,
        }
    }
}

/// The state of parsing: variables, arrays and open branches.
struct ShellReader {
    variables: HashMap<String, String>,
    arrays: HashMap<String, Vec<String>>,
    branches: Vec<ShellBranch>,
    num_added_bytes: usize,
    reached: Reached,
}

/// The commands that a script reaches, and assignments that could not be decided.
#[derive(Debug, Default)]
pub(super) struct Reached {
    pub commands: Vec<ShellCommand>,
    /// Notes on assignments in undecided branches, and the values that are used.
    pub doubts: Vec<String>,
}

/// The commands of a script with variables expanded; `variables` are set at the start.
///
/// Assignments are applied on the way. In a branch that may or may not be taken, a variable keeps its value, or gets the first one assigned.
///
/// # Errors
/// A message if the variables expand to too much text.
pub(super) fn commands(text: &str, variables: HashMap<String, String>) -> Result<Reached, String> {
    let (arrays, branches, reached) = (HashMap::new(), Vec::new(), Reached::default());
    let mut reader = ShellReader { variables, arrays, branches, num_added_bytes: 0, reached };
    for words in words(text) {
        reader.command(&words)?;
    }
    Ok(reader.reached)
}

impl ShellReader {
    fn command(&mut self, words: &[String]) -> Result<(), String> {
        let Some(words) = self.enter(words)? else { return Ok(()) };
        let taken: Vec<_> = self.branches.iter().map(ShellBranch::is_taken).collect();
        if words.is_empty() || taken.contains(&Some(false)) {
            return Ok(());
        }
        let (is_doubtful, words) = (taken.contains(&None), self.expanded(words)?);
        match words[0].strip_suffix("=(") {
            Some(name) => self.set_array(name, &words[1..words.len() - 1], is_doubtful),
            None => {
                self.set_variables(&words, is_doubtful);
                self.reached.commands.push(ShellCommand { words, is_doubtful });
            }
        }
        Ok(())
    }

    fn set_array(&mut self, name: &str, items: &[String], is_doubtful: bool) {
        let (name, adds) = (name.trim_end_matches('+'), name.ends_with('+'));
        match self.arrays.get_mut(name) {
            Some(_) if is_doubtful => self.reached.commands.push(ShellCommand { words: items.to_vec(), is_doubtful }),
            Some(known) if adds => known.extend_from_slice(items),
            _ => _ = self.arrays.insert(name.to_owned(), items.to_vec()),
        }
    }

    fn set_variables(&mut self, words: &[String], is_doubtful: bool) {
        for word in words {
            match assignment(word) {
                Some((name, value)) => {
                    let known = self.variables.get(name).filter(|known| is_doubtful && !known.is_empty());
                    let counts = known.unwrap_or(&value.to_owned()).clone();
                    if is_doubtful && words[0] != "export" && (known.is_none() || counts != value) {
                        self.reached.doubts.push(format!(
                            "{name}={value}: in a branch whose condition is unknown here; {counts} is used"
                        ));
                    }
                    self.variables.insert(name.to_owned(), counts);
                }
                None if ["export", "local", "declare", "readonly"].contains(&word.as_str()) => (),
                None => break,
            }
        }
    }

    /// Opens and closes branches; returns the rest of the command, which is inside them.
    fn enter<'a>(&mut self, words: &'a [String]) -> Result<Option<&'a [String]>, String> {
        let text: Vec<&str> = words.iter().map(String::as_str).collect();
        match self.branches.last_mut() {
            Some(ShellBranch::Case { expects_pattern: true, .. }) if text[0] != "esac" => {
                return self.pattern(words).map(Some);
            }
            Some(ShellBranch::If { in_condition, is_taken, .. }) if *in_condition => {
                *in_condition = text[0] != "then";
                if *in_condition {
                    *is_taken = None; // a further command of the condition
                    return Ok(None);
                }
            }
            _ => (),
        }
        let rest = match text.as_slice() {
            ["if", condition @ ..] => {
                let is_taken = self.test(condition)?;
                self.branches.push(ShellBranch::If { is_taken, was_taken: Some(false), in_condition: true });
                return Ok(None);
            }
            ["elif", condition @ ..] => {
                let holds = self.test(condition)?;
                self.next_of_if(holds, true);
                return Ok(None);
            }
            ["else", ..] => {
                self.next_of_if(Some(true), false);
                &words[1..]
            }
            ["case", subject, "in", ..] => {
                let subject = Some(self.expand(subject)?).filter(|text| !expand::has_variable(text));
                let (is_taken, was_taken) = (Some(false), Some(false));
                self.branches.push(ShellBranch::Case { subject, is_taken, was_taken, expects_pattern: true });
                return if words.len() > 3 { self.pattern(&words[3..]).map(Some) } else { Ok(None) };
            }
            ["for" | "while" | "until" | "select", ..] => {
                self.branches.push(ShellBranch::Loop);
                return Ok(None);
            }
            ["fi" | "esac" | "done", ..] => {
                self.branches.pop();
                return Ok(None);
            }
            [";;", ..] => {
                if let Some(ShellBranch::Case { expects_pattern, is_taken, .. }) = self.branches.last_mut() {
                    (*expects_pattern, *is_taken) = (true, Some(false));
                }
                return Ok(None);
            }
            ["then" | "do", ..] => &words[1..],
            _ => words,
        };
        match rest.first().map(String::as_str) {
            Some("if" | "case" | "for" | "while" | "until") if rest.len() < words.len() => self.enter(rest),
            _ => Ok(Some(rest)),
        }
    }

    /// Enters the branch after `elif` or `else`.
    fn next_of_if(&mut self, holds: Option<bool>, has_condition: bool) {
        if let Some(ShellBranch::If { is_taken, was_taken, in_condition }) = self.branches.last_mut() {
            *in_condition = has_condition;
            *was_taken = either(*was_taken, *is_taken);
            *is_taken = both(was_taken.map(|was| !was), holds);
        }
    }

    /// Evaluates the patterns at the start of a `case` branch, up to the parenthesis.
    fn pattern<'a>(&mut self, words: &'a [String]) -> Result<&'a [String], String> {
        let closing = words.iter().position(|word| word.ends_with(')'));
        let patterns = &words[..closing.map_or(words.len(), |at| at + 1)];
        let mut fits = Some(false);
        if let Some(ShellBranch::Case { subject, is_taken, was_taken, expects_pattern }) = self.branches.last_mut() {
            for pattern in patterns {
                let pattern = pattern.trim_start_matches('(').trim_end_matches(')');
                let fit = match (pattern.strip_suffix('*'), &*subject) {
                    (Some(""), _) => Some(true),
                    (Some(start), Some(subject)) => Some(subject.starts_with(start)),
                    (None, Some(subject)) => Some(subject == pattern),
                    (_, None) => None,
                };
                fits = either(fits, fit);
            }
            *is_taken = either(*is_taken, both(was_taken.map(|was| !was), fits));
            if closing.is_some() {
                *was_taken = either(*was_taken, *is_taken);
                *expects_pattern = false;
            }
        }
        Ok(&words[patterns.len()..])
    }

    /// Evaluates a condition `[ .. ]` of known texts and integers; `None` if unknown.
    fn test(&mut self, condition: &[&str]) -> Result<Option<bool>, String> {
        let words = condition.iter().map(|word| self.expand(word)).collect::<Result<Vec<_>, _>>()?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ["[" | "[[", inner @ .., "]" | "]]"] = words.as_slice() else { return Ok(None) };
        if inner.iter().any(|word| expand::has_variable(word)) {
            return Ok(None);
        }
        let numbers = |a: &str, b: &str| Some((a.parse::<i64>().ok()?, b.parse::<i64>().ok()?));
        Ok(match inner {
            ["-n", text] => Some(!text.is_empty()),
            ["-z", text] => Some(text.is_empty()),
            [a, "=" | "==", b] => Some(a == b),
            [a, "!=", b] => Some(a != b),
            [a, "-eq", b] => numbers(a, b).map(|(a, b)| a == b),
            [a, "-ne", b] => numbers(a, b).map(|(a, b)| a != b),
            [a, "-gt", b] => numbers(a, b).map(|(a, b)| a > b),
            [a, "-ge", b] => numbers(a, b).map(|(a, b)| a >= b),
            [a, "-lt", b] => numbers(a, b).map(|(a, b)| a < b),
            [a, "-le", b] => numbers(a, b).map(|(a, b)| a <= b),
            _ => None,
        })
    }

    /// Expands the variables of a word.
    fn expand(&mut self, word: &str) -> Result<String, String> {
        let filled = expand::expanded(word, &self.variables);
        self.num_added_bytes += filled.len().saturating_sub(word.len());
        match self.num_added_bytes > MAX_ADDED_BYTES {
            true => {
                Err(format!("expanding its variables adds more than {MAX_ADDED_BYTES} bytes, the limit for a script"))
            }
            false => Ok(filled),
        }
    }

    /// Expands the variables and arrays of words.
    fn expanded(&mut self, words: &[String]) -> Result<Vec<String>, String> {
        let mut all = Vec::with_capacity(words.len());
        for word in words {
            let array =
                word.strip_prefix("${").and_then(|rest| rest.strip_suffix("[@]}").or(rest.strip_suffix("[*]}")));
            match array.and_then(|name| self.arrays.get(name)) {
                Some(items) => {
                    self.num_added_bytes += items.iter().map(String::len).sum::<usize>();
                    all.extend(items.iter().cloned());
                }
                None => {
                    let filled = self.expand(word)?;
                    match is_variable(word) && holds_overrides(&filled) {
                        true => all.extend(filled.split_whitespace().filter(|part| *part != "\\").map(str::to_owned)),
                        false => all.push(filled),
                    }
                }
            }
            if self.num_added_bytes > MAX_ADDED_BYTES {
                return Err(format!(
                    "expanding its variables adds more than {MAX_ADDED_BYTES} bytes, the limit for a script"
                ));
            }
        }
        Ok(all)
    }
}

/// Whether a word consists of one variable.
fn is_variable(word: &str) -> bool {
    let name = word.strip_prefix('$').map(|name| name.trim_start_matches('{').trim_end_matches('}'));
    name.is_some_and(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
}

/// Whether a variable's text contains several settings, which a shell splits into words.
fn holds_overrides(text: &str) -> bool {
    let mut words = text.split_whitespace().filter(|word| *word != "\\");
    let is_setting = |word: &str| word.split_once('=').is_some_and(|(name, _)| name.contains('.'));
    words.next().is_some_and(is_setting) && words.next().is_some()
}

fn either(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    }
}

fn both(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    either(a.map(|a| !a), b.map(|b| !b)).map(|neither| !neither)
}

/// Splits an assignment into variable and value.
pub(super) fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, value))
}

/// Splits a script into commands and words, without comments and quotes; a backslash at the end of a line joins it with the next. `${..}` and `$(..)`
/// belong to one word. An array `NAME=( .. )` is one command, and so is the `;;` after a `case` branch.
fn words(text: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), String::new(), None);
    let (mut is_word, mut in_array) = (false, false);
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
            (None, '"' | '\'') => (quote, is_word) = (Some(c), true),
            (None, '#') if word.is_empty() => chars = chars.as_str().trim_start_matches(|c| c != '\n').chars(),
            (None, '(') if word.ends_with('=') && !in_array => {
                word.push(c);
                words.push(std::mem::take(&mut word));
                in_array = true;
            }
            (None, c) if c.is_whitespace() || matches!(c, ';' | '&' | '|') || (in_array && c == ')') => {
                if !word.is_empty() || std::mem::take(&mut is_word) {
                    words.push(std::mem::take(&mut word));
                }
                if in_array && c == ')' {
                    words.push(c.into());
                    in_array = false;
                }
                if (c == '\n' || !c.is_whitespace()) && !in_array {
                    commands.push(std::mem::take(&mut words));
                }
                if c == ';' && chars.as_str().starts_with(';') {
                    chars.next();
                    commands.push(vec![";;".to_owned()]);
                }
            }
            (None, c) => word.push(c),
        }
        is_word &= quote.is_some() || word.is_empty();
    }
    words.extend(Some(word).filter(|it| !it.is_empty()));
    commands.push(words);
    commands.retain(|words| !words.is_empty());
    commands
}
