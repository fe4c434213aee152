//! Python string methods that minijinja's compatibility layer lacks or implements differently.

use minijinja::value::from_args;
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{invalid, python, values};

/// Largest width to which a string may be padded, in characters.
const MAX_WIDTH: usize = 1 << 20;

/// Calls a Python method that minijinja itself does not provide.
pub(super) fn call(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.as_str() {
        Some(text) => of_string(text, method, args)?,
        None => values::view(value, method).filter(|_| args.is_empty()),
    };
    own.map_or_else(|| unknown_method_callback(state, value, method, args), Ok)
}

/// `separator.join(values)`.
pub(super) fn join(separator: &str, values: &Value) -> Result<String, Error> {
    let mut text = String::new();
    for (index, value) in values.try_iter()?.enumerate() {
        if index > 0 {
            text.push_str(separator);
        }
        python::write(&mut text, &value)?;
    }
    Ok(text)
}

/// Calls a Python string method on `text`; `None` if this file does not implement the method.
pub(super) fn of_string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let value = match method {
        "partition" | "rpartition" => partition(text, from_args::<(&str,)>(args)?.0, method == "rpartition")?,
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            Value::from(rsplit(text, separator, limit.and_then(|limit| usize::try_from(limit).ok()))?)
        }
        "removeprefix" => without(text, text.strip_prefix(from_args::<(&str,)>(args)?.0)),
        "removesuffix" => without(text, text.strip_suffix(from_args::<(&str,)>(args)?.0)),
        "find" | "rfind" | "index" | "rindex" => find(text, method, from_args::<(&str,)>(args)?.0)?,
        "count" => Value::from(match from_args::<(&str,)>(args)?.0 {
            "" => text.chars().count() + 1,
            what => text.matches(what).count(),
        }),
        "swapcase" => Value::from(text.chars().flat_map(swapped).collect::<String>()),
        "casefold" if text.is_ascii() => Value::from(text.to_lowercase()),
        "casefold" => return Err(invalid("casefold is supported for ASCII letters only")),
        "capitalize" => Value::from(capitalized(text)),
        "title" => Value::from(titled(text)),
        "strip" => {
            let chars: (Option<&str>,) = from_args(args)?;
            let is_cut = |letter: char| chars.0.map_or(letter.is_whitespace(), |chars| chars.contains(letter));
            Value::from(text.trim_matches(is_cut))
        }
        "split" if args.first().is_none_or(Value::is_none) => {
            let (_, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            Value::from(words(text, limit.and_then(|limit| usize::try_from(limit).ok())))
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing(text, width)?)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let (fill, missing) = (fill.unwrap_or(" "), missing(text, width)?);
            let left = match method {
                "ljust" => 0,
                "rjust" => missing,
                _ => missing / 2 + (missing & width & 1),
            };
            Value::from(format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left)))
        }
        "join" => Value::from(join(text, from_args::<(&Value,)>(args)?.0)?),
        // All of no characters is false in Python.
        "isdigit" | "isnumeric" | "isalpha" | "isalnum" | "isspace" if text.is_empty() => Value::from(false),
        // Only letters that have a case count.
        "islower" => Value::from(is_lower(text)),
        "isupper" => Value::from(is_upper(text)),
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            split_lines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn partition(text: &str, separator: &str, from_the_right: bool) -> Result<Value, Error> {
    refuse_empty(separator)?;
    let parts = if from_the_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match parts {
        Some((before, after)) => [before, separator, after],
        None if from_the_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(values::tuple(parts.map(Value::from)))
}

fn rsplit(text: &str, separator: Option<&str>, limit: Option<usize>) -> Result<Vec<String>, Error> {
    let limit = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let mut parts: Vec<String> = match separator {
        Some(separator) => {
            refuse_empty(separator)?;
            text.rsplitn(limit, separator).map(str::to_owned).collect()
        }
        None => words_from_the_right(text, limit),
    };
    parts.reverse();
    Ok(parts)
}

/// `str.rsplit()` without separator: words between white space, the last first. After `limit - 1` splits the rest is one item.
fn words_from_the_right(text: &str, limit: usize) -> Vec<String> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end());
    while !rest.is_empty() {
        let start = rest.rfind(char::is_whitespace).filter(|_| parts.len() + 1 < limit);
        let cut = start.map_or(0, |start| start + rest[start..].chars().next().map_or(0, char::len_utf8));
        parts.push(rest[cut..].to_owned());
        rest = rest[..cut].trim_end();
    }
    parts
}

/// `str.split()` without separator: words between white space. After `limit` splits the rest is one item.
fn words(text: &str, limit: Option<usize>) -> Vec<String> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start());
    while !rest.is_empty() {
        let end = rest.find(char::is_whitespace).filter(|_| limit.is_none_or(|limit| parts.len() < limit));
        let (word, behind) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(word.to_owned());
        rest = behind.trim_start();
    }
    parts
}

fn without<'a>(text: &'a str, rest: Option<&'a str>) -> Value {
    Value::from(rest.unwrap_or(text))
}

/// `str.find` and its variants: the position in characters, not in bytes.
fn find(text: &str, method: &str, what: &str) -> Result<Value, Error> {
    let place = if method.starts_with('r') { text.rfind(what) } else { text.find(what) };
    match place {
        Some(offset) => Ok(Value::from(text[..offset].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

fn missing(text: &str, width: usize) -> Result<usize, Error> {
    Ok(self::width(width)?.saturating_sub(text.chars().count()))
}

/// Checks that a padding width is at most [`MAX_WIDTH`].
pub(super) fn width(width: usize) -> Result<usize, Error> {
    match width {
        0..=MAX_WIDTH => Ok(width),
        _ => Err(invalid(format!("a width of more than {MAX_WIDTH} characters is too large"))),
    }
}

fn refuse_empty(separator: &str) -> Result<(), Error> {
    if separator.is_empty() { Err(invalid("empty separator")) } else { Ok(()) }
}

fn swapped(character: char) -> Vec<char> {
    match character.is_uppercase() {
        true => character.to_lowercase().collect(),
        false => character.to_uppercase().collect(),
    }
}

/// `str.capitalize`.
pub(super) fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(initial).unwrap_or_default();
    first + &letters.as_str().to_lowercase()
}

/// The title case of a word's first letter. If a letter's upper case is two letters, only the first of them is upper case.
fn initial(letter: char) -> String {
    let mut large = letter.to_uppercase();
    large.next().into_iter().chain(large.flat_map(char::to_lowercase)).collect()
}

/// `str.title`: a letter after a character without case begins a word.
fn titled(text: &str) -> String {
    let (mut titled, mut is_within) = (String::new(), false);
    for letter in text.chars() {
        let own = if is_within { letter.to_lowercase().collect() } else { initial(letter) };
        titled.push_str(&own);
        is_within = letter.is_uppercase() || letter.is_lowercase();
    }
    titled
}

/// `str.islower`: the text contains cased letters, and all of them are lower case.
pub(super) fn is_lower(text: &str) -> bool {
    has_case(text) && !text.chars().any(char::is_uppercase)
}

/// `str.isupper`.
pub(super) fn is_upper(text: &str) -> bool {
    has_case(text) && !text.chars().any(char::is_lowercase)
}

/// `str.splitlines`, which recognizes more line ends than `\n`.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    const ENDS: [char; 9] = ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}'];
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((at, end)) = rest.char_indices().find(|(_, letter)| ENDS.contains(letter) || *letter == '\u{2029}') {
        let behind = at + if rest[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        lines.push(&rest[..if keep_ends { behind } else { at }]);
        rest = &rest[behind..];
    }
    lines.extend(Some(rest).filter(|rest| !rest.is_empty()));
    lines
}

fn has_case(text: &str) -> bool {
    text.chars().any(|character| character.is_uppercase() || character.is_lowercase())
}
