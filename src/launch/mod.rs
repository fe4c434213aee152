//! Processes, signals and exit codes.
