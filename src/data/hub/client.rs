//! The three requests of the Hub's protocol that a download needs: the list of a repository's files, a file's hash, and its bytes.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use ureq::http::Response;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::cache::{is_safe, is_word};
use super::{HubOptions, Repo};
use crate::untrusted::{self, MAX_INDEX_BYTES};

/// Largest size in bytes of a repository's file list.
const MAX_INFO_BYTES: u64 = 256 << 20;
/// Time without a response or new bytes after which a request fails.
const PATIENCE: Duration = Duration::from_secs(60);
const CONNECT_PATIENCE: Duration = Duration::from_secs(15);

/// Why a request failed.
#[derive(Debug)]
pub(super) enum DownloadFailure {
    /// No response: no network, no such host, a broken connection, or a temporary server error.
    Unreachable(String),
    /// A permanent error response.
    Refused { status: u16, message: String },
    /// A response that cannot be used.
    Broken(String),
    /// The cache cannot be written to.
    Storage(PathBuf, io::Error),
}

impl fmt::Display for DownloadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(message) | Self::Broken(message) => f.write_str(message),
            Self::Refused { status, message } if message.is_empty() => write!(f, "the Hub answers {status}"),
            Self::Refused { status, message } => write!(f, "the Hub answers {status} ({message})"),
            Self::Storage(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

/// The commit of a repository's revision, and its files.
pub(super) struct Info {
    pub commit: String,
    pub names: Vec<String>,
}

/// Size, hash and address of a file.
pub(super) struct FileInfo {
    /// SHA-256 of a large file, or git's SHA-1 of a small one.
    pub etag: String,
    pub num_bytes: Option<u64>,
    /// The file's address at the Hub. For a large file it redirects to a storage server, which does not get the token.
    url: String,
}

/// The body of a response to a request for a file's bytes from some offset.
pub(super) enum Bytes {
    /// The bytes from the requested offset.
    Rest(Box<dyn Read>),
    /// The bytes from the start, because the server does not support ranges.
    Whole(Box<dyn Read>),
    /// The offset is at or after the end of the file.
    PastTheEnd,
}

#[derive(Debug)]
pub(super) struct HubClient {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl HubClient {
    pub fn new(options: &HubOptions) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_PATIENCE))
            .timeout_resolve(Some(CONNECT_PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .user_agent(concat!("colo-grpo/", env!("CARGO_PKG_VERSION")))
            .tls_config(TlsConfig::builder().root_certs(root_certs()).build())
            .build()
            .new_agent();
        Self { agent, endpoint: options.endpoint.clone(), token: options.token.clone() }
    }

    /// Requests the commit of the repository's revision, and its files.
    pub fn info(&self, repo: &Repo) -> Result<Info, DownloadFailure> {
        let Self { endpoint, .. } = self;
        let url = format!("{endpoint}/api/{}/{}/revision/{}", repo.plural(), repo.name, escaped(&repo.revision, false));
        let mut response = accepted(self.get(&url, None, None)?)?;
        let body = response.body_mut().with_config().limit(MAX_INFO_BYTES).read_to_vec();
        let body = body.map_err(|error| DownloadFailure::Unreachable(format!("{url}: {error}")))?;
        let broken = |what: &str| DownloadFailure::Broken(format!("{url}: {what}"));
        let info: Value = serde_json::from_slice(&body).map_err(|error| broken(&error.to_string()))?;
        let commit = info["sha"]
            .as_str()
            .filter(|sha| is_word(sha))
            .ok_or_else(|| broken("the Hub's answer names no commit (sha)"))?
            .to_owned();
        let files =
            info["siblings"].as_array().ok_or_else(|| broken("the Hub's answer has no list of files (siblings)"))?;
        let names = files.iter().filter_map(|file| file["rfilename"].as_str()).filter(|name| is_safe(name));
        Ok(Info { commit, names: names.map(str::to_owned).collect() })
    }

    /// Requests size and hash of a file, which the Hub sends before it redirects to a storage server.
    pub fn file_info(&self, repo: &Repo, commit: &str, name: &str) -> Result<FileInfo, DownloadFailure> {
        let mut url = self.file_url(repo, commit, name);
        for _ in 0..5 {
            let mut request = self.agent.head(&url).header("Accept-Encoding", "identity");
            if let Some(token) = &self.token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let request = request.config().max_redirects(0).build();
            let response = request.call().map_err(|error| unreachable(&url, error))?;
            let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            // The Hub sends on to its own pages by a path, to a store by a whole address.
            let own = text("location").filter(|to| response.status().is_redirection() && to.starts_with('/'));
            if let Some(path) = own {
                url = format!("{}{path}", origin(&self.endpoint));
                continue;
            }
            let etag = text("x-linked-etag").or_else(|| text("etag")).map(hash_of);
            let num_bytes = text("x-linked-size").or_else(|| {
                let is_the_file = response.status().is_success();
                text("content-length").filter(|_| is_the_file)
            });
            let num_bytes = num_bytes.and_then(|size| size.parse().ok());
            if !response.status().is_redirection() {
                accepted_status(&response)?;
            }
            let etag = etag.filter(|etag| is_word(etag)).ok_or_else(|| {
                DownloadFailure::Broken(format!(
                    "{url}: the answer has no usable ETag, so the file could not be checked"
                ))
            })?;
            return Ok(FileInfo { etag, num_bytes, url });
        }
        Err(DownloadFailure::Broken(format!("{url}: too many redirects")))
    }

    /// Requests the bytes of a file from offset `have`.
    pub fn read(&self, file: &FileInfo, have: u64) -> Result<Bytes, DownloadFailure> {
        let response = self.get(&file.url, (have > 0).then(|| format!("bytes={have}-")), Some("identity"))?;
        match response.status().as_u16() {
            206 => Ok(Bytes::Rest(Box::new(response.into_body().into_reader()))),
            416 => Ok(Bytes::PastTheEnd),
            _ => Ok(Bytes::Whole(Box::new(accepted(response)?.into_body().into_reader()))),
        }
    }

    fn get(&self, url: &str, range: Option<String>, encoding: Option<&str>) -> Result<Response<Body>, DownloadFailure> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        if let Some(encoding) = encoding {
            request = request.header("Accept-Encoding", encoding);
        }
        request.call().map_err(|error| unreachable(url, error))
    }

    fn file_url(&self, repo: &Repo, commit: &str, name: &str) -> String {
        let folder = if repo.plural() == "models" { "" } else { "datasets/" };
        format!("{}/{folder}{}/resolve/{commit}/{}", self.endpoint, repo.name, escaped(name, true))
    }
}

fn accepted(response: Response<Body>) -> Result<Response<Body>, DownloadFailure> {
    accepted_status(&response)?;
    Ok(response)
}

/// Checks that a response has a success status. Temporary server errors become `Unreachable`.
fn accepted_status(response: &Response<Body>) -> Result<(), DownloadFailure> {
    let status = response.status().as_u16();
    let said = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
    let message: String = said.unwrap_or_default().chars().filter(|c| !c.is_control()).take(300).collect();
    match status {
        200..=299 => Ok(()),
        408 | 429 | 500..=599 => Err(DownloadFailure::Unreachable(format!("the Hub answers {status} {message}"))),
        _ => Err(DownloadFailure::Refused { status, message }),
    }
}

fn unreachable(url: &str, error: ureq::Error) -> DownloadFailure {
    DownloadFailure::Unreachable(format!("{} cannot be reached: {error}", origin(url)))
}

/// The hash in an ETag header: `abc` for `W/"abc"`.
fn hash_of(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

/// The origin of a URL: `https://host:port`.
fn origin(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    url[start..].find('/').map_or(url, |end| &url[..start + end])
}

/// Percent-encodes a part of a URL; slashes are kept if `is_path`.
fn escaped(text: &str, is_path: bool) -> String {
    let stays = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || (is_path && byte == b'/');
    text.bytes().map(|byte| if stays(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The certificates of SSL_CERT_FILE (for networks with their own proxy), or else Mozilla's root certificates.
fn root_certs() -> RootCerts {
    let named = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"].iter().find_map(std::env::var_os);
    let Some(pem) = named.and_then(|path| untrusted::read(Path::new(&path), MAX_INDEX_BYTES).ok()) else {
        return RootCerts::WebPki;
    };
    let certificates: Vec<Certificate<'static>> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() { RootCerts::WebPki } else { RootCerts::new_with_certs(&certificates) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_and_hashes_match_the_hub() {
        assert_eq!(escaped("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(escaped("data/a b.parquet", true), "data/a%20b.parquet");
        assert_eq!(hash_of("W/\"abc\""), "abc");
        assert_eq!(origin("http://mirror:81/prefix/x"), "http://mirror:81");
        assert_eq!(origin("http://mirror"), "http://mirror");
    }
}
