//! The decoder: what it is ([`ModelSpec`]), how its weights lie in memory ([`ParamTable`]), its blocks forward and
//! backward, and its files. Knows nothing of training loops, engines or ranks beyond a tensor-parallel slice.
//!
//! | file | what it is |
//! |---|---|
//! | `spec` | the shape of a network |
//! | `params` | the flat layout of its weights |
//! | `views` | tensors over that layout, and their tensor-parallel slices |

mod params;
mod spec;
mod views;

pub use params::{ALIGNMENT, Param, ParamName, ParamTable, Unit, UnitLayout};
pub use spec::{Family, Llama3Scaling, ModelSpec};
pub use views::{BlockParams, EmbeddingParams, HeadParams, Qkv};
