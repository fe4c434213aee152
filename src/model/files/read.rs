//! Reads weights from safetensors files, one unit at a time.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use tch::{Device, Kind, Tensor};

use super::header::{self, MappedFile, dtype_of};
use super::names::{FilePlace, HfTensor, decoder, head, is_ignored, is_kept, tensors};
use super::scaled::{SCALES, Scales, is_scaled, matrix_of};
use super::{INDEX, SINGLE, mxfp4};
use crate::error::{Error, Result};
use crate::model::correction;
use crate::model::json::JsonObject;
use crate::model::params::UnitLayout;
use crate::model::spec::ModelSpec;
use crate::torch::byte_vec;
use crate::untrusted::MAX_INDEX_BYTES;

/// A tensor that is not part of the model and is copied unchanged to written checkpoints.
#[derive(Debug)]
pub(super) struct KeptTensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// Number of names that one error message lists at most.
const MAX_LISTED: usize = 8;

/// The weight files of a model folder, mapped into memory. The name, type and shape of every tensor were checked against the model.
#[derive(Debug)]
pub struct WeightFiles {
    spec: Arc<ModelSpec>,
    pub(super) shards: Vec<MappedFile>,
    /// Index in `shards` for every tensor name.
    places: BTreeMap<String, usize>,
}

impl WeightFiles {
    /// Maps `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// [`Error::BadFile`], before anything is allocated: no weights or only pickled ones, a truncated file, an inconsistent header or index, missing,
    /// unexpected or duplicate tensors, or types and shapes that differ from the model's.
    pub fn open(folder: impl AsRef<Path>, spec: Arc<ModelSpec>) -> Result<Self> {
        let folder = folder.as_ref();
        let mut files = Self { spec, shards: Vec::new(), places: BTreeMap::new() };
        let paths = locate(folder)?;
        for path in &paths {
            files.add(MappedFile::open(path).map_err(|error| files.with_missing(error, &paths))?)?;
        }
        if folder.join(SINGLE).exists() {
            files.check(&folder.join(SINGLE))?;
        } else {
            files.check_index(folder)?;
            files.check(folder)?;
        }
        Ok(files)
    }

    /// Reads one unit [layout.len] as `kind` to the CPU, in our layout, with zeros as padding.
    ///
    /// # Errors
    /// [`Error::Torch`] if memory is exhausted.
    pub fn read_unit(&self, layout: &UnitLayout, kind: Kind) -> Result<Tensor> {
        let flat = Tensor::f_zeros([layout.len as i64], (kind, Device::Cpu))?;
        for tensor in tensors(&self.spec, layout.unit) {
            let mut view = tensor.view(layout, &flat);
            if let Some([blocks, scales]) = self.mxfp4_of(&tensor) {
                let [blocks, scales] = [&blocks.0, &scales.0].map(|name| self.shard_of(name).bytes(name));
                mxfp4::decode(blocks.expect("checked before"), scales.expect("checked before"), &view.transpose(1, 2))?;
                continue;
            }
            let FilePlace { name, first, .. } = self.place_of(&tensor);
            if tensor.is_correction() {
                let mut whole = Tensor::f_zeros(tensor.shape.as_slice(), (Kind::Float, Device::Cpu))?;
                self.shard_of(&name).copy_to(&name, first, &mut whole)?;
                view.f_copy_(&correction::split(&whole)?)?;
                continue;
            }
            self.copy_to(&name, first, &mut view)?;
        }
        Ok(flat)
    }

    /// Copies a checked tensor, from its element `first` on, into `target`. An e4m3 tensor is multiplied by its scales.
    fn copy_to(&self, name: &str, first: usize, target: &mut Tensor) -> Result<()> {
        let shard = self.shard_of(name);
        let (Some(scales), Some(info), Some(bytes)) = (self.scales(name), shard.info(name), shard.bytes(name)) else {
            return shard.copy_to(name, first, target);
        };
        let &[all, columns] = &info.shape[..] else { unreachable!("checked before: {name} is a matrix") };
        let size = [(target.numel() / columns) as i64, columns as i64];
        let codes = Tensor::f_from_data_size(&bytes[first..first + target.numel()], &size, Kind::Float8e4m3fn)?;
        let values = scales.apply(&codes, ((first / columns) as i64, all as i64))?;
        target.f_copy_(&values.f_view_as(target)?)?;
        Ok(())
    }

    /// The scales of an e4m3 matrix, if the files have them.
    fn scales(&self, name: &str) -> Option<Scales<'_>> {
        if !is_scaled(self.shard_of(name), name) {
            return None;
        }
        let place = SCALES.iter().find_map(|scales| self.places.get_key_value(&format!("{name}{scales}")));
        place.map(|(name, &shard)| Scales { file: &self.shards[shard], name })
    }

    /// Whether a tensor contains the scales of an e4m3 matrix.
    fn has_scales(&self, name: &str) -> bool {
        let matrix = matrix_of(name).filter(|matrix| self.places.contains_key(matrix));
        matrix.is_some_and(|matrix| is_scaled(self.shard_of(&matrix), &matrix))
    }

    /// The tensors that are not part of the model and are kept: name, type and shape, bytes. They are unchanged, except that e4m3 tensors are
    /// multiplied by their scales and become `kind`.
    ///
    /// # Errors
    /// The errors of [`WeightFiles::read_unit`]; [`Error::BadFile`] for scales that do not fit.
    pub(super) fn kept(&self, kind: Kind) -> impl Iterator<Item = Result<KeptTensor<'_>>> {
        let names = self.places.iter().filter(|(name, _)| is_kept(&self.spec, name) && !self.has_scales(name));
        names.filter_map(move |(name, &shard)| {
            let info = self.shards[shard].info(name)?;
            let shape = info.shape.clone();
            Some(match is_scaled(&self.shards[shard], name) {
                true => self.kept_values(name, &shape, kind),
                false => Ok(KeptTensor {
                    name,
                    dtype: info.dtype,
                    shape,
                    bytes: Cow::Borrowed(self.shards[shard].bytes(name)?),
                }),
            })
        })
    }

    /// Decodes a kept e4m3 tensor by its scales.
    fn kept_values<'a>(&'a self, name: &'a str, shape: &[usize], kind: Kind) -> Result<KeptTensor<'a>> {
        let size: Vec<i64> = shape.iter().map(|&side| side as i64).collect();
        self.check_tensor(name, &size)?;
        let mut values = Tensor::f_zeros(&size, (kind, Device::Cpu))?;
        self.copy_to(name, 0, &mut values)?;
        let bytes = Cow::Owned(byte_vec(&values)?);
        Ok(KeptTensor { name, dtype: dtype_of(kind)?, shape: shape.to_vec(), bytes })
    }

    /// Checks that a tensor has the expected shape and a type that we read.
    fn check_tensor(&self, name: &str, shape: &[i64]) -> Result<()> {
        let shard = self.shard_of(name);
        if !is_scaled(shard, name) {
            return shard.check(name, shape);
        }
        shard.check_shape(name, shape)?;
        match self.scales(name) {
            Some(scales) => scales.check(shape),
            None => {
                let expected = SCALES.map(|scales| format!("{name}{scales}")).join(" or ");
                Err(Error::bad_file(
                    &shard.path,
                    format!("{name} is stored in e4m3, but its scales are missing: expected {expected}"),
                ))
            }
        }
    }

    fn add(&mut self, shard: MappedFile) -> Result<()> {
        for name in shard.names() {
            if let Some(other) = self.places.insert(name.clone(), self.shards.len()) {
                let other = self.shards[other].path.display();
                return Err(Error::bad_file(&shard.path, format!("tensor {name} is stored twice: also in {other}")));
            }
        }
        self.shards.push(shard);
        Ok(())
    }

    /// Checks that every tensor of the index is in the shard that the index names.
    fn check_index(&self, folder: &Path) -> Result<()> {
        for (name, file) in weight_map(folder)? {
            if self.places.get(&name).is_none_or(|&shard| self.shards[shard].path != folder.join(&file)) {
                return Err(Error::bad_file(folder.join(INDEX), format!("{name} is not in {file}")));
            }
        }
        Ok(())
    }

    /// Names and shapes of the tensors that contain the model's weights.
    fn expected(&self) -> Vec<(String, Vec<i64>)> {
        let tensors = self.spec.units().flat_map(|unit| tensors(&self.spec, unit));
        let places = tensors.flat_map(|tensor| match self.mxfp4_of(&tensor) {
            Some(parts) => parts.into(),
            None => {
                let FilePlace { name, shape, .. } = self.place_of(&tensor);
                vec![(name, shape)]
            }
        });
        let mut expected: Vec<_> = places.collect();
        expected.dedup(); // several of our tensors may be parts of one file tensor
        expected
    }

    /// The `expected` tensors that no file contains, each as name and shape.
    fn missing(&self, expected: &[(String, Vec<i64>)]) -> Vec<String> {
        let missing = expected.iter().filter(|(name, _)| !self.places.contains_key(name));
        missing.map(|(name, shape)| format!("{name} {shape:?}")).collect()
    }

    /// Extends an error about a file by the model's tensors that no header of `paths` names, because a gap in a header often means a missing tensor.
    fn with_missing(&self, error: Error, paths: &[PathBuf]) -> Error {
        if !matches!(&error, Error::BadFile { path, .. } if header::names(path).is_ok()) {
            return error;
        }
        let names = paths.iter().filter_map(|path| header::names(path).ok()).flatten();
        let named = Self { spec: self.spec.clone(), shards: Vec::new(), places: names.map(|name| (name, 0)).collect() };
        let missing = named.missing(&named.expected());
        match error {
            Error::BadFile { path, message } if !missing.is_empty() => {
                Error::BadFile { path, message: format!("{message}; missing {}", list(&missing)) }
            }
            error => error,
        }
    }

    /// Checks that every tensor of the model exists with its shape and a readable type, and that there are no others.
    fn check(&self, origin: &Path) -> Result<()> {
        let expected = self.expected();
        let missing = self.missing(&expected);
        let known: HashSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let unexpected = self.places.iter().filter(|(name, _)| !known.contains(name.as_str()));
        let unexpected = unexpected.filter(|(name, _)| !is_ignored(&self.spec, name) && !self.has_scales(name));
        let unexpected = unexpected.map(|(name, &shard)| {
            let shape = self.shards[shard].info(name).map(|info| info.shape.as_slice()).unwrap_or_default();
            format!("{name} {shape:?}")
        });
        let unexpected: Vec<_> = unexpected.collect();
        let mut faults = Vec::new();
        if !missing.is_empty() {
            faults.push(format!("missing {}", list(&missing)));
        }
        if !unexpected.is_empty() {
            faults.push(format!("unexpected {}", list(&unexpected)));
        }
        if !faults.is_empty() {
            let message = format!("the weights do not match config.json: {}", faults.join("; "));
            return Err(Error::bad_file(origin, message));
        }
        expected.iter().try_for_each(|(name, shape)| match mxfp4::is_part(name) {
            true => self.shard_of(name).check_bytes(name, shape),
            false => self.check_tensor(name, shape),
        })
    }

    /// Names and shapes of the two MXFP4 tensors with the matrices of all experts, if the files contain the first of them.
    fn mxfp4_of(&self, tensor: &HfTensor) -> Option<[(String, Vec<i64>); 2]> {
        let parts = mxfp4::parts(&tensor.name, tensor.stacked()?);
        (self.spec.family.traits().reads_mxfp4 && self.places.contains_key(&parts[0].0)).then_some(parts)
    }

    /// The file tensor that contains a tensor of the model; the stacked one of all experts if it exists.
    fn place_of(&self, tensor: &HfTensor) -> FilePlace {
        let fused = tensor.fused().filter(|place| self.places.contains_key(&place.name));
        fused.unwrap_or_else(|| tensor.place())
    }

    /// The shard that contains a tensor.
    fn shard_of(&self, name: &str) -> &MappedFile {
        &self.shards[self.places[name]]
    }
}

/// Whether the files of a tied model have a separate head that differs from the embedding table in any bit. Returns false for unreadable files;
/// [`WeightFiles::open`] reports what is wrong with them.
pub(in crate::model) fn has_own_head(folder: &Path, spec: &ModelSpec) -> bool {
    let table = format!("{}.embed_tokens.weight", decoder(spec));
    let paths = if spec.tie_word_embeddings { locate(folder).unwrap_or_default() } else { Vec::new() };
    let file_of = |tensor: &str| {
        let has = |path: &&PathBuf| header::names(path).is_ok_and(|names| names.iter().any(|name| name == tensor));
        MappedFile::open(paths.iter().find(has)?).ok()
    };
    let head = head(spec);
    let Some((head_file, table_file)) = file_of(head).zip(file_of(&table)) else { return false };
    let same =
        |get: fn(&TensorInfo) -> (Dtype, &[usize])| head_file.info(head).map(get) == table_file.info(&table).map(get);
    !same(|info| (info.dtype, &info.shape)) || head_file.bytes(head) != table_file.bytes(&table)
}

/// The files that contain the weights. As in transformers, a single file takes precedence over an index.
fn locate(folder: &Path) -> Result<Vec<PathBuf>> {
    if folder.join(SINGLE).exists() {
        return Ok(vec![folder.join(SINGLE)]);
    }
    if folder.join(INDEX).exists() {
        let files: BTreeSet<String> = weight_map(folder)?.into_values().collect();
        return Ok(files.into_iter().map(|file| folder.join(file)).collect());
    }
    let entries = folder
        .read_dir()
        .map_err(|error| Error::bad_file(folder, format!("cannot read this model folder: {error}")))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let pickled = names.filter(|name| [".bin", ".pt", ".pth", ".bin.index.json"].iter().any(|end| name.ends_with(end)));
    match pickled.min() {
        Some(name) => Err(Error::bad_file(folder.join(name), convert_hint(folder))),
        None => Err(Error::bad_file(folder, format!("the folder has no weights: expected {SINGLE} or {INDEX}"))),
    }
}

fn convert_hint(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "pickled weights (.bin, .pt) can run code when opened and are not supported; convert them with: python3 -c \
         \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}', \
         torch_dtype='auto').save_pretrained('{folder}-safetensors')\" and copy the tokenizer's files to \
         {folder}-safetensors"
    )
}

/// Reads the index, a map from tensor name to file name, and checks that file names have no path.
fn weight_map(folder: &Path) -> Result<BTreeMap<String, String>> {
    let path = folder.join(INDEX);
    let bad = |message: String| Error::bad_file(&path, message);
    let index = JsonObject::read_up_to(MAX_INDEX_BYTES, &path)?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| bad("expected an object under weight_map".to_owned()))?;
    let file = |(name, file): (&String, &serde_json::Value)| match file.as_str() {
        Some(file) if is_plain(file) => Ok((name.clone(), file.to_owned())),
        _ => Err(bad(format!("{name} is in {file}: expected the name of a .safetensors file of this folder"))),
    };
    map.iter().map(file).collect()
}

/// Whether a file name has no path, so that it stays within its folder.
fn is_plain(file: &str) -> bool {
    Path::new(file).file_name().is_some_and(|name| name == file)
        && !file.contains('\0')
        && file.ends_with(".safetensors")
}

fn list(names: &[String]) -> String {
    let listed = names[..names.len().min(MAX_LISTED)].join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}
