//! A policy as a configuration asks for it: all weights, or a frozen base with adapters.

use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::policy::{AdapterOptions, Policy, PolicyOptions};
use super::residence::OptimizerHome;
use crate::config::Quantization;
use crate::dist::Mesh;
use crate::error::{Error, Result};
use crate::model::{AdapterFiles, LoraSpec, ParamTable, UnitLayout, init_unit};

/// What of a model trains, and from where.
#[derive(Debug, Clone)]
pub struct PolicyStart<'a> {
    /// Adapters; `None` trains all weights.
    pub lora: Option<LoraSpec>,
    /// How their base's blocks are stored.
    pub quantization: Quantization,
    /// Key of fresh adapters, and of dropout.
    pub seed: u64,
    /// A folder of adapters to go on from.
    pub adapters: Option<&'a Path>,
}

impl Policy {
    /// [`Policy::with_home`] or [`Policy::with_adapters`].
    ///
    /// # Errors
    /// What is wrong with the adapters' folder, `InvalidValue` for adapters without `lora` or of another one, and those of
    /// [`Policy::with_home`].
    pub fn start(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: PolicyOptions,
        home: OptimizerHome,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        start: PolicyStart<'_>,
    ) -> Result<Self> {
        let PolicyStart { lora, quantization, seed, adapters: folder } = start;
        let Some(lora) = lora else {
            return match folder {
                Some(folder) => {
                    Err(other_adapters(folder, "a model folder, or lora.r and the other keys of its adapters"))
                }
                None => Policy::with_home(table, mesh, options, home, source),
            };
        };
        let earlier = folder.map(|folder| go_on(folder, &lora, &table)).transpose()?;
        let adapters = |layout: &UnitLayout| match &earlier {
            Some(files) => files.read_unit(layout, Kind::Float),
            None => init_unit(layout, seed, Kind::Float),
        };
        let adapters = AdapterOptions { lora, quantization, seed, source: &adapters };
        Policy::with_adapters(table.clone(), mesh, options, home, source, adapters)
    }
}

fn go_on(folder: &Path, lora: &LoraSpec, table: &ParamTable) -> Result<AdapterFiles> {
    let files = AdapterFiles::open(folder, table.spec.clone())?;
    let own = files.lora();
    if (own.r, own.alpha, &own.targets) == (lora.r, lora.alpha, &lora.targets) {
        return Ok(files);
    }
    let targets: Vec<_> = own.targets.iter().map(|module| module.name()).collect();
    let (r, alpha) = (own.r, own.alpha);
    let expected = format!("the adapters' own lora.r = {r}, lora.alpha = {alpha}, lora.target_modules = {targets:?}");
    Err(other_adapters(folder, &expected))
}

fn other_adapters(folder: &Path, expected: &str) -> Error {
    Error::invalid_value("model_name_or_path", folder.display(), expected)
}
