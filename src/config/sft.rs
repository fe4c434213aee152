//! The configuration of supervised fine-tuning; keys that [`Config`](super::Config) has too mean the same.

use super::field::{keys, names};
use super::range::{COUNT, SEED, above, from_to};
use super::together::Combination;
use super::{
    DataConfig, GradientCheckpointing, LoraConfig, ModelConfig, OptimizerConfig, OutputConfig, Quantization,
    SavingConfig, SupervisionConfig, ZeroConfig,
};

keys! {
    /// A validated supervised run on rows of `prompt` and `completion`, or of `messages`.
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
        pub model: ModelConfig,
        /// Rows: `prompt` and `completion`, both as text or as messages, or a conversation in `messages`. Every answer of the
        /// assistant's, from a `completion` on, is learned behind all that precedes it. Held-out rows give a loss after training.
        #[serde(flatten)]
        pub data: DataConfig,
        /// Column with the completion (`answer` in GSM8K); `none` is `completion`.
        pub dataset_completion_column: Option<String> = None,
        /// Where the run writes, and what it goes on from.
        #[serde(flatten)]
        pub output: OutputConfig,
        /// Longest row in tokens, prompt and completion; longer ones are counted and left out.
        pub max_length: usize = 1024 => COUNT,
        /// Shuffle rows each epoch, by a counter-based key.
        pub shuffle_dataset: bool = true,
        /// Rows per rank in one slice of an update; ranks that share micro-batches have them together.
        pub per_device_train_batch_size: usize = 8 => COUNT,
        /// Slices per optimizer update.
        pub gradient_accumulation_steps: usize = 1 => COUNT,
        /// Token budget of one forward and backward on one rank, or on the ranks that share micro-batches.
        pub max_tokens_per_micro_batch: usize = 16384 => COUNT,
        /// Ranks that share each micro-batch: every one has an equal part of its tokens and, where tokens see one another, some of the
        /// heads (Ulysses, arXiv 2309.14509). It divides the ranks that train, the ranks of a node, and the query heads of every layer.
        pub sequence_parallel_size: usize = 1 => COUNT,
        /// Peak learning rate.
        pub learning_rate: f64 = 2e-5 => above(0.0),
        /// Weight of the loss that keeps experts equally busy, of a model with experts; `none` is the model's own, as `config.json` has it.
        pub router_aux_loss_coef: Option<f64> = None => from_to(0.0, 1e3),
        /// The optimizer and its schedule.
        #[serde(flatten)]
        pub optimizer: OptimizerConfig,
        /// The activations that backward recomputes.
        pub gradient_checkpointing: GradientCheckpointing = GradientCheckpointing::Full,
        /// Kept inputs of blocks, and with `keep_attention` attention's outputs, wait for backward in pinned host memory: they leave beside the
        /// forward of the next block and come back beside the backward of the one above.
        pub activation_offload: bool = false,
        /// Sharding.
        pub zero: ZeroConfig,
        /// Low-rank adapters in place of the weights.
        pub lora: LoraConfig,
        /// How the frozen base of a LoRA run is stored.
        pub quantization: Quantization = Quantization::None,
        /// Steps between metric lines.
        pub logging_steps: usize = 1 => COUNT,
        /// Checkpoints.
        #[serde(flatten)]
        pub saving: SavingConfig,
        /// First word of every random key.
        pub seed: u64 = 42 => SEED,
        /// How ranks are watched and started again.
        #[serde(flatten)]
        pub supervision: SupervisionConfig,
    }
}

impl SftConfig {
    /// Every key in declaration order.
    pub fn keys() -> Vec<String> {
        names::<Self>()
    }

    /// All keys, to be looked up in the table of what does not go together.
    pub(crate) fn combination(&self) -> Combination {
        Combination::of_keys(self)
    }
}
