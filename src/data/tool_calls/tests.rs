//! Tests of tool call parsers. The cases follow the behavior that vLLM's tests publish.

use serde_json::{Value, json};

use super::*;

fn calls(parsed: &ParsedMessage) -> Vec<(&str, Value)> {
    parsed.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.clone())).collect()
}

/// Parses a message without errors into content and calls.
fn read(parser: ToolCallParser, text: &str) -> (String, Vec<(String, Value)>) {
    let parsed = parser.parse(text, &Value::Null, None);
    assert_eq!(parsed.error, None, "{text}");
    (parsed.content, parsed.tool_calls.into_iter().map(|call| (call.name, call.arguments)).collect())
}

/// After each piece, the number of bytes that are known to be content.
fn certain(parser: ToolCallParser, pieces: &[&str]) -> Vec<usize> {
    let (mut scan, mut text) = (ContentScan::new(parser, None), String::new());
    let mut advance = |piece: &&str| {
        text += piece;
        scan.advance(&text)
    };
    pieces.iter().map(&mut advance).collect()
}

fn one(content: &str, name: &str, arguments: Value) -> (String, Vec<(String, Value)>) {
    (content.to_owned(), vec![(name.to_owned(), arguments)])
}

#[test]
fn a_message_without_a_tool_call_is_plain_content() {
    for &parser in ToolCallParser::ALL {
        for text in ["", "How can I help you today?", "  2 < 3 and (a) or b] \n"] {
            let parsed = parser.parse(text, &Value::Null, None);
            assert_eq!(parsed, ParsedMessage { content: text.to_owned(), ..ParsedMessage::default() }, "{parser:?}");
            let known = if parser == ToolCallParser::OpenAi { 0 } else { text.len() };
            assert_eq!(certain(parser, &[text]), [known], "{parser:?} {text}");
        }
    }
}

#[test]
fn hermes_tool_calls_are_parsed() {
    let parse = |text: &str| read(ToolCallParser::Hermes, text);
    let weather = json!({"city": "Oslo", "days": 2});
    let call = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
</tool_call>"#;
    assert_eq!(parse(call), one("", "weather", weather.clone()));
    assert_eq!(parse(&format!("Let me see.\n{call}")), one("Let me see.\n", "weather", weather.clone()));
    assert_eq!(parse(call.trim_end_matches("</tool_call>")), one("", "weather", weather), "the end ends it, too");
    assert_eq!(parse(&format!("{call}\n{call} done")).1.len(), 2);
    let quoted = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
    assert_eq!(parse(quoted), one("", "f", json!({"a": 1})), "arguments that were written as text");
    let bare = r#"<tool_call>{"name": "f", "arguments": "hello"}</tool_call>"#;
    assert_eq!(parse(bare), one("", "f", json!("hello")));
    for wrong in [
        r#"<tool_call>{"name": "f", "arguments": {"a": 1}"#,
        r#"<tool_call>{"arguments": {}}</tool_call>"#,
        r#"<tool_call>{"name": "f"}</tool_call>"#,
        "<tool_call>f(1)</tool_call>",
        "<tool_call>",
    ] {
        let parsed = ToolCallParser::Hermes.parse(wrong, &Value::Null, None);
        assert!(parsed.tool_calls.is_empty() && parsed.content == wrong && parsed.error.is_some(), "{parsed:?}");
    }
}

#[test]
fn qwen3_xml_arguments_get_types_from_the_schema() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "is_on": {"type": "boolean"},
        "list": {"type": "array"}, "map": {"type": ["null", "object"]}, "wrong": {"type": "integer"}, "none": {"type": "string"},
    }}}}]);
    let text = "Now.\n<tool_call>\n<function=f>\n<parameter=text>\na <b>\n\nc\n</parameter>\n<parameter=count>42</parameter>\n\
        <parameter=share>2.50</parameter>\n<parameter=is_on>True</parameter>\n<parameter=list>[\"a\", 1]</parameter>\n\
        <parameter=map>{\"k\": null}</parameter>\n<parameter=wrong>many</parameter>\n<parameter=none>null</parameter>\n\
        <parameter=unknown>7</parameter>\n</function>\n</tool_call>\nThat is all.";
    let parsed = ToolCallParser::Qwen3Xml.parse(text, &tools, None);
    let arguments = json!({"text": "a <b>\n\nc", "count": 42, "share": 2.5, "is_on": true, "list": ["a", 1], "map": {"k": null},
        "wrong": "many", "none": null, "unknown": "7"});
    assert_eq!((parsed.content.as_str(), calls(&parsed)), ("Now.\n", vec![("f", arguments)]));
    let parse = |text: &str| read(ToolCallParser::Qwen3Xml, text);
    assert_eq!(parse("<tool_call>\n<function=refresh>\n</function>\n</tool_call>"), one("", "refresh", json!({})));
    assert_eq!(parse("<function=g><parameter=a>b</parameter></function>"), one("", "g", json!({"a": "b"})));
    let two = "<tool_call><function=a></function></tool_call><tool_call><function=b></function></tool_call>";
    assert_eq!(parse(two).1.len(), 2);
    for wrong in
        ["<tool_call><function=f>", "<tool_call><function=></function></tool_call>", "<tool_call>x", "<function=f"]
    {
        let parsed = ToolCallParser::Qwen3Xml.parse(wrong, &tools, None);
        assert!(parsed.tool_calls.is_empty() && parsed.content == wrong && parsed.error.is_some(), "{parsed:?}");
    }
}

#[test]
fn llama3_json_tool_calls_are_found_within_text() {
    let parse = |text: &str| read(ToolCallParser::Llama3Json, text);
    let search = json!({"query": "a {b} [c]", "limit": 10});
    let call = r#"{"name": "search", "parameters": {"query": "a {b} [c]", "limit": 10}}"#;
    assert_eq!(parse(call), one("", "search", search.clone()));
    assert_eq!(parse(&format!("<|python_tag|>{call}")), one("", "search", search.clone()));
    assert_eq!(parse(&format!("Here: {call} More?")), one("", "search", search.clone()));
    assert_eq!(parse(&call.replace("parameters", "arguments")), one("", "search", search.clone()));
    for between in [";", "; ", " ; ", "\n"] {
        assert_eq!(parse(&[call; 3].join(between)).1.len(), 3, "{between:?}");
    }
    assert_eq!(parse(&format!("{call} I used {{search}} with {{\"a\": 1}}.")), one("", "search", search));
    for wrong in [r#"{"name": "f", "parameters": {no}"#, r#"{"parameters": {}}"#, r#"{"name": "f"}"#, "{"] {
        let parsed = ToolCallParser::Llama3Json.parse(wrong, &Value::Null, None);
        assert!(parsed.tool_calls.is_empty() && parsed.content == wrong && parsed.error.is_some(), "{parsed:?}");
    }
}

#[test]
fn pythonic_tool_calls_are_parsed() {
    let parse = |text: &str| read(ToolCallParser::Pythonic, text);
    let user = "register(name='Jo Doe', age=37, share=-1.5e0, address={'city': 'X', 2: [()]}, role=None, ok=True, also=['a', \"b\"],)";
    let arguments = json!({"name": "Jo Doe", "age": 37, "share": -1.5, "address": {"city": "X", "2": [[]]}, "role": null,
        "ok": true, "also": ["a", "b"]});
    assert_eq!(parse(&format!(" [{user}]\n")), one("", "register", arguments));
    assert_eq!(parse("[tools.now()]"), one("", "tools.now", json!({})));
    assert_eq!(parse("[a(), b(x={}), c(y=[])]").1.len(), 3);
    let escaped = r#"[f(a='Martha\'s', b='\"cool\"', c="x\n\u00e9\q" 'more', d='''two
lines''')]"#;
    let texts = json!({"a": "Martha's", "b": "\"cool\"", "c": "x\né\\qmore", "d": "two\nlines"});
    assert_eq!(parse(escaped), one("", "f", texts));
    // One call that cannot be read does not cost its neighbours.
    for wrong in ["bad(x=b'z')", "bad(x=1e999)", "bad(x=y)", "bad(1)", "bad(x=f(')'))"] {
        for text in [format!("[{wrong}, good(a=1)]"), format!("[good(a=1), {wrong}]")] {
            let parsed = ToolCallParser::Pythonic.parse(&text, &Value::Null, None);
            assert_eq!(calls(&parsed), [("good", json!({"a": 1}))], "{text}");
            assert!(parsed.error.is_some(), "{text}");
        }
    }
    let deep = format!("[f(a={}{})]", "[".repeat(100_000), "]".repeat(100_000));
    for wrong in ["[f(a='x 'y' 'z), g(b='p 'q' 'r)]", "[foo(x=1])]", "[f(a=1", "[1, 2]", "[f(a=1) g()", &deep] {
        let parsed = ToolCallParser::Pythonic.parse(wrong, &Value::Null, None);
        assert!(parsed.tool_calls.is_empty() && parsed.content == wrong, "{:.80?}", parsed);
    }
}

#[test]
fn mistral_tool_calls_are_parsed_in_both_forms() {
    let parse = |text: &str| read(ToolCallParser::Mistral, text);
    let add = json!({"a": 3.5, "b": 4});
    assert_eq!(parse(r#"[TOOL_CALLS][{"name": "add", "arguments": {"a": 3.5, "b": 4}}]"#), one("", "add", add.clone()));
    assert_eq!(
        parse(r#"Hi[TOOL_CALLS]  junk [{"arguments": {"a": 3.5, "b": 4}, "name": "add"}] more"#),
        one("Hi", "add", add.clone())
    );
    assert_eq!(
        parse(r#"[TOOL_CALLS] [{"name": "a", "arguments": {"name": "J"}}, {"name": "b", "arguments": {}}]"#).1.len(),
        2
    );
    assert_eq!(parse(r#"[TOOL_CALLS]add{"a": 3.5, "b": 4}"#), one("", "add", add.clone()));
    assert_eq!(parse(r#"[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]mul{"a": {"b": 6}}"#).1.len(), 2);
    assert_eq!(parse(r#"[TOOL_CALLS]add[CALL_ID]x7[ARGS]{"a": 3.5, "b": 4}"#), one("", "add", add));
    let ids = |text: &str| {
        let parsed = ToolCallParser::Mistral.parse(text, &Value::Null, None);
        parsed.tool_calls.into_iter().map(|call| call.id).collect::<Vec<_>>()
    };
    let listed = r#"[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "abcdefgh1"}, {"name": "b", "arguments": {}}]"#;
    assert_eq!(ids(listed), [Some("abcdefgh1".to_owned()), None]);
    let named = r#"[TOOL_CALLS]a[CALL_ID]abcdefgh1[ARGS]{}[TOOL_CALLS]b[ARGS]{}"#;
    assert_eq!(ids(named), [Some("abcdefgh1".to_owned()), None]);
    for wrong in
        ["[TOOL_CALLS] not json at all", r#"[TOOL_CALLS]add{"a": 1"#, "[TOOL_CALLS]", r#"[TOOL_CALLS][{"name": "a"}]"#]
    {
        let parsed = ToolCallParser::Mistral.parse(wrong, &Value::Null, None);
        assert!(parsed.tool_calls.is_empty() && parsed.content == wrong && parsed.error.is_some(), "{parsed:?}");
    }
}

/// The format of GLM-4.5's template: strings as they are, other values as JSON.
#[test]
fn glm45_tool_calls_are_parsed() {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    let tools = json!([{"function": {"name": "weather", "parameters": {"properties": properties}}}]);
    let argument = |key: &str, value: &str| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n");
    let call = |arguments: &[String]| format!("Let me see.\n<tool_call>weather\n{}</tool_call>", arguments.concat());
    let parse = |arguments: &[String]| ToolCallParser::Glm45.parse(&call(arguments), &tools, None);
    let parsed = parse(&[
        argument("city", "7"),
        argument("days", "7"),
        argument("more", "[1, \"x\"]"),
        argument("note", "it's </arg_value> it"),
    ]);
    assert_eq!(parsed.content, "Let me see.\n");
    let expected = json!({"city": "7", "days": 7, "more": [1, "x"], "note": "it's </arg_value> it"});
    assert_eq!((parsed.tool_calls[0].name.as_str(), &parsed.tool_calls[0].arguments), ("weather", &expected));
    assert_eq!(parse(&[]).tool_calls[0].arguments, json!({}));
    let two = call(&[argument("city", "Oslo")]).repeat(2);
    assert_eq!(ToolCallParser::Glm45.parse(&two, &tools, None).tool_calls.len(), 2);
    for wrong in [
        "<tool_call>f\n<arg_key>a</arg_key>",
        "<tool_call>\n</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
        "<tool_call>f",
    ] {
        let parsed = ToolCallParser::Glm45.parse(wrong, &Value::Null, None);
        assert!(parsed.tool_calls.is_empty() && parsed.error.is_some() && parsed.content == wrong, "{wrong}");
    }
}

/// Content that was sent is never retracted, whatever text follows.
#[test]
fn streamed_content_stops_before_a_possible_tool_call() {
    for (parser, text, content) in [
        (ToolCallParser::Hermes, "2 < 3: <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "2 < 3: "),
        (ToolCallParser::Qwen3Xml, "é <function=f></function>", "é "),
        (ToolCallParser::Glm45, "é <tool_call>f\n</tool_call>", "é "),
        (ToolCallParser::Llama3Json, "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", ""),
        (ToolCallParser::Mistral, "Hi [ [TOOL_CALLS]f{}", "Hi [ "),
        (ToolCallParser::Pythonic, " [f()]", ""),
    ] {
        let chars: Vec<&str> = text.split("").collect();
        let certain = certain(parser, &chars);
        assert!(certain.is_sorted(), "{certain:?}");
        assert_eq!(&text[..*certain.last().unwrap()], content);
        assert_eq!(parser.parse(text, &Value::Null, None).tool_calls.len(), 1);
    }
    assert_eq!(certain(ToolCallParser::Hermes, &["a <tool_", "box"]), [2, 11]);
}

/// For each parser, a call of `f` in its format, and an opening marker without an end.
const CALLS: [(ToolCallParser, &str, &str); 6] = [
    (ToolCallParser::Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", "<tool_call>"),
    (
        ToolCallParser::Qwen3Xml,
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=f>",
    ),
    (
        ToolCallParser::Glm45,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>",
    ),
    (ToolCallParser::Llama3Json, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "{"),
    (ToolCallParser::Pythonic, "[f(a=1)]", "["),
    (ToolCallParser::Mistral, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}]", "[TOOL_CALLS]"),
];

/// A call within a thought is not made, whether the prompt or the model opened the thought, and whatever markers it contains.
#[test]
fn tool_calls_inside_reasoning_are_ignored() {
    for (parser, call, mark) in CALLS {
        for (open, close) in THOUGHTS {
            let names = |text: &str, thought| {
                let parsed = parser.parse(text, &Value::Null, thought);
                assert_eq!(parsed.error, None, "{text}");
                let names: Vec<String> = parsed.tool_calls.iter().map(|call| call.name.clone()).collect();
                assert!(!names.is_empty() || parsed.content == text, "{text}");
                (parsed.content, names.concat())
            };
            let called = |text: &str| names(text, None).1;
            let thought = format!("{open}\nI could {call} or {mark}.\n{close}\n\n");
            assert_eq!(called(&thought), "", "{thought}");
            let (content, name) = names(&format!("{thought}{call}"), None);
            assert_eq!((content.trim_end(), name.as_str()), (thought.trim_end(), "f"), "{thought}");
            assert_eq!(called(&format!("{thought}{open}No: {call}{close}{call}")), "f", "two thoughts");
            // The prompt has opened the thought, and is known or not.
            let rest = thought.strip_prefix(open).unwrap();
            assert_eq!(called(&format!("{rest}{call}")), "f", "{rest}");
            assert_eq!(names(&format!("{rest}{call}"), Some(close)).1, "f", "{rest}");
            assert_eq!(names(&format!("I could {call}"), Some(close)).1, "", "a thought without an end");
            assert_eq!(called(&format!("{open}I could {call}")), "", "a thought without an end");
            assert_eq!(called(&format!("So.\n {open}\nI could {call}")), "", "a thought that begins a line");
            if parser != ToolCallParser::Pythonic {
                assert_eq!(called(&format!("The tag {open} opens a thought. {call}")), "f", "a word");
                assert_eq!(called(&format!("The tag {mark} begins a call. {call}")), "f", "a word");
                assert_eq!(called(&format!("{call} {open}{call}{close} {call}")), "ff", "a thought between calls");
            }
        }
    }
}

/// Markers within an argument are part of its text.
#[test]
fn arguments_may_contain_the_format_markers() {
    let value = "a </think> <think> [TOOL_CALLS]g{} [/THINK] <tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call> \
        <function=g></function>";
    let json = json!({"name": "f", "arguments": {"a": value}}).to_string();
    let expected = json!({"a": value});
    for (parser, text) in [
        (ToolCallParser::Hermes, format!("<tool_call>{json}</tool_call>")),
        (ToolCallParser::Llama3Json, json.clone()),
        (ToolCallParser::Mistral, format!("[TOOL_CALLS][{json}]")),
        (ToolCallParser::Pythonic, format!("[f(a={value:?})]")),
        (ToolCallParser::Qwen3Xml, format!("<function=f><parameter=a>{value}</parameter></function>")),
    ] {
        assert_eq!(read(parser, &text), one("", "f", expected.clone()), "{parser:?}");
    }
}

/// For any split into pieces, content that was sent stays content, and each byte is scanned once.
#[test]
fn tool_call_parsing_is_linear_in_length() {
    let parts = ["word ", "\n", "<think>", "</think>", "[THINK]", "<tool", "[", "{", "é", "<function", "</th", "ink>"];
    let mut dice = crate::data::fixtures::Dice(3);
    for (parser, call, _) in CALLS {
        for _ in 0..200 {
            let mut pieces: Vec<&str> =
                (0..dice.roll(12)).map(|_| parts[dice.roll(parts.len() as u64) as usize]).collect();
            pieces.push(call);
            let text = pieces.concat();
            let content = parser.parse(&text, &Value::Null, None).content;
            let chars: Vec<&str> = text.split("").collect();
            for certain in [certain(parser, &pieces), certain(parser, &chars)] {
                assert!(certain.is_sorted(), "{text:?}: {certain:?}");
                let sent = &text[..*certain.last().unwrap()];
                let is_beside = matches!(parser, ToolCallParser::Llama3Json | ToolCallParser::Pythonic);
                assert!(is_beside || content.starts_with(sent), "{text:?}: {sent:?} {content:?}");
            }
        }
        for plain in ["no call ", "<think> ", "<tool_ca ", "</think>", " \n"] {
            let num_pieces = 2_000;
            let (mut scan, mut text) = (ContentScan::new(parser, None), String::new());
            for _ in 0..num_pieces {
                text += plain;
                scan.advance(&text);
            }
            let num_searched = scan.num_searched;
            assert!(
                num_searched <= 2 * text.len() + 2 * num_pieces,
                "{parser:?} {plain:?}: {num_searched} of {}",
                text.len()
            );
        }
    }
}

/// An integer that would be rounded is rejected in every format; the error names it.
#[test]
fn integers_beyond_64_bits_are_refused_as_arguments() {
    let tools = json!([{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]);
    for (parser, call, _) in CALLS {
        for (number, is_read) in
            [("18446744073709551615", true), ("-9223372036854775808", true), ("1234567890123456789012", false)]
        {
            let text = call
                .replace(": 1}", &format!(": {number}}}"))
                .replace("=1", &format!("={number}"))
                .replace(">1<", &format!(">{number}<"))
                .replace("\n1\n", number);
            let parsed = parser.parse(&text, &tools, None);
            match is_read {
                true => assert_eq!(parsed.tool_calls[0].arguments["a"].to_string(), number, "{parser:?}"),
                false => {
                    assert!(parsed.tool_calls.is_empty(), "{parser:?}");
                    let error = parsed.error.unwrap();
                    assert!(error.contains("the integer 1234567890123456789012 has more than 64 bits"), "{error}");
                }
            }
        }
    }
}

#[test]
fn the_tool_call_format_is_detected_from_the_template() {
    for (source, parser) in [
        ("{{ '<tool_call>' }}", Some(ToolCallParser::Hermes)),
        ("<tool_call>\\n<function=x>\\n<parameter=y>", Some(ToolCallParser::Qwen3Xml)),
        ("{{ '[TOOL_CALLS] [' }}", Some(ToolCallParser::Mistral)),
        ("[func_name1(params_name1=params_value1)]", Some(ToolCallParser::Pythonic)),
        ("{{ '<|python_tag|>' }}", Some(ToolCallParser::Llama3Json)),
        ("<tool_call>name\n<arg_key>x</arg_key>", Some(ToolCallParser::Glm45)),
        ("<|start|>assistant<|channel|>commentary to=functions.", Some(ToolCallParser::OpenAi)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(ToolCallParser::of_template(source), parser, "{source}");
    }
    for &parser in ToolCallParser::ALL {
        assert_eq!(serde_json::to_value(parser).unwrap(), parser.name());
    }
}
