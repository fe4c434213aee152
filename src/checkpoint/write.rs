//! The files of a checkpoint. Every rank writes its own optimizer state, the first one everything else.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use sha2::{Digest, Sha256};
use tch::Kind;

use super::TrainerState;
use super::manifest::{FileRecord, Manifest, hexadecimal};
use super::shards::{FOLDER, PARTS, tensor_name};
use crate::dist::{World, all_gather_bytes};
use crate::error::{Error, Result};
use crate::model::{ModelSpec, WeightWriter, copy_tokenizer, encode_header};
use crate::torch::{self, accumulation_kind};
use crate::train::{ParamState, Policy};

/// Room for what is small: configuration, tokenizer, headers, manifest.
const SMALL_FILES_BYTES: u64 = 32 << 20;

/// Bytes that a checkpoint takes, over all ranks.
pub fn num_bytes(policy: &Policy, state: &TrainerState) -> u64 {
    let element_bytes = policy.kind().elt_size_in_bytes() + PARTS.len() * wide(policy).elt_size_in_bytes();
    let history = state.log_history.iter().map(|line| line.to_string().len() as u64 * 2).sum::<u64>();
    (policy.table().spec.num_params() * element_bytes) as u64 + history + SMALL_FILES_BYTES
}

/// Writes everything into an empty folder, the manifest last; collective over the world.
pub fn parts(folder: &Path, tokenizer_dir: &Path, world: &World, policy: &Policy, state: &TrainerState) -> Result<()> {
    let own = if policy.saves_state() { vec![shard(folder, world, policy)?] } else { Vec::new() };
    model(folder, tokenizer_dir, world, policy)?;
    let own = serde_json::to_vec(&own).expect("records are plain data");
    let records = all_gather_bytes(&*world.group(), &own)?;
    if world.rank() == 0 {
        state.write(folder)?;
        let shards = records
            .iter()
            .flat_map(|records| serde_json::from_slice::<Vec<FileRecord>>(records).expect("records that a peer wrote"));
        Manifest::write(folder, shards.collect())?;
    }
    Ok(())
}

/// Writes the policy as a Hugging Face model folder, in the kind it is computed in; units of sharded weights are gathered
/// by all ranks, the first one writes.
pub fn model(folder: &Path, tokenizer_dir: &Path, world: &World, policy: &Policy) -> Result<()> {
    let mut writer = if world.rank() == 0 { Some(begin_model(folder, tokenizer_dir, policy)?) } else { None };
    for layout in &policy.table().units {
        let flat = policy.unit_weights(layout.unit)?;
        if let Some(writer) = &mut writer {
            writer.write_unit(layout, &flat)?;
        }
    }
    writer.map_or(Ok(()), WeightWriter::finish)
}

fn begin_model(folder: &Path, tokenizer_dir: &Path, policy: &Policy) -> Result<WeightWriter> {
    let spec = &policy.table().spec;
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    copy_tokenizer(tokenizer_dir, folder)?;
    ModelSpec { dtype: policy.kind(), ..ModelSpec::clone(spec) }.write_config(folder)?;
    WeightWriter::create(folder, spec.clone(), policy.kind())
}

/// Writes this rank's optimizer state, one parameter in memory at a time.
fn shard(folder: &Path, world: &World, policy: &Policy) -> Result<FileRecord> {
    let name = format!("{FOLDER}/rank_{:05}_of_{:05}.safetensors", world.rank(), world.size());
    let optimizer = folder.join(FOLDER);
    std::fs::create_dir_all(&optimizer).map_err(Error::io(optimizer))?;
    let mut file = HashedFile::create(folder, name)?;
    file.append(&shard_header(policy))?;
    for shard in policy.export_state() {
        let ParamState { master, m, v } = shard?.state;
        for tensor in [master, m, v] {
            file.append(torch::bytes(&tensor)?)?;
        }
    }
    file.finish()
}

fn shard_header(policy: &Policy) -> Vec<u8> {
    let kind = wide(policy);
    let dtype = if kind == Kind::Double { Dtype::F64 } else { Dtype::F32 };
    let mut end = 0;
    let infos = policy.state_ranges().flat_map(|(unit, name, elements)| {
        PARTS.map(|part| {
            let start = end;
            end += elements.len() * kind.elt_size_in_bytes();
            let info = TensorInfo { dtype, shape: vec![elements.len()], data_offsets: (start, end) };
            (tensor_name(unit, name, &elements, part), info)
        })
    });
    encode_header(infos.collect())
}

/// The kind of optimizer state.
fn wide(policy: &Policy) -> Kind {
    accumulation_kind(policy.kind())
}

/// A file that is hashed as it is written.
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
