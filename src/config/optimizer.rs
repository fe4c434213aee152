//! The keys of the optimizer and its schedule.

use super::field::keys;
use super::range::MAX_COUNT;
use super::range::{BELOW_ONE, COUNT, above, at_least, from_to};
use super::{AdjustLr, LrSchedulerType, OptimizerName};

keys! {
    /// The optimizer and its schedule; keys of the top.
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{AdjustLr, LrSchedulerKwargs, LrSchedulerType, MuonConfig, OptimizerConfig, OptimizerName};
    ///
    /// let words = [
    ///     "optim=muon",
    ///     "muon.adjust_lr_fn=original",
    ///     "lr_scheduler_type=cosine_with_min_lr",
    ///     "lr_scheduler_kwargs.min_lr_rate=0.1",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let optimizer: &OptimizerConfig = &config.optimizer;
    /// let (muon, shape): (&MuonConfig, &LrSchedulerKwargs) = (&optimizer.muon, &optimizer.lr_scheduler_kwargs);
    /// assert_eq!((optimizer.optim, muon.adjust_lr_fn), (OptimizerName::Muon, AdjustLr::Original));
    /// assert_eq!((optimizer.lr_scheduler_type, shape.min_lr_rate), (LrSchedulerType::CosineWithMinLr, Some(0.1)));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct OptimizerConfig: flat {
        /// The optimizer. `adamw_8bit` keeps AdamW's moments in 8 bits as bitsandbytes does: 6 bytes of state a parameter in
        /// place of 12; embeddings, norms, biases and matrices under 4,096 elements keep 32 bits. `muon` steps the matrices of blocks by
        /// Muon and the rest by AdamW: 8 bytes a parameter of a block.
        pub optim: OptimizerName = OptimizerName::AdamW,
        /// Muon, where `optim` is `muon`.
        pub muon: MuonConfig,
        /// Adam's first moment decay.
        pub adam_beta1: f64 = 0.9 => BELOW_ONE,
        /// Adam's second moment decay.
        pub adam_beta2: f64 = 0.999 => BELOW_ONE,
        /// Adam's denominator term.
        pub adam_epsilon: f64 = 1e-8 => above(0.0),
        /// Decoupled weight decay on matrices (not on norms and biases).
        pub weight_decay: f64 = 0.0 => at_least(0.0),
        /// Global gradient norm is clipped to this; 0 is off.
        pub max_grad_norm: f64 = 1.0 => at_least(0.0),
        /// Shape of the learning rate after warm-up.
        pub lr_scheduler_type: LrSchedulerType = LrSchedulerType::Linear,
        /// Settings of the shape.
        pub lr_scheduler_kwargs: LrSchedulerKwargs,
        /// Updates of linear warm-up.
        pub warmup_steps: usize = 0 => from_to(0.0, MAX_COUNT as f64),
        /// Share of all updates that warm up, rounded up to whole updates; in place of `warmup_steps`.
        pub warmup_ratio: f64 = 0.0 => BELOW_ONE,
        /// Optimizer updates in all; `none` follows `num_train_epochs`.
        pub max_steps: Option<usize> = None => COUNT,
        /// Passes over the training rows.
        pub num_train_epochs: f64 = 3.0 => above(0.0),
    }
}

keys! {
    /// Muon (`muon.*`), named as `torch.optim.Muon`'s arguments. `learning_rate` and `weight_decay` are those of the run.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct MuonConfig {
        /// Decay of the momentum.
        pub momentum: f64 = 0.95 => BELOW_ONE,
        /// Orthogonalise the gradient's mean with the momentum, not the momentum itself.
        pub nesterov: bool = true,
        /// Newton-Schulz iterations.
        pub ns_steps: usize = 5 => from_to(1.0, 99.0),
        /// Factor of `learning_rate` for a matrix. With `match_rms_adamw` matrices and AdamW's share one learning rate.
        pub adjust_lr_fn: AdjustLr = AdjustLr::MatchRmsAdamw,
    }
}

keys! {
    /// Settings of the learning rate's shape (`lr_scheduler_kwargs.*`), named as in transformers.
    #[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
    pub struct LrSchedulerKwargs {
        /// Rate at the last update as a share of `learning_rate`, for `lr_scheduler_type = "cosine_with_min_lr"`.
        pub min_lr_rate: Option<f64> = None => BELOW_ONE,
    }
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, ns_steps: 5, adjust_lr_fn: AdjustLr::MatchRmsAdamw }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};
    use super::*;

    #[test]
    fn optim_accepts_adamw_adamw_8bit_and_muon() {
        assert_eq!(config(&[]).optimizer.optim, OptimizerName::AdamW);
        assert_eq!(config(&["optim=adamw_torch_fused"]).optimizer.optim, OptimizerName::AdamW);
        assert_eq!(config(&["optim=adamw_bnb_8bit"]).optimizer.optim, OptimizerName::AdamW8bit);
        assert_eq!(config(&["optim=adamw_8bit", "lora.r=8"]).optimizer.optim, OptimizerName::AdamW8bit);
        assert_eq!(config(&["optim=muon"]).optimizer.muon, MuonConfig::default());
        let muon = config(&["optim=muon", "muon.momentum=0.9", "muon.adjust_lr_fn=original"]).optimizer.muon;
        assert_eq!((muon.momentum, muon.adjust_lr_fn), (0.9, AdjustLr::Original));
    }

    #[test]
    fn warmup_ratio_and_minimum_learning_rate_are_read() {
        let optimizer = config(&[
            "lr_scheduler_type=cosine_with_min_lr",
            "lr_scheduler_kwargs.min_lr_rate=0.1",
            "warmup_ratio=0.1",
        ])
        .optimizer;
        assert_eq!((optimizer.lr_scheduler_kwargs.min_lr_rate, optimizer.warmup_ratio), (Some(0.1), 0.1));
    }

    #[test]
    fn unsupported_combinations_with_muon_are_refused() {
        for (overrides, expected) in [
            (&["optim=muon", "muon.ns_steps=0"][..], "muon.ns_steps = 0: expected a whole number from 1 to 99"),
            (&["optim=adamw8"], "one of adamw, adamw_8bit, muon"),
        ] {
            let error = message(overrides);
            assert!(error.contains(expected), "{overrides:?}: {error}");
        }
    }
}
