//! The process of Python that has transformers: it answers one question and ends.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES};

/// The process's program.
const PROGRAM: &str = include_str!("transformers.py");

/// An interpreter that has transformers and torch.
#[derive(Debug)]
pub(super) struct Peer {
    python: String,
    /// Question, answer and what the process printed.
    folder: tempfile::TempDir,
}

/// A question to transformers: prompts and completions to score.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub model: &'a Path,
    /// `float32` or `bfloat16`.
    pub dtype: &'a str,
    /// `cpu` or `cuda`.
    pub device: &'a str,
    pub prompts: &'a [String],
    pub sequences: &'a [Vec<u32>],
    pub vocab_size: usize,
}

/// Logits that transformers computed.
#[derive(Debug)]
pub(super) struct PeerOutputs {
    pub versions: Versions,
    /// Ids of each prompt; the error is the reason why there are none.
    pub tokens: std::result::Result<Vec<Vec<u32>>, String>,
    /// `[T, V]` f32 of each sequence.
    pub logits: Vec<Tensor>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Versions {
    pub transformers: String,
    pub torch: String,
}

#[derive(Deserialize)]
struct PeerHeader {
    versions: Versions,
    tokens: Value,
}

impl Peer {
    /// Looks for the packages.
    ///
    /// # Errors
    /// [`Error::Environment`] with the line that installs them.
    pub fn find(python: &str) -> Result<Self> {
        let folder = tempfile::tempdir().map_err(Error::io(std::env::temp_dir()))?;
        let peer = Self { python: python.to_owned(), folder };
        peer.run(&[])?;
        Ok(peer)
    }

    /// Asks.
    ///
    /// # Errors
    /// [`Error::Environment`] with the last lines of a process that failed, or whose answer has another size.
    pub fn ask(&self, question: &Question<'_>) -> Result<PeerOutputs> {
        let Question { model, dtype, device, prompts, sequences, .. } = question;
        let text =
            json!({"folder": model, "dtype": dtype, "device": device, "prompts": prompts, "sequences": sequences});
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
            Err(error) => return Ok(Err(format!("its answer is not readable: {error}"))),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let positions: Vec<usize> = question.sequences.iter().map(Vec::len).collect();
        let expected = 4 * question.vocab_size * positions.iter().sum::<usize>();
        if bytes.len() != expected {
            let message = format!(
                "it wrote {} bytes of logits, not the {expected} of {} positions and a vocabulary of {}",
                bytes.len(),
                positions.iter().sum::<usize>(),
                question.vocab_size
            );
            return Ok(Err(message));
        }
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|word| f32::from_ne_bytes(word.try_into().expect("four bytes"))).collect();
        let mut rest = &values[..];
        let logits = positions.iter().map(|&positions| {
            let (own, others) = rest.split_at(positions * question.vocab_size);
            rest = others;
            Tensor::from_slice(own).view([positions as i64, question.vocab_size as i64])
        });
        let logits = logits.collect();
        let reason = header.tokens.as_str().map(str::to_owned);
        let tokens = serde_json::from_value(header.tokens).map_err(|error| reason.unwrap_or(error.to_string()));
        Ok(Ok(PeerOutputs { versions: header.versions, tokens, logits }))
    }

    /// Runs the program to its end.
    fn run(&self, args: &[&Path]) -> Result<()> {
        let log = File::create(self.log()).map_err(Error::io(self.log()))?;
        let mut command = Command::new(&self.python);
        command.args(["-c", PROGRAM]).args(args).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(Error::io(self.log()))?).stderr(log);
        command.env("HF_HUB_OFFLINE", "1").env("TOKENIZERS_PARALLELISM", "false");
        match command.status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(self.failed(&format!("it ended, {status}"))),
            Err(error) => {
                let message = format!("--python = {}: it cannot be started: {error}", self.python);
                Err(Error::Environment { message })
            }
        }
    }

    /// The error of the process, with the last thing that it printed.
    fn failed(&self, why: &str) -> Error {
        let said = untrusted::read_text(&self.log(), MAX_RUN_CONFIG_BYTES).unwrap_or_default();
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let python = &self.python;
        let message = match last.contains("ModuleNotFoundError") {
            true => format!(
                "verify compares with transformers, and {python} says {last}; to install it: {python} -m pip install torch==2.11.0 \
                 transformers (--python names another interpreter)"
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
