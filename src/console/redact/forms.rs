//! Secrets that are recognized by the format of their issuer.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use super::{REDACTED, pattern};

/// Token prefixes that ordinary words may share, so the rest must also contain a digit or letters of both cases.
const PLAIN: &[&str] = &[
    "sk-[A-Za-z0-9_-]{16,}",                       // OpenAI, Anthropic, OpenRouter and others
    "[prs]k-lf-[A-Za-z0-9-]{16,}",                 // Langfuse
    "(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}", // Stripe
    "hf_[A-Za-z0-9]{16,}",
    "api_org_[A-Za-z0-9]{16,}",
    "gh[pousr]_[A-Za-z0-9]{16,}",
    "github_pat_[A-Za-z0-9_]{16,}",
    "gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|oas|imt|ffct)-[A-Za-z0-9_.-]{16,}", // GitLab
    "(?:gsk|r8|fw|csk|pcsk|e2b|tvly|rpa|pplx|xai|nfp|figd|ntn|glc|glsa|sbp|shpat|shpca|shppa|shpss)[_-][A-Za-z0-9_-]{16,}",
    "(?:dckr_(?:pat|oat)|lsv2_(?:pt|sk)|tgp_v1|wandb_v1|pscale_(?:tkn|pw|oauth)|lin_api|sntry[su]|sb_secret|do[opr]_v1)_[A-Za-z0-9_.=-]{16,}",
    "(?:npm_|rubygems_|nvapi-|PMAK-|NRAK-|HRKU-|pul-|jina_|whsec_|cio)[A-Za-z0-9+/=_-]{20,}",
    "pypi-[A-Za-z0-9_-]{30,}",
    "GOCSPX-[A-Za-z0-9_-]{16,}",
    "AIza[A-Za-z0-9_-]{30,}",
    r"ya29\.[A-Za-z0-9_-]{16,}",
    "1//0[A-Za-z0-9_-]{20,}", // Google's refresh tokens
    "xox[a-z](?:\\.xox[a-z])?-[A-Za-z0-9-]{10,}",
    "xapp-[A-Za-z0-9-]{16,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"(?:hv[sbr]|dp\.(?:pt|st|ct)|sl)\.[A-Za-z0-9_-]{20,}", // Vault, Doppler, Dropbox
    r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}",
    "(?:dapi|key-|SK)[0-9a-f]{32}(?:-[0-9])?", // Databricks, Mailgun, Twilio
    "[0-9a-f]{32}-us[0-9]{1,2}",               // Mailchimp
    "ATATT3[A-Za-z0-9_=-]{20,}",
    "ATBB[A-Za-z0-9_=-]{20,}",
    "tskey-[a-z]+-[A-Za-z0-9-]{16,}",
    "AGE-SECRET-KEY-1[A-Z0-9]{20,}",
    "[0-9]{8,10}:AA[A-Za-z0-9_-]{33}",                                   // Telegram
    r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",  // Discord
    r"[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}",                   // Azure
    r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}",                                 // Airtable
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*){0,3}", // JSON web tokens
];
/// Token formats that nothing else has.
const CERTAIN: &[&str] = &[
    // AWS: the id, and the secret beside it.
    r#"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}(?:[\s:,;/|"'=]{1,4}(?:[\w-]+["']?\s*[=:]\s*["']?)?[A-Za-z0-9/+]{40})?"#,
];
/// Matches blocks of private keys, up to the end of the text if the block is cut off.
const BLOCK: &str =
    "-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?s:.*?)(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|$)";
/// Matches webhook URLs, whose path is secret.
const WEBHOOK: &str = r#"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/)[^\s"'<>\[]+"#;

/// Removes tokens of known formats from `text`.
pub(super) fn hide(text: &str) -> String {
    let text = BLOCKS.replace_all(text, REDACTED);
    let text = WEBHOOKS.replace_all(&text, format!("${{1}}{REDACTED}"));
    let text = ISSUED.replace_all(&text, |found: &Captures| {
        let is_secret =
            found.name("certain").is_some() || found.name("plain").is_some_and(|word| is_mixed(word.as_str()));
        if is_secret { format!("{}{REDACTED}", &found["ahead"]) } else { found[0].to_owned() }
    });
    text.into_owned()
}

/// Whether a word may be random characters: sixteen in a row with digits and letters, or letters of both cases mixed.
pub(super) fn is_random(word: &str) -> bool {
    word.split(|letter: char| !letter.is_ascii_alphanumeric() && !"+=".contains(letter))
        .any(|run| run.len() >= 16 && run.contains(|letter: char| letter.is_ascii_alphabetic()) && is_mixed(run))
}

/// Whether a word may be base64 credentials, as in a `Basic` header: whole groups of four characters in both cases.
pub(super) fn is_coded(word: &str) -> bool {
    word.len() >= 8
        && word.len().is_multiple_of(4)
        && !word.contains(['-', '_', '.', '~'])
        && is_mixed(word.get(1..).unwrap_or(""))
}

/// Whether a word has digits, or letters of both cases: an ordinary name such as sk-learn-contributions has neither.
fn is_mixed(word: &str) -> bool {
    let has = |kind: fn(&char) -> bool| word.chars().any(|letter| kind(&letter));
    has(char::is_ascii_digit) || (has(char::is_ascii_lowercase) && has(char::is_ascii_uppercase))
}

static BLOCKS: LazyLock<Regex> = LazyLock::new(|| pattern(BLOCK));
static WEBHOOKS: LazyLock<Regex> = LazyLock::new(|| pattern(WEBHOOK));
static ISSUED: LazyLock<Regex> = LazyLock::new(|| {
    // A word begins behind an escape, too: of a terminal's colour, of JSON or Python, of a URL.
    let ahead = r"\x1b\[[0-9;]*m|\\[nrt]|\\u[0-9a-f]{4}|\\x[0-9a-f]{2}|%[0-9A-Fa-f]{2}|\b";
    pattern(&format!("(?P<ahead>{ahead})(?:(?P<certain>{})|(?P<plain>{}))", CERTAIN.join("|"), PLAIN.join("|")))
});
