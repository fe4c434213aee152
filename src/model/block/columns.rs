//! Copies of columns between tensors of all heads and tensors of a rank's heads.

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// A run of `len` columns, from `head` on in the model and from `slot` on in a rank's tensor.
pub(super) struct ColumnRun {
    pub slot: i64,
    pub head: i64,
    pub len: i64,
}

/// A copy of some columns.
pub(super) struct ColumnCopy {
    pub into: Tensor,
    pub from: Tensor,
    /// Whether to add to the columns instead.
    pub adds: bool,
}

impl ColumnRun {
    /// The copy from a tensor of all heads to one of a rank's.
    pub(super) fn copy(&self, own: &Tensor, all: &Tensor) -> ColumnCopy {
        let (into, from) = (own.narrow(1, self.slot, self.len), all.narrow(1, self.head, self.len));
        ColumnCopy { into, from, adds: false }
    }
}

impl ColumnCopy {
    pub(super) fn run(&self) -> Result<()> {
        let (mut into, from) = (self.into.shallow_clone(), &self.from);
        match (self.adds, words(&into)?, words(from)?) {
            (true, ..) => drop(into.f_add_(from)?),
            (false, Some(mut into), Some(from)) => into.f_copy_(&from)?,
            (false, ..) => into.f_copy_(from)?,
        }
        Ok(())
    }
}

/// Columns in a GPU's memory as elements of 16 bytes, if they begin and end at such bounds. libtorch copies runs of columns element by element: half
/// of the columns of 65,536 rows of 3,584 take 0.30 ms in bfloat16 and 0.12 ms as such elements (H200).
fn words(columns: &Tensor) -> Result<Option<Tensor>> {
    const WORD_BYTES: usize = 16;
    let per_word = (WORD_BYTES / columns.kind().elt_size_in_bytes()) as i64;
    let (Device::Cuda(_), [_, len], [stride, 1]) = (columns.device(), &columns.size()[..], &columns.stride()[..])
    else {
        return Ok(None);
    };
    let is_whole =
        len % per_word == 0 && stride % per_word == 0 && columns.data_ptr().addr().is_multiple_of(WORD_BYTES);
    Ok(if is_whole { Some(columns.f_view_dtype(Kind::ComplexDouble)?) } else { None })
}
