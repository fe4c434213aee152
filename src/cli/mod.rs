//! Parses the arguments and dispatches to the subcommands. What a command does is in its own module.

mod args;
mod bench;
mod card;
mod commands;
#[cfg(test)]
mod documented_tests;
mod endpoint;
mod evaluation;
mod fetch;
mod import;
mod normalise;
mod private;
mod process;
mod reference;
mod sample;
mod seconds;
mod verify;
mod watch;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use clap::Parser;

use crate::console;
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::launch;
use crate::process::sweep;

/// Runs the program with `args` (the program's name first) and returns its exit code.
pub fn run(args: impl Iterator<Item = OsString>) -> ExitCode {
    launch::hold_signals();
    launch::name_process();
    if let Err(error) = launch::begin_process() {
        return launch::report_failure(&error);
    }
    let argv = match read(args) {
        Ok(argv) => normalise::normalise(argv),
        Err(error) => return launch::report_failure(&error),
    };
    let parsed = match args::Cli::try_parse_from(&argv) {
        Ok(parsed) => parsed,
        Err(usage) => {
            if !usage.use_stderr() {
                let printed = console::print(usage.render());
                return printed.map_or_else(|error| launch::report_failure(&error), |()| ExitCode::Done);
            }
            let usage = args::with_tips(usage);
            console::say(usage.render());
            return ExitCode::Configuration;
        }
    };
    let command = parsed.command;
    sweep();
    if command.computes() {
        launch::load_again_with_settings(); // before anything is done that would be done again
    }
    launch::receive_signals(command.on_stop());
    match catch_unwind(AssertUnwindSafe(|| commands::dispatch(command))) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => launch::report_failure(&normalise::name_options(&argv, error)),
        Err(panic) => launch::report_failure(&Error::of_panic("the program", panic_message(&*panic))),
    }
}

/// Converts the arguments to text.
///
/// # Errors
/// [`Error::InvalidValue`] for an argument that is not UTF-8.
fn read(args: impl Iterator<Item = OsString>) -> Result<Vec<String>> {
    let text = |(index, arg): (usize, OsString)| {
        let refuse = |arg: OsString| {
            let expected = "text in UTF-8; rename the file or folder";
            Error::invalid_value(&format!("argument {index}"), format!("{arg:?}"), expected)
        };
        arg.into_string().map_err(refuse)
    };
    args.enumerate().map(text).collect()
}
