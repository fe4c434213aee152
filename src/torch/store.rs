//! libtorch's TCPStore: the key-value store through which ranks rendezvous.
#![allow(unsafe_code)]

use std::net::TcpListener;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::time::Duration;

use super::ffi;
use crate::error::{Error, Result};

/// A connection to a TCPStore and, on one rank, its server. It may be used from several threads; calls are serialized.
#[derive(Debug)]
pub struct Store {
    raw: *mut ffi::RawStore,
    address: String,
    port: u16,
}

// SAFETY: c10d::TCPStore guards every operation with its own lock and has no thread affinity.
unsafe impl Send for Store {}
// SAFETY: as above; the pointer itself never changes.
unsafe impl Sync for Store {}

impl Store {
    /// Starts a store server on `address:port` and connects to it. The socket is bound to `address` only, or is `listener`, which must be bound and
    /// listening. (libtorch itself would listen on every address.) Port 0 selects a free port. `timeout` is the longest wait in [`Store::get`].
    ///
    /// # Errors
    /// [`Error::Environment`] if the address or port is not available.
    pub fn host(address: &str, port: u16, listener: Option<OwnedFd>, timeout: Duration) -> Result<Self> {
        let refused = |error: std::io::Error| Error::Environment {
            message: format!(
                "cannot open the rendezvous store on {address}:{port}: {error}; give a free port with \
                 --master_port (or MASTER_PORT), or omit it"
            ),
        };
        let listener = match listener {
            Some(fd) => TcpListener::from(fd),
            None => TcpListener::bind((address, port)).map_err(refused)?,
        };
        let port = listener.local_addr().map_err(refused)?.port();
        let host = ffi::c_string("Store::host", address)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the string outlives the call and `raw` is written on success only; the store takes the socket over.
        let status =
            unsafe { ffi::colo_store_host(host.as_ptr(), port, listener.into_raw_fd(), millis(timeout), &mut raw) };
        ffi::check(status, || format!("cannot open the rendezvous store on {address}:{port}"))?;
        Ok(Self { raw, address: address.to_owned(), port })
    }

    /// Connects to the store at `address:port`, waiting up to `timeout` for it to appear.
    ///
    /// # Errors
    /// [`Error::Environment`] if nothing answers in time.
    pub fn connect(address: &str, port: u16, timeout: Duration) -> Result<Self> {
        let host = ffi::c_string("Store::connect", address)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the string outlives the call and `raw` is written on success only.
        let status = unsafe { ffi::colo_store_connect(host.as_ptr(), port, millis(timeout), &mut raw) };
        ffi::check(status, || format!("cannot connect to the rendezvous store at {address}:{port}"))?;
        Ok(Self { raw, address: address.to_owned(), port })
    }

    /// The port of the store.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Stores `value` under `key`, replacing an earlier value.
    ///
    /// # Errors
    /// [`Error::Environment`] if the server is gone; [`Error::InvalidArgument`] for a key with a NUL byte.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let name = ffi::c_string("Store::set", key)?;
        // SAFETY: all pointers outlive the call, which copies the value.
        let status = unsafe { ffi::colo_store_set(self.raw, name.as_ptr(), value.as_ptr(), value.len()) };
        ffi::check(status, || self.context("set", key))
    }

    /// Returns the value of `key`, waiting for it up to the store's timeout.
    ///
    /// # Errors
    /// The errors of [`Store::set`]; an error if the value is not set in time.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let name = ffi::c_string("Store::get", key)?;
        let (mut value, mut bytes) = (std::ptr::null_mut(), 0);
        // SAFETY: the outputs outlive the call and are written on success only.
        let status = unsafe { ffi::colo_store_get(self.raw, name.as_ptr(), &mut value, &mut bytes) };
        ffi::check(status, || self.context("get", key))?;
        // SAFETY: on success the shim gave us `bytes` bytes of its own at `value`.
        let copy = unsafe { std::slice::from_raw_parts(value, bytes) }.to_vec();
        // SAFETY: `value` came from the shim and is not used again.
        unsafe { ffi::colo_bytes_free(value) };
        Ok(copy)
    }

    /// Adds `delta` to the number under `key` (0 if absent) and returns the sum.
    ///
    /// # Errors
    /// The errors of [`Store::set`].
    pub fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let name = ffi::c_string("Store::add", key)?;
        let mut sum = 0;
        // SAFETY: the outputs outlive the call.
        let status = unsafe { ffi::colo_store_add(self.raw, name.as_ptr(), delta, &mut sum) };
        ffi::check(status, || self.context("add", key))?;
        Ok(sum)
    }

    /// Waits until every key exists.
    ///
    /// # Errors
    /// The errors of [`Store::get`].
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let names = keys.iter().map(|key| ffi::c_string("Store::wait", key)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        // SAFETY: the names outlive the call.
        let status = unsafe { ffi::colo_store_wait(self.raw, pointers.as_ptr(), pointers.len(), millis(timeout)) };
        ffi::check(status, || self.context("wait for", &keys.join(", ")))
    }

    fn context(&self, op: &str, key: &str) -> String {
        format!("rendezvous store at {}:{}: cannot {op} {key}", self.address, self.port)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours and not used after this; the shim lets no exception out.
        unsafe { ffi::colo_store_free(self.raw) };
    }
}

fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(300);

    #[test]
    fn two_store_connections_share_keys() {
        let host = Store::host("127.0.0.1", 0, None, Duration::from_secs(10)).unwrap();
        let client = Store::connect("127.0.0.1", host.port(), Duration::from_secs(10)).unwrap();
        client.set("key", b"\0value").unwrap();
        assert_eq!(host.get("key").unwrap(), b"\0value");
        assert_eq!(host.add("count", 2).unwrap() + client.add("count", 3).unwrap(), 2 + 5);
        host.wait(&["key", "count"], SHORT).unwrap();
        let missing = client.wait(&["absent"], SHORT).unwrap_err().to_string();
        assert!(missing.contains("wait for absent"), "{missing}");
    }

    #[test]
    fn the_store_binds_only_its_address_and_refuses_a_used_port() {
        let host = Store::host("127.0.0.1", 0, None, SHORT).unwrap();
        assert!(std::net::TcpStream::connect(("127.0.0.2", host.port())).is_err());
        let error = Store::host("127.0.0.1", host.port(), None, SHORT).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Environment);
        assert!(error.to_string().contains("--master_port"), "{error}");
    }
}
