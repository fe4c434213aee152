//! Restrictions that a process applies to itself: Landlock rules and the seccomp filter of system calls.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    Scope, path_beneath_rules,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter, sock_filter,
};

use crate::config::SandboxLayer;

/// Devices that a program may write to.
pub(super) const DEVICES: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// fcntl commands that a program may use: descriptors, flags, locks, pipe size. Others send signals to other processes (F_SETOWN), watch files
/// (F_NOTIFY, F_SETLEASE) or enlarge kernel buffers (F_SETPIPE_SZ).
const FCNTL_COMMANDS: [i32; 10] = [
    libc::F_DUPFD,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETPIPE_SZ,
];
/// fcntl commands that succeed without effect: there is no other process to lock out, and the kernel keeps locks without a limit.
const GRANTED_FCNTL_COMMANDS: [i32; 2] = [libc::F_SETLK, libc::F_SETLKW];
/// ioctl commands that a program may use: those of every descriptor, and the query whether it is a terminal.
const IOCTL_COMMANDS: [u64; 7] = [
    libc::FIOCLEX,
    libc::FIONCLEX,
    libc::FIONBIO,
    libc::FIONREAD,
    libc::TCGETS,
    libc::TIOCGWINSZ,
    0x802c_542a, // TCGETS2
];
/// prctl options that a program may use: thread names and queries.
const PRCTL_OPTIONS: [i32; 12] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_GET_DUMPABLE,
    libc::PR_GET_PDEATHSIG,
    libc::PR_GET_SECCOMP,
    libc::PR_CAPBSET_READ,
    libc::PR_GET_SECUREBITS,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_GET_THP_DISABLE,
];
/// The bits of a socket's type that give its kind, and all kinds except SOCK_STREAM.
const SOCKET_KINDS: u32 = 0xf;
const OTHER_THAN_STREAM: [u32; 15] = [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The first system call number that no interpreter needs: `mount_setattr` of Linux 5.12. From here on numbers are the same for all architectures.
/// Among them are Landlock's own calls, whose rules take kernel memory without a limit, `memfd_secret`, and calls of future kernels. On x86 the x32
/// convention repeats all calls under even higher numbers.
const FIRST_NEW_CALL: u32 = 442;

/// First Landlock version that restricts truncation (Linux 6.2).
pub(super) const FIRST_WITH_TRUNCATE: libc::c_long = 3;

/// System calls that fail with EPERM: network, tracing, mounts, namespaces, kernel keys, programs and filters, other processes, leaving the killed
/// process group, what Landlock does not restrict of files (modes, owners, times, attributes, locks, notifications), and memory and queues that
/// outlive the process, belong to others or count towards no limit. Connected socket pairs within the process stay allowed, as event loops use them.
const REFUSED: &[i64] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_pidfd_send_signal,
    libc::SYS_setsid,
    libc::SYS_setpgid,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flock,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_memfd_create,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_seccomp,
    libc::SYS_vmsplice,
    libc::SYS_tee,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_lookup_dcookie,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_acct,
    libc::SYS_personality,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_inotify_init,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
];

/// Which of Landlock and seccomp this kernel does not offer, with the reason.
pub(super) fn missing() -> Vec<(SandboxLayer, io::Error)> {
    let mut missing = Vec::new();
    if let Err(error) = landlock_version() {
        missing.push((SandboxLayer::Landlock, error));
    }
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the action outlives the call.
    if unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) } < 0 {
        missing.push((SandboxLayer::Seccomp, io::Error::last_os_error()));
    }
    missing
}

/// Landlock version of this kernel, or the error if there is none.
pub(super) fn landlock_version() -> io::Result<libc::c_long> {
    const VERSION: libc::c_ulong = 1; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: asks for the version; there is no structure to point to.
    match unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, VERSION) } {
        version if version < 0 => Err(io::Error::last_os_error()),
        version => Ok(version),
    }
}

/// Restricts this process to reading and executing what is below `readable` and `work` and to writing [`DEVICES`], and forbids TCP connections, as
/// far as this kernel's Landlock supports it. With `may_write` it may also write below `work`.
///
/// # Errors
/// The kernel's refusal, or that Landlock is not enforced.
pub(super) fn restrict_files<'a>(
    readable: impl Iterator<Item = &'a PathBuf>,
    work: &Path,
    may_write: bool,
) -> Result<(), String> {
    let abi = ABI::V6;
    let in_work = if may_write { AccessFs::from_all(abi) } else { AccessFs::from_read(abi) };
    let rules = move || {
        Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(readable, AccessFs::from_read(abi)))?
            .add_rules(path_beneath_rules(DEVICES, AccessFs::from_file(abi)))?
            .add_rules(path_beneath_rules([work], in_work))?
            .restrict_self()
    };
    let RestrictionStatus { ruleset, .. } = rules().map_err(|error| format!("landlock: {error}"))?;
    if ruleset == RulesetStatus::NotEnforced {
        Err("landlock is not enforced by this kernel".to_owned())
    } else {
        Ok(())
    }
}

/// Makes the system calls of [`REFUSED`] and all from [`FIRST_NEW_CALL`] on fail in this process, and with them new processes and signals to other
/// processes.
///
/// # Errors
/// The kernel's refusal.
pub(super) fn restrict_calls() -> Result<(), String> {
    let every = |calls: &[i64]| calls.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let mut refused = every(REFUSED);
    // New threads carry CLONE_THREAD. Where clone3, whose flags cannot be seen, does not exist, glibc falls back to clone.
    let threads = libc::CLONE_THREAD as u64;
    refused.insert(libc::SYS_clone, argument(0, SeccompCmpOp::MaskedEq(threads), &[0])?);
    refused.insert(libc::SYS_tgkill, argument(0, SeccompCmpOp::Ne, &[std::process::id()])?);
    refused.insert(libc::SYS_prlimit64, argument(0, SeccompCmpOp::Ne, &[0])?);
    refused.insert(libc::SYS_prctl, vec![other_than(0, &PRCTL_OPTIONS.map(|option| option as u32))?]);
    refused.insert(libc::SYS_fcntl, vec![other_than(1, &FCNTL_COMMANDS.map(|command| command as u32))?]);
    refused.insert(libc::SYS_ioctl, vec![other_than(1, &IOCTL_COMMANDS.map(|command| command as u32))?]);
    // A datagram could be sent from one of a pair to any socket that has a path.
    let kinds = argument(1, SeccompCmpOp::MaskedEq(u64::from(SOCKET_KINDS)), &OTHER_THAN_STREAM)?;
    let others = argument(0, SeccompCmpOp::Ne, &[libc::AF_UNIX as u32])?;
    refused.insert(libc::SYS_socketpair, [kinds, others].concat());
    let granted = argument(1, SeccompCmpOp::Eq, &GRANTED_FCNTL_COMMANDS.map(|command| command as u32))?;
    let granted = [(libc::SYS_fcntl, granted)].into();
    // The last one refuses further filters.
    let filters = [
        compiled(every(&[libc::SYS_clone3]), libc::ENOSYS)?,
        compiled(granted, 0)?,
        no_new_calls(),
        compiled(refused, libc::EPERM)?,
    ];
    filters.iter().try_for_each(|filter| apply_filter(filter).map_err(failed))
}

fn failed(error: impl Display) -> String {
    format!("seccomp: {error}")
}

/// A seccomp rule for calls whose argument at `index` compares with one of `values`; like the kernel, it compares 32 bits.
fn argument(index: u8, operator: SeccompCmpOp, values: &[u32]) -> Result<Vec<SeccompRule>, String> {
    let rule = |value: &u32| {
        let operator = operator.clone();
        let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, u64::from(*value))?;
        SeccompRule::new(vec![condition])
    };
    values.iter().map(rule).collect::<Result<_, _>>().map_err(failed)
}

/// A seccomp rule for calls whose argument at `index` is none of `values`.
fn other_than(index: u8, values: &[u32]) -> Result<SeccompRule, String> {
    let differs =
        |value: &u32| SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u64::from(*value));
    values.iter().map(differs).collect::<Result<_, _>>().and_then(SeccompRule::new).map_err(failed)
}

fn compiled(calls: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Result<BpfProgram, String> {
    let target = TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?;
    let refuse = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, target).map_err(failed)?;
    BpfProgram::try_from(filter).map_err(failed)
}

/// A filter that refuses all numbers from [`FIRST_NEW_CALL`] on with the error of an unknown call.
fn no_new_calls() -> BpfProgram {
    let statement = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    vec![
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // seccomp_data.nr
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, FIRST_NEW_CALL),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}
