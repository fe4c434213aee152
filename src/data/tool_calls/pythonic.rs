//! Parses a message that is a list of Python calls whose keyword arguments are literals.

use serde_json::{Map, Number, Value};

use super::{ParsedMessage, ToolCall};
use crate::data::numbers;

/// Deepest nesting of lists and dictionaries.
const MAX_DEPTH: usize = 64;

/// Parses all calls that are well-formed. As in vLLM, a malformed call is skipped.
pub(super) fn parse(text: &str) -> ParsedMessage {
    let mut parsed = ParsedMessage::default();
    let text = text.trim();
    let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else { return parsed };
    let mut reader = LiteralReader { rest: inner };
    loop {
        reader.skip_space();
        if reader.rest.is_empty() {
            return parsed;
        }
        let before = reader.rest;
        match reader.call() {
            Ok(call) => parsed.tool_calls.push(call),
            Err(error) => {
                parsed.error = parsed.error.or(Some(error));
                match behind_call(before) {
                    Some(rest) => reader.rest = rest,
                    None => return parsed,
                }
            }
        }
        reader.skip_space();
        if !reader.take(',') && !reader.rest.is_empty() {
            parsed.error = parsed.error.or(Some(format!("expected ',' before '{}'", head(reader.rest))));
            return parsed;
        }
    }
}

/// The text after the call at its start, found by matching brackets and quotes; `None` if the call has no end.
fn behind_call(text: &str) -> Option<&str> {
    let (mut depth, mut quote, mut is_escaped) = (0_usize, None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(_), _) if is_escaped => is_escaped = false,
            (Some(_), '\\') => is_escaped = true,
            (Some(end), _) if c == end => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(&text[at + 1..]);
                }
            }
            (None, _) => {}
        }
    }
    None
}

fn head(text: &str) -> String {
    text.chars().take(20).collect()
}

struct LiteralReader<'a> {
    rest: &'a str,
}

impl<'a> LiteralReader<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, c: char) -> bool {
        let rest = self.rest.strip_prefix(c);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        self.skip_space();
        if self.take(c) { Ok(()) } else { Err(format!("expected '{c}' before '{}'", head(self.rest))) }
    }

    fn take_while(&mut self, holds: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !holds(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn name(&mut self) -> Result<&'a str, String> {
        self.skip_space();
        match self.rest.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            true => Ok(self.take_while(|c| c.is_alphanumeric() || c == '_' || c == '.')),
            false => Err(format!("expected a name before '{}'", head(self.rest))),
        }
    }

    fn call(&mut self) -> Result<ToolCall, String> {
        let name = self.name()?.to_owned();
        self.expect('(')?;
        let mut arguments = Map::new();
        loop {
            self.skip_space();
            if self.take(')') {
                return Ok(ToolCall::new(name, arguments));
            }
            let key = self.name()?;
            self.expect('=')?;
            arguments.insert(key.to_owned(), self.value(0)?);
            self.skip_space();
            if !self.take(',') && !self.rest.starts_with(')') {
                return Err(format!("expected ',' or ')' before '{}'", head(self.rest)));
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > MAX_DEPTH {
            return Err(format!("lists nested more than {MAX_DEPTH} levels deep"));
        }
        self.skip_space();
        match self.rest.chars().next() {
            Some('\'' | '"') => Ok(self.strings()?.into()),
            Some('[') => Ok(self.items('[', ']', depth)?.into()),
            Some('(') => Ok(self.items('(', ')', depth)?.into()),
            Some('{') => self.dictionary(depth),
            Some(c) if c.is_ascii_digit() || "+-.".contains(c) => self.number(),
            _ => match self.name()? {
                "True" | "true" => Ok(true.into()),
                "False" | "false" => Ok(false.into()),
                "None" | "null" => Ok(Value::Null),
                other => Err(format!("'{other}' is not a Python literal")),
            },
        }
    }

    fn items(&mut self, open: char, close: char, depth: usize) -> Result<Vec<Value>, String> {
        self.expect(open)?;
        let mut items = Vec::new();
        loop {
            self.skip_space();
            if self.take(close) {
                return Ok(items);
            }
            items.push(self.value(depth + 1)?);
            self.skip_space();
            if !self.take(',') && !self.rest.starts_with(close) {
                return Err(format!("expected ',' or '{close}' before '{}'", head(self.rest)));
            }
        }
    }

    fn dictionary(&mut self, depth: usize) -> Result<Value, String> {
        self.expect('{')?;
        let mut fields = Map::new();
        loop {
            self.skip_space();
            if self.take('}') {
                return Ok(fields.into());
            }
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                key @ (Value::Number(_) | Value::Bool(_) | Value::Null) => key.to_string(),
                _ => return Err("a key of a dictionary is a list".to_owned()),
            };
            self.expect(':')?;
            fields.insert(key, self.value(depth + 1)?);
            self.skip_space();
            if !self.take(',') && !self.rest.starts_with('}') {
                return Err(format!("expected ',' or '}}' before '{}'", head(self.rest)));
            }
        }
    }

    fn number(&mut self) -> Result<Value, String> {
        let text = self.take_while(|c| c.is_ascii_alphanumeric() || "+-._".contains(c)).replace('_', "");
        let unsigned = text.trim_start_matches('+');
        let whole = numbers::integer(unsigned)?;
        let number = whole.or_else(|| unsigned.parse().ok().and_then(Number::from_f64));
        number.map(Value::Number).ok_or_else(|| format!("'{text}' is not a finite number"))
    }

    /// Parses one string literal, or several adjacent ones, which are concatenated.
    fn strings(&mut self) -> Result<String, String> {
        let mut text = String::new();
        while let Some(quote) = self.rest.chars().next().filter(|c| "'\"".contains(*c)) {
            let triple = quote.to_string().repeat(3);
            let end = if self.rest.starts_with(&triple) { triple } else { quote.to_string() };
            self.rest = &self.rest[end.len()..];
            self.string(&end, &mut text)?;
            self.skip_space();
        }
        Ok(text)
    }

    fn string(&mut self, end: &str, text: &mut String) -> Result<(), String> {
        loop {
            if let Some(rest) = self.rest.strip_prefix(end) {
                self.rest = rest;
                return Ok(());
            }
            let mut chars = self.rest.chars();
            match chars.next() {
                None => return Err("a string without its end".to_owned()),
                Some('\n') if end.len() == 1 => return Err("a string over the end of a line".to_owned()),
                Some('\\') => {
                    self.rest = chars.as_str();
                    self.escape(text)?;
                }
                Some(c) => {
                    text.push(c);
                    self.rest = chars.as_str();
                }
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Result<(), String> {
        let mut chars = self.rest.chars();
        let c = chars.next().ok_or("a string without its end")?;
        self.rest = chars.as_str();
        let simple = match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            '0' => '\0',
            'b' => '\u{8}',
            'f' => '\u{c}',
            '\\' | '\'' | '"' => c,
            '\n' => return Ok(()),
            'x' => return self.code_point(2, text),
            'u' => return self.code_point(4, text),
            'U' => return self.code_point(8, text),
            _ => {
                text.push('\\'); // Python keeps what it does not know
                c
            }
        };
        text.push(simple);
        Ok(())
    }

    fn code_point(&mut self, num_digits: usize, text: &mut String) -> Result<(), String> {
        let digits = self.rest.get(..num_digits).ok_or("an escape without its digits")?;
        let code = u32::from_str_radix(digits, 16).map_err(|error| format!("'{digits}': {error}"))?;
        text.push(char::from_u32(code).ok_or_else(|| format!("'{digits}' is not the code of a character"))?);
        self.rest = &self.rest[num_digits..];
        Ok(())
    }
}
