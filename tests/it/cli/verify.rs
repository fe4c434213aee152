//! `verify` against a package that answers with the logits that transformers once gave for a golden folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::program::{Ended, command, end};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen2_tied");

/// Stands in for torch: what the program's worker asks of it.
const TORCH: &str = "
import contextlib
__version__ = '2.11'
float32, bfloat16 = 'float32', 'bfloat16'
inference_mode = contextlib.nullcontext
def tensor(values, device): return values
";

/// Stands in for transformers: the recorded logits of one prompt, and a row of nothing for the token behind it. CHANGE is run first.
const TRANSFORMERS: &str = "
import array, json, os, types
__version__ = '5.23.0'
print('a line on standard output')
recorded = json.load(open(os.environ['GOLDEN']))
index = recorded['all_logits_of']
prompt, rows = recorded['input_ids'][index], recorded['all_logits']
words = lambda text: [int(word[1:]) for word in text.split()]
exec(os.environ.get('CHANGE', ''))

class Logits(list):
    def float(self): return self
    cpu = numpy = float
    def tobytes(self): return b''.join(array.array('f', row).tobytes() for row in self)

class Model:
    def to(self, device): assert device == 'cpu'; return self
    def eval(self): return self
    def __call__(self, input_ids):
        assert input_ids[0][:-1] == prompt, input_ids
        return types.SimpleNamespace(logits=[Logits(rows + [[0.0] * len(rows[0])])])

class AutoModelForCausalLM:
    def from_pretrained(folder, dtype):
        assert os.path.exists(folder + '/model.safetensors') and dtype == os.environ['DTYPE'], dtype
        return Model()

class PreTrainedTokenizerFast:
    def from_pretrained(folder): return lambda text: {'input_ids': words(text)}
";

/// The golden folder with a tokenizer of words: `w7` is 7.
fn model(folder: &Path) -> PathBuf {
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(Path::new(GOLDEN).join(file), model.join(file)).unwrap();
    }
    let vocab: serde_json::Map<_, _> = (0..96).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(model.join("tokenizer_config.json"), r#"{"eos_token": "w2"}"#).unwrap();
    model
}

/// Runs `verify` where Python has these modules.
fn verify(torch: &str, change: &str, more: &[&str]) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    fs::write(folder.path().join("torch.py"), torch).unwrap();
    fs::write(folder.path().join("transformers.py"), TRANSFORMERS).unwrap();
    let golden = Path::new(GOLDEN).join("golden.json");
    let recorded: Value = serde_json::from_str(&fs::read_to_string(&golden).unwrap()).unwrap();
    let ids = recorded["input_ids"][recorded["all_logits_of"].as_u64().unwrap() as usize].as_array().unwrap();
    let prompt = ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ");
    let dtype = if more.contains(&"bfloat16") { "bfloat16" } else { "float32" };
    let mut command = command("verify --device cpu --max_completion_length 1");
    command.args(["--prompt", &prompt]);
    if !more.contains(&"--model") {
        command.arg("--model").arg(model);
    }
    command.args(more).env("PYTHONPATH", folder.path()).env("GOLDEN", golden).env("DTYPE", dtype);
    end(command.env("CHANGE", change).spawn().unwrap())
}

#[test]
fn a_model_with_transformers_logits_passes_in_both_types() {
    for more in [&[][..], &["--dtype", "bfloat16"]] {
        let ended = verify(TORCH, "", more);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let rows: Vec<&str> = ended.stdout.lines().map(str::trim).collect();
        assert!(rows[0].contains("against transformers 5.23.0 (torch 2.11)"), "{rows:?}");
        assert!(rows[0].ends_with("on cpu: 1 prompts, 13 positions"), "{rows:?}");
        let row = |start: &str| {
            *rows.iter().find(|row| row.starts_with(start)).unwrap_or_else(|| panic!("{start}: {rows:?}"))
        };
        assert!(row("prompts with equal tokens").contains("1 of 1"), "{rows:?}");
        let of = |start: &str| row(start).strip_prefix(start).unwrap().split_whitespace().next().unwrap().to_owned();
        let mean: f64 = of("trainer: mean at the position that differs most").parse().unwrap();
        let most: f64 = of("trainer: largest difference of a logit").parse().unwrap();
        let (least, limit) = if more.is_empty() { (0.0, 1e-4) } else { (1e-4, 0.2) };
        assert!(least < mean && mean <= most && mean < limit && most < 10.0 * limit, "{rows:?}");
        if more.is_empty() {
            assert!(row("trainer: equal most probable token").contains("13 of 13"), "{rows:?}");
            assert!(row("engine: greedy tokens").contains("1 of 1"), "{rows:?}");
        }
    }
}

#[test]
fn what_differs_by_more_than_rounding_is_said_and_ends_with_13() {
    let shifted = "rows[5] = [logit + 0.5 for logit in rows[5]]"; // the softmax is the same, the weights are not
    let engine = "rows[12][0] += 1000; rows[12][1] -= 1000"; // the last position alone decides the engine's token
    for (change, told) in [
        (shifted, "the trainer's logits at one position differ by 5.000e-1 on average, --tolerance allows 0.001"),
        (engine, "the trainer's logits at one position"),
        ("rows[3][4] = float('nan')", "the trainer's logits at one position differ by NaN"),
        ("words = lambda text: [1]", "1 of 1 prompts have other tokens"),
    ] {
        let ended = verify(TORCH, change, &[]);
        ended.assert_error(change, 13, &[told, "its numbers are not those of transformers"]);
        assert!(ended.stdout.contains("trainer: mean difference"), "the table comes first: {}", ended.stdout);
    }
    assert_eq!(verify(TORCH, shifted, &["--tolerance", "0.51"]).code, Some(0));
    let engine = verify(TORCH, engine, &["--tolerance", "100"]);
    engine.assert_error("the engine", 13, &["the engine's log-probabilities differ by"]);
}

#[test]
fn without_transformers_the_line_that_installs_it_is_said() {
    let missing = "raise ModuleNotFoundError(\"No module named 'torch'\")";
    verify(missing, "", &[]).assert_error(
        "no torch",
        4,
        &["No module named 'torch'", "python3 -m pip install torch==2.11.0 transformers", "--python"],
    );
    let fewer = "rows = [row[1:] for row in rows]";
    verify(TORCH, fewer, &[]).assert_error("another vocabulary", 4, &["bytes of logits", "a vocabulary of 96"]);
    let broken = "raise RuntimeError('no such architecture')";
    verify(TORCH, broken, &[]).assert_error("a failure", 4, &["RuntimeError: no such architecture"]);
    verify(TORCH, "", &["--python", "/no/such/python"]).assert_error("no python", 4, &["--python = /no/such/python"]);
}

/// Without a network a name is an error that says how it is downloaded, as in every command.
#[test]
fn a_model_may_be_named() {
    verify(TORCH, "", &["--model", "tests/none"]).assert_error("a name", 3, &["hf download tests/none"]);
}
