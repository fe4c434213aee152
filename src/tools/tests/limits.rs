//! Tests of limits on turns, results and completions.

use super::*;

#[test]
fn length_limits_end_a_trajectory_as_in_trl() {
    // The answer does not fit: it is dropped, and the trajectory ends as it is.
    let turn = call("later", json!({"text": "ab"}));
    let len_of = |played: &PlayedConversations| played.tokenizer.encode(&turn, false).unwrap().len() + 1;
    let mut played = PlayedConversations::new(&["max_completion_length=2000"]);
    let mut trajectory = Trajectory::default();
    played.say(&mut trajectory, &turn);
    let TurnOutcome::Continues(context) = played.outcome(&trajectory) else { panic!("it ended") };
    let whole = len_of(&played) + context.len();
    for (limit, fits) in [(whole, true), (whole - 1, false)] {
        let mut played = PlayedConversations::new(&[&format!("max_completion_length={limit}")]);
        match played.outcome(&trajectory) {
            TurnOutcome::Continues(again) => assert!(fits && again == context),
            opened @ TurnOutcome::Opened(_) => panic!("{opened:?}"),
            TurnOutcome::Ended(EpisodeEnd { messages, .. }) => {
                assert!(!fits && messages.len() == 1 && messages[0]["tool_calls"].is_array(), "{messages:?}");
                assert_eq!(played.conversations.take_stats().num_overlong, 1);
            }
        }
    }
    // The second turn's calls are not answered.
    let mut played = PlayedConversations::new(&["max_tool_calling_iterations=1", "max_tool_response_length=6"]);
    let context = played.context(&call("later", json!({"text": "abcdef"})));
    assert!(context.contains("tool\nabc...(truncated)...def<|im_end|>"), "{context}");
    trajectory.push_context(&[1], 3);
    played.say(&mut trajectory, &turn);
    let TurnOutcome::Ended(EpisodeEnd { messages, .. }) = played.outcome(&trajectory) else { panic!("it goes on") };
    assert_eq!(messages.len(), 3, "{messages:?}");
    // A turn that a length limit cut off is the last one.
    let mut played = PlayedConversations::new(&[]);
    let mut trajectory = Trajectory::default();
    played.say(&mut trajectory, &turn);
    trajectory.finish_reason = Some(FinishReason::Length);
    assert!(matches!(played.outcome(&trajectory), TurnOutcome::Ended(_)));
    assert_eq!(played.conversations.take_stats().num_calls, 0);
}

/// Text that cannot fit is not tokenized: the work is limited by what could fit, however long a tool's result is.
#[test]
fn a_huge_tool_result_is_not_tokenized_completely() {
    for words in [20_000, 200_000] {
        let mut played = PlayedConversations::new(&["max_completion_length=2000"]);
        let mut trajectory = Trajectory::default();
        played.say(&mut trajectory, &call("flood", json!({"words": words})));
        let before = ENCODED_BYTES.get();
        let outcome = played.outcome(&trajectory);
        assert!(matches!(outcome, TurnOutcome::Ended(_)), "{outcome:?}");
        let num_bytes = ENCODED_BYTES.get() - before;
        assert!(num_bytes < 40_000, "{num_bytes} bytes of {} were tokenized", 5 * words);
        assert_eq!(played.conversations.take_stats().num_overlong, 1);
    }
}
