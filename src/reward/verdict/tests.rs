use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::types::{Prompt, fixtures};

/// Results of math-verify 0.9.0, open-r1 at commit 1416fa0 and TRL 1.16, recorded by scripts/golden_rewards.py.
fn golden() -> Value {
    serde_json::from_str(include_str!("../../../tests/golden/rewards.json")).unwrap()
}

fn texts(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

fn group(reference: &str, texts: &[String]) -> RolloutGroup {
    let columns = json!({"answer": reference}).as_object().unwrap().clone();
    let prompt = Prompt { columns: Arc::new(columns), ..fixtures::prompt(0) };
    let completions = texts.iter().map(|text| fixtures::completion(text)).collect();
    RolloutGroup { completions, ..RolloutGroup::new(prompt) }
}

fn verdict(name: &str) -> Verdict {
    Verdict::of(name, &RewardConfig::default()).unwrap()
}

/// Every pair that this crate considers equal is also equal for the original reward, in all 160,000 pairs of spellings.
#[test]
fn numbers_accepted_without_math_verify_are_equal_by_math_verify() {
    let golden = golden();
    let spellings = &golden["spellings"];
    let completions = texts(&spellings["completions"]);
    for (name, equal) in spellings["equal"].as_object().unwrap() {
        let equal: HashMap<usize, Vec<usize>> =
            serde_json::from_value::<Vec<_>>(equal.clone()).unwrap().into_iter().collect();
        let (verdict, mut num_told, mut num_equal) = (verdict(name), 0, 0);
        for (i, reference) in texts(&spellings["golds"]).iter().enumerate() {
            let group = group(reference, &completions);
            let equal = equal.get(&i).map_or(&[][..], Vec::as_slice);
            num_equal += equal.len();
            for (j, completion) in completions.iter().enumerate() {
                if verdict.at_once(&group, j).unwrap().is_some() {
                    assert!(equal.contains(&j), "{name}: {reference} and {completion}");
                    num_told += 1;
                }
            }
        }
        assert!(num_told > num_equal / 20, "{name}: {num_told} of {num_equal}");
    }
}

#[test]
fn math_answers_score_as_in_open_r1_and_trl() {
    let golden = golden();
    let answers: Vec<(String, String)> = serde_json::from_value(golden["answers"].clone()).unwrap();
    let group = group("", &answers.iter().map(|(_, text)| text.clone()).collect::<Vec<_>>());
    let is_right = |name: &str, index: usize| golden["of_answer"][name][index].as_f64();
    let mut settings = RewardConfig::default();
    settings.arguments.cosine_max_len = 100;
    for (name, by) in [("cosine", "accuracy"), ("length", "accuracy"), ("get_cosine_scaled_reward", "accuracy_reward")]
    {
        let verdict = Verdict::of(name, &settings).unwrap();
        for (index, (reference, text)) in answers.iter().enumerate() {
            let is_read_by_all = reference.contains(['$', '\\']);
            let Some(is_right) = is_right(by, index).filter(|_| is_read_by_all) else { continue };
            let score = verdict.score(is_right == 1.0, &group, index).unwrap();
            let expected = golden["of_answer"][name][index].as_f64().unwrap() as f32;
            let close = score.value().is_some_and(|score| (score - expected).abs() < 1e-6);
            assert!(close, "{name}: {text}: {score:?}, expected {expected}");
        }
    }
}

#[test]
fn a_missing_answer_column_is_a_failure_and_solution_is_accepted() {
    let mut group = group("5", &["\\boxed{5}".into()]);
    assert_eq!(verdict("math").at_once(&group, 0).unwrap(), Some(Score::Value(1.0)));
    group.prompt.columns = Arc::new(json!({"answer": 5, "solution": "$6$"}).as_object().unwrap().clone());
    assert_eq!(verdict("math").at_once(&group, 0).unwrap(), Some(Score::Value(1.0)));
    assert_eq!(verdict("accuracy").at_once(&group, 0).unwrap(), None);
    group.prompt.columns = Arc::new(json!({"answer": null}).as_object().unwrap().clone());
    assert_eq!(verdict("math").at_once(&group, 0).unwrap_err().kind, FailureKind::Error);
}

#[test]
fn only_the_part_after_the_reasoning_is_compared() {
    let texts = ["<think>\\boxed{5}</think> \\boxed{6}", "\\boxed{6}", "a</think>\\boxed{6}</think>\\boxed{5}"]
        .map(str::to_owned);
    let group = group("5", &texts);
    let told = |name| (0..3).map(|index| verdict(name).at_once(&group, index).unwrap().is_some()).collect::<Vec<_>>();
    assert_eq!(told("reasoning_accuracy_reward"), [false, false, true]);
    assert_eq!(told("accuracy_reward"), [false; 3]);
}
