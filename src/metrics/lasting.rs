//! A file that is appended to during a whole run, and created again if it is deleted or moved meanwhile.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::untrusted::Folder;

/// Number of bytes copied at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The open file. Its contents stay readable here after its name is gone.
#[derive(Debug)]
pub(super) struct LastingFile {
    folder: Folder,
    name: String,
    file: File,
}

impl LastingFile {
    /// Opens a file for appending; creates it if it does not exist.
    pub fn open(folder: Folder, name: &str) -> io::Result<Self> {
        Ok(Self { name: name.to_owned(), file: folder.append(name)?, folder })
    }

    /// Appends `bytes` in one write. If the file's name is gone, it first creates a new file with all earlier contents.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.restore()?;
        self.file.write_all(bytes)
    }

    /// If the file's name is gone, creates the file again with all earlier contents.
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
