//! Checks that functions which other modules can call take and return no tuples, except for three self-explanatory ones.

use super::sources;

/// Signatures of the functions in a file, without tests, that other modules can call: name, and text up to the body.
fn signatures(text: &str) -> Vec<(String, String)> {
    let tests = regex::Regex::new(r"(?ms)^#\[cfg\(test\)\]\nmod \w+ \{\n.*?^\}\n").unwrap();
    let comment = regex::Regex::new(r"(?s)/\*.*?\*/|//[^\n]*").unwrap();
    let code = tests.replace_all(text, "");
    let code = comment.replace_all(&code, "");
    let function = regex::Regex::new(r"(?m)^ *pub(?:\(crate\))? (?:const )?(?:unsafe )?fn (\w+)").unwrap();
    let signature = |found: regex::Captures| {
        let rest = &code[found.get(0).unwrap().end()..];
        let mut depth = 0;
        let end = rest.find(|c: char| {
            depth += i32::from("([".contains(c)) - i32::from(")]".contains(c));
            depth == 0 && "{;".contains(c)
        });
        let words: Vec<&str> = rest[..end.unwrap_or(rest.len())].split_whitespace().collect();
        (found[1].to_owned(), words.join(" "))
    };
    function.captures_iter(&code).map(signature).collect()
}

/// The tuples among a signature's types, each with the text before it.
fn tuples(signature: &str) -> Vec<(&str, &str)> {
    let whole = |(start, _): (usize, &str)| {
        let (mut depth, mut commas) = (0, 0);
        let end = signature[start..].find(|c: char| {
            depth += i32::from("([<".contains(c)) - i32::from(")]>".contains(c));
            commas += i32::from(c == ',' && depth == 1);
            depth == 0
        })?;
        let (before, tuple) = (&signature[..start], &signature[start..=start + end]);
        let is_call = ["Fn", "FnMut", "FnOnce", "fn"].iter().any(|name| before.ends_with(name));
        let is_list = before.is_empty() || before.ends_with('>'); // of the arguments
        let is_pattern = signature[start + end + 1..].starts_with(':') && !before.ends_with(": ");
        (commas > 0 && !is_call && !is_list && !is_pattern).then_some((before, tuple))
    };
    signature.match_indices('(').filter_map(whole).collect()
}

/// Whether a tuple is self-explanatory: a libtorch tensor's options; a table entry of key and value; an output, and the values that its backward
/// reads.
fn says_itself(before: &str, tuple: &str) -> bool {
    let num_parts = tuple.split(", ").count();
    let is_entry = ["Item = ", "Item = &", "Vec<", "["].iter().any(|list| before.ends_with(list));
    let is_output = tuple.starts_with("(Tensor, ") && ["-> ", "-> Result<"].iter().any(|end| before.ends_with(end));
    tuple == "(Kind, Device)" || (num_parts == 2 && (is_entry || is_output))
}

fn unnamed(file: &str, text: &str) -> Vec<String> {
    let of = |(name, signature): &(String, String)| -> Vec<String> {
        let all = tuples(signature).into_iter().filter(|(before, tuple)| !says_itself(before, tuple));
        all.map(|(_, tuple)| format!("{file}: {name} {tuple}")).collect()
    };
    signatures(text).iter().flat_map(of).collect()
}

#[test]
fn signatures_between_modules_have_no_unnamed_tuples() {
    let own = |(file, _): &(String, String)| !file.contains("tests") && !file.contains("testing");
    let found: Vec<_> =
        sources().iter().filter(|file| own(file)).flat_map(|(file, text)| unnamed(file, text)).collect();
    assert!(found.is_empty(), "give them a struct, or separate arguments: {found:#?}");
}

#[test]
fn the_check_finds_unnamed_tuples() {
    for (text, expected) in [
        ("pub fn f(x: (usize, f64)) {", 1),
        ("    pub(crate) fn f<T: Copy>(\n        (a, b): (usize, Range<usize>), // [N]\n    ) -> Result<(A, B)> {", 2),
        ("pub fn f() -> Result<(Tensor, Tensor, Tensor)> {", 1),
        ("pub fn f(rows: &[(usize, usize, usize)]) {", 1),
        ("pub fn f(x: Option<(usize, usize)>) {", 1),
        ("pub fn f(x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {", 0),
        ("pub fn f(options: (Kind, Device)) -> Vec<(String, Value)> {", 0),
        ("pub fn f(each: impl Fn(usize, usize), all: &[(&str, f64)]) {", 0),
        ("pub fn f(Place { rank, size }: Place, [a, b]: [&Tensor; 2]) -> impl Iterator<Item = (K, V)> {", 0),
        ("pub fn f<F: Fn(usize)>(x: usize, y: usize) {", 0),
        ("pub(super) fn f(x: (usize, f64)) {", 0),
    ] {
        assert_eq!(unnamed("a.rs", text).len(), expected, "{text}: {:?}", unnamed("a.rs", text));
    }
}
