use std::process::Command;

use super::*;
use crate::error::ExitCode;

/// If the tools' process is killed during a call, a new one replaces it and open trajectories are masked. If it ends repeatedly, the run
/// ends.
#[test]
fn a_killed_tool_process_is_replaced_and_its_trajectories_masked() {
    let mut played = PlayedConversations::new(&["environment"]);
    let kill = |played: &PlayedConversations| {
        let pid = played.conversations.process.functions.pid().to_string();
        assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    };
    let columns = json!({"prompt": [{"role": "user", "content": "go"}], "start": 4});
    let columns = Arc::new(columns.as_object().unwrap().clone());
    let prompt = Prompt { id: 0, text: "go".into(), token_ids: vec![1], columns };
    let next = |played: &mut PlayedConversations| loop {
        if let Some((key, outcome)) = played.conversations.poll(Duration::from_secs(60), |_| true).unwrap().pop() {
            return (key, outcome);
        }
    };
    played.conversations.open(GROUP, &prompt, 2).unwrap();
    assert!(matches!(next(&mut played).1, TurnOutcome::Opened(None)));
    let [asked, idle] = [0, 1].map(|sample| TrajectoryKey { group: GROUP, sample });
    let mut trajectory = Trajectory::default();
    played.say(&mut trajectory, &call("freeze", json!({})));
    played.conversations.turn_ended(asked, &[1], &trajectory).unwrap();
    kill(&played);
    let masked = |(key, outcome): (TrajectoryKey, TurnOutcome), expected: TrajectoryKey| {
        let TurnOutcome::Ended(EpisodeEnd { failure: Some(failure), environment: None, .. }) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(
            key == expected
                && failure.contains("the process of the tools has ended: its worker process ended with signal: 9"),
            "{failure}"
        );
    };
    masked(next(&mut played), asked);
    // The other one had an environment in the process, though it asked for nothing then.
    let mut trajectory = Trajectory::default();
    played.say(&mut trajectory, &call("move", json!({"by": 1})));
    played.conversations.turn_ended(idle, &[1], &trajectory).unwrap();
    masked(next(&mut played), idle);
    assert_eq!(played.conversations.take_stats().num_failed, 2);
    // The next ones are served as before.
    let columns = json!({"prompt": [{"role": "user", "content": "go"}], "start": 4});
    let (_, contexts, end) = episode(&mut played, columns, &[&call("move", json!({"by": 3})), "done"]);
    assert!(contexts[0].contains("at 7") && end.environment.is_some(), "{contexts:?}");

    kill(&played);
    played.conversations.turn_ended(asked, &[1], &trajectory).unwrap();
    masked(next(&mut played), asked);
    kill(&played);
    played.conversations.turn_ended(idle, &[1], &trajectory).unwrap();
    masked(next(&mut played), idle);
    kill(&played);
    played.conversations.turn_ended(asked, &[1], &trajectory).unwrap();
    let error = played.conversations.poll(Duration::from_secs(60), |_| true).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::RewardService);
    assert!(error.to_string().starts_with("the process of the tools ended 3 times in a row"), "{error}");
}
