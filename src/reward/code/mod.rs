//! The reward `code`: runs the program in a completion against tests. Its output is graded outside of the sandbox. The program gets a test's input
//! and never sees what is expected. The reward is the share of tests passed.
//!
//! | file | what it is |
//! |---|---|
//! | `tests` | the tests of a row, and how a program's output is compared |

mod tests;

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tests::Test;

use super::protocol::{CodeRequest, RewardReply, read_frame, write_frame};
use crate::config::CodeConfig;
use crate::error::{Error, Result};
use crate::sandbox::Sandbox;

/// Name of the reward that is the share of passed tests.
pub const NAME: &str = "code";

/// Name of the reward that is 1 if all tests pass, as open-r1's `binary_code`.
pub const BINARY_NAME: &str = "binary_code";

/// Hidden subcommand with which a reward pool starts this program as a sandbox worker.
pub const SANDBOX_COMMAND: &str = "sandbox-worker";

/// Runs a sandbox worker that serves requests on standard input and output. `settings` is a [`CodeConfig`] as JSON. If the sandbox cannot be
/// set up, every request is answered with the reason.
///
/// # Errors
/// [`Error::InvalidArgument`] for malformed settings; [`Error::Environment`] if the reward pool that sends requests has ended.
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

/// Whether a program that does nothing would pass all tests of a row.
pub(super) fn ask_for_nothing(columns: &Map<String, Value>, tests_column: &str) -> bool {
    tests::read(columns, tests_column).is_ok_and(|tests| tests.iter().all(Test::accepts_silence))
}

/// The share of tests that the completion's program passes. It is 0 without a program, and if the passed tests would also be passed by a program
/// that does nothing.
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

/// The program in a completion: its last complete code block between fences of three backticks.
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
