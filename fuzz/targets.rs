//! What is fed with any bytes: every function takes them as a file, or as a text, that a stranger wrote. It returns if they
//! are read (true) or refused with the exit code of files (3), of configuration (2) or of checkpoints (5), and panics otherwise. Shared by the
//! fuzz targets and by the test `hostile`.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::ExitCode;
use colo_grpo::internal::checkpoint::Checkpoint;
use colo_grpo::internal::config::{Config, RewardConfig};
use colo_grpo::internal::data::{ChatTemplate, Dataset, DatasetOptions, Message, SftDataset, Tokenizer};
use colo_grpo::internal::model::{ModelSpec, ParamTable, WeightFiles, init_folder};
use colo_grpo::internal::reward::{answer_reader, check_reply, exact_answer, numeric_answer};
use sha2::{Digest, Sha256};
use tch::Kind;

const SHARD: &str = "model-00001-of-00001.safetensors";
const SINGLE: &str = "model.safetensors";

/// `{`: the index of a model whose shard is honest; else the length and header of a file whose data is honest.
pub fn weights(data: &[u8]) -> bool {
    thread_local!(static MODEL: (tempfile::TempDir, Vec<u8>) = honest_model());
    let spec = Arc::new(ModelSpec::preset("micro").expect("a preset"));
    MODEL.with(|(folder, honest)| {
        let folder = folder.path();
        if data.first() == Some(&b'{') {
            let _ = fs::remove_file(folder.join(SINGLE));
            fs::write(folder.join("model.safetensors.index.json"), data).unwrap();
        } else {
            fs::write(folder.join(SINGLE), [data, &honest[header_len(honest)..]].concat()).unwrap();
        }
        let Some(files) = read_or(ExitCode::Files, WeightFiles::open(folder, spec.clone())) else { return false };
        let units = &ParamTable::new(spec, 1).units;
        assert!(units.iter().all(|layout| files.read_unit(layout, Kind::Float).is_ok()), "what was checked is read");
        true
    })
}

/// Length and header of an honest file of weights.
pub fn honest_header() -> Vec<u8> {
    let (_, file) = honest_model();
    file[..header_len(&file)].to_vec()
}

fn honest_model() -> (tempfile::TempDir, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    init_folder(&Arc::new(ModelSpec::preset("micro").expect("a preset")), folder.path(), 1, None, &mut |_, _| ())
        .unwrap();
    fs::rename(folder.path().join(SINGLE), folder.path().join(SHARD)).unwrap();
    let file = fs::read(folder.path().join(SHARD)).unwrap();
    (folder, file)
}

fn header_len(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize
}

/// A run's configuration as TOML, as YAML where it begins with `---`, and as an override; a model's where it begins with `{`.
pub fn config(data: &[u8]) -> bool {
    let name = match data {
        [b'{', ..] => "config.json",
        [b'-', b'-', b'-', ..] => "run.yaml",
        _ => "run.toml",
    };
    let text = String::from_utf8_lossy(data).into_owned();
    with_file(name, data, |path| {
        if name == "config.json" {
            return read_or(ExitCode::Files, ModelSpec::from_config_json(path)).is_some();
        }
        let required = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"].map(str::to_owned);
        let overrides = [&required[..], &[text]].concat();
        let outcomes = [Config::load(Some(path), &required), Config::load(None, &overrides)];
        let read: Vec<Config> =
            outcomes.into_iter().filter_map(|outcome| read_or(ExitCode::Configuration, outcome)).collect();
        for config in &read {
            assert_eq!(Config::from_toml(&config.to_toml()).expect("what was read is read again"), *config);
        }
        !read.is_empty()
    })
}

/// JSONL rows to sample from and to imitate, for the demo's tokenizer and chat template.
pub fn rows(data: &[u8]) -> bool {
    thread_local!(static TOKENIZER: Tokenizer = demo_tokenizer());
    let options = DatasetOptions { required_columns: vec!["answer".to_owned()], ..DatasetOptions::default() };
    with_file("rows.jsonl", data, |path| {
        TOKENIZER.with(|tokenizer| {
            let read = read_or(ExitCode::Files, Dataset::from_file(path, tokenizer, &options));
            let rows = read.as_ref().map_or(&[][..], Dataset::prompts);
            assert!(rows.iter().all(|prompt| prompt.columns.contains_key("answer")));
            let taught = read_or(ExitCode::Files, SftDataset::from_file(path, tokenizer, &[], 64));
            let mut examples = taught.iter().flat_map(|data| &data.examples);
            assert!(examples.all(|example| (1..example.token_ids.len()).contains(&example.prompt_len)));
            read.is_some() || taught.is_some()
        })
    })
}

fn demo_tokenizer() -> Tokenizer {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")); // the crate's or the fuzz targets'
    let folders = package.ancestors().map(|root| root.join("configs/arithmetic/model"));
    Tokenizer::from_folder(folders.into_iter().find(|folder| folder.exists()).expect("the repository"))
        .expect("a tokenizer")
}

/// A completion and the row's answer, one line each.
pub fn answer(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let (completion, reference) = text.split_once('\n').unwrap_or((&text, "1"));
    let settings = RewardConfig::default();
    let columns = serde_json::Map::from_iter([("answer".to_owned(), reference.into())]);
    let exact = exact_answer(completion, None, &columns, "answer").expect("text is compared with text");
    let number = numeric_answer(completion, None, &columns, "answer").ok(); // None: the reference is no number
    assert!([Some(exact), number].into_iter().flatten().all(|score| [0.0, 1.0].contains(&score)));
    let vote = answer_reader("numeric_answer", &settings).unwrap().expect("it compares answers")(completion);
    assert!(number != Some(1.0) || vote.is_some(), "what is right is an answer");
    number.is_some()
}

/// A chat template, for a short conversation.
pub fn template(data: &[u8]) -> bool {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    let template = ChatTemplate::new(&String::from_utf8_lossy(data), tokens.into());
    let Some(template) = read_or(ExitCode::Files, template) else { return false };
    let messages = ["system", "user"].map(|role| Message::new(role, "what is 'one' ?"));
    read_or(ExitCode::Files, template.render(&messages, true)).is_some()
}

/// A Parquet file; what does not begin as one is a footer of a file without rows.
pub fn parquet(data: &[u8]) -> bool {
    thread_local!(static TOKENIZER: Tokenizer = demo_tokenizer());
    let of_footer = || [b"PAR1", data, &(data.len() as u32).to_le_bytes(), b"PAR1"].concat();
    let file = if data.starts_with(b"PAR1") { data.to_vec() } else { of_footer() };
    with_file("rows.parquet", &file, |path| {
        let read = TOKENIZER.with(|tokenizer| Dataset::from_file(path, tokenizer, &DatasetOptions::default()));
        match read {
            Err(Error::EmptyDataset { .. }) => true, // a footer may be all there is
            read => read_or(ExitCode::Files, read).is_some(),
        }
    })
}

/// A checkpoint's manifest where it begins as [`honest_manifest`] does, else the state of its trainer.
pub fn checkpoint(data: &[u8]) -> bool {
    thread_local!(static FOLDER: tempfile::TempDir = tempfile::tempdir().unwrap());
    FOLDER.with(|folder| {
        let is_manifest = data.starts_with(b"{\"format");
        let state = if is_manifest { STATE.as_bytes() } else { data };
        fs::write(folder.path().join("trainer_state.json"), state).unwrap();
        fs::write(folder.path().join("manifest.json"), data).unwrap();
        let read = read_or(ExitCode::Checkpoint, Checkpoint::open(folder.path(), is_manifest));
        read.is_some_and(|checkpoint| checkpoint.folder == folder.path())
    })
}

/// The state of a trainer at its beginning.
pub const STATE: &str = r#"{"global_step": 0, "num_updates": 0, "generation_step": 0, "epoch": 0.0, "max_steps": 1,
    "num_input_tokens_seen": 0, "world_size": 1, "num_rows": 1, "sampler": {"epoch": 0, "position": 0, "late": []},
    "config": {"values": {"seed": 1}, "digests": {}, "salt": 0}, "log_history": [{"step": 1}]}"#;

/// The manifest of a checkpoint that has [`STATE`] alone.
pub fn honest_manifest() -> String {
    let digits: String = Sha256::digest(STATE).iter().map(|byte| format!("{byte:02x}")).collect();
    let record = format!(r#"{{"path": "trainer_state.json", "bytes": {}, "sha256": "{digits}"}}"#, STATE.len());
    format!(r#"{{"format": 1, "files": [{record}]}}"#)
}

/// What a reward's process answers for three completions.
pub fn reply(data: &[u8]) -> bool {
    check_reply(data, 3).is_ok()
}

fn with_file(name: &str, data: &[u8], read: impl FnOnce(&Path) -> bool) -> bool {
    thread_local!(static FOLDER: tempfile::TempDir = tempfile::tempdir().unwrap());
    FOLDER.with(|folder| {
        let path = folder.path().join(name);
        fs::write(&path, data).unwrap();
        read(&path)
    })
}

fn read_or<T>(code: ExitCode, outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Err(error) => {
            assert_eq!(error.exit_code(), code, "{error}");
            None
        }
        read => read.ok(),
    }
}
