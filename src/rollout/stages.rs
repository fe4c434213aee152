//! This rank's place in an engine: the ranks that share the engine, and the layers of this rank.

use std::sync::Arc;

use crate::model::{ModelSpec, Stage, Stages};
use crate::ranks::{Collective, Mesh, SingleRank};

/// The ranks of an engine and their layers, as seen from one rank.
#[derive(Debug, Clone)]
pub struct EngineRanks {
    /// All ranks of the engine, stage by stage. They have the same requests and make the same decisions.
    pub all: Arc<dyn Collective>,
    /// The tensor-parallel group: the ranks of this rank's stage, which share its layers.
    pub tp: Arc<dyn Collective>,
    /// The pipeline group: one rank of each stage, in order, including this one.
    pub pipe: Arc<dyn Collective>,
    /// The layers of each stage.
    pub stages: Stages,
}

impl EngineRanks {
    /// Takes the engine's groups from a mesh.
    pub fn new(mesh: &Mesh, stages: Stages) -> Self {
        Self { all: mesh.engine.clone(), tp: mesh.tp.clone(), pipe: mesh.pipe.clone(), stages }
    }

    /// An engine of one tensor-parallel group that holds all layers.
    pub fn of_one_stage(spec: &ModelSpec, tp: Arc<dyn Collective>) -> Self {
        let pipe = Arc::new(SingleRank::new("pipe", tp.ranks()[tp.rank()], tp.device()));
        Self { all: tp.clone(), tp, pipe, stages: Stages::one(spec) }
    }

    /// This rank's stage.
    pub fn stage(&self) -> Stage {
        self.stages.stage(self.pipe.rank())
    }
}
