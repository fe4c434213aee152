//! Assigns the files of a data set to splits by the rules of Hugging Face's `datasets`: by the declarations in the README, or else
//! by file and folder names.

use std::collections::BTreeMap;

use glob::{MatchOptions, Pattern};
use serde_yaml_ng::Value;

use crate::config::check_openings;
use crate::untrusted::{self, ThreadLimits};

/// Extensions of files that hold rows.
pub(super) const EXTENSIONS: [&str; 6] = ["parquet", "jsonl", "ndjson", "json", "csv", "tsv"];
/// Words in a file name that indicate its split.
const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Error text for a folder written by `save_to_disk` of `datasets`: says how to convert it.
const SAVED_TO_DISK: &str = "Arrow files of save_to_disk, which are not supported; convert them in Python: \
                             datasets.load_from_disk(FOLDER)[\"train\"].to_parquet(\"train.parquet\")";
/// Pattern rules: `*` does not match across folders, `**` does.
const WITHIN: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// Limits for the thread that parses a README's header and matches its patterns.
const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 64 << 20, memory_bytes: 256 << 20, cpu_s: 5 };

/// File names by split.
type Splits = BTreeMap<String, Vec<String>>;

/// The files of `split` in the configuration `config` of a data set with the file names `files` and the README.md text `readme`.
///
/// # Errors
/// A message with the splits or configurations that exist.
pub(super) fn split_files(
    files: &[String],
    readme: Option<String>,
    config: Option<&str>,
    split: &str,
) -> Result<Vec<String>, String> {
    let by_readme = match readme {
        Some(readme) => {
            let (files, config) = (files.to_vec(), config.map(str::to_owned));
            let work = move || {
                let configs = declared(&readme)?;
                configs.map(|configs| declared_splits(&configs, &files, config.as_deref())).transpose()
            };
            untrusted::once("README.md", LIMITS, work)
                .map_err(|breach| format!("its README.md could not be processed: {breach}"))??
        }
        None => None,
    };
    let mut splits = by_readme.unwrap_or_else(|| splits_by_name(files, config));
    let found = splits.remove(split).filter(|found| !found.is_empty());
    let mut found = found.ok_or_else(|| {
        let has = match splits.is_empty() {
            true if files.iter().any(|file| file.ends_with(".arrow")) => SAVED_TO_DISK.to_owned(),
            true => "no data files (Parquet, JSONL, JSON, CSV)".to_owned(),
            false => format!("the splits {}", splits.keys().cloned().collect::<Vec<_>>().join(", ")),
        };
        format!("there is no split '{split}': the data set has {has}")
    })?;
    found.sort();
    check_complete(&found)?;
    Ok(found)
}

/// The `configs` list in the README's YAML header, if there is one.
fn declared(readme: &str) -> Result<Option<Vec<Value>>, String> {
    let Some(header) = readme.strip_prefix("---").and_then(|rest| rest.split("\n---").next()) else { return Ok(None) };
    check_openings(header).map_err(|message| format!("the header of its README.md: {message}"))?;
    let Ok(header) = serde_yaml_ng::from_str::<Value>(header) else { return Ok(None) };
    let configs = header.get("configs").and_then(Value::as_sequence).into_iter().flatten();
    let with_files: Vec<Value> = configs.filter(|config| config.get("data_files").is_some()).cloned().collect();
    Ok(Some(with_files).filter(|configs| !configs.is_empty()))
}

fn declared_splits(configs: &[Value], files: &[String], name: Option<&str>) -> Result<Splits, String> {
    let name_of = |config: &Value| config.get("config_name").and_then(Value::as_str).unwrap_or("default").to_owned();
    let is_default = |config: &&Value| {
        name_of(config) == "default" || config.get("default").and_then(Value::as_bool).unwrap_or(false)
    };
    let chosen = match (name, configs) {
        (Some(name), _) => configs.iter().find(|config| name_of(config) == name),
        (None, [only]) => Some(only),
        (None, _) => configs.iter().find(is_default),
    };
    let chosen = chosen.ok_or_else(|| {
        let names: Vec<String> = configs.iter().map(name_of).collect();
        let none = name.map_or_else(|| "as it has several".to_owned(), |name| format!("and it has no '{name}'"));
        format!("dataset_config must name one of its configurations, {none}: {}", names.join(", "))
    })?;
    let declared = &chosen["data_files"];
    let entries = match declared.as_sequence() {
        Some(entries) if entries.iter().any(|entry| entry.get("split").is_some()) => entries.clone(),
        _ => return Ok(Splits::from([("train".to_owned(), matching(files, &patterns(declared)))])),
    };
    Ok(entries
        .iter()
        .filter_map(|entry| {
            Some((entry.get("split")?.as_str()?.to_owned(), matching(files, &patterns(&entry["path"]))))
        })
        .collect())
}

/// Reads one pattern or a list of patterns.
fn patterns(value: &Value) -> Vec<String> {
    let texts = value.as_sequence().map_or_else(|| vec![value], |list| list.iter().collect());
    texts.into_iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The files whose whole path matches one of the patterns.
pub(super) fn matching(files: &[String], patterns: &[String]) -> Vec<String> {
    let compiled = patterns.iter().filter_map(|text| Pattern::new(text.trim_start_matches("./")).ok());
    let compiled: Vec<Pattern> = compiled.collect();
    let fits = |file: &&String| compiled.iter().any(|pattern| pattern.matches_with(file, WITHIN));
    files.iter().filter(fits).cloned().collect()
}

fn splits_by_name(files: &[String], config: Option<&str>) -> Splits {
    let within = config.map(|config| format!("{config}/"));
    let of_config = |file: &&String| within.as_ref().is_none_or(|folder| file.starts_with(folder.as_str()));
    let rows: Vec<&String> = files.iter().filter(of_config).filter(|file| extension(file).is_some()).collect();
    let mut counts = BTreeMap::new();
    rows.iter().for_each(|file| *counts.entry(extension(file)).or_insert(0) += 1);
    // The same rows may be there in two formats: the one of most files is taken.
    let rank = |kind: &Option<&str>| EXTENSIONS.iter().position(|name| Some(*name) == *kind);
    let format =
        counts.iter().max_by_key(|(kind, count)| (**count, std::cmp::Reverse(rank(kind)))).map(|(kind, _)| *kind);
    let mut splits = Splits::new();
    for file in rows.into_iter().filter(|file| Some(extension(file)) == format) {
        splits.entry(split_of(file)).or_default().push(file.clone());
    }
    splits
}

fn extension(file: &str) -> Option<&str> {
    let name = file.rsplit('/').next().filter(|name| !name.starts_with('.'))?;
    let (stem, extension) = name.rsplit_once('.')?;
    // What says something of a data set, and holds no rows.
    let is_about = ["dataset_info", "dataset_infos", "dataset_dict", "state", "config"].contains(&stem);
    EXTENSIONS.contains(&extension).then_some(extension).filter(|_| !is_about)
}

/// The split of a file by its name or its folders' names; `train` if they indicate none.
fn split_of(file: &str) -> String {
    let (folders, name) = file.rsplit_once('/').unwrap_or(("", file));
    if let Some((split, _)) = sharded(name) {
        return split.to_owned();
    }
    let said = |text: &str| {
        let words: Vec<String> = text.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_lowercase).collect();
        KEYWORDS.iter().find(|(_, names)| words.iter().any(|word| names.contains(&word.as_str())))
    };
    said(name).or_else(|| said(folders)).map_or("train", |(split, _)| split).to_owned()
}

/// Parses a shard name such as `train-00000-of-00004.parquet` to its split and the number of shards.
fn sharded(name: &str) -> Option<(&str, usize)> {
    let stem = name.split('.').next()?;
    let (stem, count) = stem.rsplit_once("-of-")?;
    let (split, index) = stem.rsplit_once('-')?;
    index.parse::<usize>().ok()?;
    Some((split, count.parse().ok()?)).filter(|(split, _)| !split.is_empty())
}

/// Returns an error if some shards of a split are missing, as in a partially downloaded cache.
fn check_complete(files: &[String]) -> Result<(), String> {
    let mut counts: BTreeMap<(String, usize), usize> = BTreeMap::new();
    for file in files {
        let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
        if let Some((split, count)) = sharded(name) {
            *counts.entry((format!("{folder}/{split}"), count)).or_default() += 1;
        }
    }
    match counts.iter().find(|((_, count), found)| *count != **found) {
        Some(((split, count), found)) => {
            Err(format!("only {found} of the {count} files of the split '{split}' are in the cache"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deeply_nested_readme_header_is_refused() {
        let deep = format!("---\nconfigs: {}\n---\n", "[".repeat(1_000_000));
        let refused = split_files(&files(&["train.jsonl"]), Some(deep), None, "train").unwrap_err();
        assert!(refused.starts_with("the header of its README.md: it has 1000000 brackets"), "{refused}");
    }

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// The README header of `openai/gsm8k`, which declares two configurations.
    const GSM8K: &str = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: \
        main/train-*\n  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n    \
        path: socratic/train-*\n---\n# GSM8K\n";

    #[test]
    fn the_readme_declares_configurations_and_splits() {
        let names = [
            "README.md",
            "main/train-00000-of-00001.parquet",
            "main/test-00000-of-00001.parquet",
            "socratic/train-00000-of-00001.parquet",
        ];
        let of = |config, split| split_files(&files(&names), Some(GSM8K.to_owned()), config, split);
        assert_eq!(of(Some("main"), "test").unwrap(), ["main/test-00000-of-00001.parquet"]);
        assert_eq!(of(Some("socratic"), "train").unwrap(), ["socratic/train-00000-of-00001.parquet"]);
        assert_eq!(
            of(Some("socratic"), "test").unwrap_err(),
            "there is no split 'test': the data set has the splits train"
        );
        let several = of(None, "train").unwrap_err();
        assert!(several.ends_with("as it has several: main, socratic"), "{several}");
        let wrong = of(Some("mian"), "train").unwrap_err();
        assert!(wrong.ends_with("it has no 'mian': main, socratic"), "{wrong}");
        let one = "---\nconfigs:\n- config_name: default\n  data_files: 'rows/*.jsonl'\n---\n";
        let names = files(&["rows/a.jsonl", "rows/b.jsonl", "rows/c/d.jsonl"]);
        let found = split_files(&names, Some(one.to_owned()), None, "train");
        assert_eq!(found.unwrap(), ["rows/a.jsonl", "rows/b.jsonl"]);
    }

    #[test]
    fn file_names_determine_splits_without_a_readme() {
        let of =
            |names: &[&str], config, split| split_files(&files(names), Some("# no header".to_owned()), config, split);
        let names = [
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/train_sft-00000-of-00001.parquet",
            "data/test-00000-of-00001.parquet",
            "dataset_infos.json",
        ];
        assert_eq!(of(&names, None, "train").unwrap(), names[..2]);
        assert_eq!(of(&names, None, "train_sft").unwrap(), names[2..3]);
        let part = of(&names[1..], None, "train").unwrap_err();
        assert_eq!(part, "only 1 of the 2 files of the split 'data/train' are in the cache");
        assert_eq!(of(&["train.jsonl", "eval.jsonl"], None, "test").unwrap(), ["eval.jsonl"]);
        assert_eq!(of(&["rows.csv", "val/a.csv", "note.txt"], None, "train").unwrap(), ["rows.csv"]);
        assert_eq!(of(&["math/train/0000.parquet", "art/train/0000.parquet"], Some("math"), "train").unwrap().len(), 1);
        assert_eq!(of(&["a.jsonl", "a.parquet"], None, "train").unwrap(), ["a.parquet"]);
        let none = of(&["note.txt", "gsm8k.py"], None, "train").unwrap_err();
        assert!(none.ends_with("the data set has no data files (Parquet, JSONL, JSON, CSV)"), "{none}");
        let saved =
            ["dataset_dict.json", "train/dataset_info.json", "train/state.json", "train/data-00000-of-00001.arrow"];
        let saved = of(&saved, None, "train").unwrap_err();
        assert!(
            saved.contains(
                "Arrow files of save_to_disk, which are not supported; convert them in Python: \
                            datasets.load_from_disk(FOLDER)"
            ),
            "{saved}"
        );
    }
}
