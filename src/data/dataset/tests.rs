use rustix::fs::{CWD, FileType, Mode};

use super::super::fixtures::TokenizerFolder;
use super::*;

fn read(rows: &[&str], options: &DatasetOptions) -> Result<Dataset> {
    let folder = TokenizerFolder::new();
    folder.write(
        "chat_template.jinja",
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}answer{% endif %}",
    );
    folder.write("rows.jsonl", &rows.join("\n"));
    Dataset::from_file(folder.path().join("rows.jsonl"), &folder.tokenizer(), options)
}

fn message(rows: &[&str]) -> String {
    read(rows, &DatasetOptions::default()).unwrap_err().to_string()
}

#[test]
fn text_prompts_are_unchanged_and_conversations_are_rendered() {
    let rows = [
        r#"{"problem": "one plus one", "solution": "two", "level": 3}"#,
        r#"{"prompt": [{"role": "user", "content": "what is one"}], "ground_truth": 1}"#,
        r#"{"prompt": [{"role": "system", "content": "two"}, {"role": "user", "content": "one"}], "answer": null}"#,
        r#"{"prompt": null, "question": "one", "answer": "two"}"#, // as pandas fills columns of other rows
    ];
    let system_prompt = Some("three".into());
    let options = DatasetOptions { system_prompt, prompt_format: PromptFormat::Text, ..Default::default() };
    let data = read(&rows, &options).unwrap();
    assert_eq!(data.prompt(0).text, "one plus one");
    assert_eq!(data.prompt(0).token_ids, [0, 1, 4, 1]); // BOS, as the tokenizer's own template adds it
    assert_eq!(data.prompt(0).columns["answer"], "two");
    assert_eq!(data.prompt(0).columns["level"], 3);
    assert_eq!(data.prompt(1).text, "three what is one answer");
    assert_eq!(data.prompt(1).token_ids, [3, 7, 6, 1, 8]);
    assert_eq!(data.prompt(1).columns["answer"], 1);
    assert_eq!(data.prompt(2).text, "two one answer");
    assert_eq!(data.prompt(3).text, "one");
    let notices = data.counts().notices();
    assert!(notices.len() == 1 && notices[0].starts_with("notice: 2 of 4 prompts are text"), "{notices:?}");
    let told = data.description();
    assert_eq!(
        told,
        "prompts: text unchanged, conversations through the chat template; the first one: \"one plus one\""
    );
    assert!(read(&rows[1..3], &options).unwrap().counts().notices().is_empty());
    assert_eq!(data.prompts().iter().map(|prompt| prompt.id).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn reading_rows_reports_progress() {
    let folder = TokenizerFolder::new();
    folder.write("rows.jsonl", &[r#"{"prompt": "one"}"#; 3].join("\n"));
    let (mut all, sources) = (Vec::new(), RowSources::file(folder.path().join("rows.jsonl")));
    let mut told = |done, is_over| all.push((done, is_over));
    Dataset::read_with(&sources, &folder.tokenizer(), &DatasetOptions::default(), &mut told).unwrap();
    assert_eq!(all, [(1, false), (2, false), (3, false), (3, true)]);
}

#[test]
fn tools_that_the_template_does_not_show_are_reported() {
    let add = serde_json::json!([{"type": "function", "function": {"name": "one"}}]);
    for (tools, template, is_told) in [
        (add.clone(), "{% for m in messages %}{{ m.content }}{% endfor %}", true),
        (
            add,
            "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
            false,
        ),
        (Value::Null, "{% for m in messages %}{{ m.content }}{% endfor %}", false),
    ] {
        let folder = TokenizerFolder::new();
        folder.write("chat_template.jinja", template);
        folder.write("rows.jsonl", r#"{"prompt": [{"role": "user", "content": "two"}]}"#);
        let options = DatasetOptions { tools: ToolSchemas::new(tools, Default::default()), ..Default::default() };
        let data = Dataset::from_file(folder.path().join("rows.jsonl"), &folder.tokenizer(), &options).unwrap();
        let notices = data.counts().notices().concat();
        assert_eq!(notices.contains("shows the model no tools"), is_told, "{template}: {notices}");
    }
}

#[test]
fn prompt_format_chat_makes_text_a_user_message() {
    // GSM8K's row, and one of open-r1's mathematics.
    let gsm8k = r#"{"question": "what is one plus one", "answer": "one plus one is two\n#### 2"}"#;
    let math = r#"{"problem": "one plus two", "solution": "\\boxed{3}", "answer": "3"}"#;
    let options = DatasetOptions { system_prompt: Some("three".into()), ..Default::default() };
    let data = read(&[gsm8k, math], &options).unwrap();
    assert_eq!(data.prompt(0).text, "three what is one plus one answer");
    assert_eq!(
        (&data.prompt(1).text[..], &data.prompt(1).columns["answer"]),
        ("three one plus two answer", &"3".into())
    );
    assert!(data.counts().notices().is_empty());
    let told = data.description();
    assert!(
        told.starts_with("prompts: text as a user's message, through the chat template; the first one: \"three what")
    );

    // Without a chat template text stays text, unless it is asked for.
    let folder = TokenizerFolder::new();
    folder.write("rows.jsonl", &[gsm8k; 2].join("\n"));
    let of = |options: &DatasetOptions| {
        Dataset::from_file(folder.path().join("rows.jsonl"), &folder.tokenizer(), options)
            .map_err(|error| error.to_string())
    };
    assert_eq!(of(&DatasetOptions::default()).unwrap().prompt(0).text, "what is one plus one");
    let notices = of(&options).unwrap().counts().notices();
    assert!(notices[0].starts_with("notice: 2 of 2 prompts are text"), "{notices:?}");
    let chat = DatasetOptions { prompt_format: PromptFormat::Chat, ..Default::default() };
    assert!(of(&chat).unwrap_err().contains("chat template: the model's folder has no chat template"));
}

#[test]
fn variables_reach_the_chat_template() {
    let folder = TokenizerFolder::new();
    let template =
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if enable_thinking is false %}minus{% endif %}";
    folder.write("chat_template.jinja", template);
    folder.write("rows.jsonl", r#"{"prompt": "one"}"#);
    let text = |variables: serde_json::Value| {
        let tokenizer = folder.tokenizer().with_template_variables(variables.as_object().unwrap()).unwrap();
        let data = Dataset::from_file(folder.path().join("rows.jsonl"), &tokenizer, &DatasetOptions::default());
        data.unwrap().prompt(0).text.clone()
    };
    assert_eq!(text(serde_json::json!({})), "one ");
    assert_eq!(text(serde_json::json!({"enable_thinking": false})), "one minus");
}

#[test]
fn a_prompt_may_have_another_column() {
    let options = DatasetOptions { prompt_column: Some("task".into()), ..Default::default() };
    let data = read(&[r#"{"prompt": "one", "task": "two"}"#], &options).unwrap();
    assert_eq!(data.prompt(0).text, "two answer");
    let error = read(&[r#"{"prompt": "one"}"#], &options).unwrap_err().to_string();
    assert!(error.ends_with("no column 'task'; columns seen: prompt"), "{error}");
}

#[test]
fn rows_are_read_from_jsonl_json_and_csv() {
    let folder = TokenizerFolder::new();
    let read = |name: &str, text: &str| {
        folder.write(name, text);
        let data = Dataset::from_file(folder.path().join(name), &folder.tokenizer(), &DatasetOptions::default());
        data.map_err(|error| error.to_string())
    };
    let rows = |data: Dataset| -> Vec<(String, serde_json::Value)> {
        let row = |prompt: &Prompt| (prompt.text.clone(), prompt.columns["answer"].clone());
        data.prompts().iter().map(row).collect()
    };
    let expected = [("one plus one".to_owned(), "2".into()), ("one".to_owned(), serde_json::Value::Null)];
    for (name, text) in [
        (
            "a.json",
            " \n[{\"question\": \"one plus one\", \"answer\": \"2\"},\n {\"question\": \"one\", \"answer\": null}]",
        ),
        (
            "lines.json",
            "{\"question\": \"one plus one\", \"answer\": \"2\"}\n{\"question\": \"one\", \"answer\": null}",
        ),
        ("a.csv", "question,answer\n\"one plus\none\",2\none,\n"),
        ("a.tsv", "\u{feff}question\tanswer\none plus one\t2\none\t\n"),
    ] {
        let read = rows(read(name, text).unwrap());
        let read: Vec<_> = read.into_iter().map(|(text, answer)| (text.replace('\n', " "), answer)).collect();
        assert_eq!(read, expected, "{name}");
    }
    assert!(read("b.json", "[{\"question\": \"one\"}, 3]").unwrap_err().contains("b.json:2: expected an object"));
    assert!(read("c.json", "[{").unwrap_err().contains("expected a JSON list of objects"));
    assert!(read("b.csv", "question,answer\none\n").unwrap_err().contains("b.csv:2: "));
    assert!(read("c.csv", "question,question\none,one\n").unwrap_err().contains("names the column 'question' twice"));
}

#[test]
fn open_r1_rows_with_tests_are_read() {
    let row = r#"{"prompt": "one", "verification_info": {"language": "python", "test_cases": [{"input": "1", "output": "2"}]}}"#;
    let options = DatasetOptions { required_columns: vec!["tests".into()], ..Default::default() };
    let data = read(&[row], &options).unwrap();
    assert_eq!(data.prompt(0).columns["tests"]["test_cases"][0]["output"], "2");
    let error = read(&[r#"{"prompt": "one"}"#], &options).unwrap_err().to_string();
    assert!(error.contains("'tests'") && error.contains("'verification_info'"), "{error}");
}

#[test]
fn verl_rows_are_read() {
    let row = r#"{"data_source": "gsm8k", "prompt": [{"role": "user", "content": "one"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": 0}}"#;
    let data = read(&[&row.replace('\n', " ")], &DatasetOptions::default()).unwrap();
    assert_eq!(data.prompt(0).columns["answer"], "1");
    assert_eq!(data.prompt(0).columns["extra_info"]["index"], 0);
}

#[test]
fn dropped_long_prompts_are_counted_by_reason_and_row_ids_stay() {
    let rows = [r#"{"prompt": "one one one one"}"#, r#"{"prompt": "one one one"}"#, r#"{"prompt": "one"}"#];
    let options = DatasetOptions {
        max_prompt_length: Some(4),
        max_model_length: Some(5),
        max_completion_length: 3,
        ..Default::default()
    };
    let data = read(&rows, &options).unwrap();
    let counts = data.counts();
    assert_eq!((counts.read, counts.over_max_prompt_length, counts.over_context, counts.kept), (3, 1, 1, 1));
    let why = "1 longer than max_prompt_length 4, 1 longer than 2 tokens, context 5 less max_completion_length 3";
    assert_eq!(counts.to_string(), format!("3 read, {why}, 1 kept"));
    assert_eq!(counts.notices()[0], format!("warning: 2 of 3 rows are left out: {why}"));
    assert_eq!(data.prompt(0).id, 2);
    let options = DatasetOptions { max_prompt_length: Some(1), ..Default::default() };
    let error = read(&rows, &options).unwrap_err().to_string();
    assert!(error.contains("no usable prompts (3 read, 3 longer than max_prompt_length 1,"), "{error}");
}

#[test]
fn losing_more_than_a_tenth_of_the_rows_is_a_warning() {
    let counts = |over_context| DatasetCounts {
        read: 20,
        over_context,
        kept: 20 - over_context,
        context: Some((64, 56)),
        ..Default::default()
    };
    assert!(counts(2).notices().is_empty());
    let warnings = counts(3).notices();
    assert!(warnings[0].ends_with("3 longer than 8 tokens, context 64 less max_completion_length 56"), "{warnings:?}");
}

#[test]
fn a_byte_order_mark_is_skipped_and_other_encodings_are_refused() {
    let rows = |bytes: &[u8]| {
        let folder = TokenizerFolder::new();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, bytes).unwrap();
        Dataset::from_file(&path, &folder.tokenizer(), &DatasetOptions::default())
    };
    for text in
        ["\u{feff}{\"prompt\": \"one\"}\r\n", "\u{feff}[{\"prompt\": \"one\"}]", "\u{feff}\n{\"prompt\": \"one\"}"]
    {
        assert_eq!(rows(text.as_bytes()).unwrap().prompt(0).text, "one", "{text:?}");
    }
    let error = rows(b"{\"prompt\": \"one\"}\n{\"prompt\": \"\xe9\"}\n").unwrap_err().to_string();
    assert!(error.contains(":2: not UTF-8: expected text in UTF-8 (convert it with iconv"), "{error}");
}

#[test]
fn bad_rows_are_named_with_line_and_columns() {
    assert!(message(&[]).contains("no usable prompts (0 read,"));
    let missing = message(&["", r#"{"text": "one", "answer": 1}"#]);
    assert!(
        missing.ends_with(
            ":2: no column 'prompt' or 'problem' or 'question'; columns seen: text, answer; to use another column set \
             dataset_prompt_column"
        ),
        "{missing}"
    );
    let nothing = message(&[r#"{"prompt": null, "answer": 1}"#]);
    assert!(
        nothing.ends_with("columns seen: prompt (null), answer; to use another column set dataset_prompt_column"),
        "{nothing}"
    );
    let cut = message(&["{\"prompt\": [", r#"{"prompt": "one"}"#]);
    assert!(cut.contains(":1: not JSON: EOF while parsing a list; expected an object"), "{cut}");
    assert!(message(&[r#"{"prompt": "one""#]).contains(":1: not JSON"));
    assert!(message(&[r#"["one"]"#]).contains("expected an object"));
    assert!(message(&[r#"{"prompt": 3}"#]).contains("neither text nor a list"));
    assert!(message(&[r#"{"prompt": [{"role": "user"}]}"#]).contains("expected content (text)"));
    assert!(
        message(&[r#"{"prompt": [{"role": "user", "content": "one", "tool_calls": [1]}]}"#])
            .contains("column 'prompt', message 1: tool_calls[0]: expected an object")
    );
    assert!(
        message(&[r#"{"prompt": [{"role": "assistant", "content": "one"}]}"#])
            .contains("a prompt must end with a message to answer")
    );
    assert!(
        message(&[r#"{"prompt": "hippopotamus"}"#])
            .contains(":1: tokenizer and model disagree: the tokenizer cannot encode")
    );
    let options = DatasetOptions { required_columns: vec!["answer".into()], ..Default::default() };
    let error = read(&[r#"{"prompt": "one", "answer": null}"#], &options).unwrap_err().to_string();
    assert!(error.contains("no column 'answer'"), "{error}");
    assert!(error.ends_with("; to use another column set reward.answer_column"), "{error}");
    let with_answer = |answer: &str| read(&[&format!(r#"{{"prompt": "one", "answer": {answer}}}"#)], &options);
    for rounded in ["123456789012345678901234567890", "-9876543210987654321"] {
        let error = with_answer(rounded).unwrap_err().to_string();
        assert!(error.contains(&format!(":1: column answer: the integer {rounded} has more than 64 bits")), "{error}");
        with_answer(&format!("\"{rounded}\"")).unwrap();
    }
    for exact in ["18446744073709551615", "-9223372036854775808", "1e22", "6.022e23", "0.30000000000000004"] {
        with_answer(exact).unwrap();
    }
    for exact in ["449.49106478873813", "-0.0", "1.0", "1", "18446744073709551615"] {
        assert_eq!(with_answer(exact).unwrap().prompt(0).columns["answer"].to_string(), exact);
    }
    let list = format!("[{{\"prompt\": \"one\"}}, {{\"prompt\": \"one\", \"id\": {}}}]", u128::MAX);
    let error = message(&[&list]);
    assert!(error.contains(&format!("[1].id: the integer {} has more than 64 bits", u128::MAX)), "{error}");
}

/// Rows in OpenAI's form, with nulls that Parquet stores for fields that only other rows have.
#[test]
fn text_parts_of_a_message_are_joined() {
    let row = |parts: &str| format!(r#"{{"prompt": [{{"role": "user", "content": [{parts}]}}]}}"#);
    let parts = r#"{"type": "text", "text": "what is ", "image_url": null}, {"type": "text", "text": "one"}"#;
    let data = read(&[&row(parts)], &DatasetOptions::default()).unwrap();
    assert_eq!(data.prompt(0).text, "what is one answer");
    for other in [r#"{"type": "image_url", "image_url": "x"}"#, r#"{"type": "text"}"#, r#""one""#] {
        assert!(message(&[&row(other)]).contains("column 'prompt', message 1: content[0]: expected"), "{other}");
    }
}

#[test]
fn conversations_need_a_chat_template() {
    let folder = TokenizerFolder::new();
    folder.write("rows.jsonl", r#"{"prompt": [{"role": "user", "content": "one"}]}"#);
    let path = folder.path().join("rows.jsonl");
    let error = Dataset::from_file(path, &folder.tokenizer(), &DatasetOptions::default()).unwrap_err();
    assert!(matches!(error, Error::ChatTemplate { .. }), "{error}");
}

#[test]
fn jsonl_may_be_a_pipe_but_parquet_may_not() {
    let folder = TokenizerFolder::new();
    let pipe = folder.path().join("rows");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let read = |bytes: Vec<u8>| {
        std::thread::scope(|scope| {
            scope.spawn(|| std::fs::write(&pipe, bytes));
            Dataset::from_file(&pipe, &folder.tokenizer(), &DatasetOptions::default())
        })
    };
    let rows = "{\"prompt\": \"one\"}\n{\"prompt\": \"two three\"}\n";
    let data = read(rows.into()).unwrap();
    assert_eq!((data.len(), data.prompt(1).text.as_str()), (2, "two three"));
    assert_eq!(read(b"{}".to_vec()).unwrap_err().to_string().matches("rows:1: no column").count(), 1);
    let error = read([b"PAR1", rows.as_bytes()].concat()).unwrap_err().to_string();
    assert!(error.contains("expected a regular file"), "{error}");
}

#[test]
fn huge_prompts_are_counted_as_too_long_without_tokenizing() {
    let long = "one ".repeat(1 << 20);
    let rows = [
        format!(r#"{{"prompt": "{long}"}}"#),
        format!(r#"{{"prompt": [{{"role": "user", "content": "{long}"}}]}}"#),
        r#"{"prompt": "one"}"#.to_owned(),
    ];
    let rows = rows.each_ref().map(String::as_str);
    let options = DatasetOptions { max_model_length: Some(5), max_completion_length: 3, ..Default::default() };
    let counts = read(&rows, &options).unwrap().counts().clone();
    assert_eq!((counts.read, counts.over_context, counts.kept), (3, 2, 1));
    let options = DatasetOptions { max_prompt_length: Some(4), ..options };
    let counts = read(&rows, &options).unwrap().counts().clone();
    assert_eq!((counts.over_max_prompt_length, counts.over_context, counts.kept), (2, 0, 1));
}

#[test]
fn device_files_are_refused_as_data() {
    let folder = TokenizerFolder::new();
    let rows = folder.path().join("rows");
    std::os::unix::fs::symlink("/dev/zero", &rows).unwrap();
    let error = Dataset::from_file(&rows, &folder.tokenizer(), &DatasetOptions::default()).unwrap_err();
    assert!(error.to_string().ends_with("expected a regular file, found a device"), "{error}");
}
