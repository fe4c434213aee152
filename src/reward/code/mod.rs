//! The reward `code`: the program in a completion is run against tests, and graded outside of the sandbox it runs in. It
//! gets a test's input and never sees what is expected. The reward is the share of tests passed.
//!
//! | file | what it is |
//! |---|---|
//! | `tests` | the tests of a row, and what a program's output is compared with |

mod tests;

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tests::Test;

use super::protocol::{CodeRequest, RewardReply, read_frame, write_frame};
use crate::config::CodeConfig;
use crate::error::{Error, Result};
use crate::sandbox::Sandbox;

/// The reward's name.
pub const NAME: &str = "code";

/// The reward that is 1 where all tests are passed, as open-r1's of this name.
pub const BINARY_NAME: &str = "binary_code";

/// The hidden subcommand that a reward pool starts this program with.
pub const SANDBOX_COMMAND: &str = "sandbox-worker";

/// Serves requests on standard input and output; `settings` is a [`CodeConfig`] as JSON. What keeps the sandbox from being
/// built is the answer to every request.
///
/// # Errors
/// [`Error::InvalidArgument`] for other settings; [`Error::Environment`] if whoever asks is gone.
pub fn serve(settings: &str) -> Result<()> {
    let settings: CodeConfig = serde_json::from_str(settings).map_err(|error| Error::InvalidArgument {
        op: SANDBOX_COMMAND,
        expected: "settings of the reward 'code' as JSON".to_owned(),
        got: error.to_string(),
    })?;
    let sandbox = Sandbox::new(&settings);
    let answer = |request: &CodeRequest| {
        let sandbox = sandbox.as_ref().map_err(String::clone)?;
        if request.completions.is_empty() {
            return Ok(Vec::new()); // asked whether we are ready
        }
        let tests = tests::read(&request.columns, &settings.tests_column)?;
        request.completions.iter().map(|completion| score(sandbox, completion, &tests, &settings)).collect()
    };
    serve_with(&mut io::stdin().lock(), &mut io::stdout().lock(), answer)
        .map_err(|error| Error::Environment { message: format!("{SANDBOX_COMMAND}: {error}") })
}

fn serve_with(
    input: &mut impl Read,
    output: &mut impl Write,
    answer: impl Fn(&CodeRequest) -> Result<Vec<f64>, String>,
) -> io::Result<()> {
    while let Some(request) = read_frame(input)? {
        let reply = match serde_json::from_slice::<CodeRequest>(&request) {
            Err(error) => RewardReply::error(None, error.to_string()),
            Ok(request) => match answer(&request) {
                Err(message) => RewardReply::error(Some(request.id), message),
                Ok(rewards) => RewardReply::rewards(request.id, rewards),
            },
        };
        write_frame(output, &reply)?;
    }
    Ok(())
}

/// Whether a row's tests ask for nothing: a program that does nothing would pass them all.
pub(super) fn ask_for_nothing(columns: &Map<String, Value>, tests_column: &str) -> bool {
    tests::read(columns, tests_column).is_ok_and(|tests| tests.iter().all(Test::accepts_silence))
}

/// The share of tests that the completion's program passes; 0 without a program, and for one that passes none but those that a
/// program passes which does nothing.
fn score(sandbox: &Sandbox, completion: &str, tests: &[Test], settings: &CodeConfig) -> Result<f64, String> {
    let Some(program) = program(completion) else { return Ok(0.0) };
    let deadline = Instant::now() + Duration::from_secs_f64(settings.timeout_s);
    let (mut num_passed, mut does_something) = (0, false);
    for test in tests {
        if Instant::now() >= deadline {
            break;
        }
        let run = sandbox.run(&program, test.input.as_bytes(), deadline)?;
        if run.succeeded && test.accepts(&run.output) {
            num_passed += 1;
            does_something |= !test.accepts_silence();
        }
    }
    Ok(if does_something { num_passed as f64 / tests.len() as f64 } else { 0.0 })
}

/// The last complete block between fences of three back-ticks.
fn program(completion: &str) -> Option<String> {
    let (mut open, mut last) = (None::<String>, None);
    for line in completion.lines() {
        match (&mut open, line.trim_start().starts_with("```")) {
            (None, true) => open = Some(String::new()),
            (Some(_), true) => last = open.take(),
            (Some(text), false) => {
                text.push_str(line);
                text.push('\n');
            }
            (None, false) => {}
        }
    }
    last
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn the_last_complete_code_block_is_graded() {
        assert_eq!(program("so:\n```python\nprint(1)\n```\nno:\n```\nprint(2)\n```").as_deref(), Some("print(2)\n"));
        assert_eq!(program("```python\nprint(1)\n```\n```python\nprint(2)").as_deref(), Some("print(1)\n"));
        assert_eq!(program("print(1)"), None);
    }
}
