//! Finds a model: in a folder or in a repository of the Hugging Face Hub, with or without adapters.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::{INDEX, SINGLE};
use super::json::{ADAPTER_CONFIG, JsonObject};
use super::lora::ADAPTER_WEIGHTS;
use crate::data::hub::{Snapshot, is_plainly_local};
use crate::data::{Hub, Repo, TEMPLATES_FOLDER};
use crate::error::{Error, Result};

/// The folders that a model is loaded from: a model folder, or a base model's folder and an adapter folder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSource {
    /// The model folder: configuration, weights, tokenizer.
    pub base: PathBuf,
    /// The folder of the adapters, if there are any.
    pub adapters: Option<PathBuf>,
}

impl ModelSource {
    /// Finds `name` without network access. `name` is a model folder, an adapter folder, or a repository in the Hub's cache; `base` overrides the
    /// base model that adapters name.
    ///
    /// # Errors
    /// [`Error::Hub`] for a name that is none of these; [`Error::BadFile`] for adapters whose base is not found.
    pub fn new(name: &Path, base: Option<&Path>) -> Result<Self> {
        Self::find(name, None, base, &Hub::cached())
    }

    /// Finds `name` through `hub`, which may download it. `revision` applies to repositories.
    ///
    /// # Errors
    /// The errors of [`ModelSource::new`].
    pub fn find(name: &Path, revision: Option<&str>, base: Option<&Path>, hub: &Hub) -> Result<Self> {
        let folder = locate(name, revision, hub)?;
        refuse_gguf(&folder)?;
        if !folder.join(ADAPTER_CONFIG).exists() {
            return Ok(Self { base: folder, adapters: None });
        }
        let base = base.map_or_else(|| base_of(&folder, hub), |base| locate(base, None, hub))?;
        Ok(Self { base, adapters: Some(folder) })
    }
}

/// Refuses GGUF files (llama.cpp) with an error that explains how to convert them.
fn refuse_gguf(folder: &Path) -> Result<()> {
    let is_of = |path: &Path, kind: &str| path.extension().is_some_and(|extension| extension == kind);
    let files: Vec<PathBuf> = match std::fs::read_dir(folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => vec![folder.to_owned()], // a file, or missing: its reader reports that
    };
    let Some(file) = files.iter().find(|file| is_of(file, "gguf")) else { return Ok(()) };
    if files.iter().any(|file| is_of(file, "safetensors")) {
        return Ok(());
    }
    let (place, name) = (file.parent().unwrap_or(folder).display(), file.file_name().unwrap_or_default().display());
    let message = format!(
        "GGUF (the format of llama.cpp) is not supported: expected a Hugging Face folder (config.json, tokenizer.json, \
         *.safetensors). Use the original repository, or convert the file, which keeps its quantization error: python3 \
         -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; [c.from_pretrained('{place}', \
         gguf_file='{name}').save_pretrained('converted') for c in (M, T)]\""
    );
    Err(Error::bad_file(file, message))
}

/// The local folder of a model given by its path or by its repository's name.
fn locate(name: &Path, revision: Option<&str>, hub: &Hub) -> Result<PathBuf> {
    let repo = name.to_str().filter(|_| !is_plainly_local(name)).and_then(|name| Repo::model(name, revision));
    let Some(repo) = repo else { return Ok(name.to_owned()) };
    let snapshot = hub.open(&repo)?;
    snapshot.fetch(&model_files(&repo, &snapshot)?)?;
    Ok(snapshot.folder())
}

/// The files of a repository that a run needs: configurations, the tokenizer, and one set of weights.
fn model_files(repo: &Repo, snapshot: &Snapshot<'_>) -> Result<Vec<String>> {
    let names = snapshot.names();
    let has = |name: &str| names.iter().any(|known| known == name);
    let is_small = |name: &&String| {
        let own = name.strip_prefix(TEMPLATES_FOLDER).and_then(|name| name.strip_prefix('/')).unwrap_or(name);
        !own.contains('/') && (name.ends_with(".json") || name.ends_with(".jinja"))
    };
    let mut wanted: Vec<String> = names.iter().filter(is_small).cloned().collect();
    if let Some(index) = snapshot.text(INDEX)? {
        let index: Value = serde_json::from_str(&index).unwrap_or_default();
        let shards = index["weight_map"].as_object().into_iter().flatten().filter_map(|(_, file)| file.as_str());
        wanted.extend(shards.map(str::to_owned).collect::<BTreeSet<_>>());
        return Ok(wanted);
    }
    let weights = [SINGLE, ADAPTER_WEIGHTS].into_iter().find(|name| has(name));
    let Some(weights) = weights else {
        let pickled = names.iter().find(|name| [".bin", ".pt", ".gguf"].iter().any(|end| name.ends_with(end)));
        let instead = pickled.map_or_else(|| "no other weights either".to_owned(), |name| format!("only {name}"));
        let message = format!(
            "the repository has no safetensors weights ({instead}); expected {SINGLE} or {INDEX} (convert other \
             formats at {})",
            "https://huggingface.co/spaces/safetensors/convert"
        );
        return Err(Error::Hub { repo: repo.to_string(), message });
    };
    wanted.push(weights.to_owned());
    Ok(wanted)
}

/// The folder of the base model that an adapter's configuration names: relative to the current folder, relative to the adapter's folder, or on the
/// Hub.
fn base_of(folder: &Path, hub: &Hub) -> Result<PathBuf> {
    let config = JsonObject::read(&folder.join(ADAPTER_CONFIG))?;
    let text = |key: &str| config.get(key).and_then(Value::as_str);
    let named = text("base_model_name_or_path").unwrap_or_default();
    let candidates = [PathBuf::from(named), folder.join(named)];
    let found = candidates.into_iter().find(|base| !named.is_empty() && base.join("config.json").exists());
    if let Some(found) = found {
        return Ok(found);
    }
    if is_plainly_local(Path::new(named)) || Repo::model(named, None).is_none() {
        let expected = "a model folder, or a name on the Hugging Face Hub; name it with --base_model";
        return Err(config.wrong("base_model_name_or_path", expected));
    }
    locate(Path::new(named), text("revision"), hub)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ExitCode;

    #[test]
    fn a_gguf_model_is_refused_with_a_conversion_command() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model-q4_k_m.gguf");
        std::fs::write(&file, "GGUF").unwrap();
        for name in [folder.path(), &file] {
            let error = ModelSource::new(name, None).unwrap_err();
            assert_eq!(error.exit_code(), ExitCode::Files);
            for part in [
                "model-q4_k_m.gguf",
                "GGUF (the format of llama.cpp)",
                "Hugging Face folder",
                "gguf_file='model-q4_k_m.gguf'",
            ] {
                assert!(error.to_string().contains(part), "{part}: {error}");
            }
        }
        std::fs::write(folder.path().join("model.safetensors"), "").unwrap();
        assert!(ModelSource::new(folder.path(), None).is_ok(), "a model beside it is read");
    }
}
