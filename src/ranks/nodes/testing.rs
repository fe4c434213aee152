//! Test nodes: threads of one process, each with its own shared memory, which join over the loopback interface.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::auth::Token;
use super::client::Client;
use super::control::NodesControl;
use super::hub::NodeHub;
use super::layout::Greeting;
use crate::ranks::control::Deadline;
use crate::ranks::shm::Member;

/// The token of all tests.
pub(in crate::ranks) const TOKEN: &str = "the token of a test";

/// A port, and its listener until rank 0 takes it.
#[derive(Debug)]
pub(in crate::ranks) struct TestHub {
    listener: Mutex<Option<TcpListener>>,
    pub(super) port: u16,
    pub(super) longest_silence: Duration,
}

impl TestHub {
    pub(in crate::ranks) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        Self { listener: Mutex::new(Some(listener)), port, longest_silence: Duration::from_secs(20) }
    }

    /// Starts the hub, if the greeting is rank 0's.
    pub(super) fn start(&self, greeting: &Greeting) -> Option<NodeHub> {
        let listener = (greeting.rank == 0).then(|| self.listener.lock().unwrap().take()).flatten()?;
        let token = Token::new(TOKEN).unwrap();
        Some(NodeHub::start(listener, token, greeting.clone(), self.longest_silence).unwrap())
    }

    /// An authenticated connection.
    pub(super) fn join(&self, greeting: &Greeting, timeout: Duration) -> Client {
        let (token, deadline) = (Token::new(TOKEN).unwrap(), Deadline::after(timeout));
        Client::join(("127.0.0.1", self.port), &token, greeting, self.longest_silence, deadline).unwrap()
    }
}

/// The greeting of rank `rank` of `world_size`, with `local_size` ranks per node.
pub(super) fn greeting((rank, world_size, local_size): (usize, usize, usize)) -> Greeting {
    Greeting {
        rank,
        local_rank: rank % local_size,
        world_size,
        local_size,
        host: format!("host{}", rank / local_size),
        attempt: 2,
        program: "a test".to_owned(),
        compared: Vec::new(),
    }
}

/// Maximum time for the ranks of a test to join, independent of the tested timeouts.
const MEETING: Duration = Duration::from_secs(60);

/// The control plane of one rank.
pub(in crate::ranks) fn control(hub: &TestHub, member: Arc<Member>, place: (usize, usize, usize)) -> Arc<NodesControl> {
    let greeting = greeting(place);
    let served = hub.start(&greeting);
    let client = hub.join(&greeting, MEETING);
    let layout = client.await_welcome(Deadline::after(MEETING)).unwrap();
    Arc::new(NodesControl::new(place.0, member, client, layout, served))
}
