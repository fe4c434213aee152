//! Models and data sets by Hub name: downloads from a local server with the Hub's protocol, and offline use of the cache.

mod server;

use std::fs;
use std::path::{Path, PathBuf};

use colo_grpo::internal::data::{Hub, HubOptions, Repo};
use serde_json::Value;
use server::{COMMIT, Faults, Server, hex};
use sha2::{Digest, Sha256};

use crate::program::{MODEL, SMALL_RUN, command, end, json_lines};

const NAME: &str = "tests/tiny";
const SHARD: &str = "model.safetensors";

/// Bytes in which no part occurs twice.
fn weights() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn tiny() -> Server {
    Server::new("models/tests/tiny", &[("config.json", b"{}"), (SHARD, &weights()), ("sub/notes.txt", b"n")])
}

fn options(server: &Server, cache: &Path) -> HubOptions {
    let mut options = HubOptions::from_env();
    (options.endpoint, options.cache) = (server.endpoint(), cache.to_owned());
    (options.token, options.is_offline) = (None, false);
    options
}

/// Downloads these files of the model, and reads them.
fn fetch(options: HubOptions, names: &[&str]) -> Result<Vec<Vec<u8>>, String> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let hub = Hub::new(options);
    let paths = hub.open(&Repo::model(NAME, None).unwrap()).and_then(|snapshot| snapshot.fetch(&names));
    let paths = paths.map_err(|error| error.to_string())?;
    Ok(paths.into_iter().map(|path| fs::read(path).unwrap()).collect())
}

fn blob(cache: &Path) -> PathBuf {
    cache.join("models--tests--tiny/blobs").join(hex(&Sha256::digest(weights())))
}

fn downloads(server: &Server) -> Vec<String> {
    server.take_requests().into_iter().filter(|request| request.starts_with("GET /store/")).collect()
}

#[test]
fn files_are_downloaded_once_and_found_without_a_network() {
    let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
    let names = ["config.json", SHARD, "sub/notes.txt"];
    let files = [b"{}".to_vec(), weights(), b"n".to_vec()];
    assert_eq!(fetch(options(&server, cache.path()), &names).unwrap(), files);
    let folder = cache.path().join("models--tests--tiny");
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(folder.join("snapshots").join(COMMIT).join("sub/notes.txt")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{link:?}");
    assert_eq!(fs::read(blob(cache.path())).unwrap(), weights());
    server.take_requests();

    assert_eq!(fetch(options(&server, cache.path()), &names).unwrap(), files);
    assert_eq!(server.take_requests(), [format!("GET /api/models/{NAME}/revision/main")]);
    let offline = |cache: &Path| {
        let mut options = options(&server, cache);
        options.is_offline = true;
        options
    };
    assert_eq!(fetch(offline(cache.path()), &names).unwrap(), files);
    let nowhere = tempfile::tempdir().unwrap();
    let error = fetch(offline(nowhere.path()), &names).unwrap_err();
    assert!(error.contains("HF_HUB_OFFLINE is set") && error.ends_with("hf download tests/tiny"), "{error}");
    fs::remove_file(folder.join("snapshots").join(COMMIT).join(SHARD)).unwrap();
    let error = fetch(offline(cache.path()), &names).unwrap_err();
    assert!(error.contains("lacks model.safetensors;"), "{error}");
    assert_eq!(server.take_requests(), [""; 0]);
}

#[test]
fn an_interrupted_download_resumes() {
    let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
    server.set_faults(Faults { cut_after: Some(500_000), ..Faults::default() });
    assert_eq!(fetch(options(&server, cache.path()), &[SHARD]).unwrap(), [weights()]);
    let requests = downloads(&server);
    assert!(requests.len() == 2 && requests[1].contains(" bytes="), "{requests:?}");

    // An earlier process left a part.
    let blob = blob(cache.path());
    for (never_resumes, part) in [(false, &weights()[..700_000]), (true, &weights()[..700_000]), (false, &[7; 900])] {
        fs::remove_file(&blob).unwrap();
        fs::write(blob.with_extension("incomplete"), part).unwrap();
        server.set_faults(Faults { never_resumes, ..Faults::default() });
        assert_eq!(fetch(options(&server, cache.path()), &[SHARD]).unwrap(), [weights()], "{never_resumes}");
        let requests = downloads(&server);
        assert!(requests[0].ends_with(&format!("bytes={}-", part.len())), "{requests:?}");
        assert!(!blob.with_extension("incomplete").exists());
    }
}

#[test]
fn a_corrupt_download_is_repeated_once_and_then_refused() {
    for name in [SHARD, "config.json"] {
        let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
        server.set_faults(Faults { num_corrupt: 1, ..Faults::default() });
        assert!(fetch(options(&server, cache.path()), &[name]).is_ok(), "{name}");
        let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
        server.set_faults(Faults { num_corrupt: 9, ..Faults::default() });
        let error = fetch(options(&server, cache.path()), &[name]).unwrap_err();
        assert!(error.contains(&format!("{name}: two downloads of the file did not match its hash")), "{error}");
        let folder = cache.path().join("models--tests--tiny");
        assert!(!folder.join("snapshots").join(COMMIT).join(name).exists());
        assert_eq!(fs::read_dir(folder.join("blobs")).unwrap().count(), 0, "{name}");
    }
}

#[test]
fn a_hub_refusal_says_what_to_do_and_the_token_stays_private() {
    let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
    server.set_faults(Faults { token: Some("secret".into()), ..Faults::default() });
    let error = fetch(options(&server, cache.path()), &[SHARD]).unwrap_err();
    assert!(error.contains("401 (Repository not found)") && error.contains("set HF_TOKEN"), "{error}");
    server.take_requests();
    let mut given = options(&server, cache.path());
    given.token = Some("secret".into());
    assert_eq!(fetch(given, &[SHARD, "config.json"]).unwrap()[0], weights());
    for request in server.take_requests() {
        assert_eq!(request.ends_with("Bearer secret"), !request.contains(" /store/"), "{request}");
    }

    let absent = Repo::model("tests/absent", None).unwrap();
    let error = Hub::new(options(&server, cache.path())).open(&absent).unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
    server.set_faults(Faults::default());
    let error = Hub::new(options(&server, cache.path())).open(&absent).unwrap_err().to_string();
    assert!(error.contains("404") && error.contains("check the name"), "{error}");
    let other = Repo::model(NAME, Some("v9")).unwrap();
    let error = Hub::new(options(&server, cache.path())).open(&other).unwrap_err().to_string();
    assert!(error.starts_with("tests/tiny@v9: ") && error.contains("revision"), "{error}");
}

#[test]
fn an_unreachable_hub_falls_back_to_the_cache() {
    let (server, cache) = (tiny(), tempfile::tempdir().unwrap());
    let closed = || {
        let mut options = options(&server, cache.path());
        options.endpoint = "http://127.0.0.1:1".into();
        options
    };
    let error = fetch(closed(), &[SHARD]).unwrap_err();
    assert!(error.contains("http://127.0.0.1:1 cannot be reached") && error.contains("hf download"), "{error}");
    fetch(options(&server, cache.path()), &[SHARD]).unwrap();
    assert_eq!(fetch(closed(), &[SHARD]).unwrap(), [weights()]);
}

/// A server with the demo's model and rows as repositories.
fn demo() -> Server {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join(MODEL);
    let names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let mut files: Vec<(&str, Vec<u8>)> =
        names.iter().map(|name| (name.as_str(), fs::read(folder.join(name)).unwrap())).collect();
    let generation = br#"{"eos_token_id": 1, "bos_token_id": null, "temperature": 0.7, "top_p": 0.8}"#;
    let eos: Value = serde_json::from_slice(&fs::read(folder.join("generation_config.json")).unwrap()).unwrap();
    let generation = String::from_utf8_lossy(generation).replace("1,", &format!("{},", eos["eos_token_id"]));
    files.iter_mut().filter(|(name, _)| *name == "generation_config.json").for_each(|(_, bytes)| {
        *bytes = generation.clone().into_bytes();
    });
    files.push(("pytorch_model.bin", vec![1; 9]));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    let server = Server::new("models/tests/tiny", &files);
    let rows = fs::read(root.join("configs/arithmetic/train.jsonl")).unwrap();
    let held_out = fs::read(root.join("configs/arithmetic/eval.jsonl")).unwrap();
    let readme = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train*\n  - split: test\n    \
        path: main/test*\n---\n";
    let files: [(&str, &[u8]); 3] =
        [("README.md", readme), ("main/train.jsonl", &rows), ("main/test.jsonl", &held_out)];
    server.add("datasets/tests/sums", &files);
    server
}

#[test]
fn a_run_uses_a_model_and_a_data_set_by_hub_name() {
    let (server, home) = (demo(), tempfile::tempdir().unwrap());
    let run = |more: &str, offline: bool| {
        let line = format!(
            "--nproc 2 {SMALL_RUN} model_name_or_path={NAME} train_file=none dataset_name=tests/sums eval_steps=1 max_eval_samples=4 {more}"
        );
        let mut command = command(&line);
        command.env("HF_HOME", home.path()).env("HF_ENDPOINT", server.endpoint()).env_remove("HF_HUB_CACHE");
        command.env("HF_HUB_OFFLINE", if offline { "1" } else { "0" });
        end(command.spawn().unwrap())
    };
    let out = home.path().join("out");
    let first = run(&format!("output_dir={}", out.display()), false);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert!(first.stderr.contains("tests/sums (train): ") && first.stderr.contains("tests/sums (test): 4 read"));
    assert!(
        first.stderr.contains("prompts: conversations, through the chat template; the first one: \""),
        "{}",
        first.stderr
    );
    let requests = server.take_requests();
    assert!(requests.iter().all(|request| !request.contains("pytorch_model.bin")), "{requests:?}");
    let asked = requests.iter().filter(|request| request.contains("/api/")).count();
    assert_eq!(asked, 3, "the launcher alone asks: {requests:?}"); // the model, and the data set for each split
    let generation: Value =
        serde_json::from_slice(&fs::read(out.join("final/generation_config.json")).unwrap()).unwrap();
    assert_eq!((generation["temperature"].as_f64(), generation["top_p"].as_f64()), (Some(0.7), Some(0.8)));

    // The run's own configuration is one to run again; nothing is asked of the network.
    let again = format!(
        "--nproc 2 --config {}/run_config.json output_dir={}",
        out.display(),
        out.with_extension("2").display()
    );
    let mut again = command(&again);
    let again = again.env("HF_HOME", home.path()).env("HF_ENDPOINT", server.endpoint()).env_remove("HF_HUB_CACHE");
    let again = end(again.env("HF_HUB_OFFLINE", "1").spawn().unwrap());
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(server.take_requests(), [""; 0]);
    let reward = |folder: &Path| {
        let lines = json_lines(&fs::read_to_string(folder.join("metrics.jsonl")).unwrap());
        lines.iter().filter_map(|line| line.get("reward").cloned()).collect::<Vec<_>>()
    };
    assert_eq!(reward(&out), reward(&out.with_extension("2")));

    let wrong = run("dataset_config=mian seedd=1 dataset_train_split=train", true);
    wrong.assert_error("a configuration that is not there", 2, &["unknown key 'seedd'", "it has no 'mian': main"]);
}

/// `eval` resolves rows like a run, and its launcher downloads them.
#[test]
fn an_evaluation_uses_rows_by_hub_name() {
    let (server, home) = (demo(), tempfile::tempdir().unwrap());
    let eval = |ranks: usize, rows: &str, home: &Path| {
        let line = format!("eval --nproc {ranks} --model {NAME} --device cpu {rows}");
        let mut command = command(&line);
        command.env("HF_HOME", home).env("HF_ENDPOINT", server.endpoint()).env_remove("HF_HUB_CACHE");
        end(command.env("HF_HUB_OFFLINE", "0").spawn().unwrap())
    };
    let hub = "--data hf://datasets/tests/sums/main/te*.jsonl --max_completion_length 2";
    let config =
        "--config configs/tiny-cpu.toml train_file=none eval_file=none dataset_name=tests/sums max_eval_samples=4";
    for (ranks, rows, problems) in [(2, hub, 200), (2, config, 4), (1, config, 4)] {
        let home = tempfile::tempdir().unwrap();
        let ended = eval(ranks, rows, home.path());
        assert_eq!(ended.code, Some(0), "{rows}: {}", ended.stderr);
        assert!(ended.stdout.contains(&format!("\"problems\":{problems},")), "{rows}: {}", ended.stdout);
    }
    let folder = home.path().join("rows");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("train.jsonl"), "{\"prompt\": \"what is one plus one ?\", \"answer\": 2}\n".repeat(3))
        .unwrap();
    fs::write(folder.join("test.jsonl"), "{\"prompt\": \"what is one plus one ?\", \"answer\": 2}\n").unwrap();
    for (entry, problems) in [("", 1), ("/t*.jsonl", 4)] {
        let ended = eval(1, &format!("--data {}{entry} --max_completion_length 2", folder.display()), home.path());
        assert!(ended.stdout.contains(&format!("\"problems\":{problems},")), "{entry}: {}", ended.stderr);
    }
    eval(1, "--data openai/gsm8k", home.path()).assert_error(
        "a name of the Hub",
        3,
        &["openai/gsm8k: --data: No such file", "named hf://datasets/openai/gsm8k/PATTERN"],
    );
}

#[test]
fn missing_hub_files_are_reported_with_other_errors() {
    let out = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} model_name_or_path=Qwen/Nowhere train_file=openai/gsm8k eval_file=rows/*.jsonl beta=-1 output_dir={}",
        out.path().display()
    );
    let home = out.path().join("home");
    let run = |line: &str| end(command(line).env("HF_HOME", &home).env("HF_HUB_OFFLINE", "1").spawn().unwrap());
    let fragments = [
        "beta = -1: expected",
        "hf download Qwen/Nowhere",
        "openai/gsm8k: train_file: No such file",
        "dataset_name = openai/gsm8k and fetched with: hf download openai/gsm8k --repo-type dataset",
        "rows/*.jsonl: eval_file: no file matches the pattern",
    ];
    run(&line).assert_error("a wrong value and missing files", 2, &fragments);
    let line = line.replace("beta=-1", "generation_batch_size=7 reward_funcs=[\"format\",\"nosuch\"]");
    let fragments = [&["generation_batch_size = 7", "nosuch", "rows/*.jsonl"], &fragments[1..4]].concat();
    run(&line).assert_error("a wrong batch, a missing reward and missing files", 2, &fragments);
    let line = line.replace("generation_batch_size=7 reward_funcs=[\"format\",\"nosuch\"]", "");
    run(&line).assert_error("missing files alone", 3, &["hf download Qwen/Nowhere", "rows/*.jsonl"]);
}

/// As in TRL, 4 ranks with 4 completions each may share a group of 16; it equals the group of one rank with all 16.
#[test]
fn a_group_that_spans_ranks_is_sampled_and_trained_on_as_one() {
    let out = tempfile::tempdir().unwrap();
    let steps = |ranks: usize| {
        let folder = out.path().join(ranks.to_string());
        let line = format!(
            "--nproc {ranks} {SMALL_RUN} num_generations=16 per_device_train_batch_size={} max_steps=3 output_dir={}",
            16 / ranks,
            folder.display()
        );
        let ended = end(command(&line).spawn().unwrap());
        assert_eq!(ended.code, Some(0), "{line}\n{}", ended.stderr);
        let lines = json_lines(&fs::read_to_string(folder.join("metrics.jsonl")).unwrap());
        let steps: Vec<Value> = lines.into_iter().filter(|line| line.get("reward").is_some()).collect();
        assert_eq!(steps.len(), 3);
        steps
    };
    let (one, four) = (steps(1), steps(4));
    for (one, four) in one.iter().zip(&four) {
        for name in ["reward", "reward_std", "completions/mean_length", "num_tokens"] {
            assert_eq!(one[name], four[name], "{name}");
        }
        for name in ["loss", "grad_norm", "entropy"] {
            let (one, four) = (one[name].as_f64().unwrap(), four[name].as_f64().unwrap());
            assert!((one - four).abs() <= 1e-5 + 1e-4 * one.abs(), "{name}: {one} and {four}"); // sums in another order
        }
    }
    assert!(one.iter().any(|step| step["grad_norm"].as_f64().unwrap() > 0.0), "a run without gradient shows nothing");
}
