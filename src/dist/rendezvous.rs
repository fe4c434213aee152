//! How the ranks of one host come to share a segment: its name passes through the rendezvous store.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use super::env::WorkerEnv;
use super::shm::{Member, Segment};
use super::world::WorldOptions;
use crate::error::{Error, Result};
use crate::torch::Store;

/// Variable with the descriptor of the store's listening socket, which the launcher binds and rank 0 inherits: no port is
/// free when the launcher looks and taken when the worker comes.
pub const STORE_FD_VARIABLE: &str = "COLO_GRPO_STORE_FD";

/// Meets all ranks of `env`'s world and maps their shared memory.
pub(super) fn meet(env: &WorkerEnv, options: &WorldOptions) -> Result<Member> {
    if env.local_world_size != env.world_size {
        let message = format!(
            "{} of {} ranks are on this host: shared-memory collectives reach no further; start all ranks on one host",
            env.local_world_size, env.world_size
        );
        return Err(Error::Environment { message });
    }
    if options.slot_bytes < env.world_size * 256 {
        let expected = format!("at least {} bytes for {} ranks", env.world_size * 256, env.world_size);
        return Err(Error::InvalidArgument { op: "World::join", expected, got: options.slot_bytes.to_string() });
    }
    let store = open_store(env, options)?;
    let (segment, file) = if env.rank == 0 {
        let made = Segment::create(env.world_size, options.slot_bytes);
        let told = made.as_ref().map(|(_, file)| file.path().display().to_string()).map_err(|error| error.to_string());
        store.set(&key(), &serde_json::to_vec(&told).expect("strings serialise"))?;
        let (segment, file) = made?;
        (segment, Some(file))
    } else {
        let told: Result<String, String> = serde_json::from_slice(&store.get(&key())?)
            .map_err(|error| Error::Environment { message: format!("rendezvous: {error}") })?;
        let path = told.map_err(|message| Error::Environment { message })?;
        (Segment::open(Path::new(&path), env.world_size, options.slot_bytes)?, None)
    };
    let member = Member::new(Arc::new(segment), env.rank, options.timeout);
    member.meet_world("join")?;
    drop(file); // every rank has it mapped: no name is left behind, however the run ends
    Ok(member)
}

/// A restart under torchrun meets in the same store, so that keys carry its number.
fn key() -> String {
    format!("colo-grpo/{}/segment", std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap_or_default())
}

fn open_store(env: &WorkerEnv, options: &WorldOptions) -> Result<Store> {
    let agent_serves = std::env::var("TORCHELASTIC_USE_AGENT_STORE").is_ok_and(|value| value == "True");
    if env.rank != 0 || agent_serves {
        return Store::connect(&env.master_addr, env.master_port, options.timeout);
    }
    Store::host(&env.master_addr, env.master_port, inherited_listener()?, options.timeout)
}

#[allow(unsafe_code)]
fn inherited_listener() -> Result<Option<OwnedFd>> {
    let Ok(text) = std::env::var(STORE_FD_VARIABLE) else { return Ok(None) };
    let refuse = || Error::Environment { message: format!("{STORE_FD_VARIABLE}={text}: not an open descriptor") };
    let fd: RawFd = text.parse().map_err(|_| refuse())?;
    // SAFETY: asking for a descriptor's flags changes nothing.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(refuse());
    }
    // SAFETY: the launcher opened it for this process and nothing else here knows of it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
