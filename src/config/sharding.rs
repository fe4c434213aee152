//! Keys of what ranks share out, and of where state lives while it is not used.

use super::field::keys;
use super::range::{COUNT, from_to};
use super::{AutoOr, Dtype, OptimizerResidency, ReferenceResidency};

keys! {
    /// Sharding (`zero.*`).
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
        /// 0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: weights too.
        pub stage: u8 = 2 => from_to(0.0, 3.0),
        /// Ranks that share one copy of the state; `none` is the ranks that train, on several nodes those of one node, so that gradients
        /// alone cross the network. Fewer are hybrid sharding.
        pub shard_group_size: Option<usize> = None => COUNT,
        /// Type that ranks send gradients to one another in; `auto` is float32. As FSDP's `reduce_dtype` and DeepSpeed's
        /// `communication_data_type`.
        pub reduce_dtype: Dtype = Dtype::Auto,
        /// Type that gradients are added up in over micro-batches; `auto` is float32. As DeepSpeed's `grad_accum_dtype`.
        pub grad_accum_dtype: Dtype = Dtype::Auto,
    }
}

keys! {
    /// Residency (`residency.*`).
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
        /// Master weights and Adam moments.
        pub optimizer: AutoOr<OptimizerResidency> = AutoOr::Auto,
        /// Weights of the reference model, and of a teacher.
        pub reference: AutoOr<ReferenceResidency> = AutoOr::Auto,
    }
}

impl ZeroConfig {
    /// Ranks that share one copy of the state, of `num_trainers` ranks with `local_size` on each node.
    pub fn shard_group(&self, num_trainers: usize, local_size: usize) -> usize {
        let fits = self.stage > 0 && num_trainers > local_size && num_trainers.is_multiple_of(local_size);
        self.shard_group_size.unwrap_or(if fits { local_size } else { num_trainers })
    }
}
