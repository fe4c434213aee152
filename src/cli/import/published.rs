//! Tests with keys and values of published scripts and recipes, in files written for these tests.

use std::path::{Path, PathBuf};

use super::*;

const FOLDER: &str = "tests/golden/import/published";

/// The configuration imported from a file, with its notes; the home folder is called HOME.
fn imported(file: &Path) -> (String, String) {
    let read = read(file).unwrap();
    let (mut draft, program) = translated(read, None);
    draft.check().unwrap_or_else(|error| panic!("{}: {error}\n{}", file.display(), draft.notes().join("\n")));
    let text = draft.text(file, &program).replace(&std::env::var("HOME").unwrap(), "HOME");
    let (notes, keys) = text.split_once("\n\n").unwrap();
    (notes.to_owned(), keys.to_owned())
}

fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.is_file() && path.extension() != Some("toml".as_ref())).collect();
    files.sort();
    files
}

/// Every key that a text sets: `a.b=`, `--flag`, `key:` at the start of a line.
fn keys_in(file: &Path, text: &str) -> Vec<String> {
    let pattern = match is_script(file) {
        true => r#"(?m)(?:^|[\s("+])([a-z_]+(?:\.[A-Za-z_]+)+)=|\s--([a-z_]+)"#,
        false => r"(?m)^([a-z_]+(?:\.[a-z_]+)*):",
    };
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with(['#'])).collect();
    let text = lines.join("\n");
    let found = regex::Regex::new(pattern).unwrap();
    let own = |captures: regex::Captures<'_>| captures.iter().flatten().nth(1).map(|key| key.as_str().to_owned());
    found.captures_iter(&text).filter_map(own).collect()
}

/// Launcher flags, which set no key of a run, and keys in branches that the script does not take.
const NOT_OF_THE_RUN: &[&str] = &[
    "frozen",
    "extra",
    "no",
    "runtime",
    "working",
    "num_processes",
    "actor_rollout_ref.rollout.enforce_eager",
    "ray_kwargs.ray_init.num_gpus",
];

#[test]
fn published_configurations_import_with_their_effective_values() {
    let files = files();
    assert!(files.len() >= 9, "{files:?}");
    for file in files {
        let (notes, keys) = imported(&file);
        let expected = std::fs::read_to_string(file.with_extension("toml")).unwrap_or_default();
        assert_eq!(keys, expected, "{}\n{notes}", file.display());
    }
}

#[test]
fn every_key_of_a_published_file_is_in_the_result_or_in_a_list() {
    for file in files() {
        let text = std::fs::read_to_string(&file).unwrap();
        let (notes, keys) = imported(&file);
        let theirs = keys_in(&file, &text);
        assert!(theirs.len() > 10, "{}: {theirs:?}", file.display());
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
        let words: Vec<&str> = notes.split(|c| !is_name(c)).map(|word| word.trim_matches('.')).collect();
        for key in theirs.iter().filter(|key| !NOT_OF_THE_RUN.contains(&key.as_str())) {
            let bare = crate::migration::bare(key);
            let is_kept = keys.lines().any(|line| line.starts_with(&format!("{key} = ")));
            let is_table = words.iter().any(|word| word.starts_with(&format!("{bare}.")));
            assert!(
                is_kept || is_table || words.contains(&bare) || words.contains(&key.as_str()),
                "{}: {key} is in neither\n{notes}",
                file.display()
            );
        }
    }
}

/// Every word of a command is imported or noted, whatever its form.
#[test]
fn every_argument_of_a_command_is_imported_or_noted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.sh");
    let own = "algorithm.adv_estimator=grpo data.train_files=a.parquet actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=8";
    for (word, part) in [
        ("+algorithm.one=1", "algorithm.one = 1"),
        ("++algorithm.one=1", "algorithm.one = 1"),
        ("~algorithm.one", "~algorithm.one: it sets no known key"),
        ("model_engine=megatron", "model_engine"),
        ("actor@actor_rollout_ref.actor=other", "actor@actor_rollout_ref.actor=other: it sets no known key"),
        ("rollout/engine=other", "rollout/engine=other: it sets no known key"),
        ("stray", "stray: it sets no known key"),
        (
            "--config-path=there --config-name=mine",
            "--config-name = \"mine\": the file there/mine.yaml was found neither",
        ),
        ("-cp there -cn mine", "--config-name = \"mine\": the file there/mine.yaml was found neither"),
        ("--config-name ppo_trainer", "--config-name: ppo_trainer is verl's own"),
        ("--multirun", "--multirun: it sets no known key"),
        ("\"${MORE[@]}\"", "algorithm.two = 2"),
        ("$SEVERAL", "algorithm.four = 4"),
        ("${UNKNOWN[@]}", "${UNKNOWN[@]}: it sets no known key"),
    ] {
        let script = format!(
            "MORE=(algorithm.two=2)\nSEVERAL=\"\n algorithm.three=3 \\\n algorithm.four=4\"\npython3 -m verl.trainer.main_ppo {own} {word} $@ 2>&1 | tee log\n"
        );
        std::fs::write(&file, script).unwrap();
        let (notes, _) = imported(&file);
        assert!(notes.contains(part), "{word}: {notes}");
        assert!(!notes.contains("log: ") && !notes.contains("$@"), "{word}: {notes}");
    }
}

/// A branch that is known to be taken is imported; of an unknown branch the settings are noted.
#[test]
fn shell_branches_are_evaluated_or_noted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.sh");
    let script = "rows=a.parquet\nn=4\nKIND=$(uname)\nEMPTY=\nif [ -z \"$EMPTY\" ]; then n=8; elif [ x = x ]; then n=9; else n=10; fi\n\
        if [ $n -gt 4 ] && true; then length=64; fi\n\
        case \"$KIND\" in\n  Linux) mini=16 ;;\n  *) mini=32\n rows=b.parquet ;;\nesac\n\
        case \"$n\" in 4|5) batch=8 ;; 8) batch=64 ;; *) batch=1 ;; esac\n\
        MORE=()\nif [ \"$KIND\" = Linux ]; then MORE+=(algorithm.two=2); fi\n\
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$rows actor_rollout_ref.model.path=m \\\n\
        actor_rollout_ref.rollout.n=$n data.train_batch_size=$batch actor_rollout_ref.actor.ppo_mini_batch_size=$mini ${MORE[@]} \\\n\
        data.max_response_length=$length trainer.n_gpus_per_node=1\n";
    std::fs::write(&file, script).unwrap();
    let (notes, keys) = imported(&file);
    for line in
        ["train_file = \"a.parquet\"", "num_generations = 8", "steps_per_generation = 4", "max_completion_length = 64"]
    {
        assert!(keys.lines().any(|known| known == line), "{line}: {keys}\n{notes}");
    }
    for part in [
        "mini=32: in a branch whose condition is unknown here; 16 is used",
        "rows=b.parquet: ",
        "algorithm.two=2: in a branch",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

#[test]
fn the_trl_version_comes_from_an_option_a_pin_or_the_keys() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    let own = "model_name_or_path: m\ndataset_name: a/b\nreward_funcs: [accuracy_reward]\n";
    let with = |more: &str, version: Option<&str>| {
        std::fs::write(&file, format!("{own}{more}")).unwrap();
        let named = version.map(|version| TrlVersion::named(version).unwrap());
        let version = named.or_else(|| TrlVersion::required_beside(&file));
        let (mut draft, program) = translated(read(&file).unwrap(), version);
        draft.check().unwrap();
        draft.text(&file, &program)
    };
    let newest = with("", None);
    assert!(newest.contains("(defaults of trl 1.16, because the file names no version; use --trl_version"), "{newest}");
    assert!(!newest.contains("beta") && !newest.contains("loss_type"), "{newest}");
    let old = with("", Some("0.18.2"));
    for line in [
        "beta = 0.04",
        "loss_type = \"bnpo\"",
        "importance_sampling_correction = false",
        "use_bias_correction_kl = false",
        "max_completion_length = 256",
        "max_prompt_length = 512",
    ] {
        assert!(old.lines().any(|known| known == line), "{line}: {old}");
    }
    let told = with("beta: 0.0\nmax_prompt_length: 1024\n", None);
    assert!(told.contains("(defaults of trl 0.27, the last version that has max_prompt_length;"), "{told}");
    assert!(!told.contains("use_bias_correction_kl") && !told.contains("loss_type"), "{told}");
    std::fs::write(folder.path().join("setup.py"), "deps = [\n    \"trl[vllm]==0.23.1\",\n]\n").unwrap();
    let pinned = with("", None);
    for part in [
        "defaults of trl 0.23, pinned by ",
        "\nimportance_sampling_mode = \"token_truncate\"\n",
        "\nimportance_sampling_clip_max = 2.0\n",
    ] {
        assert!(pinned.contains(part), "{part}: {pinned}");
    }
    for wrong in ["1", "0.13", "new", "1.x"] {
        assert!(TrlVersion::named(wrong).is_err(), "{wrong}");
    }
}
