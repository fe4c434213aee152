//! One safetensors file, mapped into memory, with a header that is checked against the file before anything is read.
//!
//! A file is 8 bytes of header length (little endian), the header (JSON: name to dtype, shape, data_offsets), the data.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::IgnoredAny;
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::untrusted;

/// Longest header that is accepted, in bytes; this is safetensors' own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Number of bytes that store the header's length.
const LENGTH_BYTES: usize = 8;

/// A mapped file whose tensors are all within it, without gaps or overlaps.
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
        let (map, data_start) = map(path)?;
        let (text, actual) = (&map[LENGTH_BYTES..data_start], map.len() as u64);
        let header: Metadata = serde_json::from_slice(text)
            .map_err(|error| bad(format!("bad header: {}", fault(text).unwrap_or_else(|| error.to_string()))))?;
        match data_start.checked_add(header.data_len()) {
            Some(expected) if expected as u64 == actual => Ok(Self { path: path.to_owned(), map, header, data_start }),
            Some(expected) if expected as u64 > actual => Err(bad(format!(
                "the file is truncated: it has {actual} bytes, expected {expected}; copy or download it again"
            ))),
            expected => Err(bad(format!(
                "the file has {actual} bytes, but its header describes {}",
                expected.unwrap_or(usize::MAX)
            ))),
        }
    }

    /// The metadata entry of this name.
    pub(crate) fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Names of the file's tensors, in file order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// A text entry of the header's metadata, such as a note about quantization.
    pub(in crate::model) fn note(&self, name: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(name).map(String::as_str)
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// The bytes of a tensor, which may be misaligned.
    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (start, end) = self.info(name)?.data_offsets;
        Some(&self.map[self.data_start + start..self.data_start + end])
    }

    /// Checks that a tensor exists with this shape and a type that we can read.
    ///
    /// # Errors
    /// [`Error::BadFile`] with its name, what was found and what was expected.
    pub(in crate::model) fn check(&self, name: &str, shape: &[i64]) -> Result<()> {
        self.check_type(name, shape, &|dtype| kind_of(dtype).is_some(), "F32, BF16 or F16")
    }

    /// Checks a tensor of bytes (U8), like [`MappedFile::check`].
    ///
    /// # Errors
    /// [`Error::BadFile`].
    pub(in crate::model) fn check_bytes(&self, name: &str, shape: &[i64]) -> Result<()> {
        self.check_type(name, shape, &|dtype| dtype == Dtype::U8, "U8")
    }

    fn check_type(&self, name: &str, shape: &[i64], fits: &dyn Fn(Dtype) -> bool, expected: &str) -> Result<()> {
        let info = self.check_shape(name, shape)?;
        match fits(info.dtype) {
            true => Ok(()),
            false => {
                let message = format!("{name} has type {:?}, expected {expected}", info.dtype);
                Err(Error::bad_file(&self.path, message))
            }
        }
    }

    /// Checks that a tensor exists with this shape.
    ///
    /// # Errors
    /// The errors of [`MappedFile::check`].
    pub(super) fn check_shape(&self, name: &str, shape: &[i64]) -> Result<&TensorInfo> {
        let bad = |message| Err(Error::bad_file(&self.path, message));
        let Some(info) = self.info(name) else { return bad(format!("missing {name} {shape:?}")) };
        if !info.shape.iter().map(|&size| size as i64).eq(shape.iter().copied()) {
            return bad(format!("{name} has shape {:?}, expected {shape:?}", info.shape));
        }
        Ok(info)
    }

    /// Copies a tensor that passed [`MappedFile::check`], from its element `first` on, into `target`. The mapped data may be misaligned.
    ///
    /// # Errors
    /// [`Error::Torch`] if memory is exhausted.
    pub(in crate::model) fn copy_to(&self, name: &str, first: usize, target: &mut Tensor) -> Result<()> {
        let kind = self.info(name).and_then(|info| kind_of(info.dtype));
        let (bytes, kind) = self.bytes(name).zip(kind).expect("checked before");
        let element = kind.elt_size_in_bytes();
        let bytes = &bytes[first * element..(first + target.numel()) * element];
        target.f_copy_(&Tensor::f_from_data_size(bytes, &target.size(), kind)?)?;
        Ok(())
    }
}

/// The names in a file's header, without checking the header's contents.
///
/// # Errors
/// [`Error::BadFile`] if the header is not a JSON object.
pub(super) fn names(path: &Path) -> Result<Vec<String>> {
    let (map, data_start) = map(path)?;
    let header: HashMap<String, IgnoredAny> = serde_json::from_slice(&map[LENGTH_BYTES..data_start])
        .map_err(|error| Error::bad_file(path, format!("bad header: {error}")))?;
    Ok(header.into_keys().collect())
}

/// Maps a file and returns the offset of the data after its header.
fn map(path: &Path) -> Result<(Mmap, usize)> {
    let bad = |message: String| Error::bad_file(path, message);
    let file = untrusted::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => bad("missing".to_owned()),
        _ => bad(error.to_string()),
    })?;
    let actual = file.metadata().map_err(|error| bad(error.to_string()))?.len();
    if actual < LENGTH_BYTES as u64 {
        return Err(bad(format!("the file is truncated: it has {actual} bytes, expected at least {LENGTH_BYTES}")));
    }
    // SAFETY: the map is read-only, and only this module reads it. If another process truncates the file meanwhile, ours gets SIGBUS, like every
    // program that maps weights.
    let map = unsafe { Mmap::map(&file) }.map_err(|error| bad(error.to_string()))?;
    let header_bytes = u64::from_le_bytes(map[..LENGTH_BYTES].try_into().expect("8 bytes"));
    if header_bytes > MAX_HEADER_BYTES {
        return Err(bad(format!("the header has {header_bytes} bytes: expected at most {MAX_HEADER_BYTES}")));
    }
    let data_start = LENGTH_BYTES + header_bytes as usize;
    if data_start > map.len() {
        return Err(bad(format!(
            "the file is truncated: it has {actual} bytes, but its header alone needs {data_start}"
        )));
    }
    Ok((map, data_start))
}

/// A header's entries, before [`Metadata`] checks that they are consistent.
#[derive(serde::Deserialize)]
struct Entries {
    #[serde(rename = "__metadata__")]
    _metadata: Option<IgnoredAny>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

/// The first invalid tensor of a header, in file order, if its entries can be parsed.
fn fault(header: &[u8]) -> Option<String> {
    let entries: Entries = serde_json::from_slice(header).ok()?;
    let mut tensors: Vec<_> = entries.tensors.iter().map(|(name, info)| (info.data_offsets, name, info)).collect();
    tensors.sort_unstable_by_key(|&(offsets, name, _)| (offsets, name));
    let (mut end, mut last) = (0, "the beginning of the data");
    for ((first, next), name, TensorInfo { dtype, shape, .. }) in tensors {
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size));
        let bytes = bits.map_or_else(|| "more than 2^64".to_owned(), |bits| bits.div_ceil(8).to_string());
        if next < first || bits != (next - first).checked_mul(8) {
            return Some(format!(
                "{name} is stored in bytes {first} to {next}, but {dtype:?} {shape:?} needs {bytes} bytes"
            ));
        }
        if first > end {
            return Some(format!("bytes {end} to {first}, between {last} and {name}, belong to no tensor"));
        }
        if first < end {
            return Some(format!("{name} begins at byte {first}, before the end of {last} at {end}"));
        }
        (end, last) = (next, name);
    }
    None
}

/// The tensor type for a dtype in a file; `None` if we do not read it.
fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F32 => Some(Kind::Float),
        Dtype::BF16 => Some(Kind::BFloat16),
        Dtype::F16 => Some(Kind::Half),
        _ => None,
    }
}

/// The dtype in a file for a tensor type.
pub(in crate::model) fn dtype_of(kind: Kind) -> Result<Dtype> {
    match kind {
        Kind::Float => Ok(Dtype::F32),
        Kind::BFloat16 => Ok(Dtype::BF16),
        Kind::Half => Ok(Dtype::F16),
        other => {
            let expected = "Float, BFloat16 or Half".to_owned();
            Err(Error::InvalidArgument { op: "WeightWriter::create", expected, got: format!("{other:?}") })
        }
    }
}
