//! Distributes the processors among the threads of workers.
#![allow(unsafe_code)]

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use crate::process::PROGRAM;
use crate::ranks::{NCCL_INTERFACE_VARIABLE, NCCL_SETTINGS, WorkerEnv, nccl_interface};

/// OpenMP threads spin while they wait unless this is set, which takes processors from other work: two concurrent runs were ten times slower.
const WAIT_POLICY: &str = "OMP_WAIT_POLICY";
const PASSIVE: &str = "passive";
const NUM_THREADS: &str = "OMP_NUM_THREADS";

/// Gives each of `num_workers` an equal share of the processors, and lets its threads sleep while they wait. Settings of the user have priority.
pub(super) fn share_processors(command: &mut Command, num_workers: usize) {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let num_threads = (processors / num_workers).max(1).to_string();
    for (name, value) in [(NUM_THREADS, num_threads.as_str()), (WAIT_POLICY, PASSIVE)] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
}

/// Sets environment variables that OpenMP and NCCL read when they are loaded, unless the user has set them; OpenMP threads then sleep while they
/// wait. For this the process executes its program again with the same process id, so no thread may run yet, and all earlier work is lost. Call it
/// first in `main`.
pub fn load_again_with_settings() {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let mut missing: Vec<_> =
        missing_settings(is_set).into_iter().map(|(name, value)| (name, value.to_owned())).collect();
    if !is_set(NCCL_INTERFACE_VARIABLE) {
        missing.extend(interface().map(|name| (NCCL_INTERFACE_VARIABLE, name)));
    }
    if missing.is_empty() {
        return;
    }
    if let Err(error) = load_again(&missing) {
        tracing::debug!("cannot restart the program with its environment variables set: {error}");
    }
}

/// Executes the program again with additional variables. Unlike std's `exec` it keeps blocked signals blocked, so that a pending signal reaches the
/// program's handlers.
fn load_again(variables: &[(&str, String)]) -> io::Result<()> {
    let assigned = |name: &OsStr, value: &OsStr| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat());
    let args = std::env::args_os().map(|arg| CString::new(arg.as_bytes())).collect::<Result<Vec<_>, _>>()?;
    let own = std::env::vars_os().map(|(name, value)| assigned(&name, &value));
    let further = variables.iter().map(|(name, value)| assigned(name.as_ref(), value.as_ref()));
    let env = own.chain(further).collect::<Result<Vec<_>, _>>()?;
    let program = CString::new(PROGRAM)?;
    let pointers =
        |texts: &[CString]| -> Vec<_> { texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect() };
    // SAFETY: both lists end with a null pointer, and their texts outlive the call, which returns only where it failed.
    unsafe { libc::execve(program.as_ptr(), pointers(&args).as_ptr(), pointers(&env).as_ptr()) };
    Err(io::Error::last_os_error())
}

/// Sets the process name, which process lists would otherwise show as `exe` if it was started by [`PROGRAM`].
pub fn name_process() {
    // SAFETY: the name ends with NUL and outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"colo-grpo".as_ptr()) };
}

/// The network interface towards rank 0, for a worker whose world is on several nodes.
fn interface() -> Option<String> {
    let env = WorkerEnv::from_env().ok()??;
    let spans_nodes = env.local_world_size < env.world_size;
    spans_nodes.then(|| nccl_interface(&env.master_addr, env.master_port)).flatten()
}

fn missing_settings(is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, &'static str)> {
    let all = std::iter::once((WAIT_POLICY, PASSIVE)).chain(NCCL_SETTINGS);
    all.filter(|(name, _)| !is_set(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_settings_of_the_user_are_kept() {
        assert_eq!(missing_settings(|_| true), []);
        let missing = missing_settings(|name| name == WAIT_POLICY);
        assert_eq!(missing, NCCL_SETTINGS);
        assert_eq!(missing_settings(|_| false).len(), 1 + NCCL_SETTINGS.len());
    }

    #[test]
    fn workers_divide_the_cpus_and_do_not_spin() {
        let mut command = Command::new("true");
        share_processors(&mut command, usize::MAX);
        let told =
            |name: &str| command.get_envs().find(|(key, _)| *key == name).map(|(_, value)| value.unwrap().to_owned());
        for (name, value) in [(NUM_THREADS, "1"), (WAIT_POLICY, PASSIVE)] {
            assert_eq!(told(name), std::env::var_os(name).is_none().then(|| value.into()), "{name}");
        }
    }
}
