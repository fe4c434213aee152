//! Secrets are taken out of whatever is logged or written: what stands under a secret's name (`api_key = ..`, `"--token", ".."`,
//! `?sig=..`, `Authorization: ..`), credentials in URLs, and what issuers make to be known by its first letters.

use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde_json::Value;

const REDACTED: &str = "[redacted]";

/// How the name of a secret ends, in an assignment, an option or an object.
const NAME_ENDS: &str = "token|key|secret|password|passwd|passphrase|pwd|credentials?";
/// The endings that need a word before them where any text may follow: `key = 3` is no secret.
const VAGUE_ENDS: &str = "token|key";
/// Names that end so and are no secrets: those of vocabularies, tables and keyboards.
const HARMLESS: &str = "(?:mon|don|tur|hoc|joc|whis|hot)key$|(?:^|[^a-z])(?:[beusp]os|pad|unk|mask|sep|cls|image|video|audio|special|start|end|stop|first|last|next|\
    new|per|max|min|num|an|a|the|each|every|any|this|that|sort|primary|foreign|partition|public|unknown)[ _.-]?(?:token|key)$";
/// Names of secrets in the query of a URL, where no other word need come before.
const QUERY_ENDS: &str = "sig|signature|auth|credential";
/// Headers that are secrets whole, but for the scheme.
const HEADERS: &str = "(?:proxy-)?authorization|(?:set-)?cookie";
/// Secrets that their issuers made to be known: Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Google, Slack, Stripe, npm,
/// PyPI, SendGrid, NVIDIA, JSON web tokens, private keys.
const ISSUED: &[&str] = &[
    "hf_[A-Za-z0-9]{16,}",
    "api_org_[A-Za-z0-9]{16,}",
    "sk-[A-Za-z0-9_-]{16,}",
    "(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}",
    "whsec_[A-Za-z0-9+/=]{16,}",
    "gh[pousr]_[A-Za-z0-9]{16,}",
    "github_pat_[A-Za-z0-9_]{16,}",
    "glpat-[A-Za-z0-9_-]{16,}",
    "(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "AIza[A-Za-z0-9_-]{30,}",
    r"ya29\.[A-Za-z0-9_-]{16,}",
    "xox[a-z]-[A-Za-z0-9-]{10,}",
    "npm_[A-Za-z0-9]{30,}",
    "pypi-[A-Za-z0-9_-]{30,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "nvapi-[A-Za-z0-9_-]{16,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    "-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
];

/// `text` with its secrets replaced by `[redacted]`.
pub fn redact(text: &str) -> String {
    let text = URL.replace_all(text, format!("${{1}}{REDACTED}@"));
    let text = ISSUED_SECRET.replace_all(&text, |found: &Captures| {
        // A name such as sk-learn-contributions has no digit.
        let is_secret = found[0].contains(|letter: char| letter.is_ascii_digit()) || found[0].starts_with('-');
        if is_secret { REDACTED.to_owned() } else { found[0].to_owned() }
    });
    let text = HEADER.replace_all(&text, format!("${{1}}{REDACTED}"));
    let text = BEARER.replace_all(&text, format!("${{1}}{REDACTED}"));
    let text = QUERY.replace_all(&text, format!("${{1}}{REDACTED}"));
    let text = ASSIGNMENT.replace_all(&text, hidden);
    OPTION.replace_all(&text, hidden).into_owned()
}

/// Redacts every string of a JSON value, in place; what stands under a secret's name, or follows an option of such a name,
/// goes whole.
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
            for (name, value) in members {
                match SECRET_NAME.is_match(name) && !is_harmless(name) && !value.is_null() {
                    true => *value = REDACTED.into(),
                    false => redact_json(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// An assignment without its value, unless the name is no secret's: groups `before` (the name among it), `name`, `value`. What has no value
/// is a file's name.
fn hidden(found: &Captures) -> String {
    let Some(value) = found.name("value").map(|value| value.as_str()) else { return found[0].to_owned() };
    if is_harmless(&found["name"]) || value.starts_with(REDACTED) {
        return found[0].to_owned();
    }
    let quote = value.strip_prefix('\\').unwrap_or(value).chars().next().filter(|letter| "\"'".contains(*letter));
    let escape = if value.starts_with('\\') { "\\" } else { "" };
    let quote = quote.map_or(String::new(), |quote| format!("{escape}{quote}"));
    format!("{}{quote}{REDACTED}{quote}", &found["before"])
}

fn is_harmless(name: &str) -> bool {
    HARMLESS_NAME.is_match(name)
}

/// A value in quotes, those of JSON within JSON included, or up to where a word ends.
const VALUE: &str = r#"(?P<value>\\"[^"]*\\"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&"'<>\[\]{}|\\][^\s,;&"']*)"#;
/// A value behind an option without `=`: no other option.
const NEXT_WORD: &str = r#"(?P<value>"(?:[^"\\-]|\\.)(?:[^"\\]|\\.)*"|'[^'-][^']*'|[^\s,;&"'<>\[\]{}|-][^\s,;&"']*)"#;

static SECRET_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("(?i)(?:{NAME_ENDS}|apikey|{HEADERS})$")));
static HARMLESS_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("(?i){HARMLESS}")));
static ASSIGNMENT: LazyLock<Regex> = LazyLock::new(|| {
    let name = format!(r"[\w.-]+(?:{VAGUE_ENDS})|[\w.-]*(?:{NAME_ENDS})");
    let name = name.replace(&format!("*(?:{VAGUE_ENDS}|"), "*(?:");
    let file = format!(r"/[\w.-]*(?:{NAME_ENDS}):"); // the colon behind a path begins what is said of it, no value
    pattern(&format!(r#"(?i){file}|(?P<before>\b(?P<name>{name})(?:\\?["'])?\s*[=:]\s*){VALUE}"#))
});
static OPTION: LazyLock<Regex> = LazyLock::new(|| {
    let name = format!(r"(?P<name>--?[\w.-]*?(?:{NAME_ENDS}))");
    pattern(&format!(r#"(?i)(?P<before>(?:^|[\s"'\[(,`])(?:{name}(?:\s+|["']\s*,\s*))){NEXT_WORD}"#))
});
static OPTION_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"(?i)^--?[\w.-]*(?:{NAME_ENDS}|apikey)$")));
static QUERY: LazyLock<Regex> =
    LazyLock::new(|| pattern(&format!(r#"(?i)([?&][\w.%-]*(?:{NAME_ENDS}|{QUERY_ENDS})=)[^\s&#"'<>\[]+"#)));
static URL: LazyLock<Regex> = LazyLock::new(|| pattern(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@"));
static HEADER: LazyLock<Regex> = LazyLock::new(|| {
    let scheme = r"(?:(?:bearer|basic|digest|token|apikey|negotiate)\s+)?";
    pattern(&format!(r#"(?i)(\b(?:{HEADERS})(?:\\?["'])?\s*[=:]\s*(?:\\?["'])?{scheme})[^\s"'\\\[][^"'\\\r\n]*"#))
});
static BEARER: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\b(bearer\s+)[\w.~+/=-]{16,}"));
static ISSUED_SECRET: LazyLock<Regex> = LazyLock::new(|| {
    let issued =
        ISSUED.iter().map(|issued| if issued.starts_with('-') { (*issued).to_owned() } else { format!(r"\b{issued}") });
    pattern(&issued.collect::<Vec<_>>().join("|"))
});

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file compile")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        for (text, expected) in [
            ("HF_TOKEN=abc WANDB_API_KEY: xyz", "HF_TOKEN=[redacted] WANDB_API_KEY: [redacted]"),
            (r#"{"db_password": "a \"b\" c", "steps": 3}"#, r#"{"db_password": "[redacted]", "steps": 3}"#),
            ("{'api_key': 'a b', 'steps': 3}", "{'api_key': '[redacted]', 'steps': 3}"),
            (r#""{\"api_key\": \"abc\", \"n\": 1}""#, r#""{\"api_key\": \"[redacted]\", \"n\": 1}""#),
            ("https://me:pw@host/path?x=1", "https://[redacted]@host/path?x=1"),
            ("http://host/?access_token=abc&page=2", "http://host/?access_token=[redacted]&page=2"),
            ("http://host/a?sig=a%2Fb&key=c d", "http://host/a?sig=[redacted]&key=[redacted] d"),
            (
                "s3://b/o?X-Amz-Signature=0a&X-Amz-Credential=AK",
                "s3://b/o?X-Amz-Signature=[redacted]&X-Amz-Credential=[redacted]",
            ),
            ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
            (r#"-H "Authorization: abc def" -v"#, r#"-H "Authorization: [redacted]" -v"#),
            (r#"{"Authorization": "Basic YWI6Yw=="}"#, r#"{"Authorization": "Basic [redacted]"}"#),
            ("-H 'X-Api-Key: abc'", "-H 'X-Api-Key: [redacted]'"),
            ("Cookie: session=1; id=2", "Cookie: [redacted]"),
            ("passwd=abc pwd=x passphrase: y", "passwd=[redacted] pwd=[redacted] passphrase: [redacted]"),
            ("judge --api-key abc --top 3", "judge --api-key [redacted] --top 3"),
            (r#"["judge", "--api-key","abc", "x"]"#, r#"["judge", "--api-key","[redacted]", "x"]"#),
            (r#"["--password", "a b"]"#, r#"["--password", "[redacted]"]"#),
            ("['--token', 'abc']", "['--token', '[redacted]']"),
            ("--hub_token=abc", "--hub_token=[redacted]"),
            (
                "run/db_password=abc run/token: api_key: abc",
                "run/db_password=[redacted] run/token: api_key: [redacted]",
            ),
            (r#"{"run/pwd": "abc"}"#, r#"{"run/pwd": "[redacted]"}"#),
        ] {
            assert_eq!(redact(text), expected);
        }
    }

    #[test]
    fn what_issuers_made_to_be_known_goes_without_a_name() {
        let random = "Zx81Kq0PwLm3Rt5VbN7cYd9F";
        let upper = random.to_uppercase();
        let jwt = format!("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.{random}");
        let known =
            ["hf_", "sk-", "sk-proj-", "sk-ant-api03-", "ghp_", "gho_", "github_pat_", "glpat-", "xoxb-12-", "nvapi-"];
        let known = known.map(|prefix| format!("{prefix}{random}"));
        let others = [format!("AKIA{}", &upper[..16]), format!("AIza{random}{random}"), jwt];
        let key = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----".to_owned();
        for secret in known.into_iter().chain(others).chain([key]) {
            assert_eq!(redact(&format!("got {secret} here")), "got [redacted] here");
        }
    }

    #[test]
    fn what_is_no_secret_stays() {
        let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        for text in [
            "num_tokens=100, key = 3, learning_rate: 1e-6, num_key_value_heads = 8, max_tokens: 4096",
            "eos_token: <|im_end|>, pad_token = <pad>, \"bos_token\": \"<s>\", next_token=5, num_input_tokens_seen: 9",
            r#"{"key_value_heads": 8, "tokenizer": "Qwen/Qwen2.5-7B-Instruct", "monkey": "x"}"#,
            "meta-llama/Llama-3.1-8B-Instruct, task-sk-learn-contributions-and-more, risk-averse-optimisation",
            "unknown key 'max_stepz'; did you mean 'max_steps'?",
            "train_file: expected a key among a, b; token 151643 is no word; the key: value pairs",
            "unexpected argument '--tokens' found; --max-token 5; --key <KEY>; --hub_token --push",
            "https://huggingface.co/Qwen/Qwen2.5-7B?page=2&sort=name#token",
            "git@github.com:owner/name.git, a@b.c",
            "password reset, secretary: x, the secret of it",
            "/etc/passwd: expected a file of rows, .jsonl or .json; keys/api.token:3: bad line; ./hub_token: missing",
            "{{ messages[0]['content'] }} {% if add_generation_prompt %}",
            "the bearer of news",
            hash,
        ] {
            assert_eq!(redact(text), text);
        }
    }

    #[test]
    fn json_keeps_its_shape() {
        let mut value = serde_json::json!({
            "hub_token": "abc", "no_token": null, "list": ["ftp://u:p@h"], "n": 1, "db_password": 123, "api_key": ["a", {"b": "c"}],
            "command": ["judge", "--api-key", "abc", "--password", "--verbose", "--top", "3"], "eos_token": "</s>", "Cookie": "c",
        });
        redact_json(&mut value);
        let expected = serde_json::json!({
            "hub_token": "[redacted]", "no_token": null, "list": ["ftp://[redacted]@h"], "n": 1, "db_password": "[redacted]",
            "api_key": "[redacted]", "command": ["judge", "--api-key", "[redacted]", "--password", "--verbose", "--top", "3"],
            "eos_token": "</s>", "Cookie": "[redacted]",
        });
        assert_eq!(value, expected);
    }
}
