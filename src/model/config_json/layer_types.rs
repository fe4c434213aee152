//! The key `layer_types`, which names the kind of mixer of each layer.

use serde_json::Value;

use super::super::json::JsonObject;
use crate::error::{Error, Result};

/// The key in `config.json`.
pub(super) const KEY: &str = "layer_types";
/// Type of a layer whose tokens attend to all tokens before them.
pub(super) const FULL: &str = "full_attention";
/// Type of a layer whose tokens attend to a sliding window.
pub(super) const SLIDING: &str = "sliding_attention";
/// Type of a layer with a gated delta net.
pub(super) const LINEAR: &str = "linear_attention";

/// The layer types that the file lists, each one of `kinds`; `None` if it has no list.
///
/// # Errors
/// [`Error::BadFile`](crate::Error::BadFile) for a value that is not a list, and for the first type that the decoder does not support.
pub(super) fn read<'c>(config: &'c JsonObject, kinds: [&str; 2], num_layers: usize) -> Result<Option<Vec<&'c str>>> {
    let Some(types) = config.get(KEY) else { return Ok(None) };
    let expected = expected(kinds, num_layers);
    let types = types.as_array().ok_or_else(|| config.wrong(KEY, expected.as_str()))?;
    let known = |(layer, kind): (usize, &'c Value)| match kind.as_str() {
        Some(name) if kinds.contains(&name) => Ok(name),
        _ => Err(config.wrong(KEY, format!("{expected}; layer {layer} is {kind}"))),
    };
    types.iter().enumerate().map(known).collect::<Result<_>>().map(Some)
}

/// The error for a list whose length is not the number of layers.
pub(super) fn wrong_len(config: &JsonObject, num_layers: usize) -> Error {
    config.wrong(KEY, expected([FULL, SLIDING], num_layers))
}

/// Reads the list like [`read`], and checks that it has one entry per layer.
///
/// # Errors
/// The errors of [`read`]; [`Error::BadFile`](crate::Error::BadFile) for a list of another length.
pub(super) fn read_all<'c>(
    config: &'c JsonObject,
    kinds: [&str; 2],
    num_layers: usize,
) -> Result<Option<Vec<&'c str>>> {
    match read(config, kinds, num_layers)? {
        Some(types) if types.len() != num_layers => Err(config.wrong(KEY, expected(kinds, num_layers))),
        types => Ok(types),
    }
}

fn expected([one, other]: [&str; 2], num_layers: usize) -> String {
    format!("a list of \"{one}\" and \"{other}\", one for each of {num_layers} layers")
}
