use super::super::fixtures::TokenizerFolder;
use super::*;

#[test]
fn decoding_restores_text_and_skips_special_tokens() {
    let tokenizer = TokenizerFolder::new().tokenizer();
    let ids = tokenizer.encode("one plus two", false).unwrap();
    assert_eq!(tokenizer.decode(&ids).unwrap(), "one plus two");
    let eos = tokenizer.eos_token_id().unwrap();
    assert_eq!(tokenizer.decode(&[&ids[..], &[eos, 9999]].concat()).unwrap(), "one plus two");
    assert_eq!(tokenizer.encode("one", true).unwrap(), [tokenizer.token_id("<s>").unwrap(), ids[0]]);
}

#[test]
fn text_without_a_token_is_an_error() {
    let error = TokenizerFolder::new().tokenizer().encode("one hippopotamus", false).unwrap_err();
    assert!(error.to_string().contains("cannot encode 'one hippopotamus'"), "{error}");
}

#[test]
fn vocabulary_and_embedding_sizes_are_compared() {
    let tokenizer = TokenizerFolder::new().tokenizer();
    let rows = tokenizer.vocab_size();
    tokenizer.check_against(rows + 5, &[]).unwrap();
    let error = tokenizer.check_against(rows - 1, &[]).unwrap_err().to_string();
    let expected = format!("ids up to {} ('</s>'), the model has {} embedding rows", rows - 1, rows - 1);
    assert!(error.contains(&expected), "{error}");
    let error = tokenizer.check_against(rows + 5, &[rows as u32]).unwrap_err().to_string();
    assert!(error.contains(&format!("eos_token_id {rows} in the model's configuration is not a token")), "{error}");
}

#[test]
fn a_missing_eos_is_an_error() {
    let folder = TokenizerFolder::new();
    folder.write("tokenizer_config.json", "{}");
    let tokenizer = folder.tokenizer();
    let error = tokenizer.check_against(100, &[]).unwrap_err().to_string();
    assert!(error.contains("no end-of-sequence token"), "{error}");
    tokenizer.check_against(100, &[1]).unwrap();
    folder.write("tokenizer_config.json", r#"{"eos_token": {"content": "<|end|>"}}"#);
    let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("eos_token '<|end|>'"), "{error}");
}

/// The expected ids and texts come from scripts/golden_tokenizers.py: AutoTokenizer's results for folders whose files disagree.
#[test]
fn tokenizer_files_are_merged_as_by_auto_tokenizer() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/tokenizers.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    for case in cases {
        let folder = TokenizerFolder::new();
        folder.write("tokenizer.json", &golden["tokenizer.json"].to_string());
        folder.write("chat_template.jinja", golden["template"].as_str().unwrap());
        for (name, file) in case["files"].as_object().unwrap() {
            folder.write(name, &file.to_string());
        }
        let (name, tokenizer) = (&case["name"], folder.tokenizer());
        for (at, text) in golden["texts"].as_array().unwrap().iter().enumerate() {
            let ids = tokenizer.encode(text.as_str().unwrap(), true).unwrap();
            assert_eq!(serde_json::json!(ids), case["ids"][at], "{name}: {text}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), case["texts"][at], "{name}: {text}");
        }
        assert_eq!(serde_json::json!(tokenizer.eos_token_id()), case["eos"], "{name}");
        let chat = tokenizer.apply_chat_template(&[Message::user("x")], false).unwrap();
        assert_eq!(chat, case["chat"], "{name}");
    }
    assert!(cases.len() > 20);
    assert_eq!(merged::TOKENIZER_KEYS.undocumented(), Vec::<&str>::new());
}

/// The expected ids come from scripts/golden_tokenizers.py: those of AutoTokenizer of transformers 5 for tokenizer classes that it rebuilds.
#[test]
fn differences_to_auto_tokenizer_are_reported() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/tokenizer_classes.json")).unwrap();
    let (cases, mut notices) = (golden["cases"].as_array().unwrap(), Vec::new());
    for case in cases {
        let folder = TokenizerFolder::new();
        let mut file = golden["bases"][case["base"].as_u64().unwrap() as usize].clone();
        case["pieces"].as_object().unwrap().iter().for_each(|(key, piece)| file[key] = piece.clone());
        case["flags"].as_object().unwrap().iter().for_each(|(key, flag)| file["model"][key] = flag.clone());
        folder.write("tokenizer.json", &file.to_string());
        folder.write("tokenizer_config.json", &case["config"].to_string());
        folder.write("config.json", &case["model"].to_string());
        let (name, tokenizer) = (&case["name"], folder.tokenizer());
        let rebuilt = AutoClass::of(&TokenFiles::read(folder.path()).unwrap()).rebuilt(&tokenizer.inner);
        let (auto, mut others) = (rebuilt.as_ref().unwrap_or(&tokenizer.inner), Vec::new());
        for (at, text) in rebuilt::hard_texts().iter().enumerate() {
            let ids = auto.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            assert_eq!(serde_json::json!(ids), case["ids"][at], "{name}: {text:?}");
            others.extend((tokenizer.encode(text, false).unwrap() != ids).then_some(at));
        }
        assert_eq!(serde_json::json!(others), case["others"], "{name}");
        assert_eq!(tokenizer.notice().is_some(), !others.is_empty(), "{name}");
        notices.extend(tokenizer.notice().map(str::to_owned));
    }
    assert!(cases.len() > 30 && notices.len() > 10);
    assert!(notices[0].contains("its class GPT2Tokenizer") && notices[0].contains("\"In 2024"), "{}", notices[0]);
}

#[test]
fn contradicting_tokenizer_files_are_refused_by_name() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/tokenizers.json")).unwrap();
    let refused = |config: Value, edit: &dyn Fn(&mut Value), message: &str| {
        let (folder, mut json) = (TokenizerFolder::new(), golden["tokenizer.json"].clone());
        edit(&mut json);
        folder.write("tokenizer.json", &json.to_string());
        folder.write("tokenizer_config.json", &config.to_string());
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }) && error.to_string().contains(message), "{error}");
    };
    let same = |_: &mut Value| {};
    let decoder = |id: &str, token: Value| serde_json::json!({"added_tokens_decoder": {id: token}});
    refused(
        decoder("9", serde_json::json!({"content": "<s>"})),
        &same,
        "'<s>' has id 9 in added_tokens_decoder, but 263 in tokenizer.json",
    );
    refused(decoder("7", serde_json::json!("<s>")), &same, "expected an id as key and an object");
    refused(serde_json::json!({"fix_mistral_regex": true}), &same, "fix_mistral_regex is true: expected false");
    refused(serde_json::json!({"fast_tokenizer_files": ["tokenizer.4.0.json"]}), &same, "fast_tokenizer_files is");
    refused(
        serde_json::json!({}),
        &|json| json["model"]["dropout"] = 0.1.into(),
        "model.dropout in tokenizer.json is above 0",
    );
    let words = |json: &mut Value| {
        json["model"] = serde_json::json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})
    };
    refused(serde_json::json!({"clean_up_tokenization_spaces": true}), &words, "clean_up_tokenization_spaces is true");
}

#[test]
fn the_template_named_tool_use_is_used_with_tools() {
    let folder = TokenizerFolder::new();
    let chat = |folder: &TokenizerFolder, tools: Value| {
        let messages = vec![serde_json::json!({"role": "user", "content": "x"})];
        folder.tokenizer().converse(Conversation { messages, tools, ..Conversation::default() })
    };
    let tools = || serde_json::json!([{"name": "f"}]);
    let named = serde_json::json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]});
    folder.write("tokenizer_config.json", &named.to_string());
    assert_eq!(chat(&folder, Value::Null).unwrap(), "plain");
    assert_eq!(chat(&folder, tools()).unwrap(), "f");
    assert_eq!(folder.tokenizer().template_source(), Some("{{ tools[0].name }}"));
    // Files come before the configuration, which then counts for nothing.
    std::fs::create_dir(folder.path().join(TEMPLATES_FOLDER)).unwrap();
    folder.write("additional_chat_templates/tool_use.jinja", "file: {{ tools[0].name }}");
    assert_eq!(chat(&folder, tools()).unwrap(), "file: f");
    let error = chat(&folder, Value::Null).unwrap_err().to_string();
    assert!(error.contains("none named 'default', which conversations need: the names are tool_use"), "{error}");
    folder.write("chat_template.jinja", "file");
    assert_eq!(chat(&folder, Value::Null).unwrap(), "file");
}

#[test]
fn the_chat_template_comes_from_file_text_or_list() {
    let folder = TokenizerFolder::new();
    let messages = [Message::user("one")];
    let error = folder.tokenizer().apply_chat_template(&messages, true).unwrap_err().to_string();
    assert!(error.contains("give prompts as text"), "{error}");
    for (config, expected) in [
        (r#"{"eos_token": "</s>", "chat_template": "{{ eos_token }}1"}"#, "</s>1"),
        (r#"{"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "2"}]}"#, "2"),
    ] {
        folder.write("tokenizer_config.json", config);
        assert_eq!(folder.tokenizer().apply_chat_template(&messages, true).unwrap(), expected);
    }
    folder.write("chat_template.jinja", "{{ messages[0].content }}");
    assert_eq!(folder.tokenizer().apply_chat_template(&messages, true).unwrap(), "one");
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::BadFile { path, .. } if path.ends_with("tokenizer.json")), "{error}");
    std::fs::write(folder.path().join("tekken.json"), "{}").unwrap();
    let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(error.contains("the folder has tekken.json, which is not supported"), "{error}");
}

#[test]
fn tokenizer_panics_and_endless_text_are_errors() {
    let folder = TokenizerFolder::new();
    let honest = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let with = |key: &str, value: Value| {
        let mut json: Value = serde_json::from_str(&honest).unwrap();
        json[key] = value;
        folder.write("tokenizer.json", &json.to_string());
        Tokenizer::from_folder(folder.path())
    };
    let tenfold = serde_json::json!({"type": "Replace", "pattern": {"String": "t"}, "content": "t".repeat(10)});
    for (key, value, told) in [
        ("normalizer", serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "panic: "),
        ("model", serde_json::json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}), "panic: "),
        ("normalizer", serde_json::json!({"type": "Sequence", "normalizers": vec![tenfold; 12]}), "512 MiB of memory"),
    ] {
        let error = with(key, value).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }) && error.to_string().contains(told), "{error}");
    }
    let second_of_one = serde_json::json!({"type": "TemplateProcessing", "special_tokens": {},
        "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}]});
    let error = with("post_processor", second_of_one).unwrap().encode("one", true).unwrap_err();
    assert!(error.to_string().contains("cannot encode 'one': panic: "), "{error}");
}
