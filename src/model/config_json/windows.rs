//! Keys of `config.json` that give layers a sliding window.

use serde_json::{Value, json};

use super::layer_types;
use crate::error::Result;
use crate::model::families::Window;
use crate::model::json::JsonObject;
use crate::model::spec::{Mixer, ModelSpec};

const KEY: &str = "sliding_window";
/// Key of an interval n: every n-th layer has full attention.
const PERIOD: &str = "sliding_window_pattern";

/// The sliding window of each layer; `types` is the file's list of layer types, if it has one.
pub(super) fn read(
    config: &JsonObject,
    counts: Window,
    types: Option<Vec<&str>>,
    num_layers: usize,
) -> Result<Vec<Option<usize>>> {
    let all = |window| Ok(vec![window; num_layers]);
    let window = match counts {
        Window::Never => return all(None),
        Window::Refused if config.flag("use_sliding_window")? => {
            return Err(
                config.wrong("use_sliding_window", "false: sliding windows in every second layer are not supported")
            );
        }
        Window::Refused => return all(None),
        Window::Always(usual) if !config.has(KEY) => return all(Some(usual)),
        Window::Switched | Window::Listed | Window::SwitchedForAll if !config.flag("use_sliding_window")? => {
            return all(None);
        }
        _ if config.get(KEY).is_none() => return all(None),
        _ => config.size(KEY, 1 << 31)?,
    };
    match (counts, types) {
        (Window::Patterned(usual), None) => {
            let period = if config.has(PERIOD) { config.size(PERIOD, 1 << 12)? } else { usual };
            Ok((1..=num_layers).map(|layer| (!layer.is_multiple_of(period)).then_some(window)).collect())
        }
        (Window::Switched | Window::Listed | Window::Patterned(_), Some(types)) if types.len() == num_layers => {
            Ok(types.into_iter().map(|kind| (kind == layer_types::SLIDING).then_some(window)).collect())
        }
        (Window::Switched | Window::Listed | Window::Patterned(_), Some(_)) => {
            Err(layer_types::wrong_len(config, num_layers))
        }
        (Window::Switched, None) => {
            let first = config.count("max_window_layers")?;
            Ok((0..num_layers).map(|layer| (layer >= first).then_some(window)).collect())
        }
        _ => all(Some(window)),
    }
}

/// Adds the keys of windows to a `config.json`: those that switch windows on, and the list of layer types.
pub(super) fn write(spec: &ModelSpec, counts: Window, config: &mut Value) {
    let has_window = |layer: usize| matches!(spec.layers[layer].mixer, Mixer::Attention(own) if own.window.is_some());
    let count = (0..spec.num_layers()).filter(|&layer| has_window(layer)).count();
    let is_switched = matches!(counts, Window::Switched | Window::Listed);
    if is_switched {
        config["use_sliding_window"] = json!(count > 0);
        config["max_window_layers"] = json!(spec.num_layers() - count);
    }
    if count > 0 || !is_switched {
        let name = |layer| if has_window(layer) { layer_types::SLIDING } else { layer_types::FULL };
        config[layer_types::KEY] = (0..spec.num_layers()).map(name).collect();
    }
}
