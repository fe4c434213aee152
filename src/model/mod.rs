//! The decoder: what it is ([`ModelSpec`]), how its weights lie in memory ([`ParamTable`]), its blocks forward and
//! backward, and its files. Knows nothing of training loops, engines or ranks beyond a tensor-parallel slice.
//!
//! | file | what it is |
//! |---|---|
//! | `spec` | the shape of a network and of its layers: parameters, bytes, operations |
//! | `families` | what belongs to a family, not to a model |
//! | `circumstances` | which settings go together with a model |
//! | `config_json`, `json` | that shape from and to a model folder; its JSON files |
//! | `distinct` | what layers share that are alike in one thing: rotations, windows |
//! | `stages` | which layers each stage of a pipeline has |
//! | `preset` | published shapes |
//! | `params` | the flat layout of its weights |
//! | `views` | tensors over that layout: embedding and head |
//! | `files` | safetensors, read and written unit by unit |
//! | `lora` | low-rank adapters beside frozen matrices |
//! | `format` | formats of matrices: bytes, preparation, products and their gradients |
//! | `block` | one block and its sublayers: parameters and their slices, forward and backward |
//! | `correction` | corrections of a router's scores, as weights have them |
//! | `head` | scored tokens' log-probabilities, forward and backward |
//! | `init` | fresh weights |
//! | `export` | folders of trained adapters, merged or not |

mod block;
mod circumstances;
mod config_json;
mod correction;
mod distinct;
mod export;
mod families;
mod files;
mod format;
mod head;
mod init;
mod json;
mod lora;
mod params;
mod preset;
mod source;
mod spec;
mod stages;
#[cfg(test)]
mod tests;
mod views;

pub use block::{
    BlockContext, BlockMatrix, BlockParams, Linear, PackedMixer, Routes, SavedBlock, SequenceMixer, TokenExchange,
    block_backward, block_forward, draft_input, draft_input_backward,
};
pub use distinct::{ByRope, ByWindow, Distinct, Ropes};
pub use export::{ExportOptions, export_folder};
pub(crate) use files::{MappedFile, encode_header, sync};
pub use files::{WeightFiles, WeightWriter};
pub use format::{
    BaseRounding, Exact, Format, Fp8, Nf4, OwnProducts, Piece, Plain, Section, StepCost, StepExperts, StepOutput,
    StepProducts, StepRows, StoredBlock, StoredFormat, Use, bytes_of_parts, trial_bytes,
};
pub use head::{
    HeadSums, SavedHead, ScoredTokens, Scoring, head_backward, head_chunk_tokens, head_forward, head_logits,
};
pub use init::{copy_tokenizer, init_folder, init_unit, init_unit_on};
pub(crate) use json::{is_model_folder, model_within};
pub use lora::{AdapterBase, AdapterFiles, BlockLora, Lora, LoraSpec, write_adapters};
pub use params::{Param, ParamTable, UnitLayout};
pub use preset::PRESETS;
pub use source::ModelSource;
pub use spec::{
    AttentionSpec, BlockSpec, DeltaNetSpec, DenseSpec, ElementBytes, ExpertsSpec, Family, LinearSpec, Matrix, Mixer,
    Mlp, ModelSpec, NormPlaces, ParamName, QkNorm, RopeSpec, SharedExpertSpec, Sight, Unit,
};
pub(crate) use spec::{MIXER_NORMS, MLP_NORMS, TpSplit};
pub use stages::{Stage, Stages};
pub use views::{EmbeddingParams, HeadParams};
