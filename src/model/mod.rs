//! The decoder: its shape ([`ModelSpec`]), the memory layout of its weights ([`ParamTable`]), forward and backward of its blocks, and its files.
//! Knows nothing of training loops or engines, and of ranks only tensor-parallel slices and sequence parallelism.
//!
//! | file | content |
//! |---|---|
//! | `spec` | the shape of a model and of its layers: parameters, bytes, operations |
//! | `families` | properties of model families that `config.json` leaves unsaid |
//! | `circumstances` | which settings can be combined with a model |
//! | `config_json`, `json` | reads and writes the shape as a model folder's JSON files |
//! | `distinct` | values shared by layers with equal rotary embeddings or windows |
//! | `stages` | the layers of each pipeline stage |
//! | `preset` | shapes of published models |
//! | `params` | the flat layout of weights |
//! | `views` | the embedding's and the head's tensors in that layout |
//! | `files` | safetensors, read and written unit by unit |
//! | `lora` | low-rank adapters of frozen matrices |
//! | `format` | number formats of matrices: bytes, preparation, GEMMs and their gradients |
//! | `block` | one block and its sublayers: parameters, their slices, forward and backward |
//! | `correction` | corrections of a router's scores, as stored in weights |
//! | `head` | log-probabilities of scored tokens, forward and backward |
//! | `init` | random initialization |
//! | `export` | exports trained models and adapters, merged or not |

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
    BaseRounding, Exact, ExpertStep, Format, Fp8, Int8, Nf4, OwnProducts, Piece, Plain, Section, StepCost, StepExperts,
    StepOutput, StepProducts, StepRows, StoredBlock, StoredFormat, Use, bytes_of_parts, trial_bytes,
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
    Mlp, ModelSpec, NormPlaces, ParamName, QkNorm, RopeSpec, RowsShape, SharedExpertSpec, Sight, Unit,
};
pub(crate) use spec::{DRAFT_NORMS, MIXER_NORMS, MLP_NORMS, TpSplit};
pub use stages::{Stage, Stages};
pub use views::{EmbeddingParams, HeadParams};
