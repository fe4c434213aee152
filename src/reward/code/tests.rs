//! The tests of a row: the input of a program, and the expected output.

use serde_json::{Map, Value};

/// One test: a run of a program with an input and an expected output.
#[derive(Debug, PartialEq)]
pub(super) struct Test {
    pub input: String,
    expected: String,
}

impl Test {
    /// Whether `output` is the expected output. White space at the ends of lines and of the output is ignored.
    pub fn accepts(&self, output: &[u8]) -> bool {
        let output = String::from_utf8_lossy(output);
        let lines = |text: &str| text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
        lines(&output) == lines(&self.expected)
    }

    /// Whether a program that writes nothing passes this test.
    pub fn accepts_silence(&self) -> bool {
        self.accepts(b"")
    }
}

/// Reads the tests in `columns[column]`. Forms: a list of `{input, output}`; `{inputs, outputs}`, as in APPS and verl; either under
/// `test_cases`, as in open-r1; any of these as a string of JSON.
pub(super) fn read(columns: &Map<String, Value>, column: &str) -> Result<Vec<Test>, String> {
    let value = columns.get(column).ok_or_else(|| format!("no column '{column}'"))?;
    let bad = |what: &str| format!("column '{column}': {what}");
    let parsed;
    let value = match value {
        Value::String(text) => {
            parsed = serde_json::from_str::<Value>(text)
                .map_err(|error| bad(&format!("expected a list, or a list as JSON text: {error}")))?;
            &parsed
        }
        other => other,
    };
    let value = value.get("test_cases").unwrap_or(value);
    if value.get("fn_name").is_some_and(|name| !name.is_null()) {
        return Err(bad(
            "tests that call a function (fn_name) are not supported, only tests with standard input and output",
        ));
    }
    let pairs: Vec<(Option<&Value>, Option<&Value>)> = match (value, value.get("inputs"), value.get("outputs")) {
        (Value::Array(tests), ..) => tests.iter().map(|test| (test.get("input"), test.get("output"))).collect(),
        (_, Some(Value::Array(inputs)), Some(Value::Array(outputs))) if inputs.len() == outputs.len() => {
            inputs.iter().map(Some).zip(outputs.iter().map(Some)).collect()
        }
        _ => return Err(bad("expected a list of {input, output}, or lists {inputs, outputs} of equal length")),
    };
    let test = |(input, output)| Some(Test { input: text(input?)?, expected: text(output?)? });
    let tests: Option<Vec<Test>> = pairs.into_iter().map(test).collect();
    tests
        .filter(|tests| !tests.is_empty())
        .ok_or_else(|| bad("expected at least one test, with input and output as text"))
}

/// The text of a string or of a list of lines.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(lines) => lines.iter().map(|line| Some(line.as_str()?.to_owned() + "\n")).collect(),
        _ => None,
    }
}

#[cfg(test)]
mod unit_tests {
    use serde_json::json;

    use super::*;

    fn tests(value: Value) -> Result<Vec<Test>, String> {
        read(&Map::from_iter([("tests".to_owned(), value)]), "tests")
    }

    #[test]
    fn known_forms_of_code_tests_are_read_and_others_refused() {
        let expected = [Test { input: "1 2\n".into(), expected: "3".into() }];
        for value in [
            json!([{"input": "1 2\n", "output": "3", "type": "stdin_stdout"}]),
            json!({"inputs": ["1 2\n"], "outputs": ["3"]}),
            json!({"language": "python", "test_cases": [{"input": ["1 2"], "output": "3"}]}),
            json!("{\"inputs\": [\"1 2\\n\"], \"outputs\": [\"3\"], \"fn_name\": null}"),
        ] {
            assert_eq!(tests(value.clone()).unwrap(), expected, "{value}");
        }
        for (value, part) in [
            (json!({"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}), "fn_name"),
            (json!({"inputs": ["1"], "outputs": []}), "of equal length"),
            (json!([]), "at least one test"),
            (json!([{"input": 1, "output": "1"}]), "as text"),
            (json!("assert f(1) == 1"), "a list as JSON text"),
        ] {
            assert!(tests(value.clone()).unwrap_err().contains(part), "{value}");
        }
    }

    #[test]
    fn surrounding_white_space_of_outputs_is_ignored() {
        let test = Test { input: String::new(), expected: "1 2\n3\n".into() };
        assert!(test.accepts(b"1 2  \r\n3\n\n") && !test.accepts(b"1  2\n3") && !test.accepts(b"1 2\n\n3"));
    }
}
