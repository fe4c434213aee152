//! The steps of a forked process before it becomes the sandboxed program: it enters its own namespaces, sees only system files and an empty folder,
//! drops its identity, and applies limits and filters to itself.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use super::layers::{self, DEVICES};
use super::{PROGRAM_FILE, Pipes, Sandbox};
use crate::config::SandboxLayer;

/// User and group id of the program inside the user namespace.
pub(super) const INNER_ID: u32 = 1000;
pub(super) const NOBODY: u32 = 65534;
/// Message with which the process asks the sandbox to map its ids.
pub(super) const ASKS_FOR_IDS: &str = "ids\n";

/// The program's working folder, if it has its own root file system. No readable path may be below it, so it has a name of its own.
const WORK: &str = "/colo-grpo-work";
/// Maximum size in bytes of all files that the program writes.
const WORK_BYTES: u64 = 64 << 20;
/// Maximum number of files and folders that the program creates; their inodes take memory that their size does not count.
const WORK_FILES: u64 = 4096;
const MAX_FILE_BYTES: u64 = 16 << 20;
const MAX_OPEN_FILES: u64 = 64;
const MAX_THREADS: u64 = 64;
/// Maximum number of pending signals and timers, which the kernel counts together.
const MAX_SIGNALS: u64 = 64;

/// Namespaces in the order in which they are entered: the first gives the privilege to enter the others.
const NAMESPACES: [(SandboxLayer, i32); 4] = [
    (SandboxLayer::UserNamespace, libc::CLONE_NEWUSER),
    (SandboxLayer::MountNamespace, libc::CLONE_NEWNS),
    (SandboxLayer::NetworkNamespace, libc::CLONE_NEWNET),
    (SandboxLayer::PidNamespace, libc::CLONE_NEWPID),
];

/// Turns this process into `program` with a limit on CPU seconds, or reports on the pipe why it cannot.
///
/// `folder` is empty and belongs to this process: its root file system is mounted there, or else the program writes there.
pub(super) fn become_program(sandbox: &Sandbox, folder: &Path, program: (&str, u64), mut pipes: Pipes) -> ! {
    if let Err(reason) = enter(sandbox, folder, program, &mut pipes) {
        let _ = pipes.report.write_all(reason.as_bytes());
    }
    // SAFETY: ends this copy of the process without running anything of the original's.
    unsafe { libc::_exit(1) }
}

/// Enters the sandbox and executes the program; returns only on failure.
fn enter(
    sandbox: &Sandbox,
    folder: &Path,
    (program, cpu_seconds): (&str, u64),
    pipes: &mut Pipes,
) -> Result<(), String> {
    // SAFETY: plain system call; the group is the one that the sandbox kills.
    unsafe { libc::setpgid(0, 0) };
    die_with_parent();
    let mut missing = layers::missing();
    for (layer, flag) in NAMESPACES {
        // SAFETY: plain system call; this process has one thread.
        if unsafe { libc::unshare(flag) } != 0 {
            missing.push((layer, io::Error::last_os_error()));
        } else if layer == SandboxLayer::UserNamespace {
            map_ids(pipes).map_err(|error| format!("user_namespace: {error}"))?;
        }
    }
    let landlock = layers::landlock_version().unwrap_or(0);
    refuse_missing(&missing, &sandbox.settings.may_lack, landlock)?;
    let has = |layer: SandboxLayer| missing.iter().all(|(missing, _)| *missing != layer);
    // SAFETY: plain system calls; what the walls need beside those above costs nothing where it is refused.
    unsafe { libc::unshare(libc::CLONE_NEWIPC) };
    if has(SandboxLayer::PidNamespace) {
        become_first_process()?;
    }
    let work = match has(SandboxLayer::MountNamespace) {
        true => change_root(sandbox, folder).map_err(|error| format!("mount_namespace: {error}"))?,
        false => folder.to_owned(),
    };
    let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let file = File::create_new(work.join(PROGRAM_FILE));
    file.and_then(|mut file| file.write_all(program.as_bytes())).map_err(failed("cannot write the program's file"))?;
    std::env::set_current_dir(&work).map_err(failed("cannot enter the program's folder"))?;
    give_up_identity(has(SandboxLayer::UserNamespace)).map_err(failed("identity"))?;
    limit(sandbox, cpu_seconds).map_err(|error| format!("cannot set resource limits: {error}"))?;
    // SAFETY: plain system call with whole numbers.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if has(SandboxLayer::Landlock) {
        // Without a file system of its own nothing would bound what a program writes.
        layers::restrict_files(sandbox.readable.without_links(), &work, has(SandboxLayer::MountNamespace))?;
    }
    connect(pipes).map_err(failed("pipes"))?;
    if has(SandboxLayer::Seccomp) {
        layers::restrict_calls()?;
    }
    let args: Vec<*const libc::c_char> =
        sandbox.command.iter().map(|arg| arg.as_ptr()).chain([std::ptr::null()]).collect();
    // SAFETY: both lists end with a null pointer and outlive the call; the environment is empty.
    unsafe { libc::execve(args[0], args.as_ptr(), [std::ptr::null()].as_ptr()) };
    let error = io::Error::last_os_error();
    let interpreter = sandbox.command[0].to_string_lossy();
    Err(format!("{interpreter}: {error}; reward.code.command names one that any user may run"))
}

/// The error that names every missing layer that `reward.code.may_lack` does not permit. Some permitted layers must not be missing together.
fn refuse_missing(
    missing: &[(SandboxLayer, io::Error)],
    may_lack: &[SandboxLayer],
    landlock: libc::c_long,
) -> Result<(), String> {
    let unexpected: Vec<String> = missing
        .iter()
        .filter(|(layer, _)| !may_lack.contains(layer))
        .map(|(layer, error)| format!("{} ({error})", layer.name()))
        .collect();
    if !unexpected.is_empty() {
        return Err(format!(
            "the sandbox cannot use {}: permit it for this process, or list it in reward.code.may_lack if you accept a \
             weaker sandbox",
            unexpected.join(", ")
        ));
    }
    let lacks = |layer: SandboxLayer| missing.iter().any(|(missing, _)| *missing == layer);
    let mut open = Vec::new();
    // Landlock alone knows no modes, owners, times and attributes, and an old one no truncation.
    if lacks(SandboxLayer::MountNamespace) && (lacks(SandboxLayer::Seccomp) || landlock < layers::FIRST_WITH_TRUNCATE) {
        open.push("mount_namespace, and seccomp or Landlock of Linux 6.2: nothing would protect files from a program");
    }
    if lacks(SandboxLayer::NetworkNamespace) && lacks(SandboxLayer::Seccomp) {
        open.push("network_namespace and seccomp: nothing would block network access of a program");
    }
    if lacks(SandboxLayer::PidNamespace) && lacks(SandboxLayer::Seccomp) {
        open.push("pid_namespace and seccomp: nothing would end processes that a program starts");
    }
    if open.is_empty() { Ok(()) } else { Err(format!("the sandbox cannot use {}", open.join("; "))) }
}

fn die_with_parent() {
    // SAFETY: plain system call with whole numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
}

/// Asks the sandbox to map the ids of the new user namespace, which needs privileges outside of it.
fn map_ids(pipes: &mut Pipes) -> io::Result<()> {
    pipes.report.write_all(ASKS_FOR_IDS.as_bytes())?;
    pipes.go.read_exact(&mut [0])
}

/// Continues as the first process of the new PID namespace, whose end kills all others; the parent waits for it.
fn become_first_process() -> Result<(), String> {
    // SAFETY: this process has one thread; the child goes on with a copy of everything.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(format!("pid_namespace: {}", io::Error::last_os_error())),
        0 => {
            die_with_parent();
            Ok(())
        }
        _ => {
            let mut status = 0;
            // SAFETY: closes every descriptor, so that the program alone holds its pipes; waits for the own child; ends.
            unsafe {
                libc::close_range(0, u32::MAX, 0);
                libc::waitpid(pid, &raw mut status, 0);
                libc::_exit(if libc::WIFEXITED(status) {
                    libc::WEXITSTATUS(status)
                } else {
                    128 + libc::WTERMSIG(status)
                });
            }
        }
    }
}

/// Makes `root` the root file system: a small in-memory file system with the readable paths, some devices and an empty folder. Returns that folder.
fn change_root(sandbox: &Sandbox, root: &Path) -> io::Result<PathBuf> {
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE, None)?;
    let options = format!("size={WORK_BYTES},nr_inodes={WORK_FILES},mode=755");
    mount(Some("tmpfs"), root, Some("tmpfs"), libc::MS_NOSUID | libc::MS_NODEV, Some(&options))?;
    for path in sandbox.readable.paths() {
        show(path, root)?;
    }
    fs::create_dir(root.join("dev"))?;
    for device in DEVICES.map(Path::new) {
        let target = inner(root, device);
        File::create(&target)?;
        mount(device.to_str(), &target, None, libc::MS_BIND, None)?;
    }
    let work = root.join(&WORK[1..]);
    fs::create_dir(&work)?;
    chown(&work, Some(INNER_ID), Some(INNER_ID))?;
    std::env::set_current_dir(root)?;
    // SAFETY: both paths outlive the calls; the old root comes to lie over the new one and is detached.
    let outcome = unsafe {
        match libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) {
            0 => libc::umount2(c".".as_ptr(), libc::MNT_DETACH),
            _ => -1,
        }
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PathBuf::from(WORK))
}

/// Makes `path` visible below `root`, read-only; a link stays a link.
fn show(path: &Path, root: &Path) -> io::Result<()> {
    let target = inner(root, path);
    if target.symlink_metadata().is_ok() {
        return Ok(()); // below one that is shown already
    }
    if let Some(parent) = target.parent() {
        // To be passed through and not listed.
        fs::DirBuilder::new().recursive(true).mode(0o711).create(parent)?;
    }
    if path.is_symlink() {
        return symlink(fs::read_link(path)?, &target);
    }
    if path.is_dir() {
        fs::create_dir(&target)?;
    } else {
        File::create(&target)?;
    }
    mount(path.to_str(), &target, None, libc::MS_BIND | libc::MS_REC, None)?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    let target = text(&target)?;
    // SAFETY: path and attributes outlive the call, which is told the attributes' size.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if outcome != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The place of an absolute path below another root.
fn inner(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn mount(
    from: Option<&str>,
    to: &Path,
    kind: Option<&str>,
    flags: libc::c_ulong,
    options: Option<&str>,
) -> io::Result<()> {
    let owned = |text: Option<&str>| text.map(CString::new).transpose().map_err(io::Error::other);
    let (from, kind, options, to_text) = (owned(from)?, owned(kind)?, owned(options)?, text(to)?);
    let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
    // SAFETY: every text ends with a zero and outlives the call.
    let outcome =
        unsafe { libc::mount(pointer(&from), to_text.as_ptr(), pointer(&kind), flags, pointer(&options).cast()) };
    let at = |error: io::Error| io::Error::other(format!("{}: {error}", to.display()));
    if outcome != 0 { Err(at(io::Error::last_os_error())) } else { Ok(()) }
}

fn text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Becomes a user without privileges; exec drops the remaining capabilities.
fn give_up_identity(has_user_namespace: bool) -> io::Result<()> {
    // SAFETY: plain system calls on this process alone.
    let is_root = unsafe { libc::geteuid() } == 0;
    let id = match (has_user_namespace, is_root) {
        (true, _) => INNER_ID,
        (false, true) => NOBODY,
        (false, false) => return Ok(()),
    };
    if is_root {
        fs::set_permissions(".", fs::Permissions::from_mode(0o700))?;
        chown(".", Some(id), Some(id))?;
        // SAFETY: plain system call; no groups are set.
        unsafe { libc::setgroups(0, std::ptr::null()) };
    }
    // SAFETY: plain system calls on this process alone.
    if unsafe { libc::setresgid(id, id, id) != 0 || libc::setresuid(id, id, id) != 0 } {
        return Err(io::Error::last_os_error());
    }
    die_with_parent(); // a change of user undoes it
    Ok(())
}

/// Applies the resource limits to this process. A lower limit of the machine is kept, unless `reward.code` promises more.
fn limit(sandbox: &Sandbox, cpu_seconds: u64) -> Result<(), String> {
    let memory = ("ulimit -v", "reward.code.memory_bytes");
    let time = ("ulimit -t", "the CPU time of reward.code.timeout_s");
    for (resource, most, promised) in [
        (libc::RLIMIT_AS, sandbox.settings.memory_bytes as u64, Some(memory)),
        (libc::RLIMIT_CPU, cpu_seconds, Some(time)),
        (libc::RLIMIT_FSIZE, MAX_FILE_BYTES, None),
        (libc::RLIMIT_NOFILE, MAX_OPEN_FILES, None),
        (libc::RLIMIT_NPROC, MAX_THREADS, None),
        (libc::RLIMIT_SIGPENDING, MAX_SIGNALS, None),
        (libc::RLIMIT_MSGQUEUE, 0, None),
        (libc::RLIMIT_MEMLOCK, 0, None),
        (libc::RLIMIT_CORE, 0, None),
    ] {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the limit outlives the call, which fills it in.
        unsafe { libc::getrlimit(resource, &raw mut limit) };
        let most = match promised {
            Some((name, key)) if limit.rlim_max < most => {
                return Err(format!(
                    "{name} allows {}, but {key} needs {most}: raise the limit or lower the key",
                    limit.rlim_max
                ));
            }
            _ => most.min(limit.rlim_max),
        };
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: the limit outlives the call.
        if unsafe { libc::setrlimit(resource, &raw const limit) } != 0 {
            return Err(io::Error::last_os_error().to_string());
        }
    }
    Ok(())
}

/// Connects the program's input and output to the pipes, discards its error output and closes everything else.
fn connect(pipes: &Pipes) -> io::Result<()> {
    let nothing = fs::OpenOptions::new().write(true).open("/dev/null")?;
    for (from, to) in [(pipes.input.as_raw_fd(), 0), (pipes.output.as_raw_fd(), 1), (nothing.as_raw_fd(), 2)] {
        // SAFETY: plain system call on open descriptors; the standard ones of this copy are nobody else's.
        if unsafe { libc::dup2(from, to) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: plain system call; descriptors stay open until exec.
    if unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use SandboxLayer::*;

    use super::*;

    #[test]
    fn missing_sandbox_layers_must_not_open_an_escape() {
        let every = [UserNamespace, MountNamespace, NetworkNamespace, PidNamespace, Landlock, Seccomp];
        let refusal = |missing: &[SandboxLayer], landlock| {
            let missing: Vec<_> =
                missing.iter().map(|layer| (*layer, io::Error::from_raw_os_error(libc::EPERM))).collect();
            refuse_missing(&missing, &every, landlock).err().unwrap_or_default()
        };
        assert_eq!(refusal(&every[..4], 3), "");
        assert_eq!(refusal(&[Landlock], 0), "");
        assert!(refusal(&every[..4], 2).contains("Landlock of Linux 6.2"));
        assert!(refusal(&[MountNamespace, Seccomp], 6).contains("protect files from a program"));
        assert!(refusal(&[NetworkNamespace, Seccomp], 6).contains("block network access of a program"));
        assert!(refusal(&[PidNamespace, Seccomp], 6).contains("end processes that a program starts"));
    }
}
