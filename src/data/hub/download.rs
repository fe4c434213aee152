//! Downloads files into the cache. A download resumes where an earlier one ended, is checked against the file's hash, and is made by one
//! process at a time.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::Repo;
use super::cache::{RepoCache, make_parent};
use super::client::{Bytes, DownloadFailure, FileInfo, HubClient};
use super::options::DownloadCallback;
use crate::untrusted;

/// Files that are downloaded in parallel.
const NUM_THREADS: usize = 4;
/// Requests in a row without a new byte after which a download fails.
const MAX_ATTEMPTS: u32 = 5;
/// Pause after the first failed request; doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// A download of a repository's files into the cache.
pub(super) struct Download<'a> {
    pub client: &'a HubClient,
    pub repo: &'a Repo,
    pub commit: &'a str,
    pub cache: &'a RepoCache,
    pub progress: &'a DownloadCallback,
}

/// Bytes of all files: received and total.
#[derive(Default)]
struct Counts {
    done: AtomicU64,
    total: AtomicU64,
}

impl Download<'_> {
    /// Downloads every file of `names` into the cache. Stops at the first failure; received bytes stay in the cache for the next attempt.
    pub fn run(&self, names: &[&String]) -> Result<(), DownloadFailure> {
        let (next, failure, counts) = (AtomicUsize::new(0), Mutex::new(None), Counts::default());
        let infos: Vec<FileInfo> = names.iter().map(|name| self.info(name)).collect::<Result<_, _>>()?;
        counts.total.store(infos.iter().filter_map(|info| info.num_bytes).sum(), Ordering::Relaxed);
        let first_failure = || failure.lock().unwrap_or_else(|poison| poison.into_inner());
        let work = || {
            let files = || names.iter().zip(&infos).nth(next.fetch_add(1, Ordering::Relaxed));
            while let Some((name, info)) = files().filter(|_| first_failure().is_none()) {
                if let Err(error) = self.file(name, info, &counts) {
                    first_failure().get_or_insert(error);
                }
            }
        };
        thread::scope(|scope| (0..NUM_THREADS.min(names.len())).for_each(|_| _ = scope.spawn(work)));
        let failure = first_failure().take();
        failure.map_or(Ok(()), Err)
    }

    fn info(&self, name: &str) -> Result<FileInfo, DownloadFailure> {
        let mut attempts = 0;
        loop {
            match self.client.file_info(self.repo, self.commit, name) {
                Err(DownloadFailure::Unreachable(message)) => pause_or_end(&mut attempts, message)?,
                answer => return answer,
            }
        }
    }

    fn file(&self, name: &str, info: &FileInfo, counts: &Counts) -> Result<(), DownloadFailure> {
        let (blob, lock) = (self.cache.blob(&info.etag), self.cache.lock(&info.etag));
        let made = make_parent(&blob).and_then(|()| make_parent(&lock)).and_then(|()| File::create(&lock));
        let lock_file = made.map_err(|error| DownloadFailure::Storage(lock.clone(), error))?;
        let locked = flock(&lock_file, FlockOperation::LockExclusive);
        locked.map_err(|error| DownloadFailure::Storage(lock.clone(), error.into()))?;
        if !blob.is_file() {
            self.contents(name, info, &blob, counts)?;
        }
        self.cache.link(self.commit, name, &info.etag).map_err(|error| DownloadFailure::Storage(blob, error))
    }

    /// Downloads the contents of a file until they are complete and their hash matches.
    fn contents(&self, name: &str, info: &FileInfo, blob: &Path, counts: &Counts) -> Result<(), DownloadFailure> {
        let part = blob.with_extension("incomplete");
        let storage = |error| DownloadFailure::Storage(part.clone(), error);
        let (mut attempts, mut is_second_copy) = (0, false);
        loop {
            let have = fs::metadata(&part).map_or(0, |found| found.len());
            let whole = info.num_bytes.unwrap_or(u64::MAX);
            let outcome = if have == whole && have > 0 { Ok(()) } else { self.more(name, info, have, &part, counts) };
            let has = fs::metadata(&part).map_or(0, |found| found.len());
            let lost = match outcome {
                Err(DownloadFailure::Unreachable(message)) => Some(message),
                Err(failure) => return Err(failure),
                Ok(()) if has < whole && info.num_bytes.is_some() => {
                    Some(format!("{name}: received {has} of {whole} bytes"))
                }
                Ok(()) => None,
            };
            if let Some(message) = lost {
                attempts = if has > have { 0 } else { attempts };
                pause_or_end(&mut attempts, message)?;
                continue;
            }
            if is_right(&part, info).map_err(storage)? {
                return fs::rename(&part, blob).map_err(storage);
            }
            fs::remove_file(&part).map_err(storage)?; // an earlier part of another file, or damage on the way
            if have == 0 && std::mem::replace(&mut is_second_copy, true) {
                let message = format!("{name}: two downloads of the file did not match its hash {}", info.etag);
                return Err(DownloadFailure::Broken(message));
            }
        }
    }

    /// Requests the bytes of the file that are missing, and appends them to the partial download.
    fn more(
        &self,
        name: &str,
        info: &FileInfo,
        have: u64,
        part: &Path,
        counts: &Counts,
    ) -> Result<(), DownloadFailure> {
        let (mut bytes, starts_again) = match self.client.read(info, have)? {
            Bytes::Rest(bytes) => (bytes, false),
            Bytes::Whole(bytes) => (bytes, true),
            Bytes::PastTheEnd => return Ok(()), // the hash says whether it is whole
        };
        let storage = |error| DownloadFailure::Storage(part.to_owned(), error);
        let mut options = OpenOptions::new();
        let options = if starts_again { options.write(true).truncate(true) } else { options.append(true) };
        let mut file = options.create(true).open(part).map_err(storage)?;
        counts.add(if starts_again { 0 } else { have }, self.progress);
        let mut buffer = vec![0; 1 << 18];
        loop {
            let lost =
                |error: io::Error| DownloadFailure::Unreachable(format!("{name}: the connection broke: {error}"));
            let count = bytes.read(&mut buffer).map_err(lost)?;
            if count == 0 {
                return Ok(());
            }
            file.write_all(&buffer[..count]).map_err(storage)?;
            counts.add(count as u64, self.progress);
        }
    }
}

impl Counts {
    fn add(&self, count: u64, progress: &DownloadCallback) {
        let done = self.done.fetch_add(count, Ordering::Relaxed) + count;
        let total = self.total.load(Ordering::Relaxed);
        progress(done.min(total), total);
    }
}

/// Waits before the next attempt, twice as long each time; fails after the last attempt.
fn pause_or_end(attempts: &mut u32, message: String) -> Result<(), DownloadFailure> {
    *attempts += 1;
    if *attempts >= MAX_ATTEMPTS {
        return Err(DownloadFailure::Unreachable(message));
    }
    thread::sleep(FIRST_PAUSE * 2_u32.pow(*attempts - 1));
    Ok(())
}

/// Whether a file has the expected size and hash. A hash whose length is neither that of SHA-256 nor of SHA-1 is not checked.
fn is_right(path: &Path, info: &FileInfo) -> io::Result<bool> {
    let num_bytes = fs::metadata(path)?.len();
    if info.num_bytes.is_some_and(|expected| expected != num_bytes) {
        return Ok(false);
    }
    let hash = match info.etag.len() {
        64 => digest(path, Sha256::new())?,
        40 => digest(path, Sha1::new().chain_update(format!("blob {num_bytes}\0")))?,
        _ => return Ok(true),
    };
    Ok(hash.eq_ignore_ascii_case(&info.etag))
}

fn digest<D: Digest>(path: &Path, mut digest: D) -> io::Result<String> {
    let mut file = untrusted::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => digest.update(&buffer[..count]),
        }
    }
}
