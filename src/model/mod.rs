//! The decoder: what it is ([`ModelSpec`]), how its weights lie in memory ([`ParamTable`]), its blocks forward and
//! backward, and its files. Knows nothing of training loops, engines or ranks beyond a tensor-parallel slice.
//!
//! | file | what it is |
//! |---|---|
//! | `spec` | the shape of a network |
//! | `config_json`, `json` | that shape from and to a model folder; its JSON files |
//! | `preset` | published shapes |
//! | `params` | the flat layout of its weights |
//! | `views` | tensors over that layout, and their tensor-parallel slices |
//! | `files` | safetensors, read and written unit by unit |
//! | `lora` | low-rank adapters beside frozen matrices |
//! | `quantized` | blocks stored in 4 bits |
//! | `block` | one block, forward and backward |
//! | `block_gradients` | where a block's gradients go: to its weights, or to its adapters |
//! | `head` | scored tokens' log-probabilities, forward and backward |
//! | `init` | fresh weights |
//! | `export` | folders of trained adapters, merged or not |

mod block;
mod block_gradients;
mod config_json;
mod export;
mod files;
mod head;
mod init;
mod json;
mod lora;
mod params;
mod preset;
mod quantized;
mod spec;
#[cfg(test)]
mod tests;
mod views;

pub use block::{Attention, BlockContext, PackedAttention, SavedBlock, attention_scale, block_backward, block_forward};
pub use block_gradients::BlockGradients;
pub use export::export_folder;
pub(crate) use files::{MappedFile, encode_header, sync};
pub use files::{WeightFiles, WeightWriter};
pub use head::{SavedHead, Scored, Scoring, head_backward, head_chunk_tokens, head_forward};
pub use init::{copy_tokenizer, init_folder, init_unit, init_unit_on};
pub(crate) use json::is_model_folder;
pub use lora::{AdapterFiles, BlockLora, Lora, LoraSpec, Matrix, ModelSource, write_adapters};
pub use params::{ALIGNMENT, Param, ParamName, ParamTable, Unit, UnitLayout};
pub use preset::PRESETS;
pub use quantized::QuantizedBlock;
pub use spec::{Family, Llama3Scaling, ModelSpec};
pub use views::{BlockParams, EmbeddingParams, HeadParams, Qkv};
