//! Tests the command `verify` with a fake Python interpreter that returns recorded logits of transformers.

mod families;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::program::{Ended, command, end};

/// The folder of most tests.
const GOLDEN: &str = "qwen2_tied";

/// A fake Python interpreter with transformers. Returns the results that scripts/golden_verify.py recorded from a real one. CHANGE is executed
/// first; it may modify `rows`, the model's logits.
const PYTHON: &str = "
import array, json, os, re, sys
print('a line on standard output')
exec(os.environ.get('FIND', ''))
if len(sys.argv) > 3:
    asked = json.load(open(sys.argv[-2]))
    assert asked['device'] == 'cpu' and len(asked['sequences'][0]) == 14 and os.path.exists(asked['folder'] + '/config.json'), asked
    line, values = open(os.environ['RECORDED'] + asked['dtype'] + '.bin', 'rb').read().split(b'\\n', 1)
    header, values = json.loads(line), array.array('f', values)
    number = lambda word: int(word[1:]) if re.fullmatch(r'w\\d\\d', word) else 0
    words = lambda text: [number(word) for word in text.replace('w02', ' w02 ').split()]
    auto, name = None, 'TokenizersBackend'
    rest, rows = values[:-14 * 96], [values[at:at + 96] for at in range(len(values) - 14 * 96, len(values), 96)]
    exec(os.environ.get('CHANGE', ''))
    header['tokens'] = {'file': [words(text) for text in asked['texts']], 'class': name}
    header['tokens']['auto'] = [(auto or words)(text) for text in asked['texts']]
    with open(sys.argv[-1], 'wb') as file:
        file.write(json.dumps(header).encode() + b'\\n' + rest.tobytes() + b''.join(array.array('f', row).tobytes() for row in rows))
";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A copy of a golden folder with a word tokenizer, in which `w07` has id 7.
fn model(name: &str, folder: &Path) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    let entries = golden(name).read_dir().unwrap().map(|entry| entry.unwrap());
    for entry in entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with("verify_")) {
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let vocab: serde_json::Map<_, _> = (0..96).map(|id| (format!("w{id:02}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w00"},
    });
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(model.join("tokenizer_config.json"), r#"{"eos_token": "w02"}"#).unwrap();
    model
}

/// Modifies a matrix in a model's file, for example scales rows or swaps two parts.
fn damage(model: &Path, name: &str, change: impl Fn(&mut Vec<f32>)) {
    let files = model.read_dir().unwrap().map(|entry| entry.unwrap().path());
    for path in files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")) {
        let mut bytes = fs::read(&path).unwrap();
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
        let Some(offsets) = header[name]["data_offsets"].as_array() else { continue };
        let at = |index: usize| start + offsets[index].as_u64().unwrap() as usize;
        let part = &mut bytes[at(0)..at(1)];
        // A bfloat16 is the upper half of a float32.
        let size = if header[name]["dtype"] == "BF16" { 2 } else { 4 };
        let value = |word: &[u8]| {
            let mut whole = [0; 4];
            whole[4 - size..].copy_from_slice(word);
            f32::from_le_bytes(whole)
        };
        let mut values: Vec<f32> = part.chunks_exact(size).map(value).collect();
        change(&mut values);
        part.copy_from_slice(
            &values.iter().flat_map(|value| value.to_le_bytes()[4 - size..].to_vec()).collect::<Vec<_>>(),
        );
        fs::write(path, bytes).unwrap();
        return;
    }
    panic!("no {name} in {}", model.display());
}

/// A change of the model's folder before `verify` reads it.
type Damage<'a> = &'a dyn Fn(&Path);

/// Runs `verify` with the recorded logits, which CHANGE may modify.
fn verify(change: &str, more: &[&str]) -> Ended {
    verify_damaged(&|_| (), ("", change), more)
}

fn verify_damaged(damage: Damage<'_>, python: (&str, &str), more: &[&str]) -> Ended {
    verify_golden(GOLDEN, damage, python, more)
}

/// Runs `verify` on a copy of a golden folder.
fn verify_golden(name: &str, damage: Damage<'_>, (find, change): (&str, &str), more: &[&str]) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let model = model(name, folder.path());
    damage(&model);
    let python = folder.path().join("python");
    fs::write(folder.path().join("answer.py"), PYTHON).unwrap();
    fs::write(&python, format!("#!/bin/sh\nexec python3 {}/answer.py \"$@\"\n", folder.path().display())).unwrap();
    fs::set_permissions(&python, Permissions::from_mode(0o755)).unwrap();
    let recorded: Value = serde_json::from_str(&fs::read_to_string(golden(name).join("golden.json")).unwrap()).unwrap();
    let ids = recorded["input_ids"][recorded["all_logits_of"].as_u64().unwrap() as usize].as_array().unwrap();
    let prompt = ids.iter().map(|id| format!("w{:02}", id.as_u64().unwrap())).collect::<Vec<_>>().join(" ");
    let mut command = command("verify --device cpu --max_completion_length 1");
    command.args(["--prompt", &prompt]);
    if !more.contains(&"--model") {
        command.arg("--model").arg(model);
    }
    if !more.contains(&"--python") {
        command.arg("--python").arg(&python);
    }
    command.args(more).env("RECORDED", golden(name).join("verify_")).env("FIND", find);
    end(command.env("CHANGE", change).spawn().unwrap())
}

#[test]
fn verify_passes_a_model_that_matches_transformers() {
    for more in [&[][..], &["--dtype", "bfloat16"]] {
        let ended = verify("", more);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let rows: Vec<&str> = ended.stdout.lines().map(str::trim).collect();
        assert!(rows[0].contains("against transformers 5.24.0 (torch 2.11.0"), "{rows:?}");
        assert!(rows[0].ends_with("on cpu: 1 prompts, 13 positions"), "{rows:?}");
        assert_eq!(rows.last(), Some(&"verdict: the same model up to rounding"));
        assert_eq!(ended.stderr.matches("verify, ").count(), 3, "each part is said as it begins\n{}", ended.stderr);
        let row = |start: &str| {
            *rows.iter().find(|row| row.starts_with(start)).unwrap_or_else(|| panic!("{start}: {rows:?}"))
        };
        for reader in ["tokenizer.json", "AutoTokenizer"] {
            let figure = row(&format!("texts with the tokens of {reader}"));
            let counts: Vec<&str> = figure.split_whitespace().filter(|word| word.parse::<u32>().is_ok()).collect();
            assert!(counts.len() == 2 && counts[0] == counts[1] && counts[0].parse::<u32>().unwrap() > 20, "{rows:?}");
        }
        for of in ["trainer: error of layer", "trainer: error of the head by itself", "engine: mean difference"] {
            let figures: Vec<f64> = row(of).split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let (measured, limit) = (figures[figures.len() - 2], figures[figures.len() - 1]);
            assert!(measured <= limit && (more.is_empty() || measured > 1e-5), "{rows:?}");
        }
        if more.is_empty() {
            assert!(row("trainer: equal most probable token").contains("13 of 13"), "{rows:?}");
            assert!(row("engine: greedy tokens").contains("1 of 1"), "{rows:?}");
        } else {
            assert!(row("trainer: mean KL divergence").contains("at most"), "{rows:?}");
        }
    }
}

/// Faults that change logits less than the rounding of a correct model are attributed to the block that has them.
#[test]
fn verify_finds_wrong_rows_matrices_and_swapped_heads() {
    let row = |values: &mut Vec<f32>| values[5 * 32..6 * 32].iter_mut().for_each(|value| *value *= 1.05);
    let matrix = |values: &mut Vec<f32>| values.iter_mut().for_each(|value| *value *= 1.05);
    let heads = |values: &mut Vec<f32>| values[..2 * 8 * 32].rotate_left(8 * 32);
    let found = |part: &str, layer: usize, change: &dyn Fn(&mut Vec<f32>), dtype: &str| {
        let name = format!("model.layers.{layer}.{part}.weight");
        let ended = verify_damaged(&|model| damage(model, &name, change), ("", ""), &["--dtype", dtype]);
        ended.assert_error(&name, 13, &[&format!("error of layer {layer}, the worst, by itself")]);
    };
    found("self_attn.q_proj", 0, &row, "float32");
    found("self_attn.v_proj", 1, &row, "float32");
    found("mlp.gate_proj", 1, &row, "float32");
    found("self_attn.k_proj", 0, &matrix, "bfloat16");
    found("mlp.up_proj", 1, &matrix, "bfloat16");
    found("self_attn.q_proj", 1, &heads, "bfloat16");
}

#[test]
fn verify_reports_large_differences_with_exit_code_13() {
    let shifted = "rows[5] = [logit + 0.5 for logit in rows[5]]"; // the softmax is the same, the weights are not
    let engine = "rows[12][0] += 1000; rows[12][1] -= 1000"; // the last position alone decides the engine's token
    let worst = "trainer: mean at the position that differs most";
    for (change, told) in [
        (shifted, format!("{worst}: 5.00e-1, where rounding makes at most 1.00e-3")),
        (engine, worst.to_owned()),
        ("rows[3][4] = float('nan')", format!("{worst}: NaN")),
        ("words = lambda text: [1]", "texts get other tokens than with tokenizer.json, first \"w".to_owned()),
    ] {
        let ended = verify(change, &[]);
        ended.assert_error(change, 13, &[&told, "outputs differ from transformers by more than rounding errors"]);
        assert!(ended.stdout.contains("trainer: mean difference"), "the table comes first: {}", ended.stdout);
        assert!(
            ended.stdout.lines().last().unwrap().starts_with("verdict: not the same model as in transformers: "),
            "{}",
            ended.stdout
        );
    }
    assert_eq!(verify(shifted, &["--tolerance", "510"]).code, Some(0));
    // Where AutoTokenizer alone has other tokens, its class is named and the model is none the worse.
    let digits = "name = 'GPT2Tokenizer'; auto = lambda text: [5] if '2024' in text else words(text)";
    let ended = verify(digits, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in ["AutoTokenizer gives other tokens, first for \"In 2024", "its class GPT2Tokenizer", "tokenizer_class"]
    {
        assert!(ended.stdout.contains(part), "{part}: {}", ended.stdout);
    }
    let engine = verify(engine, &["--tolerance", "100000"]);
    engine.assert_error("the engine", 13, &["engine: mean difference of log-probabilities"]);
}

#[test]
fn verify_without_transformers_prints_the_install_command() {
    let missing = "raise ModuleNotFoundError(\"No module named 'torch'\")";
    let installs = ["No module named 'torch'", "-m pip install torch==2.11.0 transformers", "--python"];
    verify_damaged(&|_| (), (missing, ""), &[]).assert_error("no torch", 4, &installs);
    let fewer = "rows = [row[1:] for row in rows]";
    verify(fewer, &[]).assert_error(
        "another vocabulary",
        4,
        &["bytes, which is not the size of the results", "a vocabulary of 96"],
    );
    let broken = "raise RuntimeError('no such architecture')";
    verify(broken, &[]).assert_error("a failure", 4, &["RuntimeError: no such architecture"]);
    verify("", &["--python", "/no/such/python"]).assert_error("no python", 4, &["--python = /no/such/python"]);
}

/// Without network access, a Hub name gives an error that says how to download the model, as in every command.
#[test]
fn verify_accepts_a_hub_model_name() {
    verify("", &["--model", "tests/none"]).assert_error("a name", 3, &["hf download tests/none"]);
}
