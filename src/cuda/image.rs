//! Reads kernels from a cubin, with the shared memory that each declares and its maximum number of threads. Tests use this to check launches without
//! a GPU.

use std::collections::{BTreeMap, BTreeSet};

/// Resource limits of a kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct KernelLimits {
    /// Static shared memory of the kernel, including what the hardware reserves per block.
    pub static_bytes: usize,
    /// Maximum number of threads per block.
    pub threads: usize,
}

/// Shared memory of one Hopper multiprocessor. A single block can use all of it except the hardware's reservation.
pub(super) const HOPPER_SHARED_BYTES: usize = 228 << 10;

/// Names of the kernels in an ELF image: each has a section `.text.<name>`.
pub(super) fn kernels(image: &[u8]) -> BTreeSet<String> {
    sections(image).filter_map(|(name, ..)| name.strip_prefix(".text.").map(str::to_owned)).collect()
}

/// The limits of every kernel in an ELF image, by name.
pub(super) fn limits(image: &[u8]) -> BTreeMap<String, KernelLimits> {
    const SIZED_VALUE: u8 = 4;
    const MAX_THREADS: u8 = 5;
    let mut all = BTreeMap::<String, KernelLimits>::new();
    for (name, bytes, body) in sections(image) {
        if let Some(kernel) = name.strip_prefix(".nv.shared.") {
            all.entry(kernel.to_owned()).or_default().static_bytes = bytes;
        }
        let Some(kernel) = name.strip_prefix(".nv.info.") else { continue };
        let mut rest = body;
        while let [format, attribute, low, high, after @ ..] = rest {
            let len = if *format == SIZED_VALUE { usize::from(u16::from_le_bytes([*low, *high])) } else { 0 };
            if (*format, *attribute) == (SIZED_VALUE, MAX_THREADS) {
                all.entry(kernel.to_owned()).or_default().threads = number(after, 0, 4);
            }
            rest = &after[len..];
        }
    }
    all
}

/// Name, size and contents of every section; contents are empty for sections that only reserve memory.
fn sections(image: &[u8]) -> impl Iterator<Item = (&str, usize, &[u8])> {
    const NO_BITS: usize = 8;
    let (table, entry_bytes) = (number(image, 0x28, 8), number(image, 0x3a, 2));
    let header = move |index: usize| &image[table + index * entry_bytes..][..entry_bytes];
    let names = number(header(number(image, 0x3e, 2)), 0x18, 8);
    let section = move |index: usize| {
        let header = header(index);
        let name = &image[names + number(header, 0, 4)..];
        let name = &name[..name.iter().position(|&byte| byte == 0).unwrap()];
        let (offset, bytes) = (number(header, 0x18, 8), number(header, 0x20, 8));
        let body = if number(header, 4, 4) == NO_BITS { &[] } else { &image[offset..][..bytes] };
        (std::str::from_utf8(name).unwrap(), bytes, body)
    };
    (0..number(image, 0x3c, 2)).map(section)
}

fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..][..len].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
}
