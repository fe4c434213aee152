//! The configuration of supervised fine-tuning. Keys that [`Config`](super::Config) has, too, mean the same.

use super::field::{keys, names};
use super::range::{COUNT, SEED, above, from_to};
use super::together::Combination;
use super::{
    DataConfig, GradientCheckpointing, LoraConfig, ModelConfig, OptimizerConfig, OutputConfig, Quantization,
    SavingConfig, SupervisionConfig, ZeroConfig,
};

keys! {
    /// The validated configuration of a supervised run on rows with `prompt` and `completion`, or with `messages`.
    ///
    /// ```
    /// use colo_grpo::config::SftConfig;
    ///
    /// let words = ["model_name_or_path=Qwen/Qwen2.5-1.5B", "train_file=chats.jsonl", "max_length=2048"].map(str::to_owned);
    /// let config = SftConfig::load(None, &words)?;
    /// assert_eq!((config.max_length, config.learning_rate), (2048, 2e-5));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    #[non_exhaustive]
    pub struct SftConfig {
        /// The model that is trained.
        #[serde(flatten)]
        /// Branch, tag or commit of a model on the Hub; `none` is `main`.
        pub model: ModelConfig,
        /// Rows with `prompt` and `completion`, both as text or as messages, or with a conversation in `messages`. Every assistant answer (from
        /// `completion` on, if there is one) is trained on, given all that precedes it. Held-out rows give a loss after training.
        #[serde(flatten)]
        pub data: DataConfig,
        /// Column that holds the completion (`answer` in GSM8K); `none` is `completion`.
        pub dataset_completion_column: Option<String> = None,
        /// Keys for the output folder and for resuming.
        #[serde(flatten)]
        pub output: OutputConfig,
        /// Maximum row length in tokens, prompt and completion together; longer rows are counted and dropped.
        pub max_length: usize = 1024 => COUNT,
        /// Shuffle rows each epoch, with a counter-based random key.
        pub shuffle_dataset: bool = true,
        /// Rows per rank in one slice of an update; ranks that share micro-batches process their rows together.
        pub per_device_train_batch_size: usize = 8 => COUNT,
        /// Number of slices per optimizer update.
        pub gradient_accumulation_steps: usize = 1 => COUNT,
        /// Maximum number of tokens of one forward and backward on one rank, or on all ranks that share micro-batches.
        pub max_tokens_per_micro_batch: usize = 16384 => COUNT,
        /// Number of ranks that share each micro-batch. Each computes an equal part of its tokens and, in attention and delta nets, some of the heads
        /// (Ulysses, arXiv 2309.14509). It must divide the ranks that train, the ranks of a node, and the query heads of every layer.
        pub sequence_parallel_size: usize = 1 => COUNT,
        /// Peak learning rate.
        pub learning_rate: f64 = 2e-5 => above(0.0),
        /// Coefficient of the load balancing loss of models with experts; `none` is the value in the model's `config.json`.
        pub router_aux_loss_coef: Option<f64> = None => from_to(0.0, 1e3),
        /// Keys for the optimizer and its schedule.
        #[serde(flatten)]
        pub optimizer: OptimizerConfig,
        /// Which activations backward recomputes.
        pub gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Full,
        /// Keep saved inputs of blocks (with `keep_attention` also attention's outputs) in pinned host memory until backward. They are copied out
        /// during the forward of the next block and back during the backward of the block above.
        pub activation_offload: bool = false,
        /// Keys for ZeRO sharding.
        pub zero: ZeroConfig,
        /// Keys for LoRA adapters.
        pub lora: LoraConfig,
        /// How the frozen base of a LoRA run is stored.
        pub quantization: Quantization = Quantization::None,
        /// Number of steps between metric lines.
        pub logging_steps: usize = 1 => COUNT,
        /// Keys for checkpoints.
        #[serde(flatten)]
        pub saving: SavingConfig,
        /// Random seed, the first word of every random key.
        pub seed: u64 = 42 => SEED,
        /// Keys for how ranks are watched and restarted.
        #[serde(flatten)]
        pub supervision: SupervisionConfig,
    }
}

impl SftConfig {
    /// Names of all keys of `T`, in declaration order.
    pub fn keys() -> Vec<String> {
        names::<Self>()
    }

    /// All keys, to be checked against the table of exclusions.
    pub(crate) fn combination(&self) -> Combination {
        Combination::of_keys(self)
    }
}
