//! Optimizer state on disk: one safetensors file a rank, whose tensors are named `unit/param/first-last/what`.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorView};
use tch::{Kind, Tensor};

use super::manifest::FileRecord;
use crate::dist::World;
use crate::error::{Error, Result};
use crate::model::{ParamName, Unit};
use crate::torch;
use crate::train::{ParamState, Policy};

/// Where the files are within a checkpoint.
pub const FOLDER: &str = "optimizer";

/// Writes this rank's part and returns its record.
pub fn write(folder: &Path, world: &World, policy: &Policy) -> Result<FileRecord> {
    let name = format!("{FOLDER}/rank_{:05}_of_{:05}.safetensors", world.rank(), world.size());
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for shard in policy.export_state() {
        let shard = shard?;
        let prefix = prefix(shard.unit, shard.name);
        let range = format!("{}-{}", shard.elements.start, shard.elements.end);
        let ParamState { master, m, v } = shard.state;
        for (what, tensor) in [("master", master), ("m", m), ("v", v)] {
            tensors.push((format!("{prefix}/{range}/{what}"), tensor));
        }
    }
    let views: Vec<(&str, TensorView<'_>)> =
        tensors.iter().map(|(name, tensor)| Ok((name.as_str(), view(tensor)?))).collect::<Result<_>>()?;
    let path = folder.join(&name);
    safetensors::serialize_to_file(views, None, &path).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(source) => Error::Io { path: path.clone(), source },
        other => Error::Checkpoint { path: path.clone(), message: other.to_string() },
    })?;
    FileRecord::of(folder, &name)
}

/// All ranks' files of a checkpoint, read by range.
#[derive(Debug)]
pub struct ShardFiles {
    folder: PathBuf,
    pieces: HashMap<String, Vec<Piece>>,
}

/// Consecutive elements of a parameter in one file.
#[derive(Debug)]
struct Piece {
    elements: Range<usize>,
    file: std::sync::Arc<File>,
    /// Byte offset of the first element of master weights, first and second moments.
    offsets: HashMap<String, u64>,
    kind: Kind,
}

impl ShardFiles {
    /// Reads the headers of all files.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is no such thing.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut files = Self { folder: folder.to_owned(), pieces: HashMap::new() };
        let optimizer = folder.join(FOLDER);
        for entry in std::fs::read_dir(&optimizer).map_err(Error::io(&optimizer))? {
            files.add(&entry.map_err(Error::io(&optimizer))?.path())?;
        }
        Ok(files)
    }

    /// State of some elements of a parameter, put together from the pieces that overlap them.
    pub fn read(&self, unit: Unit, name: ParamName, elements: Range<usize>) -> Result<ParamState> {
        let prefix = prefix(unit, name);
        let read = |what: &str| {
            let mut parts = Vec::new();
            let mut at = elements.start;
            while at < elements.end {
                let piece = self.pieces.get(&prefix).and_then(|pieces| {
                    pieces.iter().find(|piece| piece.elements.contains(&at) && piece.offsets.contains_key(what))
                });
                let Some(piece) = piece else {
                    return Err(self.bad(format!("no element {at} of {prefix}/{what} in any file of {FOLDER}/")));
                };
                let end = piece.elements.end.min(elements.end);
                parts.push(piece.read(what, at..end).map_err(Error::io(&self.folder))??);
                at = end;
            }
            Ok(Tensor::f_cat(&parts, 0)?)
        };
        Ok(ParamState { master: read("master")?, m: read("m")?, v: read("v")? })
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(Error::io(path))?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(Error::io(path))?;
        let size = file.metadata().map_err(Error::io(path))?.len();
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > size.saturating_sub(8) {
            return Err(self.bad(format!("{}: header of {header_bytes} bytes in {size}", path.display())));
        }
        let mut header = vec![0; 8 + header_bytes as usize];
        file.read_exact_at(&mut header, 0).map_err(Error::io(path))?;
        let metadata: Metadata =
            serde_json::from_slice(&header[8..]).map_err(|error| self.bad(format!("{}: {error}", path.display())))?;
        let file = std::sync::Arc::new(file);
        for (name, info) in metadata.tensors() {
            let parsed = parse(&name).zip(kind_of(info.dtype));
            let Some(((prefix, elements, what), kind)) = parsed else {
                return Err(self.bad(format!("{}: unexpected tensor {name}", path.display())));
            };
            let offset = 8 + header_bytes + info.data_offsets.0 as u64;
            let pieces = self.pieces.entry(prefix).or_default();
            match pieces.iter_mut().find(|piece| piece.elements == elements) {
                Some(piece) => _ = piece.offsets.insert(what, offset),
                None => {
                    let offsets = HashMap::from([(what, offset)]);
                    pieces.push(Piece { elements, file: file.clone(), offsets, kind });
                }
            }
        }
        Ok(())
    }

    fn bad(&self, message: String) -> Error {
        Error::Checkpoint { path: self.folder.clone(), message }
    }
}

impl Piece {
    fn read(&self, what: &str, elements: Range<usize>) -> std::io::Result<Result<Tensor>> {
        let width = self.kind.elt_size_in_bytes();
        let mut bytes = vec![0; elements.len() * width];
        let first = (elements.start - self.elements.start) * width;
        self.file.read_exact_at(&mut bytes, self.offsets[what] + first as u64)?;
        Ok(Tensor::f_from_data_size(&bytes, &[elements.len() as i64], self.kind).map_err(Error::from))
    }
}

fn prefix(unit: Unit, name: ParamName) -> String {
    format!("{unit}/{name:?}")
}

/// `unit/param/first-last/what` into its parts.
fn parse(name: &str) -> Option<(String, Range<usize>, String)> {
    let (rest, what) = name.rsplit_once('/')?;
    let (prefix, range) = rest.rsplit_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((prefix.to_owned(), first.parse().ok()?..last.parse().ok()?, what.to_owned()))
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::F64 => Some(Kind::Double),
        _ => None,
    }
}

fn view(tensor: &Tensor) -> Result<TensorView<'_>> {
    let dtype = if tensor.kind() == Kind::Double { Dtype::F64 } else { Dtype::F32 };
    let shape = tensor.size().iter().map(|&size| size as usize).collect();
    TensorView::new(dtype, shape, torch::bytes(tensor)?).map_err(|error| Error::InvalidArgument {
        op: "checkpoint::shards::view",
        expected: "a contiguous float tensor".into(),
        got: error.to_string(),
    })
}
