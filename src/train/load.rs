//! Creates a policy, in which either all weights train or only adapters of a frozen base.

use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::adapters::Adapters;
use super::network::Network;
use super::network_options::NetworkOptions;
use super::offload::ActivationOffload;
use super::optimizer::Optimizer;
use super::policy::{Policy, PolicyOptions};
use super::residence::{OptimizerHome, Transitions};
use super::sharding::Sharding;
use super::weights::Weights;
use crate::config::Quantization;
use crate::error::{Error, Result};
use crate::memory::HostPool;
use crate::model::{AdapterFiles, LoraSpec, ParamTable, UnitLayout, init_unit};
use crate::ranks::Mesh;
use crate::torch::accumulation_kind;

/// Which part of a model trains, and the weights that it starts from.
#[derive(Debug, Clone)]
pub struct PolicyStart<'a> {
    /// Settings of LoRA adapters; `None` trains all weights.
    pub lora: Option<LoraSpec>,
    /// Storage format of the frozen base's blocks.
    pub quantization: Quantization,
    /// Random key of new adapters and of dropout.
    pub seed: u64,
    /// A folder of adapters to continue from.
    pub adapters: Option<&'a Path>,
    /// Whether to keep a frozen copy of these adapters for [`Policy::reference_logprobs`].
    pub keeps_initial: bool,
}

/// The adapters of a policy with a frozen base.
pub struct AdapterOptions<'a> {
    /// The adapters' settings.
    pub lora: LoraSpec,
    /// Storage format of the base's blocks; quantized ones are whole on every rank.
    pub quantization: Quantization,
    /// Random key of dropout.
    pub seed: u64,
    /// Whether to keep a frozen copy of the initial adapters for [`Policy::reference_logprobs`].
    pub keeps_initial: bool,
    /// Returns the whole flat tensor `[len]` of the adapters' weights for a layout, in any floating dtype.
    pub source: &'a dyn Fn(&UnitLayout) -> Result<Tensor>,
}

impl std::fmt::Debug for AdapterOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdapterOptions").field("lora", &self.lora).field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl Policy {
    /// Creates a policy by [`Policy::with_home`] or, for LoRA, by [`Policy::with_adapters`].
    ///
    /// # Errors
    /// Errors of the adapters' folder, `InvalidValue` for a folder without `lora` or with other settings, and the errors of [`Policy::with_home`].
    pub fn start(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: PolicyOptions,
        home: OptimizerHome,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        start: PolicyStart<'_>,
    ) -> Result<Self> {
        let PolicyStart { lora, quantization, seed, adapters: folder, keeps_initial } = start;
        if options.network.device.is_cuda() {
            table.spec.validate_gpu(options.network.kind, None, Path::new(""))?;
        }
        if let Some(format) = quantization.format() {
            format.check(&table.spec)?;
        }
        let Some(lora) = lora else {
            return match folder {
                Some(folder) => {
                    Err(other_adapters(folder, "a full model, or lora.r and the other LoRA keys of these adapters"))
                }
                None => Policy::with_home(table, mesh, options, home, source),
            };
        };
        lora.check(&table.spec)?;
        if options.network.device.is_cuda() {
            lora.check_gpu(&table.spec, options.network.kind, options.network.format)?;
        }
        let earlier = folder.map(|folder| go_on(folder, &lora, &table)).transpose()?;
        let adapters = |layout: &UnitLayout| match &earlier {
            Some(files) => files.read_unit(layout, Kind::Float),
            None => init_unit(layout, seed, Kind::Float),
        };
        let keeps_initial = keeps_initial && earlier.is_some(); // new adapters have B = 0, so the reference equals the base
        let adapters = AdapterOptions { lora, quantization, seed, keeps_initial, source: &adapters };
        Policy::with_adapters(table.clone(), mesh, options, home, source, adapters)
    }

    /// [`Policy::new`] with the optimizer state stored in `home`, whose pool has the `optimizer` bytes of [`super::TrainBytes`].
    ///
    /// # Errors
    /// The errors of [`Policy::new`], and `InvalidArgument` for a pool that is too small.
    pub fn with_home(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: PolicyOptions,
        home: OptimizerHome,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<Self> {
        let sharding = Sharding::new(&table, mesh, options.stage)?;
        let (optimizer, weights) = Self::load_trained("policy_weights", table, &sharding, options, home, source)?;
        Ok(Self::assemble(Network::new(weights, None, options.network, mesh)?, optimizer, sharding, options))
    }

    /// Creates a frozen model with adapters that train: only these have master weights, moments and gradients. `source` returns the model's units,
    /// `adapters.source` those of [`ParamTable::adapters`].
    ///
    /// # Errors
    /// The errors of [`Policy::with_home`].
    pub fn with_adapters(
        table: Arc<ParamTable>,
        mesh: &Mesh,
        options: PolicyOptions,
        home: OptimizerHome,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        adapters: AdapterOptions<'_>,
    ) -> Result<Self> {
        let AdapterOptions { lora, quantization, seed, keeps_initial, source: adapter_source } = adapters;
        let NetworkOptions { kind, device, .. } = options.network;
        let adapter_table = Arc::new(ParamTable::adapters(table.spec.clone(), &lora, table.shards));
        let (owner, place) = ("policy_weights", (kind, device));
        let base = match quantization.format() {
            None => {
                let sharding = Sharding::new(&table, mesh, options.stage)?;
                Weights::load(owner, table, sharding, place, source, |_, _| Ok(()))?
            }
            Some(format) => {
                let sharding = Sharding::new(&table, mesh, options.stage.min(2))?;
                Weights::load_quantized(owner, table, sharding, place, source, (quantization, format))?
            }
        };
        let sharding = Sharding::new(&adapter_table, mesh, options.stage.min(2))?;
        let copy =
            |table| Weights::load("reference_adapters", table, sharding.clone(), place, adapter_source, |_, _| Ok(()));
        let initial = keeps_initial.then(|| copy(adapter_table.clone())).transpose()?;
        let (optimizer, weights) =
            Self::load_trained("adapter_weights", adapter_table, &sharding, options, home, adapter_source)?;
        let adapters = Adapters::new(weights, initial, lora, seed, mesh.world.rank());
        Ok(Self::assemble(Network::new(base, Some(adapters), options.network, mesh)?, optimizer, sharding, options))
    }

    fn load_trained(
        owner: &'static str,
        table: Arc<ParamTable>,
        sharding: &Sharding,
        options: PolicyOptions,
        home: OptimizerHome,
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
    ) -> Result<(Optimizer, Weights)> {
        let NetworkOptions { kind, device, .. } = options.network;
        let mut optimizer =
            Optimizer::new(&table, sharding, (options.adam, options.optim), (accumulation_kind(kind), device), home)?;
        let load_master = |index, whole: &Tensor| optimizer.load_master(index, whole);
        let weights = Weights::load(owner, table, sharding.clone(), (kind, device), source, load_master)?;
        Ok((optimizer, weights))
    }

    /// Offloads the tensors that blocks keep for backward to `pool`, which has
    /// [`TrainedModel::offloaded_bytes`](super::TrainedModel::offloaded_bytes). A micro-batch that needs more allocates a further pool.
    #[must_use]
    pub fn with_activation_offload(mut self, pool: HostPool) -> Self {
        self.network.offload = Some(ActivationOffload::new(pool));
        self
    }

    /// Sets for how many tokens of a micro-batch attention is computed in two parts of a rank's heads, if ranks share micro-batches. Results do not
    /// depend on it.
    #[doc(hidden)]
    #[must_use]
    pub fn halving_heads_from(mut self, num_tokens: i64) -> Self {
        self.network.exchange = self.network.exchange.take().map(|exchange| exchange.halving_from(num_tokens));
        self
    }

    /// Time and bytes of offloading activations to the host and back since the last call. Waits for the device.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn take_offloaded(&mut self) -> Result<Transitions> {
        self.network.offload.as_mut().map_or_else(|| Ok(Transitions::default()), ActivationOffload::take_moves)
    }
}

fn go_on(folder: &Path, lora: &LoraSpec, table: &ParamTable) -> Result<AdapterFiles> {
    let files = AdapterFiles::open(folder, table.spec.clone())?;
    let own = files.lora();
    if (own.r, own.alpha, &own.targets) == (lora.r, lora.alpha, &lora.modules(&table.spec)) {
        return Ok(files);
    }
    let targets: Vec<_> = own.targets.iter().map(|module| module.name()).collect();
    let (r, alpha) = (own.r, own.alpha);
    let expected = format!(
        "the settings of these adapters: lora.r = {r}, lora.alpha = {alpha}, lora.target_modules = {targets:?}"
    );
    Err(other_adapters(folder, &expected))
}

fn other_adapters(folder: &Path, expected: &str) -> Error {
    Error::invalid_value("model_name_or_path", folder.display(), expected)
}
