//! Configuration keys for sharding state over ranks (ZeRO) and for where state is stored while it is not used.

use super::field::keys;
use super::range::{COUNT, from_to};
use super::{AutoOr, Dtype, OptimizerResidency, ReferenceResidency};

keys! {
    /// Keys for ZeRO sharding (`zero.*`).
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{Dtype, ZeroConfig};
    ///
    /// let words = ["zero.stage=3", "zero.shard_group_size=2", "zero.reduce_dtype=bfloat16"].map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let zero: &ZeroConfig = &config.zero;
    /// assert_eq!((zero.stage, zero.reduce_dtype), (3, Dtype::Bfloat16));
    /// assert_eq!(zero.shard_group(8, 4), 2, "of eight ranks on two nodes, two have one copy of the state");
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ZeroConfig {
        /// 0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also weights.
        pub stage: u8 = 2 => from_to(0.0, 3.0),
        /// Number of ranks that together hold one copy of the sharded state. `none` is all training ranks; on several nodes, those of one node, so
        /// that only gradients cross the network. Fewer give hybrid sharding.
        pub shard_group_size: Option<usize> = None => COUNT,
        /// Dtype in which ranks reduce gradients; `auto` is float32. Like FSDP's `reduce_dtype` and DeepSpeed's `communication_data_type`.
        pub reduce_dtype: Dtype = Dtype::Auto,
        /// Dtype in which gradients are accumulated over micro-batches; `auto` is float32. Like DeepSpeed's `grad_accum_dtype`.
        pub grad_accum_dtype: Dtype = Dtype::Auto,
    }
}

keys! {
    /// Keys for where state is stored (`residency.*`).
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{AutoOr, GradientCheckpointing, OptimizerResidency, ReferenceResidency, ResidencyConfig};
    ///
    /// let words = [
    ///     "residency.optimizer=stream",
    ///     "gradient_checkpointing=keep_attention",
    ///     "beta=0.04",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let ResidencyConfig { optimizer, reference } = config.residency;
    /// assert_eq!(optimizer, AutoOr::Given(OptimizerResidency::Stream));
    /// assert_ne!(reference, AutoOr::Given(ReferenceResidency::Host), "the plan chooses");
    /// assert_eq!(config.gradient_checkpointing, AutoOr::Given(GradientCheckpointing::KeepAttention));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ResidencyConfig {
        /// Where master weights and Adam moments are stored.
        pub optimizer: AutoOr<OptimizerResidency> = AutoOr::Auto,
        /// Where the weights of the reference model and of a teacher are stored.
        pub reference: AutoOr<ReferenceResidency> = AutoOr::Auto,
    }
}

impl ZeroConfig {
    /// Number of ranks that share one copy of the sharded state, out of `num_trainers` ranks with `local_size` per node.
    pub fn shard_group(&self, num_trainers: usize, local_size: usize) -> usize {
        let fits = self.stage > 0 && num_trainers > local_size && num_trainers.is_multiple_of(local_size);
        self.shard_group_size.unwrap_or(if fits { local_size } else { num_trainers })
    }
}
