//! Writes weights to safetensors files, one unit at a time.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::header::dtype_of;
use super::names::{FilePlace, HfTensor, tensors};
use super::read::KeptTensor;
use super::scaled::BLOCK_SCALES;
use super::{INDEX, SINGLE, WeightFiles};
use crate::error::{Error, Result};
use crate::model::correction;
use crate::model::params::UnitLayout;
use crate::model::spec::{ModelSpec, Unit, product};
use crate::ops::fp8;
use crate::torch;

/// Most bytes of data in one file; a single larger tensor gets a file of its own.
const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// Writes a model's weights to temporary files, which [`WeightWriter::finish`] renames.
///
/// Names, shapes and offsets are known in advance, so units may come in any order and none is held in memory. If it is dropped before `finish`, it
/// removes what it has written.
#[derive(Debug)]
pub struct WeightWriter {
    folder: PathBuf,
    spec: Arc<ModelSpec>,
    kind: Kind,
    format: MatrixFormat,
    shards: Vec<Shard>,
    /// For every tensor name: index in `shards`, and byte offset in that file.
    places: BTreeMap<String, (usize, u64)>,
    remaining: BTreeSet<Unit>,
}

#[derive(Debug)]
struct Shard {
    file: File,
    temporary: PathBuf,
    name: String,
    data_bytes: usize,
}

/// A tensor with its place in a file.
#[derive(Debug, Clone)]
struct Planned {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
}

impl WeightWriter {
    /// Creates the files in an existing folder, for weights of `kind` (float32, bfloat16 or float16). Tensors of `base` that are not part of the
    /// model, such as a vision tower, are copied bit for bit.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidArgument`] for another kind; the errors of [`WeightFiles::open`] if `base` may have such tensors.
    pub fn create(folder: impl AsRef<Path>, spec: Arc<ModelSpec>, kind: Kind, base: Option<&Path>) -> Result<Self> {
        Self::planned(folder.as_ref(), spec, (kind, MatrixFormat::Plain), base, MAX_SHARD_BYTES)
    }

    /// Creates the files like [`WeightWriter::create`], but with blocks' matrices in e4m3 and a scale per block of 128 x 128, as in Qwen's FP8
    /// checkpoints. Copied e4m3 tensors of `base` become `kind`.
    ///
    /// # Errors
    /// The errors of [`WeightWriter::create`]; [`Error::InvalidArgument`] for a family whose files fuse several matrices in one tensor.
    pub fn create_fp8(folder: impl AsRef<Path>, spec: Arc<ModelSpec>, kind: Kind, base: Option<&Path>) -> Result<Self> {
        if let Some(tensor) = spec.units().flat_map(|unit| tensors(&spec, unit)).find(HfTensor::is_part) {
            let expected = "a model family whose files store every matrix as its own tensor".to_owned();
            return Err(Error::InvalidArgument { op: "WeightWriter::create_fp8", expected, got: tensor.name });
        }
        Self::planned(folder.as_ref(), spec, (kind, MatrixFormat::Fp8Blocks), base, MAX_SHARD_BYTES)
    }

    #[cfg(test)]
    pub(super) fn with_shard_bytes(folder: &Path, spec: Arc<ModelSpec>, kind: Kind, bytes: usize) -> Result<Self> {
        Self::planned(folder, spec, (kind, MatrixFormat::Plain), None, bytes)
    }

    fn planned(
        folder: &Path,
        spec: Arc<ModelSpec>,
        (kind, format): (Kind, MatrixFormat),
        base: Option<&Path>,
        bytes: usize,
    ) -> Result<Self> {
        let base = base.filter(|_| spec.is_text_part || spec.delta_net().is_some() || spec.keeps_further_layers());
        let base = base.map(|base| WeightFiles::open(base, spec.clone())).transpose()?;
        let dtype = dtype_of(kind)?;
        let own = spec.units().flat_map(|unit| tensors(&spec, unit));
        let mut own: Vec<Planned> = own.flat_map(|tensor| Planned::all(&tensor, (dtype, kind), format)).collect();
        own.dedup_by(|next, last| next.name == last.name); // several of our tensors may be parts of one file tensor
        let kept = || base.iter().flat_map(|base| base.kept(kind));
        let planned = |KeptTensor { name, dtype, shape, bytes }: KeptTensor<'_>| Planned {
            name: name.to_owned(),
            dtype,
            shape,
            bytes: bytes.len(),
        };
        let others = kept().map(|tensor| tensor.map(planned)).collect::<Result<Vec<_>>>()?;
        let plan = split(own.into_iter().chain(others), bytes);
        let remaining = spec.units().collect();
        let (folder, shards, places) = (folder.to_owned(), Vec::new(), BTreeMap::new());
        let mut writer = Self { folder, spec, kind, format, shards, places, remaining };
        for (index, tensors) in plan.iter().enumerate() {
            let name = match plan.len() {
                1 => SINGLE.to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            writer.add_shard(name, tensors)?;
        }
        for tensor in kept() {
            let KeptTensor { name, bytes, .. } = tensor?;
            writer.write((name, 0), &bytes)?;
        }
        Ok(writer)
    }

    /// Writes one unit from its flat tensor [layout.len], of any type and on any device.
    ///
    /// # Errors
    /// [`Error::Io`], with [`std::io::ErrorKind::StorageFull`] if the disk is full.
    pub fn write_unit(&mut self, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        for tensor in tensors(&self.spec, layout.unit) {
            let view = tensor.view(layout, flat);
            if self.format.rounds(&tensor) {
                self.write_blocks(&tensor, &view)?;
                continue;
            }
            let view = match tensor.is_correction() {
                true => correction::sum(&view, Kind::Float)?,
                false => view.f_to_kind(self.kind)?,
            };
            let values = view.f_to_device(Device::Cpu)?.f_contiguous()?;
            let FilePlace { name, first, .. } = tensor.place();
            // SAFETY: weights change only between steps, and no step runs while they are written.
            self.write((&name, first * self.kind.elt_size_in_bytes()), unsafe { torch::bytes(&values) }?)?;
        }
        self.remaining.remove(&layout.unit);
        Ok(())
    }

    /// Writes a matrix as e4m3 blocks, and their scales.
    fn write_blocks(&self, tensor: &HfTensor, view: &Tensor) -> Result<()> {
        let matrix = view.f_to_device(Device::Cpu)?.f_reshape(tensor.shape.as_slice())?;
        let [values, scales] = fp8::rounded_blocks(&matrix)?;
        self.write((&tensor.name, 0), &torch::byte_vec(&values)?)?;
        self.write((&scales_name(tensor), 0), &torch::byte_vec(&scales)?)
    }

    /// Writes bytes of a tensor, starting at its byte `first`.
    fn write(&self, (name, first): (&str, usize), bytes: &[u8]) -> Result<()> {
        let (shard, offset) = self.places[name];
        let shard = &self.shards[shard];
        shard.file.write_all_at(bytes, offset + first as u64).map_err(Error::io(&shard.temporary))
    }

    /// Flushes the files to disk and renames them to their final names; with several files, also writes the index.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if units are missing (then nothing is left behind), [`Error::Io`].
    pub fn finish(mut self) -> Result<()> {
        if !self.remaining.is_empty() {
            let missing: Vec<_> = self.remaining.iter().map(Unit::to_string).collect();
            let (op, expected) = ("WeightWriter::finish", "every unit written".to_owned());
            return Err(Error::InvalidArgument { op, expected, got: format!("no {}", missing.join(", ")) });
        }
        for shard in &self.shards {
            shard.file.sync_all().map_err(Error::io(&shard.temporary))?;
        }
        let index = (self.shards.len() > 1).then(|| self.index());
        while let Some(shard) = self.shards.last() {
            rename(&shard.temporary, &self.folder.join(&shard.name))?;
            self.shards.pop();
        }
        if let Some(index) = &index {
            write_index(&self.folder, index)?;
        }
        // Readers prefer the single file over an index, so the one that an earlier model left must be removed.
        let stale = self.folder.join(if index.is_some() { SINGLE } else { INDEX });
        if stale.exists() {
            std::fs::remove_file(&stale).map_err(Error::io(stale))?;
        }
        sync(&self.folder)
    }

    fn add_shard(&mut self, name: String, tensors: &[Planned]) -> Result<()> {
        let mut data_bytes = 0;
        let infos = tensors.iter().map(|Planned { name, dtype, shape, bytes }| {
            let start = data_bytes;
            data_bytes += bytes;
            (name.clone(), TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: (start, data_bytes) })
        });
        let infos: Vec<_> = infos.collect();
        let starts: Vec<_> = infos.iter().map(|(_, info)| info.data_offsets.0).collect();
        let header = encode_header(infos, &[TORCH_FORMAT]);
        for (tensor, start) in tensors.iter().zip(starts) {
            self.places.insert(tensor.name.clone(), (self.shards.len(), (header.len() + start) as u64));
        }
        let temporary = self.folder.join(format!(".{name}.tmp"));
        let file = File::create(&temporary).map_err(Error::io(&temporary))?;
        // Registered first, so that a drop after a failure removes the file.
        self.shards.push(Shard { file, temporary, name, data_bytes });
        let shard = &self.shards[self.shards.len() - 1];
        shard.file.set_len((header.len() + data_bytes) as u64).map_err(Error::io(&shard.temporary))?;
        shard.file.write_all_at(&header, 0).map_err(Error::io(&shard.temporary))
    }

    /// The index: which tensor is in which file.
    fn index(&self) -> Value {
        let total_size: usize = self.shards.iter().map(|shard| shard.data_bytes).sum();
        let files = self.places.iter().map(|(name, &(shard, _))| (name, &self.shards[shard].name));
        let weight_map: BTreeMap<_, _> = files.collect();
        json!({"metadata": {"total_size": total_size}, "weight_map": weight_map})
    }
}

impl Drop for WeightWriter {
    fn drop(&mut self) {
        for shard in &self.shards {
            if let Err(error) = std::fs::remove_file(&shard.temporary) {
                tracing::warn!(path = %shard.temporary.display(), %error, "temporary file left behind");
            }
        }
    }
}

/// How matrices of blocks are written.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MatrixFormat {
    /// In the type of the other tensors.
    Plain,
    /// In e4m3, with one scale per block.
    Fp8Blocks,
}

impl MatrixFormat {
    fn rounds(self, tensor: &HfTensor) -> bool {
        self == Self::Fp8Blocks && tensor.is_rounded_as_published()
    }
}

/// The name of the tensor with a matrix's scales.
fn scales_name(tensor: &HfTensor) -> String {
    format!("{}{BLOCK_SCALES}", tensor.name)
}

impl Planned {
    /// The tensors to write for one tensor of the model: the tensor and, if it is quantized, its scales.
    fn all(tensor: &HfTensor, (dtype, kind): (Dtype, Kind), format: MatrixFormat) -> Vec<Self> {
        let FilePlace { name, shape, .. } = tensor.place();
        let new = |name: &str, shape: &[i64], (dtype, kind): (Dtype, Kind)| Self {
            name: name.to_owned(),
            dtype,
            shape: shape.iter().map(|&size| size as usize).collect(),
            bytes: product(shape) * kind.elt_size_in_bytes(),
        };
        if format.rounds(tensor) {
            let blocks: Vec<i64> = shape.iter().map(|&side| fp8::blocks(side)).collect();
            let values = new(&name, &shape, (Dtype::F8_E4M3, Kind::Float8e4m3fn));
            return vec![values, new(&scales_name(tensor), &blocks, (Dtype::F32, Kind::Float))];
        }
        let types = if tensor.is_correction() { (Dtype::F32, Kind::Float) } else { (dtype, kind) };
        vec![new(&name, &shape, types)]
    }
}

/// Splits tensors, in order, into files of at most `max_bytes`. Within a file the widest types come first, so that every tensor is aligned.
fn split(tensors: impl Iterator<Item = Planned>, max_bytes: usize) -> Vec<Vec<Planned>> {
    let (mut plan, mut shard, mut filled) = (Vec::new(), Vec::new(), 0);
    for tensor in tensors {
        if !shard.is_empty() && filled + tensor.bytes > max_bytes {
            plan.push(std::mem::take(&mut shard));
            filled = 0;
        }
        filled += tensor.bytes;
        shard.push(tensor);
    }
    plan.push(shard);
    plan.iter_mut().for_each(|shard| shard.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bitsize())));
    plan
}

/// The metadata entry by which libraries recognize a file of PyTorch tensors.
pub(crate) const TORCH_FORMAT: (&str, &str) = ("format", "pt");

/// Encodes the length and the JSON header of consecutive tensors, padded with spaces to a multiple of 8 bytes so that the data is aligned. `entries`
/// are metadata.
pub(crate) fn encode_header(infos: Vec<(String, TensorInfo)>, entries: &[(&str, &str)]) -> Vec<u8> {
    let entries: HashMap<_, _> = entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let metadata = Metadata::new(Some(entries), infos).expect("offsets are consecutive");
    let mut json = serde_json::to_value(&metadata).expect("plain strings and numbers");
    if let Some(entries) = json["__metadata__"].as_object_mut() {
        entries.sort_keys(); // equal files have equal bytes
    }
    let mut json = json.to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}

fn write_index(folder: &Path, index: &Value) -> Result<()> {
    let temporary = folder.join(format!(".{INDEX}.tmp"));
    std::fs::write(&temporary, format!("{index:#}\n")).map_err(Error::io(&temporary))?;
    sync(&temporary)?;
    rename(&temporary, &folder.join(INDEX))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).map_err(Error::io(to))
}

/// Flushes a file's data, or a folder's entries, to disk.
pub(crate) fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path))
}
