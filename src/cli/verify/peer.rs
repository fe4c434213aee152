//! The Python process that runs transformers for `verify`: it answers one request and ends.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::json;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};

/// The Python program of the process.
const PROGRAM: &str = include_str!("transformers.py");

/// A Python interpreter with transformers and torch.
#[derive(Debug)]
pub(super) struct Peer {
    python: String,
    /// Temporary folder for request, answer and log.
    folder: tempfile::TempDir,
}

/// A request to transformers: texts to tokenize, and sequences to score.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub model: &'a Path,
    /// Dtype, `float32` or `bfloat16`.
    pub dtype: &'a str,
    /// Device, `cpu` or `cuda`.
    pub device: &'a str,
    pub texts: &'a [String],
    pub sequences: &'a [Vec<u32>],
    pub spec: &'a ModelSpec,
}

/// The outputs of transformers. T tokens, D hidden size, V vocabulary, L layers.
#[derive(Debug)]
pub(super) struct PeerOutputs {
    pub versions: Versions,
    pub tokens: PeerTokens,
    pub sequences: Vec<PeerSequence>,
}

/// Token ids of each text.
#[derive(Debug, Deserialize)]
pub(super) struct PeerTokens {
    /// Token ids according to `tokenizer.json` alone.
    pub file: TokensOrReason,
    /// Token ids according to transformers' AutoTokenizer.
    pub auto: TokensOrReason,
    /// Class name of the tokenizer that AutoTokenizer returns.
    pub class: String,
}

/// Token ids of each text, or the reason why there are none.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokensOrReason {
    Tokens(Vec<Vec<u32>>),
    Reason(String),
}

/// Outputs for one sequence, computed by transformers in float32 from weights in the verified dtype.
#[derive(Debug)]
pub(super) struct PeerSequence {
    /// Residual stream before each block and after the last, rounded to that dtype. L + 1 of `[T, D]` f32
    pub inputs: Vec<Tensor>,
    /// Outputs of the blocks for these inputs. L of `[T, D]` f32
    pub outputs: Vec<Tensor>,
    /// Logits of the head for the last input. `[T, V]` f32
    pub head: Tensor,
    /// Logits of the whole model. `[T, V]` f32
    pub logits: Tensor,
    /// Errors of transformers itself in the verified dtype, if that rounds.
    pub rounding: Option<Rounding>,
}

/// Errors of transformers in the verified dtype, relative to float32.
#[derive(Debug, Deserialize)]
pub(super) struct Rounding {
    /// Relative error of each block's update. `[L][T]`
    pub blocks: Vec<Vec<f64>>,
    /// Relative error of the head's logits. `[T]`
    pub head: Vec<f64>,
    /// KL divergence of the whole model's distributions, in nats. `[T]`
    pub kl: Vec<f64>,
    /// Difference of the log-probability of each token except the first. `[T - 1]`
    pub logprobs: Vec<f64>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Versions {
    pub transformers: String,
    pub torch: String,
}

#[derive(Deserialize)]
struct PeerHeader {
    versions: Versions,
    tokens: PeerTokens,
    rounding: Option<Vec<Rounding>>,
}

impl Peer {
    /// Checks that the interpreter has the packages.
    ///
    /// # Errors
    /// [`Error::Environment`] with the command that installs them.
    pub fn find(python: &str) -> Result<Self> {
        let folder = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let peer = Self { python: python.to_owned(), folder };
        peer.run(&[])?;
        Ok(peer)
    }

    /// Sends a request and returns the outputs.
    ///
    /// # Errors
    /// [`Error::Environment`] with the last lines of a process that failed or whose answer has a wrong size.
    pub fn ask(&self, question: &Question<'_>) -> Result<PeerOutputs> {
        let Question { model, dtype, device, texts, sequences, .. } = question;
        let text = json!({"folder": model, "dtype": dtype, "device": device, "texts": texts, "sequences": sequences});
        let (asked, answered) = (self.file("question.json"), self.file("answer"));
        fs::write(&asked, text.to_string()).map_err(Error::io(&asked))?;
        self.run(&[&asked, &answered])?;
        self.read(&answered, question).map_err(Error::io(&answered))?.map_err(|message| self.failed(&message))
    }

    fn read(&self, path: &Path, question: &Question<'_>) -> std::io::Result<std::result::Result<PeerOutputs, String>> {
        let (mut file, mut line) = (BufReader::new(File::open(path)?), String::new());
        file.read_line(&mut line)?;
        let header: PeerHeader = match serde_json::from_str(&line) {
            Ok(header) => header,
            Err(error) => return Ok(Err(format!("cannot read the results that it wrote: {error}"))),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(header.outputs(&bytes, question))
    }

    /// Runs the process to its end.
    fn run(&self, args: &[&Path]) -> Result<()> {
        let log = File::create(self.log()).map_err(Error::io(self.log()))?;
        let mut command = Command::new(&self.python);
        command.args(["-c", PROGRAM]).args(args).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(Error::io(self.log()))?).stderr(log);
        command.env("HF_HUB_OFFLINE", "1").env("TOKENIZERS_PARALLELISM", "false");
        match command.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.failed(&format!("the process ended with {status}"))),
            Err(error) => {
                let message = format!("--python = {}: cannot start this interpreter: {error}", self.python);
                Err(Error::Environment { message })
            }
        }
    }

    /// The error of a failed process, with the last line that it printed.
    fn failed(&self, why: &str) -> Error {
        let said = untrusted::read_text(&self.log(), MAX_RUN_CONFIG_BYTES).unwrap_or_default();
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let python = &self.python;
        let message = match last.contains("ModuleNotFoundError") {
            true => format!(
                "verify needs torch and transformers in {python}, which fails with: {last}; install them with {python} \
                 -m pip install torch==2.11.0 transformers, or name another interpreter with --python"
            ),
            false => format!("transformers in {python}: {why}: {last}"),
        };
        Error::Environment { message }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> PathBuf {
        self.file("log")
    }
}

impl PeerHeader {
    /// The outputs from the arrays in `bytes`; an error if their size does not match the request.
    fn outputs(self, bytes: &[u8], question: &Question<'_>) -> std::result::Result<PeerOutputs, String> {
        let Self { versions, tokens, rounding } = self;
        let ModelSpec { hidden_size, vocab_size, .. } = *question.spec;
        let num_layers = question.spec.num_layers();
        let positions: Vec<usize> = question.sequences.iter().map(Vec::len).collect();
        let all: usize = positions.iter().sum();
        if bytes.len() != 4 * all * ((2 * num_layers + 1) * hidden_size + 2 * vocab_size) {
            return Err(format!(
                "it wrote {} bytes, which is not the size of the results for {all} positions, {num_layers} layers of \
                 width {hidden_size} and a vocabulary of {vocab_size}",
                bytes.len()
            ));
        }
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().expect("four bytes"))).collect();
        let mut rest = &values[..];
        let mut next = |rows: usize, columns: usize| {
            let (own, others) = rest.split_at(rows * columns);
            rest = others;
            Tensor::from_slice(own).view([rows as i64, columns as i64])
        };
        let mut roundings = rounding.map_or_else(Vec::new, |it| it.into_iter().map(Some).collect());
        if !roundings.is_empty() && roundings.len() != positions.len() {
            return Err(format!("it returned results for {} sequences, expected {}", roundings.len(), positions.len()));
        }
        roundings.resize_with(positions.len(), || None);
        let sequences = positions.iter().zip(roundings).map(|(&positions, rounding)| PeerSequence {
            inputs: (0..=num_layers).map(|_| next(positions, hidden_size)).collect(),
            outputs: (0..num_layers).map(|_| next(positions, hidden_size)).collect(),
            head: next(positions, vocab_size),
            logits: next(positions, vocab_size),
            rounding,
        });
        let sequences = sequences.collect();
        Ok(PeerOutputs { versions, tokens, sequences })
    }
}
