//! Keys that GRPO and supervised runs share: output folder, checkpoints and supervision of ranks.

use std::path::PathBuf;

use super::HeartbeatConfig;
use super::field::keys;
use super::range::{COUNT, SECONDS};

keys! {
    /// Keys for the output folder and for resuming, at the top level.
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
        /// Folder for metrics, completions, checkpoints, the report and the final model.
        pub output_dir: PathBuf = PathBuf::from("output"),
        /// Checkpoint folder to resume from, or `latest` for the newest in `output_dir`.
        pub resume_from_checkpoint: Option<String> = None,
        /// Resume even if keys that change the result differ from the checkpoint's; `lora.r` must still be equal.
        pub force_resume: bool = false,
    }
}

keys! {
    /// Keys for when and where checkpoints are written and how many are kept, at the top level.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct SavingConfig: flat {
        /// Number of steps between checkpoints, rounded up to the end of a generation batch; the last step is saved, too. `none` saves only the final
        /// model.
        pub save_steps: Option<usize> = Some(500) => COUNT,
        /// Write checkpoints in the background while training continues, from copies in host memory.
        pub save_async: bool = true,
        /// Let every node write complete checkpoints and the final model to `output_dir` on its own disk. By default `output_dir` is shared by all
        /// nodes.
        pub save_on_each_node: bool = false,
        /// Number of newest checkpoints to keep; `none` keeps all.
        pub save_total_limit: Option<usize> = None => COUNT,
    }
}

keys! {
    /// Keys for how ranks are watched and restarted, at the top level.
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct SupervisionConfig: flat {
        /// Time limit in seconds for waiting for peers in a collective.
        pub collective_timeout_s: f64 = 600.0 => SECONDS,
        /// Time in seconds without a message from another node after which it counts as lost. The end of a process is noticed at once.
        pub node_timeout_s: f64 = 30.0 => SECONDS,
        /// How often the launcher restarts the run from its newest checkpoint after a rank dies or hangs.
        pub max_restarts: usize = 0,
        /// Seconds without a heartbeat after which a rank counts as hung: `timeout_s`, and `PHASE_s` for phases with their own limit.
        pub heartbeat: HeartbeatConfig,
    }
}
