//! Keys for the optimizer and its learning rate schedule.

use super::field::keys;
use super::range::MAX_COUNT;
use super::range::{BELOW_ONE, COUNT, above, at_least, from_to};
use super::{AdjustLr, LrSchedulerType, OptimizerName};

keys! {
    /// Keys for the optimizer and its schedule, at the top level.
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
        /// The optimizer. `adamw_8bit` stores AdamW's moments in 8 bits as bitsandbytes does: 6 bytes of state per parameter instead of 12;
        /// embeddings, norms, biases and matrices with fewer than 4,096 elements keep 32-bit moments. `muon` uses Muon for the matrices of blocks and
        /// AdamW for the rest: 8 bytes per parameter of a block.
        pub optim: OptimizerName = OptimizerName::AdamW,
        /// Settings of Muon, used if `optim` is `muon`.
        pub muon: MuonConfig,
        /// Decay of Adam's first moment.
        pub adam_beta1: f64 = 0.9 => BELOW_ONE,
        /// Decay of Adam's second moment.
        pub adam_beta2: f64 = 0.999 => BELOW_ONE,
        /// Epsilon in Adam's denominator.
        pub adam_epsilon: f64 = 1e-8 => above(0.0),
        /// Decoupled weight decay of matrices (not of norms and biases).
        pub weight_decay: f64 = 0.0 => at_least(0.0),
        /// Maximum global gradient norm; larger gradients are scaled down. 0 is off.
        pub max_grad_norm: f64 = 1.0 => at_least(0.0),
        /// Learning rate schedule after warm-up.
        pub lr_scheduler_type: LrSchedulerType = LrSchedulerType::Linear,
        /// Settings of the learning rate schedule.
        pub lr_scheduler_kwargs: LrSchedulerKwargs,
        /// Number of updates of linear warm-up.
        pub warmup_steps: usize = 0 => from_to(0.0, MAX_COUNT as f64),
        /// Warm-up as a fraction of all updates, rounded up to whole updates; use it instead of `warmup_steps`.
        pub warmup_ratio: f64 = 0.0 => BELOW_ONE,
        /// Total number of optimizer updates; `none` follows from `num_train_epochs`.
        pub max_steps: Option<usize> = None => COUNT,
        /// Number of passes over the training rows.
        pub num_train_epochs: f64 = 3.0 => above(0.0),
    }
}

keys! {
    /// Settings of Muon (`muon.*`), named as the arguments of `torch.optim.Muon`. `learning_rate` and `weight_decay` are those of the run.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct MuonConfig {
        /// Decay of the momentum.
        pub momentum: f64 = 0.95 => BELOW_ONE,
        /// Nesterov momentum: orthogonalize the mean of gradient and momentum instead of the momentum.
        pub nesterov: bool = true,
        /// Number of Newton-Schulz iterations.
        pub ns_steps: usize = 5 => from_to(1.0, 99.0),
        /// How `learning_rate` is scaled for each matrix. With `match_rms_adamw`, Muon and AdamW share one learning rate.
        pub adjust_lr_fn: AdjustLr = AdjustLr::MatchRmsAdamw,
    }
}

keys! {
    /// Settings of the learning rate schedule (`lr_scheduler_kwargs.*`), named as in transformers.
    #[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
    pub struct LrSchedulerKwargs {
        /// Final learning rate as a fraction of `learning_rate`, for `lr_scheduler_type = "cosine_with_min_lr"`.
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
