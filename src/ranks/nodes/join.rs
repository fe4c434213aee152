//! How the ranks of several nodes join: first all ranks at the hub on rank 0, then the ranks of each node in shared memory.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::auth::{Token, random};
use super::client::{Client, FIRST_EPOCH};
use super::control::NodesControl;
use super::hub::NodeHub;
use super::interface::Interface;
use super::layout::{Greeting, NodeLayout};
use crate::console;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::control::{ControlPlane, Deadline, RankGroup, Stopped};
use crate::ranks::env::WorkerEnv;
use crate::ranks::options::WorldOptions;
use crate::ranks::rendezvous::{self, INHERITED, SEGMENT_FD_VARIABLE, STORE_FD_VARIABLE, SegmentAddress};
use crate::ranks::shm::{Member, Segment};

/// Joins all ranks of `env`'s world, which are on several nodes.
///
/// # Errors
/// [`Error::Environment`] if there is no token or no route to rank 0, or if nodes differ; [`Error::InvalidValue`] for a key that differs;
/// [`Error::CollectiveTimeout`] with the missing ranks and nodes; [`Error::StoppedEarly`].
pub(in crate::ranks) fn meet(env: &WorkerEnv, options: &WorldOptions) -> Result<Arc<NodesControl>> {
    let token = Token::from_env()?;
    let deadline = Deadline::after(options.timeout);
    let greeting = Greeting::new(env, options.compared.clone());
    let agent = rendezvous::agent_serves();
    let key = format!("colo-grpo/{}/hub", env.attempt);
    let (hub, host, port) = match env.rank {
        0 => {
            let listener = listen(env, agent)?;
            let address = listener.local_addr().map_err(Error::io("the hub that connects the nodes"))?;
            if agent {
                let (own, options, port) = (env.clone(), options.clone(), address.port());
                rendezvous::heeding_stop(move || {
                    rendezvous::open_store(&own, &options)?.set(&key, port.to_string().as_bytes())
                })?;
            }
            let hub = NodeHub::start(listener, token.clone(), greeting.clone(), options.node_timeout)?;
            let own = if address.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address.ip() };
            (Some(hub), own.to_string(), address.port())
        }
        _ if agent => {
            let (own, options) = (env.clone(), options.clone());
            let port = rendezvous::heeding_stop(move || rendezvous::open_store(&own, &options)?.get(&key))?;
            let port = String::from_utf8_lossy(&port).parse();
            let refuse = |_| Error::Environment {
                message: "rendezvous: the store does not hold a port number for rank 0".to_owned(),
            };
            (None, env.master_addr.clone(), port.map_err(refuse)?)
        }
        _ => (None, env.master_addr.clone(), env.master_port),
    };
    let client = Client::join((&host, port), &token, &greeting, options.node_timeout, deadline)?;
    let layout = client.await_welcome(deadline)?;
    if env.local_rank == 0 {
        introduce(env, &layout, &greeting.host);
    }
    let first_rank = env.rank - env.local_rank;
    let (segment, _offered) = match share(env, options, &client, deadline) {
        Ok(shared) => shared,
        Err(error) => {
            client.post_failure(FIRST_EPOCH, &error); // others may wait for this rank in shared memory
            return Err(error);
        }
    };
    let member = Arc::new(Member::new(Arc::new(segment), env.rank, first_rank, options.timeout));
    let control = NodesControl::new(env.rank, member, client, layout, hub);
    control.member.join().inspect_err(|error| control.post_failure(error))?;
    Ok(Arc::new(control))
}

/// Rank 0's listening socket: the one that its launcher bound, else one at MASTER_ADDR. If this host can be reached by that name only from inside,
/// like the head of a Kubernetes service, it listens on all addresses. If torchrun's store is at MASTER_PORT, it uses a free port.
fn listen(env: &WorkerEnv, agent: bool) -> Result<TcpListener> {
    if let Some(listener) = rendezvous::inherited(STORE_FD_VARIABLE)? {
        return Ok(TcpListener::from(listener));
    }
    let port = if agent { 0 } else { env.master_port };
    let everywhere = || {
        let all: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        TcpListener::bind((all[0], port)).or_else(|_| TcpListener::bind((all[1], port)))
    };
    let bound = match TcpListener::bind((env.master_addr.as_str(), port)) {
        Ok(listener) if listener.local_addr().is_ok_and(|own| !own.ip().is_loopback()) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
        found => {
            drop(found);
            everywhere()
        }
    };
    bound.map_err(|error| Error::Environment {
        message: format!(
            "rank 0 cannot listen on {}:{port}: {error}; give a free port to all nodes (MASTER_PORT)",
            env.master_addr
        ),
    })
}

/// Prints which node this is and which interface leads to the others.
fn introduce(env: &WorkerEnv, layout: &NodeLayout, host: &str) {
    let way = match Interface::towards(&env.master_addr, env.master_port) {
        Some(Interface { name, address }) => format!("interface {name} ({address})"),
        None => "an unknown interface".to_owned(),
    };
    let (node, nodes, last) = (layout.node_of(env.rank), layout.num_nodes(), env.rank + layout.local_size - 1);
    let ranks = match env.rank {
        one if one == last => format!("rank {one}"),
        first => format!("ranks {first} to {last}"),
    };
    console::say(format_args!("node {node} of {nodes} ({host}): {ranks}, {way} towards {}", env.master_addr));
}

/// The shared memory of this node's ranks: either from their launcher, or created by the first of them, which tells the others through the hub.
fn share(
    env: &WorkerEnv,
    options: &WorldOptions,
    client: &Client,
    deadline: Deadline,
) -> Result<(Segment, Option<File>)> {
    let (num_ranks, slot_bytes) = (env.local_world_size, options.slot_bytes);
    let inherited = rendezvous::inherited(SEGMENT_FD_VARIABLE)?.map(File::from);
    let made = match (&inherited, env.local_rank) {
        (None, 0) => {
            let number = random().map_err(Error::io("/dev/urandom"))?;
            let run = u64::from_le_bytes(number[..8].try_into().expect("eight bytes"));
            let (segment, file) = Segment::create(num_ranks, slot_bytes, run)?;
            Some((segment, file, run))
        }
        _ => None,
    };
    let offer: Option<(SegmentAddress, u64)> =
        made.as_ref().map(|(_, file, run)| ((std::process::id(), file.as_raw_fd()), *run));
    let everyone = RankGroup::new(0, "world", &(0..env.world_size).collect::<Vec<_>>(), env.rank);
    let bytes = serde_json::to_vec(&offer).expect("numbers");
    let ended = || phase::stop_requested().then_some(Stopped::OnRequest);
    let offers = client.gather(&everyone, &bytes, deadline, ended);
    let offers = offers.map_err(|stopped| stopped.error("join", "world", env.rank, deadline))?;
    if let Some((segment, file, _)) = made {
        return Ok((segment, Some(file)));
    }
    if let Some(file) = inherited {
        return Ok((Segment::open(&file, num_ranks, slot_bytes, INHERITED)?, None));
    }
    let offer: Option<(SegmentAddress, u64)> =
        serde_json::from_slice(&offers[env.rank - env.local_rank]).unwrap_or_default();
    let Some((address, run)) = offer else {
        let message =
            "the first rank of this node got shared memory from a launcher, but this rank did not: start all ranks of \
             a node in the same way"
                .to_owned();
        return Err(Error::Environment { message });
    };
    Ok((Segment::open(&rendezvous::open_segment(address)?, num_ranks, slot_bytes, run)?, None))
}
