//! Finds the end of operands, groups and strings in the code of a template's tags. Positions are byte offsets.

/// Position after operands joined by `*`, `/` or `%`.
pub(super) fn product_end(code: &str, start: usize) -> usize {
    let mut at = operand_end(code, start);
    loop {
        let sign = skip_blanks(code, at);
        let behind = sign + code[sign..].bytes().take_while(|byte| b"*/%".contains(byte)).count();
        if behind == sign {
            return at;
        }
        at = operand_end(code, skip_blanks(code, behind));
    }
}

pub(super) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// Position after a name or a number. The exponent of a number may have a sign.
pub(super) fn word_end(code: &str, at: usize) -> usize {
    let run = |at: usize| at + code.as_bytes()[at..].iter().take_while(|byte| is_word(**byte)).count();
    let (end, is_number) = (run(at), code[at..].starts_with(|letter: char| letter.is_ascii_digit()));
    match is_number && code[..end].ends_with(['e', 'E']) && code[end..].starts_with(['+', '-']) {
        true => run(end + 1),
        false => end,
    }
}

pub(super) fn is_tuple(operand: &str) -> bool {
    operand.starts_with('(') && group_end(operand, 0) == operand.len() && has_comma(operand)
}

/// Position after an operand: signs, a literal, name or group, then attributes, items, calls and filters.
pub(super) fn operand_end(code: &str, start: usize) -> usize {
    let mut at = start + code[start..].len() - code[start..].trim_start_matches(['-', '+', ' ']).len();
    at = match code.as_bytes().get(at) {
        Some(b'\'' | b'"') => string_end(code, at),
        Some(b'(' | b'[' | b'{') => group_end(code, at),
        _ => word_end(code, at),
    };
    loop {
        let next = skip_blanks(code, at);
        at = match code.as_bytes().get(next) {
            Some(b'(' | b'[') => group_end(code, next),
            Some(b'.' | b'|') => word_end(code, skip_blanks(code, next + 1)),
            _ => return at,
        };
    }
}

/// Position after the bracket that closes the one at `start`.
pub(super) fn group_end(code: &str, start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_usize);
    while at < code.len() {
        match code.as_bytes()[at] {
            b'\'' | b'"' => {
                at = string_end(code, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth <= 1 => return at + 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        at += char_len(code, at);
    }
    code.len()
}

/// Whether the code of a tag contains an addition (`+`).
pub(super) fn has_sum(code: &str) -> bool {
    let mut at = 0;
    while at < code.len() {
        at = match code.as_bytes()[at] {
            b'+' => return true,
            b'\'' | b'"' => string_end(code, at),
            _ => at + char_len(code, at),
        };
    }
    false
}

/// Whether a bracketed group has a comma at its top level.
fn has_comma(group: &str) -> bool {
    let mut at = 1;
    while at < group.len() {
        at = match group.as_bytes()[at] {
            b',' => return true,
            b'\'' | b'"' => string_end(group, at),
            b'(' | b'[' | b'{' => group_end(group, at),
            _ => at + char_len(group, at),
        };
    }
    false
}

/// Position after the quote that ends the string at `start`.
pub(super) fn string_end(code: &str, start: usize) -> usize {
    let (quote, mut at) = (code.as_bytes()[start], start + 1);
    while at < code.len() {
        match code.as_bytes()[at] {
            b'\\' => at += 1,
            byte if byte == quote => return at + 1,
            _ => {}
        }
        at += if at < code.len() { char_len(code, at) } else { 0 };
    }
    code.len()
}

pub(super) fn skip_blanks(code: &str, at: usize) -> usize {
    at + code[at..].len() - code[at..].trim_start().len()
}

/// Size in bytes of the character at `at`.
pub(super) fn char_len(code: &str, at: usize) -> usize {
    code[at..].chars().next().map_or(1, char::len_utf8)
}
