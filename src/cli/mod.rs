//! Argument parsing and dispatch to the subcommands.
