//! Configurations of vision-language models: `text_config` describes the text part, which is trained and sampled from. Everything else is kept
//! unchanged.

use std::path::Path;

use serde_json::{Value, json};

use super::{dtype_name, quantization};
use crate::error::{Error, Result};
use crate::model::json::{CONFIG, JsonObject};
use crate::model::spec::ModelSpec;

const KEY: &str = "text_config";

/// Extracts the description of the text part. Whether the head is tied is stated outside of it, as in transformers; so may be the dtype.
pub(super) fn read(whole: JsonObject) -> Result<JsonObject> {
    quantization::check(&whole)?;
    let mut text = whole.object(KEY)?.ok_or_else(|| whole.wrong(KEY, "an object that describes the text model"))?;
    text.take("tie_word_embeddings", &whole);
    if text.get("dtype").or(text.get("torch_dtype")).is_none() {
        ["dtype", "torch_dtype"].into_iter().for_each(|key| text.take(key, &whole));
    }
    Ok(text)
}

/// A copy of `base`'s `config.json`, changed to the type of `spec`'s weights.
pub(super) fn whole_config(spec: &ModelSpec, base: Option<&Path>) -> Result<Value> {
    let base = base.ok_or_else(|| Error::InvalidArgument {
        op: "ModelSpec::write_config",
        expected: "the folder of the original vision-language model".to_owned(),
        got: "none".to_owned(),
    })?;
    let mut config = Value::Object(JsonObject::read(&base.join(CONFIG))?.into_map());
    let dtype = json!(dtype_name(spec.dtype));
    let rewrite = |object: &mut Value| {
        for key in ["dtype", "torch_dtype"] {
            if let Some(value) = object.get_mut(key) {
                *value = dtype.clone();
            }
        }
    };
    rewrite(&mut config);
    rewrite(&mut config[KEY]);
    config.as_object_mut().expect("read as one").remove(quantization::KEY);
    if !spec.tie_word_embeddings {
        config["tie_word_embeddings"] = json!(false); // the new weights decide, not `base`'s configuration
    }
    Ok(config)
}
