use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use super::super::RewardInput;
use super::*;
use crate::types::{Prompt, fixtures};

fn group(id: u64, texts: &[&str]) -> RolloutGroup {
    let columns = serde_json::Map::from_iter([("answer".to_owned(), id.into())]);
    let prompt = Prompt { columns: Arc::new(columns), ..fixtures::prompt(id) };
    RolloutGroup {
        completions: texts.iter().map(|text| fixtures::completion(text)).collect(),
        ..RolloutGroup::new(prompt)
    }
}

fn config(names: &[&str], num_threads: usize, timeout_s: f64) -> Config {
    let overrides = [
        "model_name_or_path=m".into(),
        "train_file=t".into(),
        format!("reward_funcs={names:?}"),
        format!("reward.num_threads={num_threads}"),
        format!("reward.timeout_s={timeout_s}"),
    ];
    Config::load(None, &overrides).unwrap()
}

/// A pool with this one reward.
fn pool(num_threads: usize, timeout_s: f64, function: RewardFunction) -> RewardPool {
    RewardPool::with_functions(&config(&["own"], num_threads, timeout_s), &[("own", function)]).unwrap()
}

fn function(score: impl Fn(&RewardInput<'_>) -> Result<f32> + Send + Sync + 'static) -> RewardFunction {
    Arc::new(score)
}

fn rewards(group: &RolloutGroup) -> Vec<Option<f32>> {
    group.completions.iter().map(|completion| completion.reward).collect()
}

#[test]
fn built_in_rewards_are_weighted_and_also_kept_separately() {
    let mut config = config(&["format", "numeric_answer"], 2, 5.0);
    config.reward_weights = vec![0.5, 2.0];
    config.reward.format_pattern = "a+".into();
    let mut pool = RewardPool::new(&config).unwrap();
    let mut groups = [group(7, &["aaa", "#### 7.0", "x"])];
    let ticket = pool.submit(&groups[0]);
    pool.wait(&mut groups, &[ticket]).unwrap();
    let taken = pool.wait(&mut groups, &[ticket]).unwrap_err().to_string();
    assert!(taken.contains("1 groups and 1 tickets, 0 of them open"), "{taken}");
    let none = pool.wait(&mut groups, &[]).unwrap_err().to_string();
    assert!(none.contains("1 groups and 0 tickets"), "{none}");
    assert_eq!(rewards(&groups[0]), [Some(0.5), Some(2.0), Some(0.0)]);
    assert_eq!(groups[0].completions[1].rewards, [Some(0.0), Some(1.0)]);
    assert_eq!(pool.names(), ["format", "numeric_answer"]);
    assert_eq!(pool.required_columns(), ["answer"]);
}

#[test]
fn scores_reach_their_completions_whatever_the_order_of_threads_and_submission() {
    let length = function(|input| {
        std::thread::sleep(Duration::from_millis(input.completion.len() as u64 % 3));
        Ok(input.completion.len() as f32)
    });
    let mut groups: Vec<_> = (0..20).map(|id| group(id, &["x".repeat(id as usize).as_str(), "yyyy", "z"])).collect();
    groups.push(group(3, &["the same prompt again"]));
    let mut pool = pool(3, 5.0, length);
    let mut tickets: Vec<_> = groups.iter().rev().map(|group| pool.submit(group)).collect();
    tickets.reverse();
    pool.wait(&mut groups, &tickets).unwrap();
    for (id, group) in groups[..20].iter().enumerate() {
        assert_eq!(rewards(group), [Some(id as f32), Some(4.0), Some(1.0)]);
    }
    assert_eq!(rewards(&groups[20]), [Some(21.0)]);
    assert!(pool.shared.lock().pending.is_empty());
}

/// Groups with equal tokens are distinguished by their tickets.
#[test]
fn equal_groups_get_the_scores_of_their_own_tickets() {
    let num_calls = AtomicU32::new(0);
    let mut pool = pool(1, 5.0, function(move |_| Ok(num_calls.fetch_add(1, Ordering::SeqCst) as f32)));
    let mut groups = [group(7, &["equal"]), group(7, &["equal"])];
    let [first, second] = [pool.submit(&groups[0]), pool.submit(&groups[1])];
    pool.wait(&mut groups, &[second, first]).unwrap();
    assert_eq!(groups.each_ref().map(rewards), [[Some(1.0)], [Some(0.0)]]);
    let ticket = pool.submit(&groups[0]);
    assert_eq!(pool.shared.lock().pending.len(), 1);
    pool.give_up();
    assert!(pool.shared.lock().pending.is_empty(), "nobody asks for {ticket:?}");
}

#[test]
fn failed_rewards_mask_samples_and_are_counted_by_kind() {
    let faulty = function(|input| match input.completion {
        "panic" => panic!("asked for"),
        "nan" => Ok(f32::NAN),
        "infinite" => Ok(f32::INFINITY),
        "error" => Err(Error::Environment { message: "asked for".into() }),
        _ => Ok(1.0),
    });
    let fine = function(|_| Ok(3.0));
    let functions = [("faulty", faulty), ("fine", fine)];
    let mut pool = RewardPool::with_functions(&config(&["faulty", "fine"], 2, 5.0), &functions).unwrap();
    let mut groups = [group(0, &["panic", "nan", "infinite", "error", "good"])];
    pool.score(&mut groups).unwrap();
    assert_eq!(rewards(&groups[0]), [None, None, None, None, Some(4.0)]);
    assert_eq!(groups[0].completions[0].rewards, [None, Some(3.0)]);
    let faulty = |kind, count| FailureCount::new("faulty", kind, count);
    let kinds = [FailureKind::Error, FailureKind::Panic, FailureKind::NonFinite];
    assert_eq!(pool.take_failures(), [faulty(kinds[0], 1), faulty(kinds[1], 1), faulty(kinds[2], 2)]);
    assert_eq!(pool.take_failures(), kinds.map(|kind| faulty(kind, 0)), "kinds that were met stay");
}

#[test]
fn a_stuck_reward_masks_only_its_own_sample() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let stuck = function(move |input| {
        if input.completion == "stuck" {
            let _ = gate.lock().unwrap().recv();
        }
        Ok(1.0)
    });
    let mut pool = pool(1, 0.2, stuck);
    let mut groups = [group(0, &["stuck", "good", "good"])];
    let ticket = pool.submit(&groups[0]);
    pool.wait(&mut groups, &[ticket]).unwrap();
    assert_eq!(rewards(&groups[0]), [None, Some(1.0), Some(1.0)]);
    assert_eq!(pool.take_failures(), [FailureCount::new("own", FailureKind::Timeout, 1)]);
    drop(pool);
    drop(release);
}

#[test]
fn a_timeout_is_attributed_to_the_function_that_hangs() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let faulty = function(|_| Err(Error::Environment { message: "asked for".into() }));
    let stuck = function(move |_| {
        let _ = gate.lock().unwrap().recv();
        Ok(1.0)
    });
    let functions = [("faulty", faulty), ("stuck", stuck)];
    let mut pool = RewardPool::with_functions(&config(&["faulty", "stuck"], 1, 0.2), &functions).unwrap();
    pool.score(&mut [group(0, &["x"])]).unwrap();
    let expected = [("faulty", FailureKind::Error), ("stuck", FailureKind::Timeout)];
    assert_eq!(pool.take_failures(), expected.map(|(name, kind)| FailureCount::new(name, kind, 1)));
    drop(release);
}

#[test]
fn reward_names_are_checked_and_custom_functions_need_no_column() {
    let error = RewardPool::new(&config(&["formt"], 1, 1.0)).unwrap_err().to_string();
    assert!(
        error
            .starts_with("reward_funcs = formt: expected built-in rewards (format, numeric_answer, exact_answer, math"),
        "{error}"
    );
    let own = function(|_| Ok(0.0));
    let named_as_builtin = config(&["numeric_answer"], 1, 1.0);
    let pool = RewardPool::with_functions(&named_as_builtin, &[("numeric_answer", own)]).unwrap();
    assert!(pool.required_columns().is_empty());
}

#[test]
fn a_custom_reward_with_a_built_in_name_does_not_decide_solved() {
    let entries = ["format", "my.py:code", "exact_answer", "numeric_answer"];
    let mut config = config(&entries, 1, 1.0);
    let judges =
        |config: &Config, functions: &[_]| RewardPool::with_functions(config, functions).unwrap().judges.clone();
    assert_eq!(judges(&config, &[]), [2, 3]);
    assert_eq!(judges(&config, &[("numeric_answer", function(|_| Ok(0.0)))]), [2]);
    let table =
        ["model_name_or_path=m", "train_file=t", "reward_funcs=format", "rewards.exact_answer.command=[\"cat\"]"];
    config.rewards = Config::load(None, &table.map(str::to_owned)).unwrap().rewards;
    assert_eq!(judges(&config, &[]), [3]);
}

#[test]
fn rewards_that_can_never_mark_a_sample_solved_give_a_warning() {
    let doubt = |entries: &[&str], chosen: &[&str]| {
        let config =
            Config { eval_solved_by: chosen.iter().map(ToString::to_string).collect(), ..config(entries, 1, 1.0) };
        let functions = [("brevity", function(|_| Ok(0.5))), ("tone", function(|_| Ok(0.5)))];
        let pool = RewardPool::with_functions(&config, &functions).unwrap();
        pool.doubt_of_solving(&config.deciding_rewards(pool.judges()), !chosen.is_empty())
    };
    for (entries, chosen, part) in [
        (
            &["format", "soft_overlong_punishment"][..],
            &[][..],
            "soft_overlong_punishment gives 1, which this reward never does",
        ),
        (&["get_repetition_penalty_reward"], &[], "eval_solved_by"),
        (&["numeric_answer", "length"], &["numeric_answer", "length"], "if length gives 1, which"),
        (&["tone", "brevity"], &[], "each of tone, brevity gives 1; if one of them cannot"),
    ] {
        let said = doubt(entries, chosen).unwrap_or_default();
        assert!(said.contains(part), "{entries:?}: {said}");
    }
    for (entries, chosen) in [
        (&["numeric_answer", "length"][..], &[][..]),
        (&["numeric_answer", "brevity"], &[]),
        (&["tone", "brevity"], &["tone", "brevity"]),
        (&["format"], &[]),
    ] {
        assert_eq!(doubt(entries, chosen), None, "{entries:?}");
    }
}

/// Scores of a group are returned while other groups are still being scored.
#[test]
fn scored_groups_are_returned_before_unscored_ones() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let slow = function(move |input| {
        if input.completion == "slow" {
            let _ = gate.lock().unwrap().recv();
        }
        Ok(1.0)
    });
    let mut pool = pool(2, 30.0, slow);
    let mut groups = [group(0, &["slow", "good"]), group(1, &["good", "good"])];
    let tickets: Vec<_> = groups.iter().map(|group| pool.submit(group)).collect();
    assert_eq!(pool.poll(&mut groups, &tickets, true).unwrap(), [false, true], "it waits for the first");
    assert_eq!(rewards(&groups[0]), [None, None]);
    assert_eq!(rewards(&groups[1]), [Some(1.0), Some(1.0)]);
    assert_eq!(pool.poll(&mut groups[..1], &tickets[..1], false).unwrap(), [false], "it does not wait");
    assert!(pool.poll(&mut [], &[], true).unwrap().is_empty(), "there is nothing to wait for");
    release.send(()).unwrap();
    assert_eq!(pool.poll(&mut groups[..1], &tickets[..1], true).unwrap(), [true]);
    assert_eq!(rewards(&groups[0]), [Some(1.0), Some(1.0)]);
}

/// A terminal that does not take what is shown keeps no thread from scoring.
#[test]
fn threads_have_the_lock_while_progress_is_shown() {
    let pool = pool(1, 60.0, function(|_| Ok(1.0)));
    let (ticket, is_shown) = (pool.submit(&group(1, &["a"])), Cell::new(false));
    let show = || {
        while !pool.shared.lock().is_scored(ticket.0) {
            std::thread::yield_now();
        }
        is_shown.set(true);
    };
    drop(pool.await_until(|_| is_shown.get(), show).unwrap());
}

/// TRL reads rows with the library `datasets`, which gives all rows the same columns, with None where a row lacks one.
#[test]
fn python_functions_get_none_in_columns_that_only_other_rows_have() {
    const FUNCTION: &str = "def own(completions, target, **columns):\n    assert set(columns) == \
        {'prompts', 'completion_ids', 'trainer_state', 'level'}\n    return [None if value is None else float(value) \
        for value in target]\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("own.py");
    std::fs::write(&file, FUNCTION).unwrap();
    let mut pool = RewardPool::new(&config(&[&format!("{}:own", file.display()), "format"], 1, 60.0)).unwrap();
    pool.start().unwrap();
    let row = |columns: serde_json::Value| {
        let columns = Arc::new(columns.as_object().unwrap().clone());
        Prompt { columns, ..fixtures::prompt(0) }
    };
    let rows = [serde_json::json!({"prompt": "p", "target": "2"}), serde_json::json!({"prompt": "p"})].map(row);
    let held_out = [row(serde_json::json!({"prompt": "p", "target": null, "level": 1}))];
    assert!(pool.check_columns("the rows", &rows[1..]).is_err(), "no row has the column");
    pool.check_columns("train.jsonl", &rows).unwrap();
    pool.check_columns("held_out.jsonl", &held_out).unwrap();
    let of = |prompt: &Prompt| RolloutGroup {
        completions: vec![fixtures::completion("x")],
        ..RolloutGroup::new(prompt.clone())
    };
    let mut groups = [of(&rows[0]), of(&rows[1]), of(&held_out[0])];
    pool.score(&mut groups).unwrap();
    let scores = groups.each_ref().map(|group| group.completions[0].rewards[0]);
    assert_eq!((scores, pool.take_cause()), ([Some(2.0), None, None], None));
    assert_eq!(groups[1].completions[0].reward, Some(0.0), "the other reward applies");
}
