//! Checks README.md and docs/: links and anchors have targets, named files exist, every page is linked. Commands are
//! checked by `cli::documented_tests`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Names and texts of all pages.
fn pages() -> BTreeMap<String, String> {
    let mut pages = BTreeMap::from([("README.md".to_owned(), read("README.md"))]);
    for folder in ["docs", "docs/benchmarks"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".md") {
                let path = format!("{folder}/{name}");
                pages.insert(path.clone(), read(&path));
            }
        }
    }
    pages
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// The lines of a page outside of fenced blocks.
fn prose(text: &str) -> String {
    let mut is_fenced = false;
    let mut outside = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        !is_fenced && !is_fence
    };
    text.lines().filter(|line| outside(line)).collect::<Vec<_>>().join("\n")
}

/// The anchors of a page, derived from its headings like on GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let link = regex::Regex::new(r"\[([^\]]*)\]\([^)]*\)").unwrap();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let headings = prose(text);
    let headings =
        headings.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let text = link.replace_all(heading, "$1").to_lowercase();
        let kept = text.chars().filter(|&c| c.is_alphanumeric() || [' ', '-', '_'].contains(&c));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let count = counts.entry(name.clone()).and_modify(|count| *count += 1).or_insert(0);
        if *count == 0 { name } else { format!("{name}-{count}") }
    };
    headings.map(anchor).collect()
}

/// The relative links of a page, each as a path from the root and an anchor.
fn links(page: &str, text: &str) -> Vec<(String, String)> {
    let link = regex::Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let prose = prose(text);
    let targets = link.captures_iter(&prose).map(|found| found[1].to_owned()).collect::<Vec<_>>();
    let from_root = |target: String| {
        let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
        let folder = Path::new(page).parent().unwrap();
        let joined = if file.is_empty() { PathBuf::from(page) } else { folder.join(file) };
        let mut path = PathBuf::new();
        for part in joined.components() {
            match part {
                Component::ParentDir => drop(path.pop()),
                part => path.push(part),
            }
        }
        (path.display().to_string(), anchor.to_owned())
    };
    targets.into_iter().filter(|target| !target.starts_with("http")).map(from_root).collect()
}

/// Links of a page without a target.
fn broken_links(page: &str, text: &str) -> Vec<String> {
    let is_broken = |(path, anchor): &(String, String)| {
        let exists = root().join(path).exists();
        !exists
            || (!anchor.is_empty()
                && !anchors(if path == page { text.to_owned() } else { read(path) }.as_str()).contains(anchor))
    };
    links(page, text).into_iter().filter(is_broken).map(|(path, anchor)| format!("{page}: {path}#{anchor}")).collect()
}

#[test]
fn links_in_docs_lead_to_existing_pages_and_headings() {
    let broken: Vec<String> = pages().iter().flat_map(|(page, text)| broken_links(page, text)).collect();
    assert!(broken.is_empty(), "{broken:#?}");
    for text in ["[a](docs/no.md)", "[a](docs/install.md#no-such-heading)", "# One\n[a](#two)", "[a](configs/no.toml)"]
    {
        assert_eq!(broken_links("README.md", text).len(), 1, "{text}");
    }
    for text in [
        "[a](docs/install.md#gpus)",
        "# A `key`: [b](c)\n# Two\n[a](#two) [b](#a-key-b)\n# B\n# B\n[c](#b-1)",
        "```\n[a](no)\n```",
    ] {
        let broken: Vec<_> =
            broken_links("README.md", text).into_iter().filter(|link| link != "README.md: c#").collect();
        assert_eq!(broken, [""; 0], "{text}");
    }
}

#[test]
fn every_page_of_docs_is_linked() {
    let pages = pages();
    let linked: BTreeSet<String> =
        pages.iter().flat_map(|(page, text)| links(page, text)).map(|(path, _)| path).collect();
    let alone: Vec<_> = pages.keys().filter(|page| *page != "README.md" && !linked.contains(*page)).collect();
    assert!(alone.is_empty(), "{alone:?}");
}

/// Names of repository files on a page that do not exist. NAME and `*` are placeholders.
fn missing_files(page: &str, text: &str) -> Vec<String> {
    let path = r"(?:^|[\s`(])((?:scripts|configs|tests|src|examples|fuzz)/[\w./*{},-]+|(?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:rs|cuh?))";
    let path = regex::Regex::new(path).unwrap();
    let exists = |named: &str| {
        let named = named.trim_end_matches(['.', ',']);
        named.contains(['*', '{'])
            || named.contains("NAME")
            || root().join(named).exists()
            || root().join("src").join(named).exists()
    };
    let named = path.captures_iter(text).map(|found| found[1].to_owned()).collect::<Vec<_>>();
    named.into_iter().filter(|named| !exists(named)).map(|named| format!("{page}: {named}")).collect()
}

#[test]
fn files_named_in_docs_exist() {
    let missing: Vec<String> = pages().iter().flat_map(|(page, text)| missing_files(page, text)).collect();
    assert!(missing.is_empty(), "{missing:#?}");
    assert_eq!(
        missing_files("a", "see `src/nothing.rs`, `trainer/no.rs`, `trainer/mod.rs` and scripts/setup.sh.").len(),
        2
    );
}
