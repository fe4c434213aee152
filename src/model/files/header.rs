//! One safetensors file, mapped, with a header that was checked against the file before anything else happens.
//!
//! A file is 8 bytes of header length (little endian), the header (JSON: name to dtype, shape, data_offsets), the data.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::untrusted;

/// Longest header that is read, in bytes; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the header's length.
const LENGTH_BYTES: usize = 8;

/// A mapped file whose tensors all lie within it, without gaps or overlaps.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub(crate) path: PathBuf,
    map: Mmap,
    header: Metadata,
    data_start: usize,
}

impl MappedFile {
    /// Maps the file and checks its header.
    ///
    /// # Errors
    /// [`Error::BadFile`] with expected and actual sizes.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let bad = |message: String| Error::bad_file(path, message);
        let file = untrusted::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => bad("missing".to_owned()),
            _ => bad(error.to_string()),
        })?;
        let actual = file.metadata().map_err(|error| bad(error.to_string()))?.len();
        if actual < LENGTH_BYTES as u64 {
            return Err(bad(format!("truncated: {actual} bytes, expected at least {LENGTH_BYTES}")));
        }
        // SAFETY: the map is read-only and private to this struct. Somebody who shortens the file meanwhile ends the
        // process (SIGBUS), as with every reader that maps weights.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| bad(error.to_string()))?;
        let (length, rest) = map.split_at(LENGTH_BYTES);
        let header_bytes = u64::from_le_bytes(length.try_into().expect("8 bytes"));
        if header_bytes > MAX_HEADER_BYTES {
            return Err(bad(format!("header of {header_bytes} bytes: expected at most {MAX_HEADER_BYTES}")));
        }
        let data_start = LENGTH_BYTES + header_bytes as usize;
        let Some(text) = rest.get(..header_bytes as usize) else {
            return Err(bad(format!("truncated: {actual} bytes, expected {data_start} for the header alone")));
        };
        let header: Metadata = serde_json::from_slice(text).map_err(|error| bad(format!("bad header: {error}")))?;
        match data_start.checked_add(header.data_len()) {
            Some(expected) if expected as u64 == actual => Ok(Self { path: path.to_owned(), map, header, data_start }),
            Some(expected) if expected as u64 > actual => {
                Err(bad(format!("truncated: {actual} bytes, expected {expected}; copy or download it again")))
            }
            expected => {
                Err(bad(format!("{actual} bytes, but the header describes {}", expected.unwrap_or(usize::MAX))))
            }
        }
    }

    /// Names of its tensors, in file order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// A tensor's bytes, which may be misaligned.
    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (start, end) = self.info(name)?.data_offsets;
        Some(&self.map[self.data_start + start..self.data_start + end])
    }

    /// Refuses a tensor that is missing, of another shape or of a type that we do not read.
    ///
    /// # Errors
    /// [`Error::BadFile`] with its name, what was found and what is expected.
    pub(in crate::model) fn check(&self, name: &str, shape: &[i64]) -> Result<()> {
        let bad = |message| Err(Error::bad_file(&self.path, message));
        let Some(info) = self.info(name) else { return bad(format!("missing {name} {shape:?}")) };
        if !info.shape.iter().map(|&size| size as i64).eq(shape.iter().copied()) {
            return bad(format!("{name} has shape {:?}, expected {shape:?}", info.shape));
        }
        match kind_of(info.dtype) {
            Some(_) => Ok(()),
            None => bad(format!("{name} has type {:?}, expected F32, BF16 or F16", info.dtype)),
        }
    }

    /// Copies a tensor that passed [`MappedFile::check`], from its element `first` on, out of the map, whose data may be misaligned, to
    /// some elements in the same order.
    ///
    /// # Errors
    /// [`Error::Torch`] where memory does not suffice.
    pub(in crate::model) fn copy_to(&self, name: &str, first: usize, target: &mut Tensor) -> Result<()> {
        let kind = self.info(name).and_then(|info| kind_of(info.dtype));
        let (bytes, kind) = self.bytes(name).zip(kind).expect("checked before");
        let element = kind.elt_size_in_bytes();
        let bytes = &bytes[first * element..(first + target.numel()) * element];
        target.f_copy_(&Tensor::f_from_data_size(bytes, &target.size(), kind)?)?;
        Ok(())
    }
}

/// The kind of a weight's type; `None` where we do not read it.
fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        _ => None,
    }
}
