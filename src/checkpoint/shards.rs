//! Optimizer state on disk: one safetensors file per rank, with tensors named `unit/param/first-last/part`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::model::{MappedFile, Param, ParamName, ParamTable, Unit};
use crate::train::{ParamState, StateForm, StatePart};

/// The folder of these files within a checkpoint.
pub const FOLDER: &str = "optimizer";
/// The metadata key that says which run and step a file belongs to.
pub const MARK: &str = "checkpoint";
/// Advice for a run that trains other parameters than the one that wrote a checkpoint.
const RESUME_ALIKE: &str = "resume with the same model, lora.target_modules and speculation as the run that wrote the \
                            checkpoint";

/// The name of one part of the state of consecutive elements of a parameter.
pub fn tensor_name(unit: Unit, name: ParamName, elements: &Range<usize>, part: &str) -> String {
    format!("{}/{}-{}/{part}", param_key(unit, name), elements.start, elements.end)
}

/// The files of all ranks in a checkpoint, read by range.
#[derive(Debug)]
pub struct ShardFiles {
    folder: PathBuf,
    files: Vec<MappedFile>,
    /// Pieces by parameter, in order of elements.
    pieces: BTreeMap<String, Vec<ShardPiece>>,
}

/// Consecutive elements of a parameter, whose state parts are all in one file.
#[derive(Debug)]
struct ShardPiece {
    elements: Range<usize>,
    /// Index in `files`.
    file: usize,
    form: StateForm,
    /// Dtype of the master weights.
    wide: Kind,
}

impl ShardPiece {
    /// The elements of this piece that are in `elements`.
    fn shared(&self, elements: &Range<usize>) -> Range<usize> {
        let start = elements.start.max(self.elements.start);
        start..elements.end.min(self.elements.end).max(start)
    }
}

impl ShardFiles {
    /// Maps all files. Checks that each belongs to the checkpoint named by `mark` (`None` for checkpoints from before marks), and that together they
    /// hold every element of the model's parameters exactly once, in the `form` of this run's optimizer.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the file or the parameter.
    pub fn open(
        folder: &Path,
        mark: Option<&str>,
        table: &ParamTable,
        form: &dyn Fn(&Param) -> StateForm,
    ) -> Result<Self> {
        let mut files = Self { folder: folder.to_owned(), files: Vec::new(), pieces: BTreeMap::new() };
        let read = || -> std::io::Result<Vec<PathBuf>> {
            std::fs::read_dir(folder.join(FOLDER))?.map(|entry| Ok(entry?.path())).collect()
        };
        let mut paths = read().map_err(|error| files.bad(format!("{FOLDER}: {error}")))?;
        paths.sort();
        paths.iter().try_for_each(|path| files.add(path, mark))?;
        files.check(table)?;
        files.check_forms(table, form)?;
        Ok(files)
    }

    /// The state of a range of a parameter's elements, assembled from the overlapping pieces.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a range that begins or ends within a block of 8-bit moments.
    pub fn read(&self, unit: Unit, name: ParamName, elements: Range<usize>) -> Result<ParamState> {
        let pieces = self.pieces.get(&param_key(unit, name)).map_or(&[][..], Vec::as_slice);
        let overlapping: Vec<_> = pieces.iter().filter(|piece| !piece.shared(&elements).is_empty()).collect();
        let form = overlapping.first().map_or(StateForm::Adam, |piece| piece.form);
        let whole = |part: &StatePart| {
            let of_piece = |piece: &&ShardPiece| self.read_piece(piece, (unit, name), *part, &piece.shared(&elements));
            Ok(Tensor::f_cat(&overlapping.iter().map(of_piece).collect::<Result<Vec<_>>>()?, 0)?)
        };
        Ok(ParamState { form, tensors: form.parts().iter().map(whole).collect::<Result<_>>()? })
    }

    /// One part of the state, for some elements of a piece.
    fn read_piece(
        &self,
        piece: &ShardPiece,
        (unit, name): (Unit, ParamName),
        part: StatePart,
        elements: &Range<usize>,
    ) -> Result<Tensor> {
        let tensor = tensor_name(unit, name, &piece.elements, part.name());
        let bytes = self.files[piece.file].bytes(&tensor).expect("checked at open");
        let (kind, first) = (part.kind(piece.wide), elements.start - piece.elements.start);
        let ends_block = |at: usize| at.is_multiple_of(part.elements_per_value()) || at == piece.elements.len();
        if !ends_block(first) || !ends_block(first + elements.len()) {
            return Err(self.bad(format!(
                "{tensor}: elements {elements:?} begin or end inside a block of 8-bit Adam moments, which share one \
                 scale"
            )));
        }
        let (start, len) = (part.num_values(first), part.num_values(elements.len()));
        let width = kind.elt_size_in_bytes();
        Ok(Tensor::f_from_data_size(&bytes[start * width..(start + len) * width], &[len as i64], kind)?)
    }

    fn add(&mut self, path: &Path, mark: Option<&str>) -> Result<()> {
        let file = MappedFile::open(path).map_err(|error| self.bad(error.to_string()))?;
        let own = file.metadata(MARK);
        if own != mark {
            let [own, expected] = [own, mark].map(|mark| mark.unwrap_or("an unnamed run"));
            let file = path.display();
            return Err(self.bad(format!(
                "{file} was written by {own}, but trainer_state.json is from {expected}; take all files from the same \
                 checkpoint"
            )));
        }
        let index = self.files.len();
        for name in file.names() {
            let refuse = |fault: &str| Err(self.bad(format!("{}: tensor {name}: {fault}", path.display())));
            let Some((stem, key, elements, part)) = parse(&name) else {
                return refuse(
                    "expected a name of the form unit/parameter/first-last/part, where part is a tensor of the \
                     optimizer state such as master, m or v",
                );
            };
            let info_of = |part: StatePart| file.info(&format!("{stem}/{}", part.name()));
            let has_all = |form: &&StateForm| form.parts().iter().all(|&part| info_of(part).is_some());
            let Some(&form) = StateForm::ALL.iter().find(has_all) else {
                return refuse(
                    "other tensors of this optimizer state are missing: expected master and m, with v for AdamW or \
                     codes and scales for 8-bit AdamW",
                );
            };
            let Some(wide) = info_of(StatePart::Master).and_then(|info| kind_of(info.dtype)) else {
                return refuse("expected its master weights with dtype F32 or F64");
            };
            let fits = |&part: &StatePart| {
                let info = info_of(part).map(|info| (kind_of(info.dtype), info.shape.as_slice()));
                info == Some((Some(part.kind(wide)), &[part.num_values(elements.len())][..]))
            };
            if !form.parts().contains(&part) || !form.parts().iter().all(fits) {
                return refuse(
                    "expected the tensors of one optimizer, with their dtypes and with as many elements as the name \
                     says",
                );
            }
            if part == StatePart::Master {
                self.pieces.entry(key.to_owned()).or_default().push(ShardPiece { elements, file: index, form, wide });
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// Checks that the pieces cover every parameter of the model without gap or overlap, and no other parameter.
    fn check(&mut self, table: &ParamTable) -> Result<()> {
        let params = table.units.iter().flat_map(|layout| layout.params.iter().map(|param| (layout.unit, param)));
        let expected: BTreeMap<String, usize> =
            params.map(|(unit, param)| (param_key(unit, param.name), param.numel())).collect();
        if let Some(unknown) = self.pieces.keys().find(|key| !expected.contains_key(*key)) {
            return Err(
                self.bad(format!("{FOLDER}: {unknown} is not a parameter that this run trains: {RESUME_ALIKE}"))
            );
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

    /// Checks that all parameters have the state of this run's optimizer.
    fn check_forms(&self, table: &ParamTable, form: &dyn Fn(&Param) -> StateForm) -> Result<()> {
        let parts = |form: StateForm| form.parts().iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
        for (unit, param) in
            table.units.iter().flat_map(|layout| layout.params.iter().map(|param| (layout.unit, param)))
        {
            let (key, own) = (param_key(unit, param.name), form(param));
            if let Some(other) = self.pieces[&key].iter().find(|piece| piece.form != own) {
                let (saved, expected) = (parts(other.form), parts(own));
                let optim = own.optimizer();
                return Err(self.bad(format!(
                    "{FOLDER}: {key} has {saved}, but optim = {optim} needs {expected}: resume with the optimizer that \
                     wrote the checkpoint"
                )));
            }
        }
        Ok(())
    }

    fn misfit(&self, key: &str, numel: usize) -> Error {
        let mut message =
            format!("{FOLDER}: each of the elements 0..{numel} of {key} must be stored exactly once, but found");
        for piece in &self.pieces[key] {
            let _ = write!(message, " {:?} in {},", piece.elements, self.files[piece.file].path.display());
        }
        match self.pieces[key].is_empty() {
            true => self.bad(format!("{message} none: {RESUME_ALIKE}")),
            false => self.bad(message + " no more"),
        }
    }

    fn bad(&self, message: String) -> Error {
        Error::Checkpoint { path: self.folder.clone(), message }
    }
}

fn param_key(unit: Unit, name: ParamName) -> String {
    format!("{unit}/{name:?}")
}

/// Parses `unit/param/first-last/part` into `unit/param/first-last`, `unit/param`, elements and part.
fn parse(name: &str) -> Option<(&str, &str, Range<usize>, StatePart)> {
    let (stem, part) = name.rsplit_once('/')?;
    let part = StatePart::ALL.into_iter().find(|known| known.name() == part)?;
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
        Dtype::U8 => Some(Kind::Uint8),
        _ => None,
    }
}
