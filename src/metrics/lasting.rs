//! A file that is appended to for as long as a run lasts, and made again where someone has deleted or moved it meanwhile.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::untrusted::Folder;

/// Bytes that are copied at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The file, open. What was written stays readable here after its name is gone.
#[derive(Debug)]
pub(super) struct LastingFile {
    folder: Folder,
    name: String,
    file: File,
}

impl LastingFile {
    /// Opens a file for appending; it need not be there.
    pub fn open(folder: Folder, name: &str) -> io::Result<Self> {
        Ok(Self { name: name.to_owned(), file: folder.append(name)?, folder })
    }

    /// Appends `bytes` in one write. Where the file's name is gone, a new file gets its name and all that was written.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.restore()?;
        self.file.write_all(bytes)
    }

    /// Makes the file again, with all that was written, where its name is gone.
    pub fn restore(&mut self) -> io::Result<()> {
        if self.has_its_name() { Ok(()) } else { self.make_again() }
    }

    fn has_its_name(&self) -> bool {
        let own = self.file.metadata().map(|file| (file.dev(), file.ino()));
        let named = self.folder.open(&self.name).and_then(|file| file.metadata());
        let named = named.map(|file| (file.dev(), file.ino()));
        matches!((own, named), (Ok(own), Ok(named)) if own == named)
    }

    fn make_again(&mut self) -> io::Result<()> {
        let mut again = self.folder.append(&self.name)?;
        again.set_len(0)?;
        let (mut part, mut offset) = (vec![0; CHUNK_BYTES], 0);
        loop {
            let num_read = self.file.read_at(&mut part, offset)?;
            if num_read == 0 {
                break;
            }
            again.write_all(&part[..num_read])?;
            offset += num_read as u64;
        }
        self.file = again;
        tracing::warn!("{} was deleted or moved: writing it again", self.folder.path().join(&self.name).display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_metrics_file_is_rewritten_after_its_folder_was_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/lines");
        fs::create_dir(path.parent().unwrap()).unwrap();
        let mut file = LastingFile::open(Folder::new(path.parent().unwrap()), "lines").unwrap();
        file.append(b"one\n").unwrap();
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        file.append(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        fs::rename(&path, folder.path().join("moved")).unwrap();
        file.append(b"three\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
    }
}
