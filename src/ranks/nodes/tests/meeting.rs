//! Tests of ranks and the hub when a rank ends, falls silent, joins too late, or does not belong to the run.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use super::super::auth::Token;
use super::super::client::{Client, FIRST_EPOCH};
use super::super::connection::Connection;
use super::super::frame::{Frame, FrameKind};
use super::super::hub::{NodeHub, ProofStream};
use super::super::layout::{Greeting, WorldRefusal};
use super::super::switch::Switch;
use super::super::testing::{TOKEN, TestHub, greeting};
use super::PATIENCE;
use crate::error::{Error, ExitCode};
use crate::ranks::control::{Deadline, RankGroup, Stopped};
use crate::ranks::shm::{Member, Segment};
use crate::ranks::{WorkerEnv, World, WorldOptions};

/// The hub and the clients of nodes with one rank each, after all have joined.
fn all_that_met(num_nodes: usize) -> (Option<NodeHub>, Vec<Client>) {
    let hub = TestHub::new();
    let greetings: Vec<_> = (0..num_nodes).map(|rank| greeting((rank, num_nodes, 1))).collect();
    let served = hub.start(&greetings[0]);
    let clients: Vec<_> = greetings.iter().map(|greeting| hub.join(greeting, PATIENCE)).collect();
    for client in &clients {
        client.await_welcome(Deadline::after(PATIENCE)).unwrap();
    }
    (served, clients)
}

/// [`all_that_met`] for two nodes.
fn two_that_met() -> (Option<NodeHub>, Client, Client) {
    let (served, clients) = all_that_met(2);
    let [own, other] = clients.try_into().unwrap();
    (served, own, other)
}

/// The shared memory of rank 0, which is alone on its node.
fn own_memory() -> Arc<Member> {
    Arc::new(Member::new(Arc::new(Segment::in_process(1, 64 << 10).unwrap()), 0, 0, PATIENCE))
}

/// A rank may die while another one still joins.
#[test]
fn a_rank_lost_during_startup_is_reported_to_late_ranks() {
    let (served, own, other) = two_that_met();
    other.break_off();
    while own.lost().is_none() {
        std::thread::yield_now();
    }
    let member = own_memory();
    own.attach(member.clone());
    assert_eq!(member.failure().unwrap().rank, 1);
    drop((own, other, served));
}

/// A node may have joined, and fail, while another one still joins.
#[test]
fn a_failure_during_startup_is_not_forgotten() {
    let (served, own, other) = two_that_met();
    other.post_failure(FIRST_EPOCH, &Error::NonFinite { message: "early".to_owned() });
    let gather = |client: &Client, rank| {
        client.gather(&RankGroup::new(0, "world", &[0, 1], rank), &[], Deadline::after(PATIENCE), || None).unwrap();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| gather(&other, 1));
        gather(&own, 0); // its end arrives after the failure
    });
    let member = own_memory();
    assert!(member.failure().is_none());
    own.attach(member.clone());
    let failure = member.failure().unwrap();
    assert_eq!((failure.rank, failure.code, failure.message.contains("early")), (1, ExitCode::Numerics, true));
    drop((own, other, served));
}

/// A disconnected host neither sends data nor closes connections.
#[test]
fn a_silent_node_is_named() {
    let mut hub = TestHub::new();
    hub.longest_silence = Duration::from_secs(3);
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let mut silent = TcpStream::connect(("127.0.0.1", hub.port)).unwrap();
    let own = std::thread::scope(|scope| {
        let own = scope.spawn(|| hub.join(&first, PATIENCE));
        Token::new(TOKEN).unwrap().greet(&mut silent, &serde_json::to_vec(&second).unwrap()).unwrap();
        own.join().unwrap()
    });
    own.await_welcome(Deadline::after(PATIENCE)).unwrap();
    while own.lost().is_none() {
        std::thread::yield_now();
    }
    let lost = own.lost().unwrap();
    assert_eq!((lost.rank, lost.code), (1, ExitCode::RankDied));
    assert!(lost.message.starts_with("on node 1 (host1): no message from it for 3 s"), "{}", lost.message);
    drop((own, served, silent));
}

/// A rank whose authentication took too long may connect again, while its first connection is admitted after all.
#[test]
fn a_surplus_rank_is_refused() {
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let mut switch = Switch::new(first.clone());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut join = |greeting: &Greeting| {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let place = switch.join(greeting, Connection::new(&listener.accept().unwrap().0).unwrap());
        (place, switch.is_complete(), client)
    };
    let joined = [join(&second), join(&second), join(&first), join(&second)];
    let outcomes = joined.iter().map(|(place, is_complete, _)| (*place, *is_complete)).collect::<Vec<_>>();
    assert_eq!(outcomes, [(Some(1), false), (Some(2), false), (Some(3), true), (None, true)]);
}

/// Rank 1 lists itself twice in a gather: neither rank may get more or fewer parts than it expects.
#[test]
fn gathers_over_different_ranks_are_an_error() {
    let (served, own, other) = two_that_met();
    let gather = |client: &Client, ranks: &[usize], rank| {
        client.gather(&RankGroup::new(0, "world", ranks, rank), &[], Deadline::after(PATIENCE), || None)
    };
    let ended = std::thread::scope(|scope| {
        let ended = scope.spawn(|| gather(&other, &[0, 1, 1], 1));
        [gather(&own, &[0, 1], 0), ended.join().unwrap()]
    });
    for ended in ended {
        let Err(Stopped::Failed(failure)) = ended else { panic!("{ended:?}") };
        assert!(failure.message.contains("it called a gather over other ranks than its peers"), "{}", failure.message);
    }
    drop((own, other, served));
}

/// Rank 1 is a raw stream that sends `bytes` after all have joined. Returns the failure that rank 0 receives.
fn heard_of_one_that_sends(bytes: &[u8]) -> String {
    let hub = TestHub::new();
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let mut raw = TcpStream::connect(("127.0.0.1", hub.port)).unwrap();
    Token::new(TOKEN).unwrap().greet(&mut raw, &serde_json::to_vec(&second).unwrap()).unwrap();
    let own = hub.join(&first, PATIENCE);
    own.await_welcome(Deadline::after(PATIENCE)).unwrap();
    raw.write_all(bytes).unwrap();
    while own.lost().is_none() {
        std::thread::yield_now();
    }
    let lost = own.lost().unwrap();
    assert_eq!(lost.rank, 1);
    drop((own, served, raw));
    lost.message
}

#[test]
fn an_invalid_message_is_reported_differently_from_a_death() {
    let garbled = heard_of_one_that_sends(&[77; 99]);
    assert!(garbled.starts_with("on node 1 (host1): received a message of an unknown kind from it"), "{garbled}");
    for (kind, payload) in [
        (FrameKind::Gather, &b"no parts"[..]),
        (FrameKind::Failure, b"{}"),
        (FrameKind::Agree, b"?"),
        (FrameKind::Welcome, b""),
    ] {
        let frame = Frame::new(kind, 0, payload.to_vec());
        let heard = heard_of_one_that_sends(&[&frame.header()[..], &frame.payload].concat());
        assert!(heard.starts_with("on node 1 (host1): its message cannot be read: "), "{kind:?}: {heard}");
    }
}

/// A server at rank 0's address has the token but sends a message that no hub sends.
#[test]
fn an_invalid_message_from_the_hub_ends_all_waits() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let served = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        Token::new(TOKEN).unwrap().admit(&mut stream).unwrap();
        let frame = Frame::new(FrameKind::Welcome, 0, b"welcome".to_vec());
        stream.write_all(&[&frame.header()[..], &frame.payload].concat()).unwrap();
        stream
    });
    let (token, deadline) = (Token::new(TOKEN).unwrap(), Deadline::after(PATIENCE));
    let client = Client::join(("127.0.0.1", port), &token, &greeting((1, 2, 1)), PATIENCE, deadline).unwrap();
    let error = client.await_welcome(deadline).unwrap_err().to_string();
    assert!(error.contains("it runs the hub that connects the nodes, and its message cannot be read"), "{error}");
    drop((client, served.join().unwrap()));
}

/// The last part arrives after the deadline has passed, and before the hub is asked who is late.
#[test]
fn a_gather_that_completes_during_the_timeout_query_succeeds() {
    let (served, own, other) = two_that_met();
    let gather = |client: &Client, rank, deadline| {
        client.gather(&RankGroup::new(0, "world", &[0, 1], rank), &[rank as u8], deadline, || None)
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gather(&other, 1, Deadline::after(PATIENCE)));
        while own.ask_late(0, 0, 1) != [0] {
            std::thread::yield_now(); // rank 1's part is not there yet
        }
        assert_eq!(gather(&own, 0, Deadline::after(Duration::ZERO)).unwrap(), [[0], [1]]);
        assert_eq!(first.join().unwrap().unwrap(), [[0], [1]]);
    });
    drop((own, other, served));
}

/// Messages that a rank sent before its end are delivered. After that, no rank waits for it until a time limit.
#[test]
fn waiting_for_an_ended_rank_reports_its_end() {
    let (served, own, other) = two_that_met();
    other.relay(3, 0, 7, vec![1, 2]);
    drop(other);
    let receive = || own.receive(3, 1, Deadline::after(PATIENCE), || None);
    assert_eq!(receive().unwrap(), (7, vec![1, 2]));
    let Err(Stopped::Failed(failure)) = receive() else { panic!("nothing comes any more") };
    assert_eq!((failure.rank, &failure.message[..]), (1, "on node 1 (host1): its program has ended"));
    drop((own, served));
}

/// Other ranks may still have to exchange data that they need to end.
#[test]
fn the_hub_serves_other_ranks_while_rank_0_ends() {
    let (served, clients) = all_that_met(3);
    let [own, first, second]: [Client; 3] = clients.try_into().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || drop((own, served)));
        let Err(Stopped::Failed(gone)) = first.receive(3, 0, Deadline::after(PATIENCE), || None) else { panic!() };
        assert_eq!((gone.rank, &gone.message[..]), (0, "on node 0 (host0): its program has ended"));
        for round in 0..500 {
            for (from, to, rank) in [(&first, &second, 1), (&second, &first, 2)] {
                from.relay(3, 3 - rank, round, vec![rank as u8]);
                let received = to.receive(3, rank, Deadline::after(PATIENCE), || None).unwrap();
                assert_eq!(received, (round, vec![rank as u8]));
            }
        }
        drop((first, second));
    });
}

#[test]
fn too_small_slots_are_refused_before_connecting() {
    let env = WorkerEnv { world_size: 4, local_world_size: 2, ..World::single().env };
    let error = World::join(&env, WorldOptions { slot_bytes: 511, ..WorldOptions::default() }).unwrap_err();
    assert!(error.to_string().contains("slot_bytes of at least 512 for 2 ranks on a host"), "{error}");
}

/// Authentication has one time limit, however often the other side sends a byte.
#[test]
fn the_authentication_has_one_overall_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let stream = listener.accept().unwrap().0;
    stranger.write_all(&[7; 9]).unwrap();
    let mut byte = [0];
    ProofStream::new(&stream, PATIENCE).read_exact(&mut byte).unwrap();
    assert_eq!(byte, [7]);
    let late = ProofStream::new(&stream, Duration::ZERO).read(&mut byte).unwrap_err();
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut, "though bytes are there");
}

/// Fault 41, between nodes: without the token a connection learns only random numbers, and the run continues undisturbed.
#[test]
fn an_unauthenticated_client_of_the_hub_has_no_effect() {
    let hub = TestHub::new();
    let (first, second) = (greeting((0, 2, 1)), greeting((1, 2, 1)));
    let served = hub.start(&first);
    let connect = || TcpStream::connect(("127.0.0.1", hub.port)).unwrap();
    let mut heard = Vec::new();
    for garbage in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 200], &[0; 68]] {
        let mut stranger = connect();
        stranger.write_all(garbage).unwrap();
        let _ = stranger.shutdown(std::net::Shutdown::Write);
        let mut all = Vec::new();
        let _ = stranger.read_to_end(&mut all);
        assert!(all.len() == 48 || (all.len() == 48 + 33 && all[48..].iter().all(|&byte| byte == 0)), "{all:?}");
        heard.push(all[16..48].to_vec());
    }
    heard.sort();
    heard.dedup();
    assert_eq!(heard.len(), 4, "a challenge is never used twice");
    let wrong = Token::new("another token of a test").unwrap();
    let greeted = wrong.greet(&mut connect(), &serde_json::to_vec(&second).unwrap());
    assert!(greeted.is_err(), "rank 1's place is not given to somebody without the token");

    let (own, other) = (hub.join(&first, PATIENCE), hub.join(&second, PATIENCE));
    let layouts = [&own, &other].map(|client| client.await_welcome(Deadline::after(PATIENCE)).unwrap());
    assert_eq!(layouts[0].hosts, ["host0", "host1"]);
    drop((own, other, served));
}

#[test]
fn mismatched_nodes_are_refused_on_all_nodes() {
    let hub = TestHub::new();
    let first = greeting((0, 4, 2));
    let served = hub.start(&first);
    let own = hub.join(&first, PATIENCE);
    let other = hub.join(&greeting((3, 6, 3)), PATIENCE);
    for client in [&own, &other] {
        let error = client.await_welcome(Deadline::after(PATIENCE)).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::Environment);
        let message = error.to_string();
        assert!(
            message.contains("node 0 (host0) has 2 of 4 ranks, but node 1 (host1) (its rank 3) has 3 of 6"),
            "{message}"
        );
    }
    assert_eq!(Error::from(WorldRefusal::Nodes("x".to_owned())).to_string(), "x");
    drop((own, other, served));
}
