//! `chat`, used at a terminal and through pipes.

use std::io::Write;
use std::process::Stdio;

use serde_json::json;

use super::{QUESTION, generated};
use crate::program::{Ended, MODEL, command, end, stdout_of};

/// Runs a conversation with these input lines.
fn talked(more: &str, lines: &[u8]) -> Ended {
    let mut chat = command(&format!("chat --model {MODEL} --temperature 0 --max_completion_length 20 {more}"));
    let mut chat = chat.stdin(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(lines).unwrap();
    let ended = end(chat);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended
}

#[test]
fn a_terminal_conversation_continues_until_reset() {
    let lines = format!("{QUESTION}\n\n/reset\n{QUESTION}\nwhat is nine plus nine ?\n/unknown\n/exit\n");
    let ended = talked("", lines.as_bytes());
    let answers: Vec<&str> = ended.stdout.lines().collect();
    let alone = generated(MODEL, "--temperature 0 --chat")[0]["completion"].clone();
    assert_eq!(answers.len(), 3, "{answers:?}");
    assert_eq!((json!(answers[0]), json!(answers[1])), (alone.clone(), alone));
    assert!(ended.stderr.contains("/reset begins a new conversation"), "{}", ended.stderr);
    let said = stdout_of(&format!("chat --model {MODEL}"));
    assert_eq!(said, "", "no input is the end of the conversation");
}

/// A line that is not valid UTF-8 gets a message, and the conversation continues; so does one after an unknown adapter is named.
#[test]
fn stray_bytes_do_not_end_a_conversation() {
    let ended = talked("", &[b"two \xff\xfe\n/adapter style\n", QUESTION.as_bytes(), b"\n"].concat());
    assert_eq!(ended.stdout.lines().count(), 2, "{}", ended.stdout);
    assert!(
        ended.stderr.contains("there is no adapter of that name; those given with --adapter: none"),
        "{}",
        ended.stderr
    );
}
