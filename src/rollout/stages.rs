//! This rank's place in an engine: which ranks share it, which layers it has.

use std::sync::Arc;

use crate::model::{ModelSpec, Stage, Stages};
use crate::ranks::{Collective, Mesh, SingleRank};

/// The ranks of an engine and the layers of each, seen from one of them.
#[derive(Debug, Clone)]
pub struct EngineRanks {
    /// All ranks of the engine, stage by stage. They have the same requests and take the same decisions.
    pub all: Arc<dyn Collective>,
    /// Ranks of this rank's stage, which share its layers.
    pub tp: Arc<dyn Collective>,
    /// One rank of each stage, in order, this one among them.
    pub pipe: Arc<dyn Collective>,
    /// Which layers each stage has.
    pub stages: Stages,
}

impl EngineRanks {
    /// The engine of a mesh.
    pub fn new(mesh: &Mesh, stages: Stages) -> Self {
        Self { all: mesh.engine.clone(), tp: mesh.tp.clone(), pipe: mesh.pipe.clone(), stages }
    }

    /// The ranks of a tensor-parallel group that has all layers.
    pub fn of_one_stage(spec: &ModelSpec, tp: Arc<dyn Collective>) -> Self {
        let pipe = Arc::new(SingleRank::new("pipe", tp.ranks()[tp.rank()], tp.device()));
        Self { all: tp.clone(), tp, pipe, stages: Stages::one(spec) }
    }

    /// This rank's stage.
    pub fn stage(&self) -> Stage {
        self.stages.stage(self.pipe.rank())
    }
}
