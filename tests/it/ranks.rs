//! Starts real ranks as processes, for tests that need several.

use std::fs::File;
use std::io::Read;
use std::process::Child;
use std::time::{Duration, Instant};

use colo_grpo::internal::launch::{Inherited, LaunchOptions, Rendezvous, exit_now, worker_command};
use colo_grpo::internal::ranks::{Backend, WorkerEnv, World, WorldOptions};

/// Time limit of a test: longer than any collective waits, so that a rank can report its own error first.
const TIME_LIMIT: Duration = Duration::from_secs(600);
/// Time that the other ranks have to end after one has failed.
const GRACE: Duration = Duration::from_secs(3);
/// Exit code of a rank whose body has returned. If the test's name were wrong, the rank would run nothing and exit with 0.
const RAN: i32 = 86;
const TEST_VARIABLE: &str = "COLO_GRPO_TEST";

/// Runs `body` in `num_ranks` processes that form a world with shared memory. `test` is the calling test's path in this binary
/// (`collectives::works`): each rank is this binary again, running only that test. If a rank
/// fails or the time limit is exceeded, the test fails with every rank's output.
pub fn run(num_ranks: usize, test: &str, body: impl FnOnce(World)) {
    run_with(num_ranks, test, Duration::from_secs(60), body);
}

/// Runs `body` like [`run`], on one GPU per rank with NCCL.
pub fn run_on_gpus(num_ranks: usize, test: &str, body: impl FnOnce(World)) {
    run_in(num_ranks, test, WorldOptions { backend: Backend::Nccl, ..WorldOptions::default() }, body);
}

/// Runs `body` like [`run`], with `timeout` as the time limit of a collective.
pub fn run_with(num_ranks: usize, test: &str, timeout: Duration, body: impl FnOnce(World)) {
    run_in(num_ranks, test, WorldOptions { timeout, ..WorldOptions::default() }, body);
}

fn run_in(num_ranks: usize, test: &str, options: WorldOptions, body: impl FnOnce(World)) {
    if std::env::var(TEST_VARIABLE).is_ok_and(|running| running == test) {
        let env = WorkerEnv::from_env().unwrap().expect("worker variables");
        let world = World::join(&env, options).unwrap();
        body(world);
        exit_now(RAN);
    }
    let args = ["--exact", test, "--nocapture", "--include-ignored"].map(Into::into).to_vec();
    let options = LaunchOptions::new(num_ranks, args);
    let rendezvous = Rendezvous::bind(&options.master_addr, None).unwrap();
    let mut ranks: Vec<Rank> = (0..num_ranks).map(|rank| Rank::start(&options, &rendezvous, rank, test)).collect();
    drop(rendezvous);
    if let Err(reason) = wait(&mut ranks) {
        ranks.iter_mut().for_each(|rank| drop(rank.child.kill()));
        let outputs: Vec<String> = ranks.iter_mut().map(Rank::output).collect();
        panic!("{test}: {reason}\n{}", outputs.join("\n"));
    }
}

struct Rank {
    rank: usize,
    child: Child,
    output: File,
}

impl Rank {
    fn start(options: &LaunchOptions, rendezvous: &Rendezvous, rank: usize, test: &str) -> Self {
        let output = tempfile::tempfile().unwrap();
        let child = worker_command(options, rendezvous, rank, Inherited::default())
            .env(TEST_VARIABLE, test)
            .env("OMP_NUM_THREADS", "1")
            .stdout(output.try_clone().unwrap())
            .stderr(output.try_clone().unwrap())
            .spawn()
            .unwrap();
        Self { rank, child, output }
    }

    fn output(&mut self) -> String {
        let _ = self.child.wait();
        let mut text = String::new();
        std::io::Seek::rewind(&mut self.output).unwrap();
        self.output.read_to_string(&mut text).unwrap();
        format!("---- rank {} ----\n{text}", self.rank)
    }
}

fn wait(ranks: &mut [Rank]) -> Result<(), String> {
    let start = Instant::now();
    let mut failure: Option<(Instant, String)> = None;
    loop {
        let mut running = 0;
        for rank in ranks.iter_mut() {
            match rank.child.try_wait().unwrap() {
                None => running += 1,
                Some(status) if status.code() == Some(RAN) => (),
                Some(status) => {
                    failure.get_or_insert_with(|| (Instant::now(), format!("rank {}: {status}", rank.rank)));
                }
            }
        }
        match &failure {
            Some((since, reason)) if running == 0 || since.elapsed() > GRACE => return Err(reason.clone()),
            None if running == 0 => return Ok(()),
            None if start.elapsed() > TIME_LIMIT => return Err(format!("not done after {TIME_LIMIT:?}")),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
