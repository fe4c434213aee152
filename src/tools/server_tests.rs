use std::process::Command;
use std::time::Duration;

use serde_json::Map;

use super::process::ToolProcess;
use super::reply::ToolReply;
use crate::config::Config;

const ROOM: &str = r"
class Room:
    def reset(self):
        return None

    def get_reward(self):
        return 0.5

class Hall(Room):
    pass
";

fn replies(process: &mut ToolProcess, num_replies: usize) -> Vec<ToolReply> {
    let mut all = Vec::new();
    while all.len() < num_replies {
        all.extend(process.replies(Duration::from_secs(60)).unwrap());
    }
    all
}

/// If there are more processes than workers, surplus ones end with their trajectories; the rest serve later trajectories.
#[test]
fn more_environments_than_workers_can_be_open() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("room.py");
    std::fs::write(&file, ROOM).unwrap();
    let factory = format!("environment_factory={}:Room", file.display());
    let keys =
        ["model_name_or_path=m", "train_file=t", "reward_funcs=[]", "tool_workers=2", &factory].map(str::to_owned);
    let mut process = ToolProcess::start(&Config::load(None, &keys).unwrap()).unwrap().unwrap();
    let row = Map::new();
    for first in [1, 6] {
        for number in first..first + 5 {
            process.open(number, "", &row);
        }
        assert!(replies(&mut process, 5).iter().all(|reply| reply.error.is_none()));
        for number in first..first + 5 {
            process.close(number, "");
        }
        for mut reply in replies(&mut process, 5) {
            assert_eq!((reply.reward(), reply.error), (Some(Ok(0.5)), None));
        }
    }
}

/// If a file were loaded twice, its class could not be pickled.
#[test]
fn a_file_is_loaded_once_however_its_path_is_spelled() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("room.py"), ROOM).unwrap();
    let place = folder.path().display();
    let factories = [
        format!("environment_factory.room={place}/room.py:Room"),
        format!("environment_factory.hall={place}/./room.py:Hall"),
    ];
    let keys = ["model_name_or_path=m", "train_file=t", "reward_funcs=mine.py:tone"].map(str::to_owned);
    let config = Config::load(None, &[&keys[..], &factories].concat()).unwrap();
    let mut process = ToolProcess::start(&config).unwrap().unwrap();
    for (number, name) in [(1, "room"), (2, "hall")] {
        process.open(number, name, &Map::new());
        assert_eq!(replies(&mut process, 1)[0].error, None);
        process.close(number, name);
        let reply = &replies(&mut process, 1)[0];
        assert!(reply.error.is_none() && reply.state.is_some(), "{name}: {reply:?}");
    }
}

/// A stopped process, which enforces no time limits any more, is waited for only as long as the longest request may take.
#[test]
fn a_silent_tool_process_is_named_with_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("room.py");
    std::fs::write(&file, ROOM).unwrap();
    let factory = format!("environment_factory={}:Room", file.display());
    let keys =
        ["model_name_or_path=m", "train_file=t", "reward_funcs=[]", "tool_timeout_s=0.1", &factory].map(str::to_owned);
    let mut process = ToolProcess::start(&Config::load(None, &keys).unwrap()).unwrap().unwrap();
    process.functions.grace = Duration::from_millis(300);
    let silent = Duration::from_millis(900);
    assert!(process.replies(silent).unwrap().is_empty(), "nothing is asked for, so that nothing is late");
    let pid = process.functions.pid();
    let signal = |name: &str| Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success();
    assert!(signal("-STOP"));
    process.open(1, "", &Map::new());
    let error = loop {
        match process.replies(silent) {
            Ok(replies) => assert!(replies.is_empty()),
            Err(error) => break error,
        }
    };
    assert_eq!(error.exit_code(), crate::error::ExitCode::Hang);
    let message = error.to_string();
    for part in ["the process of the tools", "tool_timeout_s = 0.1", &format!("{pid} is in state T (stopped)")] {
        assert!(message.contains(part), "{message}");
    }
    process.functions.grace = Duration::from_secs(600);
    assert!(signal("-CONT"));
    assert_eq!(replies(&mut process, 1)[0].id, 1, "it goes on where it stopped");
}

/// A cancelled episode frees its worker for the next one. A cancelled episode that waits for a worker is not begun.
#[test]
fn cancelled_episodes_free_their_slots() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("agent.py");
    let text = "import time\n\ndef play(row, base_url):\n    time.sleep(row['seconds'])\n    return 1.0\n";
    std::fs::write(&file, text).unwrap();
    let agent = format!("agent={}:play", file.display());
    let keys =
        ["model_name_or_path=m", "train_file=t", "reward_funcs=[]", "agent_workers=1", &agent].map(str::to_owned);
    let mut process = ToolProcess::start(&Config::load(None, &keys).unwrap()).unwrap().unwrap();
    let row = |seconds: u32| Map::from_iter([("seconds".to_owned(), seconds.into())]);
    let [hangs, waits, last] = [9000, 9000, 0].map(|seconds| process.play(&row(seconds), "http://nowhere"));
    process.give_up(waits);
    process.give_up(hangs);
    let mut reply = replies(&mut process, 1).remove(0);
    assert_eq!((reply.id, reply.reward()), (last, Some(Ok(1.0))));
}

const SLOTS: &str = r#"
class Slotted:
    __slots__ = ("score", "file")

    def reset(self):
        self.score, self.file = 0.5, open("/dev/null")  # which cannot be pickled

    def get_reward(self):
        return self.score
"#;

/// Attributes that cannot be pickled are left out of an environment's state, also if they are in slots.
#[test]
fn environments_with_slots_are_supported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("slots.py");
    std::fs::write(&file, SLOTS).unwrap();
    let factory = format!("environment_factory={}:Slotted", file.display());
    let reward = format!("reward_funcs=[\"{}:reads\"]", file.display());
    let keys = ["model_name_or_path=m", "train_file=t", &reward, &factory].map(str::to_owned);
    let mut process = ToolProcess::start(&Config::load(None, &keys).unwrap()).unwrap().unwrap();
    process.open(1, "", &Map::new());
    assert_eq!(replies(&mut process, 1)[0].error, None);
    process.close(1, "");
    let mut reply = replies(&mut process, 1).remove(0);
    assert_eq!((reply.reward(), reply.error.take()), (Some(Ok(0.5)), None));
    assert!(reply.state.is_some());
}
