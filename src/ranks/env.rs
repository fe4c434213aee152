//! The place of this process in the world, from environment variables set by the program that started it.

use crate::error::{Error, Result};

/// A worker's place in the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerEnv {
    /// Rank in the world.
    pub rank: usize,
    /// Rank within this host.
    pub local_rank: usize,
    /// Total number of ranks.
    pub world_size: usize,
    /// Number of ranks on this host.
    pub local_world_size: usize,
    /// Host name of rank 0.
    pub master_addr: String,
    /// Port of the rendezvous store.
    pub master_port: u16,
    /// How many times the run was started before.
    pub attempt: u64,
}

/// Environment variable with the number of earlier starts of a run. It is torchrun's; this crate's launcher sets it, too.
pub const RESTART_COUNT_VARIABLE: &str = "TORCHELASTIC_RESTART_COUNT";

/// Maximum number of ranks of a run.
const MAX_RANKS: usize = 1 << 16;
/// Maximum number of ranks on a host; a slot of shared memory has space for 256 bytes of each.
const MAX_LOCAL_RANKS: usize = 1 << 12;

const WORKER_VARIABLES: [&str; 3] = ["RANK", "LOCAL_RANK", "WORLD_SIZE"];

impl WorkerEnv {
    /// Reads the worker's place from the environment, as set by this crate's launcher, torchrun or an operator (RANK, LOCAL_RANK, WORLD_SIZE,
    /// MASTER_ADDR, MASTER_PORT; LOCAL_WORLD_SIZE defaults to WORLD_SIZE), or by srun with several tasks. `None` if no such variable is set: the
    /// process is then a launcher.
    ///
    /// # Errors
    /// [`Error::Environment`] if the variables are incomplete or contradictory.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        if WORKER_VARIABLES.iter().any(|name| get(name).is_some()) {
            return Self::from_torchrun(&get).map(Some);
        }
        // A batch script has SLURM_PROCID too; only a step of srun has a node list of its own.
        if get("SLURM_STEP_NODELIST").is_some() && get("SLURM_NTASKS").is_some_and(|tasks| tasks != "1") {
            return Self::from_slurm(&get).map(Some);
        }
        Ok(None)
    }

    fn from_torchrun(get: &impl Fn(&str) -> Option<String>) -> Result<Self> {
        require(get, &[&WORKER_VARIABLES[..], &["MASTER_ADDR", "MASTER_PORT"]].concat())?;
        let world_size = number(get, "WORLD_SIZE")?;
        Self {
            rank: number(get, "RANK")?,
            local_rank: number(get, "LOCAL_RANK")?,
            world_size,
            local_world_size: get("LOCAL_WORLD_SIZE").map_or(Ok(world_size), |_| number(get, "LOCAL_WORLD_SIZE"))?,
            master_addr: get("MASTER_ADDR").unwrap_or_default(),
            master_port: number(get, "MASTER_PORT")?,
            attempt: get(RESTART_COUNT_VARIABLE).map_or(Ok(0), |_| number(get, RESTART_COUNT_VARIABLE))?,
        }
        .checked()
    }

    fn from_slurm(get: &impl Fn(&str) -> Option<String>) -> Result<Self> {
        require(get, &["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])?;
        let nodes = get("SLURM_STEP_NODELIST").unwrap_or_default();
        let several = nodes.contains([',', '[']);
        let node = get("SLURM_NODEID").map_or(Ok(0), |_| number(get, "SLURM_NODEID"))?;
        let tasks_per_node = get("SLURM_STEP_TASKS_PER_NODE").or_else(|| get("SLURM_TASKS_PER_NODE"));
        let world_size: usize = number(get, "SLURM_NTASKS")?;
        let local_world_size = match tasks_per_node {
            Some(list) => tasks_on_node(&list, node).ok_or_else(|| refuse("SLURM_STEP_TASKS_PER_NODE", &list))?,
            None => world_size,
        };
        let job: usize = number(get, "SLURM_JOB_ID")?;
        Self {
            rank: number(get, "SLURM_PROCID")?,
            local_rank: number(get, "SLURM_LOCALID")?,
            world_size,
            local_world_size,
            master_addr: get("MASTER_ADDR")
                .unwrap_or_else(|| if several { first_host(&nodes) } else { "127.0.0.1".to_owned() }),
            // Equal on every rank, and different from other jobs on a shared node.
            master_port: get("MASTER_PORT")
                .map_or(Ok((20_000 + job % 20_000) as u16), |_| number(get, "MASTER_PORT"))?,
            attempt: get("SLURM_RESTART_COUNT").map_or(Ok(0), |_| number(get, "SLURM_RESTART_COUNT"))?,
        }
        .checked()
    }

    fn checked(self) -> Result<Self> {
        if self.world_size > MAX_RANKS || self.local_world_size > MAX_LOCAL_RANKS {
            let (ranks, local) = (self.world_size, self.local_world_size);
            let message = format!(
                "{ranks} ranks, {local} of them on this host: expected at most {MAX_RANKS}, and {MAX_LOCAL_RANKS} on a host"
            );
            return Err(Error::Environment { message });
        }
        let fits = self.rank < self.world_size
            && self.local_rank < self.local_world_size
            && self.local_world_size <= self.world_size;
        if fits {
            return Ok(self);
        }
        let message = format!(
            "rank {} of {}, local rank {} of {}: ranks count from 0 and stay below their sizes",
            self.rank, self.world_size, self.local_rank, self.local_world_size
        );
        Err(Error::Environment { message })
    }
}

fn require(get: &impl Fn(&str) -> Option<String>, names: &[&str]) -> Result<()> {
    let (set, missing): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| get(name).is_some());
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!(
        "the environment sets {} but not {}: a worker needs all of them; unset them all to let colo-grpo launch \
         workers (if RANK numbers nodes: env -u RANK -u WORLD_SIZE colo-grpo --nnodes $WORLD_SIZE --node_rank $RANK ..)",
        set.join(", "),
        missing.join(", ")
    );
    Err(Error::Environment { message })
}

fn number<T: std::str::FromStr>(get: &impl Fn(&str) -> Option<String>, name: &str) -> Result<T> {
    let text = get(name).unwrap_or_default();
    text.trim().parse().map_err(|_| refuse(name, &text))
}

fn refuse(name: &str, value: &str) -> Error {
    Error::Environment { message: format!("{name}={value}: not a number that this variable can have") }
}

/// The first host of a Slurm node list: `node[03-04,07],other` gives node03.
fn first_host(nodes: &str) -> String {
    let end = nodes.find([',', '[']).unwrap_or(nodes.len());
    let (prefix, rest) = nodes.split_at(end);
    match rest.strip_prefix('[') {
        Some(range) => format!("{prefix}{}", range.split([',', '-', ']']).next().unwrap_or_default()),
        None => prefix.to_owned(),
    }
}

/// The number of tasks on a node from Slurm's list: `4(x2),3` means 4, 4, 3.
fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut left = node;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        if left < times {
            return tasks.parse().ok();
        }
        left -= times;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Option<WorkerEnv>> {
        WorkerEnv::from_variables(|wanted| {
            let mut pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
            pairs.find(|(name, _)| *name == wanted).map(|(_, value)| value.to_owned())
        })
    }

    #[test]
    fn torchrun_variables_must_be_complete() {
        let all = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500";
        let env = read(all).unwrap().unwrap();
        assert_eq!((env.rank, env.local_rank, env.world_size, env.local_world_size), (3, 1, 4, 2));
        assert_eq!((env.master_addr.as_str(), env.master_port, env.attempt), ("a", 29500, 0));
        let again = read(&format!("{all} TORCHELASTIC_RESTART_COUNT=2")).unwrap().unwrap();
        assert_eq!(again.attempt, 2);
        let error = read("RANK=3 WORLD_SIZE=4").unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Environment);
        assert!(error.to_string().contains("but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"), "{error}");
        assert!(error.to_string().contains("--node_rank $RANK"), "{error}");
        assert!(read("MASTER_ADDR=a MASTER_PORT=1").unwrap().is_none());
        assert!(read("RANK=4 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1").is_err());
        assert!(read("RANK=x LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1").is_err());
        for (ranks, local) in [(65_537, 8), (5000, 4097), (usize::MAX, usize::MAX)] {
            let sizes = format!("WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={local}");
            let error = read(&format!("RANK=0 LOCAL_RANK=0 {sizes} MASTER_ADDR=a MASTER_PORT=1")).unwrap_err();
            assert_eq!(error.exit_code(), crate::error::ExitCode::Environment);
            let told =
                format!("{ranks} ranks, {local} of them on this host: expected at most 65536, and 4096 on a host");
            assert!(error.to_string().contains(&told), "{error}");
        }
    }

    #[test]
    fn srun_steps_are_workers_but_batch_scripts_and_single_tasks_are_not() {
        let step = "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=41234";
        let nodes = "SLURM_STEP_NODELIST=gpu[03-04] SLURM_STEP_TASKS_PER_NODE=4,3";
        let env = read(&format!("{step} {nodes}")).unwrap().unwrap();
        assert_eq!((env.rank, env.local_rank, env.world_size, env.local_world_size), (5, 1, 7, 3));
        assert_eq!((env.master_addr.as_str(), env.master_port), ("gpu03", 21234));
        assert_eq!(read(&format!("{step} {nodes} SLURM_RESTART_COUNT=1")).unwrap().unwrap().attempt, 1);
        assert!(read(step).unwrap().is_none());
        assert!(read("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NODELIST=a").unwrap().is_none());
        let one = read("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=a");
        assert_eq!(one.unwrap().unwrap().master_addr, "127.0.0.1");
    }

    #[test]
    fn slurm_lists_expand() {
        assert_eq!(first_host("n[007,009-011],m"), "n007");
        assert_eq!(first_host("login1,login2"), "login1");
        assert_eq!([0, 1, 2, 3].map(|node| tasks_on_node("4(x2),3", node)), [Some(4), Some(4), Some(3), None]);
    }
}
