//! Checks the source against docs/architecture.md: modules import only lower layers, `unsafe` is used only in certain modules, names follow the
//! rules.

mod circles;
mod signatures;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The layer of every module. A file may import modules of lower layers only.
const FLOORS: &[(u8, &[&str])] = &[
    (0, &["error"]),
    (1, &["types", "phase", "console", "untrusted", "process", "migration", "http"]),
    (2, &["config"]),
    (3, &["torch", "data", "sandbox"]),
    (4, &["cuda", "reward"]),
    (5, &["memory", "ranks", "ops", "tools"]),
    (6, &["model", "grpo", "metrics"]),
    (7, &["rollout", "train", "eval"]),
    (8, &["plan", "update", "serve", "endpoint", "watch", "checkpoint"]),
    (9, &["colocate", "split"]),
    (10, &["trainer", "sft", "launch"]),
    (11, &["bench"]),
    (12, &["cli"]),
];

/// Modules and files that call external code, and may therefore contain `unsafe`.
const EDGES: &[&str] = &[
    "torch/",
    "cuda/",
    "memory/",
    "ranks/",
    "launch/",
    "model/files",
    // Tensors' bytes on their way to a file.
    "model/lora/peft.rs",
    "checkpoint/shard_file.rs",
    "phase/",
    // The static that holds signals.
    "main.rs",
    // The allocator that counts.
    "untrusted/meter.rs",
    // Processes: their pipes, their end, their walls.
    "process/",
    "sandbox/",
    "reward/worker.rs",
    "reward/reaper.rs",
    // Holders of views into an arena.
    "train/residence.rs",
    "rollout/copy.rs",
    "rollout/kv_cache.rs",
    "rollout/state_pages.rs",
    "rollout/gpu/",
    "serve/weights.rs",
    "bench/sleep_wake.rs",
    // Replays of what they captured.
    "bench/collectives.rs",
    "bench/decode.rs",
    "bench/kernels.rs",
    "bench/products.rs",
];

fn sources() -> Vec<(String, String)> {
    texts("src")
}

/// Names and texts of all files below a folder of the repository.
fn texts(folder: &str) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.sort();
    let name = |path: &Path| path.strip_prefix(&root).unwrap().display().to_string();
    paths.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

fn floor(room: &str) -> Option<u8> {
    FLOORS.iter().find(|(_, rooms)| rooms.contains(&room)).map(|(floor, _)| *floor)
}

fn room_of(file: &str) -> &str {
    file.split('/').next().unwrap().trim_end_matches(".rs")
}

/// First segments of paths from the crate's root, outside of comments: `crate::module`, `use crate::{module, ..}`, and as many `super` as
/// lead out of `file`.
fn imports(file: &str, text: &str) -> BTreeSet<String> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line.split(" // ").next().unwrap(), "\n"])
        .collect();
    let mut rooms = BTreeSet::new();
    let single = regex::Regex::new(r"\bcrate::([A-Za-z_]+|\*)").unwrap();
    rooms.extend(single.captures_iter(&code).map(|found| found[1].to_owned()));
    let parents = regex::Regex::new(r"\b((?:super::)+)([A-Za-z_]+)").unwrap();
    let module = regex::Regex::new(r"^( *)(?:pub(?:\([a-z: ]*\))? )?mod [a-z_]+ \{$").unwrap();
    let depth = Path::new(file).components().filter(|part| part.as_os_str() != "mod.rs").count();
    let mut inner: Vec<String> = Vec::new(); // ends of the modules that are open within the file
    for line in code.lines() {
        if let Some(found) = module.captures(line) {
            inner.push(format!("{}}}", &found[1]));
        } else if inner.last().is_some_and(|end| end == line) {
            inner.pop();
        }
        let leads_out = |found: &regex::Captures| found[1].matches("super").count() >= depth + inner.len();
        rooms.extend(parents.captures_iter(line).filter(leads_out).map(|found| found[2].to_owned()));
    }
    let grouped = regex::Regex::new(r"\bcrate::\{([^;]*)\}").unwrap();
    let head = regex::Regex::new(r"^\s*([A-Za-z_]+|\*)").unwrap();
    for group in grouped.captures_iter(&code) {
        let mut depth = 0;
        let items = group[1].split(|c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            c == ',' && depth == 0
        });
        rooms.extend(items.filter_map(|item| Some(head.captures(item)?[1].to_owned())));
    }
    rooms
}

/// Names that lib.rs re-exports at the crate's root.
fn root_names(map: &str) -> BTreeSet<String> {
    let line = regex::Regex::new(r"(?m)^pub use [a-z_]+::(.*);").unwrap();
    let name = regex::Regex::new(r"[A-Za-z_]+").unwrap();
    let listed = line.captures_iter(map).map(|found| found[1].to_owned()).collect::<Vec<_>>();
    listed.iter().flat_map(|list| name.find_iter(list)).map(|found| found.as_str().to_owned()).collect()
}

/// Imports of a file that violate the order of layers.
fn wrong_imports(file: &str, text: &str, root_names: &BTreeSet<String>) -> Vec<String> {
    let room = room_of(file);
    let own = floor(room).unwrap_or_else(|| panic!("{file}: room '{room}' stands on no floor"));
    let judge = |import: String| match floor(&import) {
        _ if import == "*" || root_names.contains(&import) => {
            Some(format!("{file} imports crate::{import}: name the room that has it"))
        }
        Some(other) if import != room && other >= own => {
            Some(format!("{file} (floor {own}) imports {import} (floor {other})"))
        }
        _ => None,
    };
    imports(file, text).into_iter().filter_map(judge).collect()
}

#[test]
fn imports_go_from_higher_to_lower_layers() {
    let map = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let root_names = root_names(&map);
    assert!(root_names.contains("World") && root_names.contains("Error"), "{root_names:?}");
    let rooms = sources().into_iter().filter(|(file, _)| !["lib", "main", "internal"].contains(&room_of(file)));
    let wrong: Vec<_> = rooms.flat_map(|(file, text)| wrong_imports(&file, &text, &root_names)).collect();
    assert!(wrong.is_empty(), "imports must go down:\n{}", wrong.join("\n"));
}

/// Examples that the check must report, and examples that it must accept.
#[test]
fn the_check_finds_imports_from_a_higher_layer() {
    let names = BTreeSet::from(["World".to_owned(), "Error".to_owned()]);
    for (file, text) in [
        ("config/mod.rs", "use crate::cuda::Placement;"),
        ("error.rs", "use crate::trainer::Trainer;"),
        ("types.rs", "use crate::config::Config;"),
        ("phase/mod.rs", "use crate::types::Prompt;"),
        ("torch/ffi.rs", "use crate::cuda::Context;"),
        ("launch/group.rs", "use crate::cli::run;"),
        ("colocate/mod.rs", "fn f(split: &crate::split::Split) {}"),
        ("error.rs", "use crate::phase::Phase;"),
        ("ops/linear.rs", "fn f(world: &crate::World) {}"),
        ("cuda/kernels/adamw.rs", "use crate::{Error, torch};"),
        ("ops/linear.rs", "use crate::*;"),
        ("ops/linear.rs", "use super::super::ranks::World;"),
        ("types.rs", "use super::phase::Phase;"),
        ("memory/mod.rs", "use super::trainer;"),
        ("config/batch.rs", "mod tests {\n    use super::super::super::cuda::Placement;\n}"),
        ("config/batch.rs", "mod tests {\n}\nfn f() {\n    super::super::cuda::devices();\n}"),
    ] {
        assert_eq!(wrong_imports(file, text, &names).len(), 1, "{file}: {text}");
    }
    for (file, text) in [
        ("cuda/stream.rs", "use crate::torch;\nuse crate::error::Error;"),
        ("phase/mod.rs", "use crate::error::Error; // not crate::World"),
        ("config/batch.rs", "mod tests {\n    use super::super::World;\n}"),
        ("ops/attention/mixed.rs", "use super::super::linear;\nuse super::runs::Runs;"),
        ("trainer/mod.rs", "use crate::{eval, error::{Error, Result}};\npub(in crate::trainer) fn f() {}"),
    ] {
        assert_eq!(wrong_imports(file, text, &names), [""; 0], "{file}: {text}");
    }
}

/// Users of the library may use these names, so each addition is a commitment.
#[test]
fn the_public_surface_is_listed() {
    let map = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let listed = "Colocated Config Error ExitCode MemoryPlan MeteredAllocator Result RolloutEngine Trainer Trajectory World config \
        data engine grpo internal main ranks reward trainer";
    let module = regex::Regex::new(r"(?m)^pub mod ([a-z_]+)").unwrap();
    let mut names = root_names(&map);
    names.extend(module.captures_iter(&map).map(|found| found[1].to_owned()));
    assert_eq!(names.into_iter().collect::<Vec<_>>().join(" "), listed);
    assert!(map.contains("#[doc(hidden)]\npub mod internal;"));
}

#[test]
fn every_module_is_in_the_table_of_lib_rs() {
    let map = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    for (_, rooms) in FLOORS {
        for room in *rooms {
            assert!(map.contains(&format!("mod {room};\n")), "lib.rs does not declare {room}");
            assert!(map.contains(&format!("[`{room}`]")), "the table in lib.rs does not show {room}");
        }
    }
}

#[test]
fn unsafe_code_stays_in_the_listed_modules() {
    for (file, text) in sources() {
        let touches = text.contains("allow(unsafe_code)");
        assert!(!touches || EDGES.iter().any(|edge| file.starts_with(edge)), "{file} allows unsafe code");
    }
}

#[test]
fn source_files_have_at_most_400_lines_and_no_todos() {
    let mut lengths: Vec<(usize, String)> = Vec::new();
    for (file, text) in sources() {
        for word in ["todo!(", "unimplemented!(", "TODO", "FIXME", "XXX"] {
            assert!(!text.contains(word), "{file} contains {word}");
        }
        assert!(!file.contains("utils"), "{file}: name what it does");
        lengths.push((text.lines().count(), file));
    }
    lengths.sort();
    let (longest, file) = lengths.last().unwrap();
    assert!(*longest <= 400, "{file} has {longest} lines");
    assert!(lengths[lengths.len() / 2].0 <= 200, "the median file has {} lines", lengths[lengths.len() / 2].0);
}

/// Lines of a file's own code, without tests, that name a model family. Properties of a family belong in its own file and in the layers
/// that it uses; presets create its models.
fn asked_families(file: &str, text: &str) -> Vec<String> {
    let is_own = file.starts_with("model/families/") || file == "model/preset.rs" || file.contains("tests");
    let code = text.split("#[cfg(test)]").next().unwrap();
    let lines = code.lines().filter(|line| !is_own && !line.trim_start().starts_with("//"));
    let is_named = |line: &&str| {
        let variant = |rest: &str| rest.starts_with(char::is_uppercase) && !rest.starts_with("ALL");
        line.split("Family::").skip(1).any(variant) || line.contains("ForCausalLM\"") || line.contains(".model_type ==")
    };
    lines.filter(is_named).map(|line| format!("{file}: {}", line.trim())).collect()
}

#[test]
fn model_families_are_named_only_in_their_own_files() {
    let asked: Vec<_> = sources().iter().flat_map(|(file, text)| asked_families(file, text)).collect();
    assert!(asked.is_empty(), "ask the layer instead (docs/contributing.md): {asked:#?}");
    let branch = "let scale = if spec.family == Family::Granite { 0.22 } else { 1.0 };";
    assert_eq!(asked_families("train/network.rs", branch).len(), 1);
    assert_eq!(asked_families("rollout/engine.rs", "architecture == \"LlamaForCausalLM\"").len(), 1);
    assert!(asked_families("model/families/granite.rs", branch).is_empty());
}

/// Names of structs, enums, traits and type aliases that `sources` define more than once.
fn shared_type_names(sources: &[(String, String)]) -> Vec<String> {
    let definition = regex::Regex::new(
        r"(?m)^(?:\s*(?:pub(?:\([a-z: ]+\))? )?(?:struct|enum|trait)|(?:pub(?:\([a-z: ]+\))? )?type) ([A-Z]\w*)",
    );
    let definition = definition.unwrap();
    let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (file, text) in sources {
        for found in definition.captures_iter(text) {
            files.entry(found.get(1).unwrap().as_str()).or_default().push(file);
        }
    }
    let is_shared = |(_, files): &(_, Vec<&str>)| files.len() > 1;
    files.into_iter().filter(is_shared).map(|(name, files)| format!("{name}: {}", files.join(", "))).collect()
}

#[test]
fn type_names_are_unique_in_the_crate() {
    assert_eq!(shared_type_names(&sources()), [""; 0], "choose the field's term for each");
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let twice = [
        file("a.rs", "pub(crate) struct Row {\n}\nimpl Form for Row {\n    type Item = u8;\n}"),
        file("b.rs", "mod tests {\n    enum Row {}\n    impl I for J {\n        type Item = u8;\n    }\n}"),
    ];
    assert_eq!(shared_type_names(&twice), ["Row: a.rs, b.rs"]);
    assert_eq!(shared_type_names(&twice[..1]), [""; 0]);
}

/// The body of a function in an `impl` of a type.
fn body<'t>(text: &'t str, of_type: &str, function: &str) -> Option<&'t str> {
    let is_type = regex::Regex::new(&format!(r"^impl(<.*>)? (.* for )?{of_type}\b")).unwrap();
    let is_function = regex::Regex::new(&format!(r"\bfn {function}[(<]")).unwrap();
    let blocks = text.split("\n}\n").filter_map(|block| Some(&block[block.rfind("\nimpl")? + 1..]));
    let mut functions = blocks.filter(|block| is_type.is_match(block)).flat_map(|block| block.split("\n    }\n"));
    functions.find(|code| is_function.is_match(code))
}

/// Lines of a printed call path whose function is not in the named file, or is not called by the function above it.
fn wrong_calls(path: &str, sources: &[(String, String)]) -> Vec<String> {
    let line = regex::Regex::new(r"^( *)(\w+)::(\w+) +(\S+)$").unwrap();
    let mut above: Vec<&str> = Vec::new(); // bodies
    let mut wrong = Vec::new();
    for printed in path.lines() {
        let parts = line.captures(printed).unwrap_or_else(|| panic!("no call: {printed}"));
        above.truncate(parts[1].len() / 2);
        let is_called = |body: &&str| body.contains(&format!(".{}(", &parts[3]));
        let is_under = if parts[1].is_empty() { true } else { above.last().is_some_and(is_called) };
        let text = sources.iter().find(|(file, _)| *file == parts[4]).map(|(_, text)| text.as_str());
        let found = text.and_then(|text| body(text, &parts[2], &parts[3]));
        if !is_under || found.is_none() || above.len() != parts[1].len() / 2 {
            wrong.push(printed.to_owned());
        }
        above.push(found.unwrap_or_default());
    }
    wrong
}

/// docs/architecture.md prints the call path from a step to the scheduler; it must match the source.
#[test]
fn the_printed_path_to_the_scheduler_is_correct() {
    let map = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md")).unwrap();
    let (_, path) = map.split_once("```text\nTrainer::train_step").unwrap();
    let path = format!("Trainer::train_step{}", path.split("\n```").next().unwrap());
    let sources = sources();
    assert_eq!(wrong_calls(&path, &sources), [""; 0]);
    for end in ["Scheduler::submit ", "Scheduler::schedule "] {
        assert!(path.contains(end), "{path}");
    }
    for (from, to) in [
        ("Trainer::sample ", "Trainer::samples "),              // no such function
        ("Trainer::sample ", "Trainer::evaluate "),             // one that is not called there
        ("rollout/session.rs", "rollout/scheduler.rs"),         // not the file
        ("      RolloutEngine::run", "    RolloutEngine::run"), // called by another one
    ] {
        assert!(!wrong_calls(&path.replace(from, to), &sources).is_empty(), "{from} for {to}");
    }
}

/// Every test that docs/faults.md mentions must exist.
#[test]
fn tests_named_in_faults_md_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).unwrap();
    let table = read(Path::new("docs/faults.md"));
    let named = regex::Regex::new(r"`([a-z_]+(?:::[a-z_]+)+)`").unwrap();
    let mut missing = Vec::new();
    for name in named.captures_iter(&table).map(|found| found[1].to_owned()) {
        let path = name.replace("::", "/");
        let (module, test) = path.rsplit_once('/').unwrap();
        let is_in = |text: &str, file: String| root.join(&file).exists() && read(Path::new(&file)).contains(text);
        let is_test = is_in(&format!("fn {test}("), format!("tests/it/{module}.rs"));
        let rooms = [format!("src/{path}.rs"), format!("src/{path}/tests.rs"), format!("tests/it/{path}.rs")];
        if !is_test && !rooms.into_iter().any(|file| is_in("#[test]", file)) {
            missing.push(name);
        }
    }
    assert!(missing.is_empty(), "docs/faults.md names {missing:?}");
}

/// All other files write through `console`, which cannot fail and filters escape codes.
#[test]
fn only_one_file_writes_to_the_terminal() {
    // The sandbox's workers speak to their parent on standard output.
    let writers = ["console/mod.rs", "reward/code/mod.rs", "tools/interpreters.rs"];
    let handle = regex::Regex::new(r"\b(stdout|stderr)\(\)").unwrap();
    let others =
        sources().into_iter().filter(|(file, text)| !writers.contains(&file.as_str()) && handle.is_match(text));
    assert_eq!(others.map(|(file, _)| file).collect::<Vec<_>>(), Vec::<String>::new());
}

/// Durations depend on the load of the machine. Benchmarks measure them; those on GPUs use them exclusively.
#[test]
fn no_test_depends_on_the_clock() {
    let clock = regex::Regex::new(r"assert!\([^;]*elapsed\(\) <").unwrap();
    let tests = texts("tests/it").into_iter().chain(sources());
    let asks = |(file, text): &(String, String)| !file.starts_with("gpu") && clock.is_match(text);
    assert_eq!(tests.filter(asks).map(|(file, _)| file).collect::<Vec<_>>(), Vec::<String>::new());
}

/// Without a `mod` declaration the tests in a file would silently not run.
#[test]
fn every_source_file_is_a_module_of_the_crate() {
    for root in ["src", "tests/it"] {
        let texts = texts(root);
        let declares = |parent: &Path, name: &str| {
            let homes =
                [parent.join("mod.rs"), parent.join("main.rs"), parent.join("lib.rs"), parent.with_extension("rs")];
            let mut homes = texts.iter().filter(|(file, _)| homes.contains(&PathBuf::from(file)));
            homes.any(|(_, text)| text.contains(&format!("mod {name};")))
        };
        for (file, _) in &texts {
            let path = Path::new(file).with_extension("");
            let module = if path.ends_with("mod") { path.parent().unwrap() } else { &path };
            let (parent, name) = (module.parent().unwrap(), module.file_name().unwrap().to_str().unwrap());
            assert!(["main", "lib"].contains(&name) || declares(parent, name), "{root}/{file} is no module");
        }
    }
}

#[test]
fn the_import_check_reads_grouped_imports() {
    let text =
        "use crate::{error::{Error, Result}, phase};\nuse crate::ranks::World; // crate::trainer\n// crate::cli\n";
    let found: Vec<_> = imports("model/spec.rs", text).into_iter().collect();
    assert_eq!(found, ["error", "phase", "ranks"]);
}
