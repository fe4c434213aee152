//! Redaction of secrets in text that is logged or written: values after the name of a secret (`api_key = ..`, `"--token", ".."`, `?sig=..`,
//! `Authorization: ..`), credentials in URLs and commands, and tokens of known formats.

mod forms;
#[cfg(test)]
mod tests;
mod values;

use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde_json::Value;

use values::hide_values;

const REDACTED: &str = "[redacted]";

/// Names of secrets in an assignment, an option or an object. `key = 3` and `token: x` do not count: these two need another word in front.
const NAME: &str = r"[\w.-]*(?:secret|password|passwd)s?(?:[_.-][\w.-]+|\d+)?|[\w.-]*(?:passphrase|passcode|pwd|credentials?|apikeys?)\d*|[\w.-]+(?:token|key)(?:[_-]?\d+)?|[\w.-]*(?:api|access|auth|private)[_-]?(?:keys|tokens)|[\w.-]*_(?:auth|pass|pw|pat|sas|jwt|dsn)";
/// Names that look like those of secrets but are harmless: of vocabularies, tables, data and keyboards.
const HARMLESS: &str = "(?:mon|don|tur|hoc|joc|whis|hot)key$|(?:^|[^a-z])(?:[beusp]os|pad|unk|mask|sep|cls|image|video|audio|special|start|end|stop|first|last|next|\
    new|per|max|min|num|an|a|the|each|every|any|this|that|sort|primary|foreign|partition|public|unknown|prompt|response|completion|answer|\
    data|cache|dict|row|column|lookup|group|map|index|config|label|text|message|fn|think|draft|vision)[ _.-]?(?:token|key)$|\
    (?:^|[^a-z])(?:forward|backward|first|second|one|two|each|per|single|num)[ _.-]pass$";
/// Names of secrets in the query of a URL, where no other word is needed in front.
const QUERY_NAME: &str = "token|key|secret|password|passwd|pwd|pass|sig|signature|auth|credential|jwt|sas";
/// Headers whose whole value is secret, except for the scheme.
const HEADERS: &str = "(?:proxy-)?authorization|(?:set-)?cookie";

/// Replaces the secrets in `text` by `[redacted]`. Applying it twice changes nothing more.
pub fn redact(text: &str) -> String {
    let text = URL.replace_all(text, format!("${{1}}{REDACTED}@"));
    let text = forms::hide(&text);
    let hide = |found: &Captures, is_secret: bool| match is_secret {
        true => format!("{}{REDACTED}", &found["before"]),
        false => found[0].to_owned(),
    };
    let text = HEADER.replace_all(&text, |found: &Captures| {
        let is_redacted = found["value"].split_once(' ').is_some_and(|(_, rest)| rest == REDACTED); // behind a scheme
        hide(found, !is_redacted)
    });
    let text = LOGIN.replace_all(&text, |found: &Captures| {
        let is_user_id = found["value"].chars().all(|letter| letter.is_ascii_digit() || letter == ':'); // docker run -u 1000:1000
        hide(found, !is_user_id)
    });
    let text = FLAG.replace_all(&text, |found: &Captures| hide(found, true));
    let text = XML.replace_all(&text, |found: &Captures| hide(found, !is_harmless(&found["name"])));
    let text = hide_values(&text, &QUERY, |_, _| true);
    let text = hide_values(&text, &ASSIGNMENT, |found, _| {
        // The colon behind a path begins what is said of it, no value.
        let is_path = found.name("slash").is_some() && !found[0].contains(['"', '\'', '=']);
        !is_path && !is_harmless(&found["name"])
    });
    let text =
        hide_values(&text, &OPTION, |found, value| !value.starts_with(['-', '<']) && !is_harmless(&found["name"]));
    let text = hide_values(&text, &NAMED, |found, _| !is_harmless(&found["name"]));
    let text = hide_values(&text, &MEMBER, |found, _| !is_harmless(&found["name"]));
    let text = SCHEME.replace_all(&text, |found: &Captures| {
        hide(
            found,
            forms::is_random(&found["value"]) || (found.name("coded").is_some() && forms::is_coded(&found["value"])),
        )
    });
    in_percent(&text)
}

/// Redacts every string of a JSON value in place. A value under the name of a secret is replaced completely, and so is a string that follows an
/// option of such a name.
pub fn redact_json(value: &mut Value) {
    match value {
        Value::String(text) => *text = redact(text),
        Value::Array(values) => {
            let mut follows_option = false;
            for value in values {
                let names_next = value.as_str().is_some_and(|text| OPTION_NAME.is_match(text) && !is_harmless(text));
                match (follows_option, &*value) {
                    (true, Value::String(text)) if !text.starts_with('-') => *value = REDACTED.into(),
                    _ => redact_json(value),
                }
                follows_option = names_next;
            }
        }
        Value::Object(members) => {
            let has_secret = |name: &str| members.get(name).and_then(Value::as_str).is_some_and(is_secret_name);
            let names_value = has_secret("name") || has_secret("key");
            for (name, value) in members {
                match (is_secret_name(name) || (names_value && name == "value")) && !value.is_null() {
                    true => *value = REDACTED.into(),
                    false => redact_json(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn is_secret_name(name: &str) -> bool {
    SECRET_NAME.is_match(name) && !is_harmless(name)
}

fn is_harmless(name: &str) -> bool {
    HARMLESS_NAME.is_match(name)
}

/// Redacts percent-encoded assignments, as in a URL that is an argument of another URL.
fn in_percent(text: &str) -> String {
    let decoded = |digits: &Captures| u8::from_str_radix(&digits[1], 16).map_or('?', char::from).to_string();
    let of_piece = |found: &Captures| {
        let Some(sign) = ENCODED_SIGN.find(&found["piece"]) else { return found[0].to_owned() };
        let name = PERCENT.replace_all(&found["piece"][..sign.start()], decoded);
        let is_secret = is_secret_name(&name) || QUERY_NAME.split('|').any(|known| name.eq_ignore_ascii_case(known));
        match is_secret && sign.end() < found["piece"].len() {
            true => format!("{}{REDACTED}{}", &found["piece"][..sign.end()], &found["end"]),
            false => found[0].to_owned(),
        }
    };
    let of_word = |word: &Captures| ENCODED_PIECE.replace_all(&word[0], of_piece).into_owned();
    ENCODED_WORD.replace_all(text, of_word).into_owned()
}

static SECRET_NAME: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!("(?i)^(?:.*[^a-z])??(?:{NAME}|token|key|auth|{HEADERS})$")));
static HARMLESS_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("(?i){HARMLESS}")));
static ASSIGNMENT: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r#"(?i)(?P<slash>/)?\b(?P<name>{NAME})(?:\\*["'])?\s*(?:=>|:=|==?|:)\s*"#)));
static OPTION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(&format!(r#"(?i)(?:^|[\s"'\[(,`])(?P<name>--?(?:{NAME}|token|key|pass))(?:\s+|["']\s*,\s*)"#))
});
static OPTION_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("(?i)^--?(?:{NAME}|token|key|pass)$")));
/// Matches a name and its value as two members of an object.
static NAMED: LazyLock<Regex> = LazyLock::new(|| {
    let quote = r#"\\*["']?"#;
    let name = format!("(?P<name>{NAME}|{HEADERS})");
    pattern(&format!(r#"(?i)\b(?:name|key){quote}\s*[=:]\s*{quote}{name}{quote}[\s,;-]+{quote}value{quote}\s*[=:]\s*"#))
});
/// Matches a name and its value as two members of a list.
static MEMBER: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r#"(?i)[(\[]\s*b?["'](?P<name>{NAME}|{HEADERS})["']\s*,\s*"#)));
static QUERY: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"(?i)[?&][\w.%-]*(?:{QUERY_NAME})=")));
/// Matches the text up to the last @ in the authority of a URL.
static URL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"([A-Za-z][A-Za-z0-9+.-]*(?:://|%3[aA]%2[fF]%2[fF]))[^\s/?#"'<>]+@"#));
static HEADER: LazyLock<Regex> = LazyLock::new(|| {
    let scheme = r"(?:(?:bearer|basic|digest|token|apikey|negotiate)\s+)?";
    pattern(&format!(
        r#"(?i)(?P<before>\b(?:{HEADERS})(?:\\*["'])?\s*[=:]\s*(?:\\*["'])?{scheme})(?P<value>[^\s"'\\\[][^"'\\\r\n]*)"#
    ))
});
/// Matches words such as `Bearer` after which a random word is a secret.
static SCHEME: LazyLock<Regex> = LazyLock::new(|| {
    let word = r"token|key|secret|password|passwd|bearer|credential|login|wandb";
    let between = r#"(?:\\*["'])?(?:\s+(?:is|was|provided|given|used|--?[\w-]+))*\s*[=:,]?\s*(?:\\*["'`])?"#;
    pattern(&format!(
        r"(?i)(?P<before>\b(?:(?P<coded>basic|_?auth)|(?:\w+[_-])?(?:{word})){between})(?P<value>[\w+/=.~-]{{8,}})"
    ))
});
/// Matches credentials `user:password` on a client's command line.
static LOGIN: LazyLock<Regex> = LazyLock::new(|| {
    let gap = r#"(?:\s+|=|["']\s*,\s*)?["']?"#;
    let client = format!(r#"\b(?:curl|wget|xh|https?)\b[^\n]*?[\s"',]-[a-z]*u{gap}"#);
    let user = r#"--(?:proxy-)?user(?:\s+|=|["']\s*,\s*)["']?"#;
    pattern(&format!(r#"(?i)(?P<before>{client}|{user})(?P<value>[^\s"':/-][^\s"':/]*:[^\s"']+)"#))
});
/// Matches a password on a client's command line, and in `.netrc`.
static FLAG: LazyLock<Regex> = LazyLock::new(|| {
    let flag =
        r"\bsshpass\s+-p\s*|\bmysql\w*\b[^\n]*?\s-p|\bredis-cli\b[^\n]*?\s-a\s+|\bdocker\s+login\b[^\n]*?\s-p\s+";
    let netrc = r"\b(?:machine\s+\S+|default)(?:\s+(?:login|account)\s+\S+)*\s+password\s+|\blogin\s+\S+\s+password\s+";
    pattern(&format!(r#"(?i)(?P<before>(?:{flag}|{netrc})["']?)[^\s"'\[]+"#))
});
static XML: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r"(?i)(?P<before><(?P<name>{NAME})(?:\s[^<>]*)?>)[^<\[]+")));
static PERCENT: LazyLock<Regex> = LazyLock::new(|| pattern("(?i)%(?:25)*([0-7][0-9a-f])"));
static ENCODED_WORD: LazyLock<Regex> = LazyLock::new(|| pattern(r#"[^\s"'<>]*%[0-9A-Fa-f]{2}[^\s"'<>]*"#));
/// Matches a word up to the next character that may separate two assignments.
static ENCODED_PIECE: LazyLock<Regex> =
    LazyLock::new(|| pattern("(?i)(?P<piece>.+?)(?P<end>[&;?]|%(?:25)*(?:26|3b|3f)|$)"));
static ENCODED_SIGN: LazyLock<Regex> = LazyLock::new(|| pattern("(?i)=|%(?:25)*3[ad]"));

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file compile")
}
