//! `layer_types`: what mixes the tokens of each layer.

use serde_json::Value;

use super::super::json::JsonObject;
use crate::error::Result;

/// The key of a `config.json`.
pub(super) const KEY: &str = "layer_types";
/// A layer whose tokens attend to all before them.
pub(super) const FULL: &str = "full_attention";
/// A layer whose tokens attend to those of a window.
pub(super) const SLIDING: &str = "sliding_attention";
/// A layer with a gated delta net.
pub(super) const LINEAR: &str = "linear_attention";

/// The type of each layer, one of `kinds`; none where the file does not say.
///
/// # Errors
/// [`Error::BadFile`](crate::Error::BadFile) for another list, with the first type that the decoder does not compute.
pub(super) fn read<'c>(config: &'c JsonObject, kinds: [&str; 2], num_layers: usize) -> Result<Option<Vec<&'c str>>> {
    let Some(types) = config.get(KEY) else { return Ok(None) };
    let [one, other] = kinds;
    let expected = format!("a list of \"{one}\" and \"{other}\", one for each of {num_layers} layers");
    let types = types.as_array().filter(|types| types.len() == num_layers);
    let types = types.ok_or_else(|| config.wrong(KEY, expected.as_str()))?;
    let known = |(layer, kind): (usize, &'c Value)| match kind.as_str() {
        Some(name) if kinds.contains(&name) => Ok(name),
        _ => Err(config.wrong(KEY, format!("{expected}; layer {layer} is {kind}"))),
    };
    types.iter().enumerate().map(known).collect::<Result<_>>().map(Some)
}
