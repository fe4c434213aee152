mod limits;
mod lost;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Conversations, EpisodeEnd, GroupKey, ToolProcess, TrajectoryKey, TurnOutcome};
use crate::config::Config;
use crate::data::fixtures::{Dice, bytes};
use crate::data::{DatasetOptions, ENCODED_BYTES, Tokenizer, TurnModel};
use crate::types::{FinishReason, Prompt, Trajectory};

const GROUP: GroupKey = GroupKey { prompt_id: 4, first_step: 0 };
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> #}";

const TOOLS: &str = r#"
import asyncio, os, time

def add(a: int, b: int = 2) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b

async def later(text: str) -> str:
    """
    Says something later.

    Args:
        text: What.
    """
    await asyncio.sleep(0.01)
    print("this goes to standard error")
    return text * 2

def hang() -> str:
    """Never answers."""
    time.sleep(1000)

def flood(words: int) -> str:
    """
    Says much.

    Args:
        words: How much.
    """
    return "word " * words

def crash() -> str:
    """Ends its process."""
    os._exit(3)

def starred(*numbers: int) -> int:
    """Adds."""

def named(**more: int) -> int:
    """Adds."""

def placed(a: int, /) -> int:
    """Adds."""

def undescribed(a: int) -> int:
    """Says nothing of a."""

def fail(why: str) -> str:
    """
    Raises.

    Args:
        why: Words.
    """
    raise ValueError(why)

class Counter:
    def __init__(self):
        self.count, self.lock = 0, open(os.devnull)  # which cannot be pickled

    def reset(self, start, **row):
        if start < 0:
            raise ValueError("no start below 0")
        self.count = start
        return f" from {start}" if row.get("tells") else None

    @property
    def twice(self):
        raise RuntimeError("nobody asks for this")

    async def move(self, by: int) -> str:
        """
        Moves.

        Args:
            by: How far.
        """
        self.count += by
        return f"at {self.count}"

    def freeze(self) -> str:
        """Never answers."""
        time.sleep(1000)

    def get_reward(self):
        if self.count > 100:
            raise ValueError("too far")
        return self.count / 10
"#;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tools");

fn config(file: &Path, names: &[&str], more: &[&str]) -> Config {
    let tools: Vec<String> = names.iter().map(|name| format!("\"{}:{name}\"", file.display())).collect();
    let keys =
        ["model_name_or_path=m", "train_file=t", "reward_funcs=format", &format!("tools=[{}]", tools.join(", "))]
            .map(str::to_owned);
    let more = more.iter().map(|&key| key.to_owned());
    Config::load(None, &keys.into_iter().chain(more).collect::<Vec<_>>()).unwrap()
}

fn tools_file(folder: &tempfile::TempDir) -> PathBuf {
    let file = folder.path().join("mine.py");
    fs::write(&file, TOOLS).unwrap();
    file
}

/// Conversations with the tools above and a tokenizer with one token per byte.
struct PlayedConversations {
    conversations: Conversations,
    tokenizer: Arc<Tokenizer>,
    eos: u32,
    _folder: tempfile::TempDir,
}

impl PlayedConversations {
    fn new(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = tools_file(&folder);
        let factory = format!("environment_factory={}:Counter", file.display());
        let more = more.iter().map(|&key| if key == "environment" { &factory } else { key });
        let config = config(&file, &["add", "later", "hang", "crash", "fail", "flood"], &more.collect::<Vec<_>>());
        let tokenizer = Arc::new(bytes(&mut Dice(3), TEMPLATE));
        let eos = tokenizer.eos_token_id().unwrap();
        let process = ToolProcess::start(&config).unwrap().unwrap();
        let options = DatasetOptions { tools: process.schemas().clone(), ..DatasetOptions::default() };
        let model = TurnModel { tokenizer: Arc::clone(&tokenizer), eos_token_ids: vec![eos], max_model_length: 4000 };
        let conversations = Conversations::new(&config, process, &model, options).unwrap();
        Self { conversations, tokenizer, eos, _folder: folder }
    }

    /// Appends a turn of `text` to `trajectory`, ended by the model.
    fn say(&self, trajectory: &mut Trajectory, text: &str) {
        for id in self.tokenizer.encode(text, false).unwrap().into_iter().chain([self.eos]) {
            trajectory.push_sampled(id, -1.0, 3);
        }
        trajectory.finish_reason = Some(FinishReason::Eos);
    }

    fn outcome(&mut self, trajectory: &Trajectory) -> TurnOutcome {
        self.outcome_behind(&[0; 10], trajectory)
    }

    fn outcome_behind(&mut self, prompt: &[u32], trajectory: &Trajectory) -> TurnOutcome {
        let key = TrajectoryKey { group: GROUP, sample: 1 };
        self.conversations.turn_ended(key, prompt, trajectory).unwrap();
        loop {
            if let Some((found, outcome)) = self.conversations.poll(Duration::from_secs(60), |_| true).unwrap().pop() {
                assert_eq!(found, key);
                return outcome;
            }
        }
    }

    /// Text of the context that follows a first turn of `text`.
    fn context(&mut self, text: &str) -> String {
        let mut trajectory = Trajectory::default();
        self.say(&mut trajectory, text);
        match self.outcome(&trajectory) {
            TurnOutcome::Continues(context) => self.tokenizer.decode_all(&context).unwrap(),
            other => panic!("{other:?}"),
        }
    }
}

fn call(name: &str, arguments: Value) -> String {
    format!("<tool_call>{}</tool_call>", json!({"name": name, "arguments": arguments}))
}

fn answered(content: &str) -> String {
    format!("<|im_start|>tool\n{content}<|im_end|>\n")
}

/// Plays an episode with the row's columns. Returns the outcome of opening it and of each turn, up to its end.
fn episode(
    played: &mut PlayedConversations,
    columns: Value,
    turns: &[&str],
) -> (Option<Prompt>, Vec<String>, EpisodeEnd) {
    let columns = Arc::new(columns.as_object().unwrap().clone());
    let prompt = Prompt { id: 0, text: "go".into(), token_ids: vec![1], columns };
    let key = TrajectoryKey { group: GROUP, sample: 0 };
    played.conversations.open(GROUP, &prompt, 1).unwrap();
    let next = |played: &mut PlayedConversations| loop {
        if let Some((found, outcome)) = played.conversations.poll(Duration::from_secs(60), |_| true).unwrap().pop() {
            assert_eq!(found, key);
            return outcome;
        }
    };
    let TurnOutcome::Opened(observed) = next(played) else { panic!("not opened") };
    let (mut trajectory, mut contexts) = (Trajectory::default(), Vec::new());
    for turn in turns {
        played.say(&mut trajectory, turn);
        played.conversations.turn_ended(key, &[0], &trajectory).unwrap();
        match next(played) {
            TurnOutcome::Continues(context) => {
                trajectory.push_context(&context, 3);
                contexts.push(played.tokenizer.decode_all(&context).unwrap());
            }
            TurnOutcome::Ended(end) => return (observed, contexts, end),
            opened @ TurnOutcome::Opened(_) => panic!("{opened:?}"),
        }
    }
    panic!("it goes on after {contexts:?}")
}

#[test]
fn an_environment_is_kept_for_a_trajectory_and_reset_for_the_next() {
    let mut played = PlayedConversations::new(&["environment", "reward_funcs=mine.py:tone"]);
    let names: Vec<&Value> = played
        .conversations
        .process
        .schemas()
        .of_any()
        .as_array()
        .unwrap()
        .iter()
        .map(|it| &it["function"]["name"])
        .collect();
    assert_eq!(
        names,
        ["add", "later", "hang", "crash", "fail", "flood", "freeze", "move"],
        "no reset, get_reward, property"
    );
    assert_eq!(played.conversations.process.rewarding_classes(), ["Counter"]);
    let turn = call("move", json!({"by": 3})) + &call("add", json!({"a": 1}));
    for (start, tells) in [(4, true), (7, false)] {
        let columns = json!({"prompt": [{"role": "user", "content": "go"}], "start": start, "tells": tells});
        let (observed, contexts, end) = episode(&mut played, columns, &[&turn, "done"]);
        assert!(
            contexts[0].contains(&format!("{}{}", answered(&format!("at {}", start + 3)), answered("3"))),
            "{contexts:?}"
        );
        let text = observed.map(|prompt| (prompt.text.clone(), prompt.token_ids.len()));
        let expected = "<|im_start|>user\ngo from 4<|im_end|>\n<|im_start|>assistant\n";
        let len = played.tokenizer.encode(expected, false).unwrap().len();
        assert_eq!(text, tells.then(|| (expected.to_owned(), len)));
        let environment = end.environment.unwrap();
        assert_eq!(
            (environment.class.as_str(), environment.reward.clone()),
            ("Counter", Some(Ok((start + 3) as f32 / 10.0)))
        );
        assert!(environment.state.is_some() && end.failure.is_none() && end.messages.len() == 4);
    }
}

#[test]
fn a_crashed_environment_masks_only_its_own_trajectory() {
    let mut played = PlayedConversations::new(&["environment", "tool_timeout_s=2"]);
    let prompt = json!([{"role": "user", "content": "go"}]);
    for (start, turn, failure) in [
        (1, call("freeze", json!({})), "no answer within 2 s"),
        (1, call("crash", json!({})), "its process ended"),
        (-1, "x".to_owned(), "reset: ValueError: no start below 0"),
    ] {
        let (_, _, end) = episode(&mut played, json!({"prompt": prompt, "start": start}), &[&turn]);
        assert!(end.failure.as_ref().unwrap().starts_with(failure) && end.environment.is_none(), "{end:?}");
    }
    let (_, _, end) = episode(&mut played, json!({"prompt": prompt, "start": 101}), &["x"]);
    let reward = end.environment.unwrap().reward.clone().unwrap();
    assert!(reward.unwrap_err().starts_with("ValueError: too far"), "masked, as with any reward that fails");
    assert_eq!(played.conversations.take_stats().num_failed, 3);
}

/// The expected schemas are those of transformers for the same functions, recorded by scripts/golden_tools.py.
#[test]
fn tool_schemas_equal_transformers() {
    let file = Path::new(GOLDEN).join("functions.py");
    let names = ["multiply", "search", "containers", "unions", "choices", "nothing"];
    let process = ToolProcess::start(&config(&file, &names, &[])).unwrap().unwrap();
    let expected: Map<String, Value> =
        serde_json::from_slice(&fs::read(Path::new(GOLDEN).join("schemas.json")).unwrap()).unwrap();
    let schemas = process.schemas().of_any().as_array().unwrap();
    assert_eq!(schemas.len(), names.len());
    for (name, schema) in names.iter().zip(schemas) {
        assert_eq!(schema.to_string(), expected[*name].to_string(), "the order of keys is the template's");
    }
}

#[test]
fn invalid_tools_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = tools_file(&folder);
    for (name, part) in [
        ("subtract", "has no attribute 'subtract'"),
        ("starred", "starred takes *numbers: a model names every argument"),
        ("named", "named takes **more: a model names every argument"),
        ("placed", "placed takes a, by its place alone: a model names every argument"),
        ("undescribed", "the docstring of undescribed has no description of the argument a"),
        ("time", "time is no function but a value of type module"),
    ] {
        let error = ToolProcess::start(&config(&file, &[name], &[])).unwrap_err().to_string();
        assert!(error.contains(part) && error.starts_with("tools = "), "{error}");
    }
    let error = ToolProcess::start(&config(&folder.path().join("none.py"), &["add"], &[])).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
    assert!(ToolProcess::start(&config(&file, &[], &[])).unwrap().is_none());
}

#[test]
fn tool_results_are_appended_in_call_order() {
    let mut played = PlayedConversations::new(&["tool_workers=2"]);
    let calls =
        [call("add", json!({"a": 3, "b": 4})), call("later", json!({"text": "é"})), call("add", json!({"a": 1}))];
    let mut trajectory = Trajectory::default();
    played.say(&mut trajectory, &calls.concat());
    let TurnOutcome::Continues(context) = played.outcome(&trajectory) else { panic!("it ended") };
    let expected = format!("\n{}{}{}<|im_start|>assistant\n", answered("7"), answered("éé"), answered("3"));
    assert_eq!(context, played.tokenizer.encode(&expected, false).unwrap(), "behind the end that was sampled");
    trajectory.push_context(&context, 3);
    played.say(&mut trajectory, "it is 7");
    let TurnOutcome::Ended(EpisodeEnd { messages, .. }) = played.outcome(&trajectory) else { panic!("it goes on") };
    let function =
        |name: &str, arguments: Value| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let called = [
        function("add", json!({"a": 3, "b": 4})),
        function("later", json!({"text": "é"})),
        function("add", json!({"a": 1})),
    ];
    let tool = |name: &str, content: &str| json!({"role": "tool", "name": name, "content": content});
    let expected = [
        json!({"role": "assistant", "content": "", "tool_calls": called}),
        tool("add", "7"),
        tool("later", "éé"),
        tool("add", "3"),
        json!({"role": "assistant", "content": "it is 7"}),
    ];
    assert_eq!(messages, expected);
    let stats = played.conversations.take_stats();
    assert_eq!((stats.num_trajectories, stats.num_turns, stats.num_calls, stats.num_failures), (1, 2, 3, 0));
}

/// A thought is distinguished from a call in the first turn, where the prompt may have opened it, and in later ones, where the context may have.
#[test]
fn tool_calls_inside_reasoning_are_not_executed() {
    let mut played = PlayedConversations::new(&[]);
    let prompt = played.tokenizer.encode("go<think>\n", false).unwrap();
    let thought = format!("I could {}", call("add", json!({"a": 5})));
    let mut only = Trajectory::default();
    played.say(&mut only, &thought);
    let TurnOutcome::Ended(end) = played.outcome_behind(&prompt, &only) else { panic!("a thought was done") };
    assert_eq!(end.messages, [json!({"role": "assistant", "content": thought})]);
    let mut both = Trajectory::default();
    played.say(&mut both, &format!("{thought}</think>{}", call("add", json!({"a": 1}))));
    let TurnOutcome::Continues(context) = played.outcome_behind(&prompt, &both) else { panic!("it ended") };
    assert!(played.tokenizer.decode_all(&context).unwrap().contains(&answered("3")));
    both.push_context(&[context, prompt].concat(), 3);
    played.say(&mut both, &thought);
    let TurnOutcome::Ended(end) = played.outcome_behind(&[0], &both) else { panic!("a thought was done") };
    assert_eq!(end.messages.len(), 3);
}

#[test]
fn failed_tool_calls_are_reported_to_the_model_and_counted() {
    let mut played = PlayedConversations::new(&["tool_timeout_s=2"]);
    for (turn, part) in [
        (call("nope", json!({})), "{'error': 'Tool nope not found.'}"),
        (call("fail", json!({"why": "a \"reason\""})), r#"{'error': 'a "reason"'}"#),
        (call("add", json!({"b": 1})), "missing 1 required positional argument: 'a'"),
        (call("add", json!([1])), "the arguments of add are no object but [1]"),
        (call("hang", json!({})), "{'error': 'no answer within 2 s'}"),
        (call("crash", json!({})), "{'error': 'its process ended'}"),
        ("<tool_call>{\"name\": \"add\"".to_owned(), "{'error': 'The tool call cannot be read: "),
        (call("add", json!({"a": 5})), "tool\n7<|im_end|>"),
    ] {
        let context = played.context(&turn);
        assert!(context.contains(part), "{turn}: {context}");
    }
    let stats = played.conversations.take_stats();
    assert_eq!((stats.num_calls, stats.num_failures, stats.num_unreadable, stats.num_timeouts), (8, 7, 1, 1));
    assert!(stats.max_seconds >= 2.0 && stats.num_answers == 7, "{stats:?}");
}
