//! Keys that every run has, of GRPO or supervised: its output folder, its checkpoints, and how its ranks are watched.

use std::path::PathBuf;

use super::HeartbeatConfig;
use super::field::keys;
use super::range::{COUNT, SECONDS};

keys! {
    /// The output folder, and the checkpoint to go on from; keys of the top.
    ///
    /// To go on where the newest checkpoint of the folder is:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{HeartbeatConfig, OutputConfig, SavingConfig, SupervisionConfig};
    ///
    /// let words = [
    ///     "output_dir=runs/sums",
    ///     "resume_from_checkpoint=latest",
    ///     "save_steps=20",
    ///     "save_total_limit=3",
    ///     "max_restarts=2",
    ///     "heartbeat.generate_s=60",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let (output, saving): (&OutputConfig, &SavingConfig) = (&config.output, &config.saving);
    /// assert_eq!((output.resume_from_checkpoint.as_deref(), saving.save_total_limit), (Some("latest"), Some(3)));
    /// let supervision: &SupervisionConfig = &config.supervision;
    /// let limits: &HeartbeatConfig = &supervision.heartbeat; // of other phases than `generate`
    /// assert_eq!((supervision.max_restarts, limits.timeout_s), (2, 300.0));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct OutputConfig: flat {
        /// Where metrics, completions, checkpoints, the report and the final model go.
        pub output_dir: PathBuf = PathBuf::from("output"),
        /// A checkpoint folder, or `latest` of `output_dir`.
        pub resume_from_checkpoint: Option<String> = None,
        /// Resume although keys that change the result differ from the checkpoint's; `lora.r` may not.
        pub force_resume: bool = false,
    }
}

keys! {
    /// When and where checkpoints are written, and how many stay; keys of the top.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct SavingConfig: flat {
        /// Steps between checkpoints, the last step's among them; `none` saves only the final model.
        pub save_steps: Option<usize> = Some(500) => COUNT,
        /// Write checkpoints beside training, from copies in host memory.
        pub save_async: bool = true,
        /// Every node writes whole checkpoints and the final model to an `output_dir` on a disk of its own, where the default is one that
        /// all nodes share.
        pub save_on_each_node: bool = false,
        /// Newest checkpoints kept; `none` keeps all.
        pub save_total_limit: Option<usize> = None => COUNT,
    }
}

keys! {
    /// How ranks are watched and started again; keys of the top.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct SupervisionConfig: flat {
        /// Longest wait for peers in a collective, in seconds.
        pub collective_timeout_s: f64 = 600.0 => SECONDS,
        /// Longest silence of another node before it counts as gone, in seconds. A process that ends is noticed at once.
        pub node_timeout_s: f64 = 30.0 => SECONDS,
        /// Times that the launcher starts the run again from its newest checkpoint when a rank dies or hangs.
        pub max_restarts: usize = 0,
        /// Seconds without a heartbeat after which a rank counts as hung: `timeout_s`, and `PHASE_s` for a phase that has a limit
        /// of its own.
        pub heartbeat: HeartbeatConfig,
    }
}
