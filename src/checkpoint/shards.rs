//! Optimizer state on disk: one safetensors file a rank, whose tensors are named `unit/param/first-last/part`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::model::{MappedFile, ParamName, ParamTable, Unit};
use crate::train::ParamState;

/// Where the files are within a checkpoint.
pub const FOLDER: &str = "optimizer";
/// The state of every element: master weight, first and second moment.
pub const PARTS: [&str; 3] = ["master", "m", "v"];

/// The name of one part of some consecutive elements of a parameter.
pub fn tensor_name(unit: Unit, name: ParamName, elements: &Range<usize>, part: &str) -> String {
    format!("{}/{}-{}/{part}", param_key(unit, name), elements.start, elements.end)
}

/// All ranks' files of a checkpoint, read by range.
#[derive(Debug)]
pub struct ShardFiles {
    folder: PathBuf,
    files: Vec<MappedFile>,
    /// By parameter, in order of elements.
    pieces: BTreeMap<String, Vec<ShardPiece>>,
}

/// Consecutive elements of a parameter, all parts of them in one file.
#[derive(Debug)]
struct ShardPiece {
    elements: Range<usize>,
    /// Index in `files`.
    file: usize,
    kind: Kind,
}

impl ShardFiles {
    /// Maps all files and checks that together they hold every element of the model's parameters once and nothing else.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the file or the parameter.
    pub fn open(folder: &Path, table: &ParamTable) -> Result<Self> {
        let mut files = Self { folder: folder.to_owned(), files: Vec::new(), pieces: BTreeMap::new() };
        let read = || -> std::io::Result<Vec<PathBuf>> {
            std::fs::read_dir(folder.join(FOLDER))?.map(|entry| Ok(entry?.path())).collect()
        };
        let mut paths = read().map_err(|error| files.bad(format!("{FOLDER}: {error}")))?;
        paths.sort();
        paths.iter().try_for_each(|path| files.add(path))?;
        files.check(table)?;
        Ok(files)
    }

    /// State of some elements of a parameter, put together from the pieces that overlap them.
    pub fn read(&self, unit: Unit, name: ParamName, elements: Range<usize>) -> Result<ParamState> {
        let [master, m, v] = PARTS.map(|part| self.read_part(unit, name, &elements, part));
        Ok(ParamState { master: master?, m: m?, v: v? })
    }

    fn read_part(&self, unit: Unit, name: ParamName, elements: &Range<usize>, part: &str) -> Result<Tensor> {
        let pieces = self.pieces.get(&param_key(unit, name)).map_or(&[][..], Vec::as_slice);
        let overlap = |piece: &ShardPiece| {
            let shared = elements.start.max(piece.elements.start)..elements.end.min(piece.elements.end);
            let tensor = tensor_name(unit, name, &piece.elements, part);
            (!shared.is_empty()).then(|| self.read_piece(piece, &tensor, &shared))
        };
        let parts: Vec<Tensor> = pieces.iter().filter_map(overlap).collect::<Result<_>>()?;
        Ok(Tensor::f_cat(&parts, 0)?)
    }

    fn read_piece(&self, piece: &ShardPiece, tensor: &str, elements: &Range<usize>) -> Result<Tensor> {
        let bytes = self.files[piece.file].bytes(tensor).expect("checked at open");
        let width = piece.kind.elt_size_in_bytes();
        let first = elements.start - piece.elements.start;
        let bytes = &bytes[first * width..(first + elements.len()) * width];
        Ok(Tensor::f_from_data_size(bytes, &[elements.len() as i64], piece.kind)?)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = MappedFile::open(path).map_err(|error| self.bad(error.to_string()))?;
        let index = self.files.len();
        for name in file.names() {
            let refuse = |fault: &str| Err(self.bad(format!("{}: tensor {name}: {fault}", path.display())));
            let Some((stem, key, elements, part)) = parse(&name) else {
                return refuse("expected unit/parameter/first-last/ and master, m or v");
            };
            let shape_of = |part| file.info(&format!("{stem}/{part}")).map(|info| (info.dtype, info.shape.as_slice()));
            let [master, m, v] = PARTS.map(shape_of);
            let Some(kind) = master.and_then(|(dtype, _)| kind_of(dtype)) else {
                return refuse("expected master weights of type F32 or F64 beside it");
            };
            if m != master || v != master || master.is_some_and(|(_, shape)| shape != [elements.len()]) {
                return refuse("expected master, m and v of one type, with as many elements as the name says");
            }
            if part == PARTS[0] {
                self.pieces.entry(key.to_owned()).or_default().push(ShardPiece { elements, file: index, kind });
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// The pieces of every parameter of the model, and of no other, follow one another without gap or overlap.
    fn check(&mut self, table: &ParamTable) -> Result<()> {
        let params = table.units.iter().flat_map(|layout| layout.params.iter().map(|param| (layout.unit, param)));
        let expected: BTreeMap<String, usize> =
            params.map(|(unit, param)| (param_key(unit, param.name), param.numel())).collect();
        if let Some(unknown) = self.pieces.keys().find(|key| !expected.contains_key(*key)) {
            return Err(self.bad(format!("{FOLDER}: {unknown} is not a parameter of this model")));
        }
        for (key, numel) in expected {
            let pieces = self.pieces.entry(key.clone()).or_default();
            pieces.sort_by_key(|piece| piece.elements.start);
            let ends = pieces.iter().map(|piece| piece.elements.end);
            let starts = pieces.iter().map(|piece| piece.elements.start);
            if !std::iter::once(0).chain(ends).eq(starts.chain([numel])) {
                return Err(self.misfit(&key, numel));
            }
        }
        Ok(())
    }

    fn misfit(&self, key: &str, numel: usize) -> Error {
        let mut message = format!("{FOLDER}: expected elements 0..{numel} of {key} once each, found");
        for piece in &self.pieces[key] {
            let _ = write!(message, " {:?} in {},", piece.elements, self.files[piece.file].path.display());
        }
        message.push_str(if self.pieces[key].is_empty() { " none" } else { " no more" });
        self.bad(message)
    }

    fn bad(&self, message: String) -> Error {
        Error::Checkpoint { path: self.folder.clone(), message }
    }
}

fn param_key(unit: Unit, name: ParamName) -> String {
    format!("{unit}/{name:?}")
}

/// `unit/param/first-last/part` into `unit/param/first-last`, `unit/param`, elements and part.
fn parse(name: &str) -> Option<(&str, &str, Range<usize>, &str)> {
    let (stem, part) = name.rsplit_once('/').filter(|(_, part)| PARTS.contains(part))?;
    let (key, range) = stem.rsplit_once('/')?;
    let (first, last) = range.split_once('-')?;
    let elements = first.parse().ok()?..last.parse().ok()?;
    let is_canonical = range == format!("{}-{}", elements.start, elements.end);
    (is_canonical && !elements.is_empty()).then_some((stem, key, elements, part))
}

fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::F64 => Some(Kind::Double),
        _ => None,
    }
}
