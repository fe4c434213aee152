//! The identity of a model's weights, by which a resumed run notices that a folder contains another model.

use sha2::{Digest, Sha256};

use super::{MappedFile, WeightFiles};
use crate::error::{Error, Result};
use crate::phase;
use crate::untrusted::{self, MAX_MODEL_JSON_BYTES};

/// Bytes that are hashed at the start and at the end of each tensor. A sample suffices: training changes all of a tensor.
const SAMPLE_BYTES: usize = 16 << 10;

impl WeightFiles {
    /// SHA-256 of `config.json` and of every tensor's name, type, shape and a sample of its bytes. Does not depend on names and number of files.
    ///
    /// # Errors
    /// [`Error::BadFile`] for `config.json`.
    pub fn identity(&self) -> Result<String> {
        let mut hash = Sha256::new();
        if let Some(folder) = self.shards.first().and_then(|file| file.path.parent()) {
            let path = folder.join("config.json");
            let text = untrusted::read(&path, MAX_MODEL_JSON_BYTES);
            hash.update(text.map_err(|error| Error::bad_file(&path, error.to_string()))?);
        }
        let named = |file| MappedFile::names(file).into_iter().map(move |name| (name, file));
        let mut tensors: Vec<(String, &MappedFile)> = self.shards.iter().flat_map(named).collect();
        tensors.sort_unstable_by(|(name, _), (other, _)| name.cmp(other));
        for (name, file) in &tensors {
            phase::beat();
            let (Some(info), Some(bytes)) = (file.info(name), file.bytes(name)) else { continue };
            hash.update(format!("{name} {:?} {:?}\n", info.dtype, info.shape));
            hash.update(&bytes[..bytes.len().min(SAMPLE_BYTES)]);
            hash.update(&bytes[bytes.len().saturating_sub(SAMPLE_BYTES)..]);
        }
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
