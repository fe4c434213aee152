//! Writes machine code of kernels for installation with the program.

use std::path::Path;

use super::capability::Capability;
use super::nvrtc::{KernelSource, SOURCES, compile_all, cubin, file_name};
use crate::error::{Error, Result};
use crate::types::Place;

/// Compiles all kernels for a compute capability and writes them to `folder`, to be installed with the program. File names are those of the cache, so
/// a file for another source or compiler is never used. Returns the number of bytes.
///
/// # Errors
/// [`Error::Environment`] without NVRTC; the errors of the file system.
pub fn write_kernels(folder: &Path, capability: Capability) -> Result<usize> {
    write_some(folder, SOURCES, capability)
}

fn write_some(folder: &Path, sources: &[&'static KernelSource], capability: Capability) -> Result<usize> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    compile_all(sources.iter().copied(), capability, Place { rank: 0, size: 1 })?;
    sources.iter().try_fold(0, |bytes, source| {
        let (image, path) = (cubin(source, capability)?, folder.join(file_name(source, capability)?));
        std::fs::write(&path, &image).map_err(Error::io(&path))?;
        Ok(bytes + image.len())
    })
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::NORMAL;
    use super::*;

    #[test]
    fn packaged_kernels_have_the_file_names_of_the_cache() {
        tch::set_num_threads(1);
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("kernels");
        let bytes: usize = [Capability::new(8, 0), Capability::HOPPER]
            .map(|chip| write_some(&own, &[&NORMAL], chip).unwrap())
            .iter()
            .sum();
        let mut written = 0;
        for chip in [Capability::new(8, 0), Capability::HOPPER] {
            let path = own.join(file_name(&NORMAL, chip).unwrap());
            let image = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(image, cubin(&NORMAL, chip).unwrap());
            written += image.len();
        }
        assert_eq!((bytes, own.read_dir().unwrap().count()), (written, 2));
    }
}
