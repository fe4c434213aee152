//! Keys that GRPO and supervised runs share: output folder, checkpoints and supervision of ranks.

use std::path::PathBuf;

use super::HeartbeatConfig;
use super::field::keys;
use super::range::{COUNT, SECONDS};

keys! {
    /// Keys for the output folder and for resuming, at the top level.
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
        /// Number of steps between checkpoints; the last step is saved, too. `none` saves only the final model.
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
