//! Tests the prompts of the policy as its own teacher against those of TRL's trainers (`scripts/golden_self_distillation.py`).

use std::sync::Arc;

use serde_json::Value;

use super::own_teacher::{OwnTeacher, filled};
use crate::config::Config;
use crate::data::{DatasetOptions, Tokenizer};
use crate::train::Sequence;
use crate::types::{Prompt, RolloutGroup, Trajectory};

/// The prompts, and which completions have one, must equal those of TRL's trainers.
#[test]
fn self_distillation_prompts_equal_trl() {
    let golden: Value = serde_json::from_str(include_str!("../../tests/golden/self_distillation.json")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_folder("configs/arithmetic/model").unwrap());
    let (prompts, known) = (golden["prompts"].as_array().unwrap(), golden["privileged_contexts"].as_array().unwrap());
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    for case in golden["cases"].as_array().unwrap() {
        let rows = case["sequences"].as_array().unwrap();
        let num_generations = rows.len() / prompts.len();
        let group = |(index, (prompt, known)): (usize, (&Value, &Value))| {
            let columns = serde_json::json!({"prompt": prompt, "privileged_context": known});
            let own = index * num_generations..(index + 1) * num_generations;
            let completion = |place: usize| {
                let token_ids = ids(&rows[place][1]);
                Trajectory {
                    text: tokenizer.decode(&token_ids).unwrap(),
                    loss_mask: vec![true; token_ids.len()],
                    token_ids,
                    reward: golden["rewards"][place].as_f64().map(|reward| reward as f32),
                    ..Trajectory::default()
                }
            };
            let columns = Arc::new(columns.as_object().unwrap().clone());
            let prompt = Prompt { id: index as u64, text: String::new(), token_ids: ids(&rows[own.start][0]), columns };
            RolloutGroup { completions: own.map(completion).collect(), ..RolloutGroup::new(prompt) }
        };
        let groups: Vec<RolloutGroup> = prompts.iter().zip(known).enumerate().map(group).collect();
        let teacher = OwnTeacher::new(&config(case), &DatasetOptions::default(), &tokenizer, 128).unwrap();
        let of_group = |group: &RolloutGroup| -> Vec<Sequence> {
            let prompt = group.prompt.token_ids.clone();
            group.completions.iter().map(|completion| Sequence::of_trajectory(&prompt, completion)).collect()
        };
        let mut sequences: Vec<Sequence> = groups.iter().flat_map(of_group).collect();
        teacher.prompt(&groups, &mut sequences).unwrap();
        let what = format!("{} {}", case["kind"], case["name"]);
        for (row, sequence) in rows.iter().zip(&sequences) {
            let expected = (row[3] == true).then(|| ids(&row[2]));
            assert_eq!(sequence.teacher_prompt, expected, "{what}");
        }
        assert!(sequences.iter().any(|sequence| sequence.teacher_prompt.is_some()), "{what}");
    }
}

/// The configuration of a case.
fn config(case: &Value) -> Config {
    let required = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"].map(str::to_owned);
    let read_here = ["template", "success", "feedback", "reprompt", "skip"];
    let keys =
        case["config"].as_object().unwrap().iter().filter(|(key, _)| read_here.iter().any(|part| key.contains(part)));
    let keys = keys.map(|(key, value)| format!("{key}={value}"));
    let kind = format!("self_distillation={}", case["kind"].as_str().unwrap());
    Config::load(None, &required.into_iter().chain([kind]).chain(keys).collect::<Vec<_>>()).unwrap()
}

#[test]
fn self_distillation_refuses_missing_context_and_long_prompts() {
    let tokenizer = Arc::new(Tokenizer::from_folder("configs/arithmetic/model").unwrap());
    let case = serde_json::json!({"kind": "sdft", "config": {}});
    let teacher = OwnTeacher::new(&config(&case), &DatasetOptions::default(), &tokenizer, 12).unwrap();
    let group = |columns: Value| {
        let columns = Arc::new(columns.as_object().unwrap().clone());
        let completion =
            Trajectory { token_ids: vec![7; 4], loss_mask: vec![true; 4], reward: Some(1.0), ..Trajectory::default() };
        let prompt = Prompt { id: 0, text: String::new(), token_ids: vec![3], columns };
        RolloutGroup { completions: vec![completion], ..RolloutGroup::new(prompt) }
    };
    let said = |columns: Value| {
        let mut sequences = [Sequence::of_tokens(vec![3, 7, 7, 7, 7], 1)];
        teacher.prompt(&[group(columns)], &mut sequences).unwrap_err().to_string()
    };
    assert!(said(serde_json::json!({"prompt": "what"})).contains("a column privileged_context"));
    let row = serde_json::json!({"prompt": "what is two plus two ?", "privileged_context": "the answer is four ?"});
    assert!(said(row).contains("raise max_model_length"));
    let answered = serde_json::json!([{"role": "user", "content": "what"}, {"role": "assistant", "content": "is"}]);
    assert!(
        said(serde_json::json!({"prompt": answered, "privileged_context": "a"})).contains("ends with a user message")
    );
}

#[test]
fn placeholders_inside_inserted_text_are_not_expanded() {
    let texts = [("{prompt}", "a {solution} b"), ("{solution}", "{prompt}")];
    assert_eq!(filled("{prompt}|{solution}{prompt}{other}", &texts), "a {solution} b|{prompt}a {solution} b{other}");
}
