//! Writes a rank's optimizer state to its file, and hashes it while writing.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use sha2::{Digest, Sha256};
use tch::{Kind, Tensor};

use super::digits::hexadecimal;
use super::manifest::FileRecord;
use super::shards::{FOLDER, MARK, tensor_name};
use crate::error::{Error, Result};
use crate::model::encode_header;
use crate::torch::{self, accumulation_kind};
use crate::train::{ParamState, Policy, StateRange};

/// A rank's optimizer state in the format of its file.
#[derive(Debug)]
pub struct ShardFile {
    name: String,
    header: Vec<u8>,
    /// Bytes without the header.
    pub bytes: u64,
}

impl ShardFile {
    /// Writes the file, one parameter after the other.
    pub fn write(
        &self,
        folder: &Path,
        states: &mut dyn Iterator<Item = Result<ParamState>>,
        told: &mut dyn FnMut(u64),
    ) -> Result<FileRecord> {
        let optimizer = folder.join(FOLDER);
        std::fs::create_dir_all(&optimizer).map_err(Error::io(optimizer))?;
        let mut file = HashedFile::create(folder, self.name.clone())?;
        file.append(&self.header)?;
        for state in states {
            for tensor in state?.tensors {
                // SAFETY: what is written is a copy of the state that nobody else has.
                file.append(unsafe { torch::bytes(&tensor) }?)?;
                told(bytes_of(&tensor));
            }
        }
        file.finish()
    }

    /// The file of a rank's part of a policy; `mark` identifies its checkpoint.
    pub fn of(policy: &Policy, name: String, mark: String) -> Self {
        let wide = accumulation_kind(policy.kind());
        let mut end = 0;
        let mut infos = Vec::new();
        for StateRange { unit, name, elements, form } in policy.state_ranges() {
            for part in form.parts() {
                let (start, num_values, kind) = (end, part.num_values(elements.len()), part.kind(wide));
                end += num_values * kind.elt_size_in_bytes();
                let info = TensorInfo { dtype: dtype_of(kind), shape: vec![num_values], data_offsets: (start, end) };
                infos.push((tensor_name(unit, name, &elements, part.name()), info));
            }
        }
        Self { name, header: encode_header(infos, &[(MARK, &mark)]), bytes: end as u64 }
    }
}

/// The safetensors dtype of a state's tensor.
fn dtype_of(kind: Kind) -> Dtype {
    match kind {
        Kind::Double => Dtype::F64,
        Kind::Uint8 => Dtype::U8,
        _ => Dtype::F32,
    }
}

/// A file that is hashed while it is written.
struct HashedFile {
    full: PathBuf,
    path: String,
    file: File,
    hasher: Sha256,
    bytes: u64,
}

impl HashedFile {
    fn create(folder: &Path, path: String) -> Result<Self> {
        let full = folder.join(&path);
        let file = File::create(&full).map_err(Error::io(&full))?;
        Ok(Self { full, path, file, hasher: Sha256::new(), bytes: 0 })
    }

    fn append(&mut self, data: &[u8]) -> Result<()> {
        self.hasher.update(data);
        self.bytes += data.len() as u64;
        self.file.write_all(data).map_err(Error::io(&self.full))
    }

    fn finish(self) -> Result<FileRecord> {
        self.file.sync_all().map_err(Error::io(&self.full))?;
        Ok(FileRecord { path: self.path, bytes: self.bytes, sha256: hexadecimal(&self.hasher.finalize()) })
    }
}

/// Bytes of a tensor's elements.
pub fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}
