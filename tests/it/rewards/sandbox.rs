//! Model-written code: the worker of the reward `code`, called as by a pool, and programs that try to escape.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use colo_grpo::internal::config::{RewardConfig, SandboxLayer};
use seccompiler::{SeccompAction, SeccompFilter, TargetArch};
use serde_json::{Value, json};

use crate::program::command;

pub const NAMESPACES: [SandboxLayer; 4] = [
    SandboxLayer::UserNamespace,
    SandboxLayer::MountNamespace,
    SandboxLayer::NetworkNamespace,
    SandboxLayer::PidNamespace,
];

/// Time limits in seconds: for programs that end, and for those that do not.
pub const PATIENT_S: f64 = 20.0;
const HASTY_S: f64 = 0.5;

/// A sandbox worker with its pipes.
pub struct Sandbox(Child);

impl Sandbox {
    fn new(may_lack: &[SandboxLayer], timeout_s: f64, around: impl FnOnce(&mut Command)) -> Self {
        Self::reading(&[], may_lack, timeout_s, around)
    }

    fn reading(
        readable: &[PathBuf],
        may_lack: &[SandboxLayer],
        timeout_s: f64,
        around: impl FnOnce(&mut Command),
    ) -> Self {
        // Without a root of its own the program is nobody, who reads no interpreter in a home folder.
        let is_bare = !may_lack.is_empty() && Path::new("/usr/bin/python3").exists();
        let python = Path::new(if is_bare { "/usr/bin/python3" } else { "python3" });
        Self::of(python, readable, (may_lack, timeout_s), around)
    }

    fn of(
        python: &Path,
        readable: &[PathBuf],
        (may_lack, timeout_s): (&[SandboxLayer], f64),
        around: impl FnOnce(&mut Command),
    ) -> Self {
        let mut settings = RewardConfig::default().code;
        settings.readable = readable.to_vec();
        settings.timeout_s = timeout_s;
        settings.memory_bytes = 256 << 20;
        settings.may_lack = may_lack.to_vec();
        settings.command.0[0] = python.display().to_string();
        let mut worker = command("sandbox-worker");
        worker.arg(serde_json::to_string(&settings).unwrap()).stdin(Stdio::piped());
        around(&mut worker);
        Self(worker.spawn().unwrap())
    }

    /// A worker with every sandbox layer. If this machine does not permit all, checks the error instead and returns `None`.
    fn complete(timeout_s: f64) -> Option<Self> {
        Self::complete_with(Path::new("python3"), timeout_s)
    }

    /// A worker with every sandbox layer and the given Python interpreter.
    pub fn complete_with(python: &Path, timeout_s: f64) -> Option<Self> {
        let mut sandbox = Self::of(python, &[], (&[], timeout_s), |_| ());
        let Err(refusal) = sandbox.ask(&[], json!({})) else { return Some(sandbox) };
        println!("not every layer is allowed here, so that its refusal is tested alone: {refusal}");
        assert!(
            refusal.starts_with("the sandbox cannot use ") && refusal.contains("reward.code.may_lack"),
            "{refusal}"
        );
        None
    }

    /// A worker with only Landlock and seccomp, as in a container without namespaces.
    fn in_container(timeout_s: f64) -> Option<Self> {
        Self::new(&NAMESPACES, timeout_s, refuse_namespaces).without_namespaces()
    }

    /// A worker like [`Sandbox::in_container`] of an unprivileged user; programs run as the same user.
    fn of_a_user(timeout_s: f64) -> Option<Self> {
        if !Command::new("unshare").args(["-U", "true"]).status().is_ok_and(|status| status.success()) {
            println!("no user namespace here to be another user in");
            return None;
        }
        let around = |command: &mut Command| {
            become_a_user(command);
            refuse_namespaces(command);
        };
        Self::new(&NAMESPACES, timeout_s, around).without_namespaces()
    }

    fn without_namespaces(mut self) -> Option<Self> {
        let Err(refusal) = self.ask(&[], json!({})) else { return Some(self) };
        println!("no Landlock or seccomp here, so that its refusal is tested alone: {refusal}");
        assert!(refusal.starts_with("the sandbox cannot use "), "{refusal}");
        None
    }

    fn ask(&mut self, completions: &[String], columns: Value) -> Result<Vec<f64>, String> {
        let request = json!({"id": 1, "prompt": "", "completions": completions, "completion_ids": [], "finish_reasons": [], "columns": columns});
        let request = request.to_string();
        let (input, output) = (self.0.stdin.as_mut().unwrap(), self.0.stdout.as_mut().unwrap());
        input.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
        input.write_all(request.as_bytes()).unwrap();
        let mut head = [0; 4];
        output.read_exact(&mut head).unwrap();
        let mut reply = vec![0; u32::from_be_bytes(head) as usize];
        output.read_exact(&mut reply).unwrap();
        let reply: Value = serde_json::from_slice(&reply).unwrap();
        match reply["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(reply["rewards"].as_array().unwrap().iter().map(|reward| reward.as_f64().unwrap()).collect()),
        }
    }

    /// The share of tests (pairs of input and output) that the program passes.
    pub fn score(&mut self, program: &str, tests: &[(&str, &str)]) -> f64 {
        let tests: Vec<Value> = tests.iter().map(|(input, output)| json!({"input": input, "output": output})).collect();
        let completion = format!("Here it is:\n```python\n{program}\n```\n");
        self.ask(&[completion], json!({"tests": tests})).unwrap()[0]
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

/// Maps this process's user to a non-root user. It thus loses all privileges at exec but still owns its files.
fn become_a_user(command: &mut Command) {
    // SAFETY: plain system calls without arguments.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let maps =
        [("setgroups", "deny".into()), ("gid_map", format!("1234 {gid} 1")), ("uid_map", format!("1234 {uid} 1"))];
    let maps = maps.map(|(name, text)| (format!("/proc/self/{name}"), text));
    let enter = move || {
        // SAFETY: plain system call; the forked process has one thread.
        if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        maps.iter().try_for_each(|(path, text)| std::fs::write(path, text))
    };
    // SAFETY: the closure makes system calls on what was prepared before the fork.
    unsafe { command.pre_exec(enter) };
}

/// Forbids new namespaces by seccomp, like a container.
pub fn refuse_namespaces(command: &mut Command) {
    let calls = [(libc::SYS_unshare, Vec::new())].into();
    let target = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32), target);
    let filter: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
    let refuse = move || seccompiler::apply_filter(&filter).map_err(std::io::Error::other);
    // SAFETY: the closure makes two system calls on what was prepared before the fork.
    unsafe { command.pre_exec(refuse) };
}

#[test]
fn programs_are_graded_only_by_their_output() {
    let Some(mut sandbox) = Sandbox::complete(PATIENT_S).or_else(|| Sandbox::in_container(PATIENT_S)) else { return };
    let sums = [("1 2\n", "3\n"), ("5 5\n", "10")];
    assert_eq!(sandbox.score("print(sum(map(int, input().split())))", &sums), 1.0);
    assert_eq!(sandbox.score("print(3)", &sums), 0.5);
    assert_eq!(sandbox.score("print(3); raise SystemExit(1)", &sums), 0.0);
    assert_eq!(sandbox.score("print(3", &sums), 0.0);
    let large = "7".repeat(1 << 19);
    assert_eq!(sandbox.score("print(len(input()))", &[(&large, "524288")]), 1.0);
    assert_eq!(sandbox.ask(&["no program".to_owned()], json!({"tests": [{"input": "", "output": ""}]})), Ok(vec![0.0]));
    let error = sandbox.ask(&["x".to_owned()], json!({})).unwrap_err();
    assert_eq!(error, "no column 'tests'");
}

/// Attempts to escape, in Python. They use the file `SECRET` and the ports `TCP` and `UDP` of this machine.
const ATTEMPTS: &[(&str, &[&str])] = &[
    (
        "network",
        &[
            "socket.create_connection(('127.0.0.1', TCP), 1)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
            "socket.socket(socket.AF_UNIX)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', DATAGRAM)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
            "socket.socketpair()[0].sendto(b'x', DATAGRAM)",
        ],
    ),
    (
        "files outside",
        &[
            "open(SECRET).read()",
            "open('/etc/passwd').read()",
            "open('/proc/1/environ').read()",
            "open('/proc/self/mem', 'r+b')",
            "os.listdir('/root')",
            "os.listdir('/tmp')",
            "open('/tmp/colo-grpo-escape', 'w')",
            "open('/usr/colo-grpo-escape', 'w')",
            "os.chmod('/usr', 0o777)",
            "os.chmod(SECRET, 0o777)",
            "os.chown(SECRET, -1, -1)",
            "os.utime(SECRET)",
            "os.truncate(SECRET, 0)",
            "os.setxattr(SECRET, 'user.x', b'x')",
        ],
    ),
    ("more processes", &["os.fork()", "subprocess.run(['/bin/true'])", "os.posix_spawn('/bin/true', ['x'], {})"]),
    ("more threads", &["[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(500)]"]),
    ("memory", &["bytearray(512 << 20)", "[bytearray(1 << 20) for _ in range(512)]"]),
    (
        "disk",
        &[
            "open('big', 'wb').write(bytes(32 << 20))",
            "[open(f'many{i}', 'wb').write(bytes(8 << 20)) for i in range(20)]",
            "[open(f'empty{i}', 'wb').close() for i in range(9999)]",
            "nest(5000)",
        ],
    ),
    (
        "word of files",
        &[
            "call('inotify_init')",
            "call('inotify_init1', 0)",
            "call('inotify_add_watch', 0, b'/etc', 2)",
            "call('fanotify_init', 0, 0)",
            "fcntl.fcntl(os.open('/usr', 0), 1026, 1)",
            "fcntl.flock(open(os.__file__), 2)",
        ],
    ),
    ("signals", &["os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", "os.setsid()"]),
    (
        "privileges",
        &[
            "call('ptrace', 0, 0, 0, 0)",
            "call('unshare', 0x10000000)",
            "call('mount', b'none', b'/work', b'tmpfs', 0, None)",
            "call('chroot', b'/')",
            "os.setuid(0)",
        ],
    ),
    (
        "other processes and what outlives it",
        &[
            "call('prctl', 1, 0, 0, 0, 0)",
            "resource.prlimit(1, resource.RLIMIT_CORE)",
            "fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())",
            "fcntl.fcntl(0, 10, 9)",
            "os.sched_setaffinity(0, os.sched_getaffinity(0))",
            "os.setpriority(os.PRIO_PROCESS, 0, 1)",
            "call('shmget', 0, 4096, 0o1600)",
            "call('msgget', 0, 0o1600)",
            "call('semget', 0, 1, 0o1600)",
            "call('mq_open', b'/colo-grpo-escape', 0o102, 0o600, None)",
            "os.memfd_create('x')",
        ],
    ),
    (
        "memory of the kernel that counts towards no limit",
        &[
            "system_call(444, None, 0, 1)",
            "system_call(444, (ctypes.c_uint64 * 3)(1, 1, 0), 24, 0)",
            "system_call(446, -1, 0)",
            "system_call(447, 0)",
            "system_call(470, 0)",
            "call('prctl', 78, 1, 1 << 16, 0, 0)",
            "call('prctl', 22, 1, 0, 0, 0)",
            "system_call(317 if os.uname().machine == 'x86_64' else 277, 0, 0, 0)",
            "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
            "fcntl.fcntl(open('main.py'), 37, bytes(32))",
            "timers()",
            "fcntl.ioctl(0, 0x8901, 0)",
            "fcntl.ioctl(os.open('/usr/lib', 0), 0x80086601, bytes(8))",
        ],
    ),
    ("descriptors", &["assert not any(map(is_open, range(3, 64))); raise OSError"]),
    ("environment", &["assert set(os.environ) <= {'LC_CTYPE'}; raise OSError"]),
];

/// Code before each attempt.
const BEFORE: &str = r#"
import ctypes, fcntl, os, resource, socket, subprocess, threading, time

def call(name, *given):
    if getattr(ctypes.CDLL(None), name)(*given) == -1: raise OSError

def system_call(number, *given):
    if ctypes.CDLL(None).syscall(number, *given) == -1: raise OSError

def timers():
    for _ in range(1000): call('timer_create', 1, None, ctypes.byref(ctypes.c_void_p()))

def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True

def nest(depth):
    for _ in range(depth):
        os.mkdir('d')
        os.chdir('d')

out = True
"#;

/// A program that prints `refused` if every one of `lines` fails.
fn attempt(lines: &[&str], secret: &Path, (tcp, udp): (u16, u16), datagram: &Path) -> String {
    let tried = lines
        .iter()
        .map(|line| format!("try:\n    {line}\n    out = False\nexcept (OSError, MemoryError, RuntimeError): pass\n"));
    let tried: String = tried.collect();
    format!(
        "SECRET, TCP, UDP, DATAGRAM = {secret:?}, {tcp}, {udp}, {datagram:?}{BEFORE}{tried}print('refused' if out else 'escaped')"
    )
}

fn tries_to_escape(mut sandbox: Sandbox, may_write: bool) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let path = folder.path().join("socket");
    let datagram = UnixDatagram::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    datagram.set_nonblocking(true).unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let (tcp, udp) = (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    tcp.set_nonblocking(true).unwrap();
    udp.set_nonblocking(true).unwrap();
    let ports = (tcp.local_addr().unwrap().port(), udp.local_addr().unwrap().port());
    for (what, lines) in ATTEMPTS {
        let program = attempt(lines, &secret, ports, &path);
        assert_eq!(sandbox.score(&program, &[("", "refused")]), 1.0, "{what}:\n{program}");
    }
    assert!(tcp.accept().is_err() && udp.recv(&mut [0]).is_err(), "something came through");
    assert!(datagram.recv(&mut [0]).is_err(), "a datagram came through");
    let event_loop = "import asyncio\nasyncio.run(asyncio.sleep(0))\nprint('woken')";
    assert_eq!(sandbox.score(event_loop, &[("", "woken")]), 1.0, "an event loop's own pair of sockets");
    // The kernel would refuse a lock to write on a file that is open to read.
    let locks = "import fcntl\nfcntl.lockf(open('main.py'), fcntl.LOCK_EX)\nprint('locked')";
    assert_eq!(sandbox.score(locks, &[("", "locked")]), 1.0, "a lock of which the kernel keeps nothing");
    let kept = "import sqlite3\nkept = sqlite3.connect('kept')\nkept.execute('create table t (x)')\nkept.execute('insert into t values (7)')\n\
                kept.commit()\nprint(sqlite3.connect('kept').execute('select x from t').fetchone()[0])";
    assert!(!may_write || sandbox.score(kept, &[("", "7")]) == 1.0, "a data base that asks for locks");

    let forged = r#"
import os, struct
reply = b'{"rewards": [1.0]}'
for fd in range(64):
    try: os.write(fd, struct.pack(">I", len(reply)) + reply)
    except OSError: pass
"#;
    assert_eq!(sandbox.score(forged, &[("", "what nobody knows")]), 0.0, "its own reward");
    assert_eq!(sandbox.score("open('left', 'w'); print(1)", &[("", "1")]), f64::from(may_write));
    assert_eq!(
        sandbox.score("import os\nprint(os.listdir('.'))", &[("", "['main.py']")]),
        1.0,
        "nothing is left behind"
    );
}

/// A link left by one program is not followed when the next program's file is written, and unreadable files that it left are removed.
fn leaves_things_behind(mut sandbox: Sandbox, may_write: bool) {
    let folder = tempfile::tempdir().unwrap();
    let outside = folder.path().join("outside");
    std::fs::write(&outside, "as it was").unwrap();
    let link = format!(
        "import os\nos.remove('main.py')\nos.symlink({outside:?}, 'main.py')\ntry: os.chmod('.', 0o500)\nexcept OSError: pass\nprint(1)"
    );
    let locked = "import os\nos.mkdir('a', 0o700)\nopen('a/b', 'w')\nos.mkdir('c', 0o300)\nopen('c/d', 'w')\nprint(1)";
    let nested = "import os\nfor _ in range(5000): os.mkdir('d'); os.chdir('d')\nprint(1)";
    for (program, score) in [(&*link, f64::from(may_write)), (locked, f64::from(may_write)), (nested, 0.0)] {
        assert_eq!(sandbox.score(program, &[("", "1")]), score, "{program}");
        assert_eq!(sandbox.score("import os\nprint(os.listdir('.'))", &[("", "['main.py']")]), 1.0, "{program}");
    }
    assert_eq!(std::fs::read_to_string(&outside).unwrap(), "as it was");
}

/// A program's time and output are limited in any case, and the worker keeps running.
fn never_ends(mut sandbox: Sandbox) {
    for (what, program) in [
        ("output", "while True: print('x' * 1000)"),
        ("run", "while True: pass"),
        ("silence", "import os, time\nos.close(1)\nos.close(0)\ntime.sleep(60)"),
    ] {
        assert_eq!(sandbox.score(program, &[("", "x"), ("", "x")]), 0.0, "endless {what}");
    }
}

#[test]
fn escape_attempts_from_the_sandbox_fail() {
    Sandbox::complete(PATIENT_S).into_iter().for_each(|sandbox| tries_to_escape(sandbox, true));
    Sandbox::complete(HASTY_S).into_iter().for_each(never_ends);
}

#[test]
fn escape_attempts_fail_with_the_layers_available_in_a_container() {
    Sandbox::in_container(PATIENT_S).into_iter().for_each(|sandbox| tries_to_escape(sandbox, false));
    Sandbox::in_container(HASTY_S).into_iter().for_each(never_ends);
}

#[test]
fn escape_attempts_fail_with_the_layers_available_to_a_user() {
    Sandbox::of_a_user(PATIENT_S).into_iter().for_each(|sandbox| tries_to_escape(sandbox, false));
}

#[test]
fn a_sandboxed_program_leaves_nothing_for_the_next() {
    Sandbox::complete(PATIENT_S).into_iter().for_each(|sandbox| leaves_things_behind(sandbox, true));
    for sandbox in [Sandbox::in_container, Sandbox::of_a_user].into_iter().filter_map(|sandbox| sandbox(PATIENT_S)) {
        leaves_things_behind(sandbox, false);
    }
}

/// A folder may be listed after its own subfolder. Between programs there is no temporary folder that a killed worker
/// could leave behind.
#[test]
fn readable_paths_of_the_sandbox_may_have_any_order() {
    let (folder, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (outer, inner) = (folder.path().join("a"), folder.path().join("a/b"));
    std::fs::create_dir_all(&inner).unwrap();
    std::fs::write(outer.join("file"), "seen").unwrap();
    if Sandbox::complete(PATIENT_S).is_none() {
        return;
    }
    let around = |command: &mut Command| {
        command.env("TMPDIR", scratch.path());
    };
    let mut sandbox = Sandbox::reading(&[inner, outer.clone()], &[], PATIENT_S, around);
    let program = format!("print(open({:?}).read())", outer.join("file"));
    assert_eq!(sandbox.score(&program, &[("", "seen")]), 1.0);
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
}

/// Row 32: the sandbox refuses to run without its layers, and names the missing ones.
#[test]
fn missing_sandbox_layers_are_named_and_refused() {
    let mut closed = Sandbox::new(&NAMESPACES[..1], PATIENT_S, refuse_namespaces);
    let refusal = closed.ask(&[], json!({})).unwrap_err();
    for layer in &NAMESPACES[1..] {
        assert!(refusal.contains(&format!("{} (Operation not permitted", layer.name())), "{refusal}");
    }
    assert!(!refusal.contains("user_namespace"), "{refusal}");
}

/// Resource limits of this machine below the sandbox's own are kept. Limits below the configured ones are reported.
#[test]
fn lower_limits_of_the_machine_are_used_or_reported() {
    let limited = |resource: libc::__rlimit_resource_t, most: u64| {
        move |command: &mut Command| {
            let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
            // SAFETY: the limit outlives the call.
            let set = move || match unsafe { libc::setrlimit(resource, &raw const limit) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            };
            // SAFETY: one system call on a number that was made before the fork.
            unsafe { command.pre_exec(set) };
        }
    };
    if Sandbox::complete(PATIENT_S).is_none() {
        return;
    }
    let mut small_files = Sandbox::new(&[], PATIENT_S, limited(libc::RLIMIT_FSIZE, 1 << 20));
    let big = "open('big', 'wb').write(bytes(900 << 10))\nprint(1)";
    assert_eq!(small_files.score(big, &[("", "1")]), 1.0);
    assert_eq!(small_files.score(&big.replace("900", "2000"), &[("", "1")]), 0.0);
    let mut little_time = Sandbox::new(&[], PATIENT_S, limited(libc::RLIMIT_CPU, 10));
    let refusal = little_time.ask(&[], json!({})).unwrap_err();
    assert!(refusal.contains("ulimit -t allows 10") && refusal.contains("reward.code.timeout_s"), "{refusal}");
}
