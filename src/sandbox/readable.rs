//! The complete list of paths that a sandboxed program can read.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::config::CodeConfig;

/// System libraries and their settings, readable by every program.
const LIBRARIES: [&str; 8] =
    ["/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"];
/// Folders for interpreters other than Python, which cannot be asked for their paths.
const OTHERS: [&str; 8] =
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/libexec", "/usr/local/lib", "/usr/share", "/etc/alternatives"];
/// Maximum number of links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Python program that prints the interpreter's executable and its own paths, one per line: the standard library, the packages and settings of its
/// environment, and the libraries of its installation. Folders that a `.pth` file adds to `sys.path` are not included.
const QUESTION: &str = r#"
import glob, os, site, sys, sysconfig
lib = os.path.join(sys.base_prefix, "lib")
installed = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
own = [sysconfig.get_path(name, vars=installed) for name in ("stdlib", "platstdlib")]
own += [path for path in site.getsitepackages() if path in sys.path]
own += [path for path in sys.path if os.path.basename(path) == "python%d%d.zip" % sys.version_info[:2]]
if sys.prefix != sys.base_prefix:
    own += [os.path.join(folder, "pyvenv.cfg") for folder in (sys.prefix, os.path.dirname(sys.executable))]
own += [lib] if os.path.isdir(os.path.join(sys.base_prefix, "conda-meta")) else glob.glob(os.path.join(glob.escape(lib), "*.so*"))
print(sys.executable, *own, sep="\n")
"#;

/// The paths that a sandboxed program can read.
#[derive(Debug)]
pub struct Readable {
    /// Path of the interpreter.
    pub(super) interpreter: PathBuf,
    /// Files and folders without links in their paths, and the links that lead to them; a folder comes before its contents. A link shows only its
    /// target.
    paths: Vec<PathBuf>,
}

impl Readable {
    /// Finds the interpreter and lists its paths, those of the system and those of `reward.code.readable`.
    ///
    /// # Errors
    /// An interpreter that does not exist or does not report its path; a path to be readable that does not exist.
    pub fn new(settings: &CodeConfig) -> Result<Self, String> {
        let name = &settings.command.0[0];
        let is_python = Path::new(name).file_name().is_some_and(|file| file.to_string_lossy().starts_with("python"));
        let (interpreter, own) = if is_python { ask_python(name)? } else { find_program(name)? };
        let system = LIBRARIES.iter().chain(OTHERS.iter().filter(|_| !is_python)).map(PathBuf::from);
        let mut paths = BTreeSet::new();
        for path in system.chain([interpreter.clone()]).chain(own) {
            let _ = follow(&path, &mut paths); // of a list of what there may be
        }
        for path in &settings.readable {
            let failed = |error| format!("reward.code.readable: cannot read {}: {error}", path.display());
            follow(path, &mut paths).map_err(failed)?;
        }
        Ok(Self { interpreter, paths: paths.into_iter().collect() })
    }

    /// All readable paths, including links.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Files and folders, without links.
    pub(super) fn without_links(&self) -> impl Iterator<Item = &PathBuf> {
        self.paths.iter().filter(|path| !path.is_symlink())
    }

    /// The readable path through which a program could read `path`, now or once it exists. Files are compared by identity, so that links and mounts
    /// cannot hide one.
    pub fn shows(&self, path: &Path) -> Option<&Path> {
        let path = std::path::absolute(path).ok()?;
        let there = path.ancestors().find_map(|path| path.canonicalize().ok())?;
        let above: Vec<_> = there.ancestors().filter_map(identity).collect();
        self.without_links().find(|shown| identity(shown).is_some_and(|it| above.contains(&it))).map(PathBuf::as_path)
    }
}

/// Device and inode number of a file.
fn identity(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|file| (file.dev(), file.ino()))
}

/// Adds to `found` the path without links, and every link on the way.
fn follow(path: &Path, found: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    let mut real = PathBuf::from("/");
    let parts =
        |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<OsString>>();
    let (mut left, mut links) = (parts(&std::path::absolute(path)?), Vec::new());
    while let Some(part) = left.pop() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir) => real = PathBuf::from("/"),
            Some(Component::ParentDir) => drop(real.pop()),
            Some(Component::Normal(name)) => {
                let next = real.join(name);
                match fs::read_link(&next) {
                    Ok(_) if links.len() >= MAX_LINKS => return Err(io::Error::from_raw_os_error(libc::ELOOP)),
                    Ok(target) => {
                        left.extend(parts(&target));
                        links.push(next);
                    }
                    Err(_) => real = next,
                }
            }
            _ => {}
        }
    }
    real.metadata()?;
    found.extend(links);
    found.insert(real);
    Ok(())
}

/// A Python interpreter's path and its own paths. The interpreter found by name may be a link, a script or part of a virtual environment.
fn ask_python(name: &str) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let output = Command::new(name).args(["-I", "-c", QUESTION]).output();
    let output = output.map_err(|error| format!("reward.code.command: cannot start {name}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().map(PathBuf::from).filter(|path| path.is_absolute());
    let executable = lines.next().ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        format!("reward.code.command: {name} does not report its own path: {}", said.trim())
    })?;
    Ok((executable, lines.collect()))
}

/// The path of a program found through the variable PATH.
fn find_program(name: &str) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&folders).map(|folder| folder.join(name));
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    let found = candidates.chain([PathBuf::from(name)]).find(is_program).and_then(|path| path.canonicalize().ok());
    let found = found.ok_or_else(|| format!("reward.code.command: there is no program {name}"))?;
    Ok((found, Vec::new()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn readable_symbolic_links_and_their_targets_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("installed/3.11.9/bin")).unwrap();
        fs::write(root.join("installed/3.11.9/bin/python3"), "").unwrap();
        fs::write(root.join("answers"), "").unwrap();
        symlink("3.11.9", root.join("installed/3.11")).unwrap();
        symlink("../installed/3.11/bin/python3", root.join("python")).unwrap();
        fs::create_dir(root.join("here")).unwrap();
        symlink(root.join("python"), root.join("here/python")).unwrap();
        let mut found = BTreeSet::new();
        follow(&root.join("here/../here/python"), &mut found).unwrap_err(); // ../installed leads out of the folder
        fs::remove_file(root.join("python")).unwrap();
        symlink("installed/3.11/bin/python3", root.join("python")).unwrap();
        follow(&root.join("here/../here/python"), &mut found).unwrap();
        let expected = ["here/python", "installed/3.11", "installed/3.11.9/bin/python3", "python"];
        assert_eq!(found.iter().collect::<Vec<_>>(), expected.map(|path| root.join(path)).iter().collect::<Vec<_>>());
        let readable = Readable { interpreter: PathBuf::new(), paths: found.into_iter().collect() };
        let python = root.join("installed/3.11.9/bin/python3");
        assert_eq!(readable.shows(&root.join("here/python")), Some(&*python));
        for hidden in ["answers", "installed/3.11/lib", "installed", "here", ""] {
            assert_eq!(readable.shows(&root.join(hidden)), None, "{hidden}");
        }
        symlink("loop", root.join("loop")).unwrap();
        assert!(follow(&root.join("loop"), &mut BTreeSet::new()).is_err());
    }

    #[test]
    fn paths_below_readable_folders_count_as_visible_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("packages/data")).unwrap();
        fs::write(root.join("packages/data/tests.jsonl"), "").unwrap();
        symlink("packages/data/tests.jsonl", root.join("train.jsonl")).unwrap();
        let readable = Readable { interpreter: PathBuf::new(), paths: vec![root.join("packages")] };
        for path in ["packages", "packages/data/tests.jsonl", "train.jsonl", "packages/run/checkpoint-1"] {
            assert_eq!(readable.shows(&root.join(path)), Some(&*root.join("packages")), "{path}");
        }
        assert_eq!(readable.shows(&root.join("run")), None);
    }
}
