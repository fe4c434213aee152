//! Access to files below a folder that other users may write to, such as a run's output folder. No link is followed below the folder, so
//! that a planted link cannot lead outside. The folder itself may be reached through links.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, mkdirat, openat, renameat, statat, unlinkat};

use super::{read_all, regular};

/// Flags for opening the folders on the way to a file.
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A folder, stored as a path whose last part must not contain links. No file descriptor is kept open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Folder {
    root: PathBuf,
    /// Whether a missing root folder is created when a file is written.
    makes_root: bool,
    below: PathBuf,
}

impl Folder {
    /// A folder given by the user. Links are followed on the way to it, but not below it.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), makes_root: true, below: PathBuf::new() }
    }

    /// Like [`Folder::new`], but the folder is not created again if it was removed.
    pub fn existing(root: &Path) -> Self {
        Self { makes_root: false, ..Self::new(root) }
    }

    /// The subfolder `name`.
    pub fn folder(&self, name: impl AsRef<Path>) -> Self {
        Self { below: self.below.join(name), ..self.clone() }
    }

    /// The folder's path, for error messages.
    pub fn path(&self) -> PathBuf {
        // Joining with nothing would end it with a slash.
        if self.below.as_os_str().is_empty() { self.root.clone() } else { self.root.join(&self.below) }
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// The system's error, or an error that the file is not a regular file or that a part of its path is a link.
    pub fn open(&self, name: &str) -> io::Result<File> {
        self.open_as(name, OFlags::RDONLY, false)
    }

    /// Reads a regular file of at most `max_bytes`.
    ///
    /// # Errors
    /// The errors of [`Folder::open`], and an error with both sizes if the file is larger.
    pub fn read(&self, name: &str, max_bytes: u64) -> io::Result<Vec<u8>> {
        read_all(self.open(name)?, max_bytes)
    }

    /// Opens a file for reading and appending. Creates the file and its folder if necessary.
    ///
    /// # Errors
    /// The errors of [`Folder::open`].
    pub fn append(&self, name: &str) -> io::Result<File> {
        self.open_as(name, OFlags::RDWR | OFlags::APPEND | OFlags::CREATE, true)
    }

    /// Opens a file for writing and truncates it. Creates the file and its folder if necessary.
    ///
    /// # Errors
    /// The errors of [`Folder::open`].
    pub fn create(&self, name: &str) -> io::Result<File> {
        let file = self.open_as(name, OFlags::WRONLY | OFlags::CREATE, true)?;
        file.set_len(0)?; // once it is known to be a regular file
        Ok(file)
    }

    /// Writes a file atomically and replaces an existing one. Creates its folder if necessary.
    ///
    /// # Errors
    /// The errors of [`Folder::open`].
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        let folder = self.handle(true)?;
        let draft = format!(".{name}.tmp");
        let is_new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let _ = unlinkat(&folder, &draft, AtFlags::empty()); // of a process that was killed
        let mut file = File::from(openat(&folder, &draft, is_new, Mode::from(0o666))?);
        let written = file.write_all(bytes.as_ref()).and_then(|()| Ok(renameat(&folder, &draft, &folder, name)?));
        if written.is_err() {
            let _ = unlinkat(&folder, &draft, AtFlags::empty());
        }
        written
    }

    /// Creates the folder and its missing parents.
    ///
    /// # Errors
    /// The errors of [`Folder::open`].
    pub fn make(&self) -> io::Result<()> {
        self.handle(true).map(drop)
    }

    /// Renames a file within the folder. A link itself is renamed, not its target.
    ///
    /// # Errors
    /// The system's error.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let folder = self.handle(false)?;
        Ok(renameat(&folder, from, &folder, to)?)
    }

    /// Removes a file. A link itself is removed, not its target.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(self.handle(false)?, name, AtFlags::empty())?)
    }

    /// Whether an entry of this name exists, including a broken link.
    pub fn has(&self, name: &str) -> bool {
        self.handle(false).is_ok_and(|folder| statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
    }

    /// Names of up to `limit` entries of the folder, unordered; empty if the folder does not exist.
    ///
    /// # Errors
    /// The errors of [`Folder::open`].
    pub fn names(&self, limit: usize) -> io::Result<Vec<OsString>> {
        let folder = match self.handle(false) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            folder => folder?,
        };
        let folder = openat(folder, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let entries = Dir::new(folder)?.filter_map(|entry| {
            let entry = entry.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
            Some(entry).filter(|name| !matches!(name, Ok(name) if name == "." || name == ".."))
        });
        Ok(entries.take(limit).collect::<Result<_, _>>()?)
    }

    fn open_as(&self, name: &str, flags: OFlags, makes_folder: bool) -> io::Result<File> {
        let folder = self.handle(makes_folder)?;
        let Some(Component::Normal(name)) = Path::new(name).components().next().filter(|_| !name.contains('/')) else {
            return Err(no_name(name));
        };
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&folder, name, flags, Mode::from(0o666));
        regular(file.map_err(|error| told(&folder, name, error.into()))?.into())
    }

    /// Opens the folder, one path component at a time. With `makes`, creates missing folders.
    fn handle(&self, makes: bool) -> io::Result<OwnedFd> {
        if makes && self.makes_root {
            std::fs::create_dir_all(&self.root)?;
        }
        let root = if self.root.as_os_str().is_empty() { Path::new(".") } else { &self.root };
        let mut folder = openat(CWD, root, FOLDER, Mode::empty())?;
        for part in self.below.components() {
            let Component::Normal(name) = part else { return Err(no_name(&self.below.to_string_lossy())) };
            if makes {
                match mkdirat(&folder, name, Mode::from(0o777)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let inner = openat(&folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty());
            folder = inner.map_err(|error| told(&folder, name, error.into()))?;
        }
        Ok(folder)
    }
}

fn no_name(name: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, format!("'{name}' is not a plain file name"))
}

/// Replaces an error that was caused by a link with one that says so.
fn told(folder: impl AsFd, name: &OsStr, error: io::Error) -> io::Error {
    let is_link = |found: rustix::fs::Stat| FileType::from_raw_mode(found.st_mode) == FileType::Symlink;
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(is_link) {
        true => io::Error::other(format!(
            "{} is a symbolic link, which could lead out of its folder: replace it with a real file or folder",
            name.display()
        )),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder with planted links to files outside. Returns the temporary folder, the outside, and the folder.
    fn planted() -> (tempfile::TempDir, PathBuf, Folder) {
        let place = tempfile::tempdir().unwrap();
        let (outside, inside) = (place.path().join("outside"), place.path().join("inside"));
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("secret"), "secret").unwrap();
        std::fs::create_dir(&inside).unwrap();
        symlink(outside.join("secret"), inside.join("file")).unwrap();
        symlink(&outside, inside.join("folder")).unwrap();
        symlink(outside.join("new"), inside.join("nowhere")).unwrap();
        let folder = Folder::new(&inside);
        (place, outside, folder)
    }

    #[test]
    fn symbolic_links_below_the_folder_are_not_followed() {
        let (_place, outside, folder) = planted();
        let inner = folder.folder("folder");
        let failures = [
            folder.open("file").err(),
            folder.append("file").err(),
            folder.create("file").err(),
            folder.append("nowhere").err(),
            folder.create("nowhere").err(),
            inner.open("secret").err(),
            inner.append("secret").err(),
            inner.create("other").err(),
            inner.write("other", "text").err(),
            inner.make().err(),
            inner.remove("secret").err(),
            inner.rename("secret", "other").err(),
            inner.names(9).err(),
            folder.folder("folder/deep").make().err(),
        ];
        for failure in failures {
            assert!(failure.as_ref().is_some_and(|it| it.to_string().contains("is a symbolic link")), "{failure:?}");
        }
        assert!(!inner.has("secret") && folder.has("nowhere"));
        let names: Vec<_> = std::fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"]);
        assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"secret");
        for name in ["../outside/secret", "..", ".", "", "/etc/passwd", "folder/secret"] {
            assert_eq!(folder.open(name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
        }
        assert_eq!(folder.folder("..").open("outside").unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn writing_replaces_a_symbolic_link() {
        let (_place, outside, folder) = planted();
        symlink(outside.join("secret"), folder.path().join(".file.tmp")).unwrap();
        folder.write("file", "whole").unwrap();
        assert_eq!(folder.read("file", 5).unwrap(), b"whole");
        assert!(!folder.has(".file.tmp") && folder.read("file", 4).is_err());
        folder.rename("nowhere", "moved").unwrap();
        folder.remove("moved").unwrap();
        assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"secret");
    }

    #[test]
    fn folders_are_created_and_the_root_may_be_a_symbolic_link() {
        let (place, _, _) = planted();
        let link = place.path().join("link");
        symlink(place.path().join("inside"), &link).unwrap();
        let deep = Folder::new(&link).folder("a/b");
        assert_eq!(deep.names(9).unwrap(), Vec::<OsString>::new());
        deep.append("log").unwrap().write_all(b"one").unwrap();
        deep.append("log").unwrap().write_all(b"two").unwrap();
        assert_eq!(std::fs::read(place.path().join("inside/a/b/log")).unwrap(), b"onetwo");
        deep.create("log").unwrap().write_all(b"3").unwrap();
        assert_eq!((deep.read("log", 9).unwrap(), deep.names(9).unwrap()), (b"3".to_vec(), vec!["log".into()]));
        rustix::fs::mknodat(CWD, deep.path().join("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for failure in [deep.open("pipe"), deep.append("pipe")] {
            assert!(failure.unwrap_err().to_string().contains("found a pipe"));
        }
        assert!(deep.create("pipe").is_err() && deep.open("none").unwrap_err().kind() == ErrorKind::NotFound);
    }
}
