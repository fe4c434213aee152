//! Settings of the Hub from environment variables, with the names that `huggingface_hub` uses.

use std::fmt;
use std::path::PathBuf;

use crate::untrusted::{self, MAX_WORDS_BYTES};

/// Callback for download progress, called with `(done, total)` in bytes.
pub(super) type DownloadCallback = Box<dyn Fn(u64, u64) + Send + Sync>;

/// Addresses of the Hub and its cache, and how download progress is shown.
pub struct HubOptions {
    /// Address of the Hub, without a slash at the end.
    pub endpoint: String,
    /// Folder of the local cache.
    pub cache: PathBuf,
    /// Access token. It is sent only to the Hub.
    pub token: Option<String>,
    /// Whether only the local cache may be read.
    pub is_offline: bool,
    /// Callback for download progress.
    pub(super) progress: DownloadCallback,
}

impl HubOptions {
    /// Reads the environment variables HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_TOKEN, HF_TOKEN_PATH and HF_HUB_OFFLINE.
    pub fn from_env() -> Self {
        Self::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    /// Calls `progress` with `(done, total)` in bytes while files are downloaded.
    pub fn with_progress(self, progress: impl Fn(u64, u64) + Send + Sync + 'static) -> Self {
        Self { progress: Box::new(progress), ..self }
    }

    fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Self {
        let folder = |name: &str| {
            let home = || get("HOME").map(PathBuf::from).unwrap_or_default();
            get(name).map(|path| path.strip_prefix("~/").map_or_else(|| PathBuf::from(&path), |rest| home().join(rest)))
        };
        let user_cache =
            || folder("XDG_CACHE_HOME").unwrap_or_else(|| folder("HOME").unwrap_or_default().join(".cache"));
        let home = folder("HF_HOME").unwrap_or_else(|| user_cache().join("huggingface"));
        let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let token_file = folder("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let saved = || untrusted::read_text(&token_file, MAX_WORDS_BYTES).ok();
        let token = get("HF_TOKEN").or_else(saved).map(|token| token.trim().to_owned());
        let is_true = |name| get(name).is_some_and(|word| ["1", "true", "yes", "on"].contains(&&*word.to_lowercase()));
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.unwrap_or_else(|| home.join("hub")),
            token: token.filter(|token| !token.is_empty()),
            is_offline: is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE"),
            progress: Box::new(|_, _| ()),
        }
    }
}

/// Formats all options except the access token, which is secret.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("HubOptions");
        shown.field("endpoint", &self.endpoint).field("cache", &self.cache).field("is_offline", &self.is_offline);
        shown.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_is_that_of_huggingface_hub() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "saved\n").unwrap();
        let home = folder.path().to_str().unwrap().to_owned();
        let options = |set: &[(&str, &str)]| {
            HubOptions::from_variables(&|name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        for (set, cache) in [
            (&[("HOME", "/u")][..], "/u/.cache/huggingface/hub"),
            (&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/u"), ("HF_HOME", "~/hf")], "/u/hf/hub"),
            (&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")], "/c"),
        ] {
            assert_eq!(options(set).cache, PathBuf::from(cache), "{set:?}");
        }
        assert_eq!(options(&[("HF_HOME", &home)]).token.as_deref(), Some("saved"));
        let given = options(&[("HF_HOME", &home), ("HF_TOKEN", "given"), ("HF_ENDPOINT", "http://mirror/")]);
        assert_eq!((given.token.as_deref(), given.endpoint.as_str()), (Some("given"), "http://mirror"));
        assert!(!format!("{given:?}").contains("given"), "{given:?}");
        assert!(options(&[("HF_HUB_OFFLINE", "1")]).is_offline && !options(&[("HF_HUB_OFFLINE", "0")]).is_offline);
    }
}
