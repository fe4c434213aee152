//! Keys of every run about its model.

use std::path::PathBuf;

use super::field::keys;
use super::{Device, Dtype, MixedPrecision, ResidualDtype};

keys! {
    /// The model that is trained, and the device and types that it is computed in; keys of the top.
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{Device, Dtype, MixedPrecision, ModelConfig, ResidualDtype};
    ///
    /// let words = ["dtype=bfloat16", "residual_dtype=float32", "mixed_precision=fp8"].map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let ModelConfig { device, dtype, residual_dtype, mixed_precision, .. } = config.model;
    /// assert_eq!((device, mixed_precision), (Device::Cpu, MixedPrecision::Fp8));
    /// assert_eq!((dtype, residual_dtype), (Dtype::Bfloat16, ResidualDtype::Float32));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ModelConfig: flat {
        /// Model that is trained: a folder, or a name on the Hugging Face Hub (`Qwen/Qwen2.5-1.5B-Instruct`).
        pub model_name_or_path: PathBuf,
        /// Branch, tag or commit of a model on the Hub; `none` is `main`.
        pub model_revision: Option<String> = None,
        /// Device; `auto` is CUDA if a GPU is visible, else the CPU.
        pub device: Device = Device::Auto,
        /// Dtype of weights and activations; `auto` is bfloat16 on CUDA and float32 on a CPU.
        pub dtype: Dtype = Dtype::Auto,
        /// Dtype of the residual stream in policy, reference and engine; `auto` is `dtype`. Its gradient always has `dtype`. `float32` halves the
        /// difference between sampler and trainer on a GPU; the engine, and a CPU, still round to `dtype` what is added to the stream. Model files do
        /// not record it: give it to `generate` and `eval` again.
        pub residual_dtype: ResidualDtype = ResidualDtype::Auto,
        /// The precision in which training multiplies by the weights of blocks, in forward and for the gradients of activations. `fp8`
        /// rounds both factors to e4m3 as they are multiplied; weights' gradients are made of what is not rounded, and master weights and
        /// sums stay in float32. `fp8_all` rounds for weights' gradients, too, by columns of a micro-batch, so that they depend on how
        /// tokens are packed and accumulated. A reference model is computed in it, too. The sampler then differs more from the trainer:
        /// `rollout_quantization` makes that small, and `importance_sampling_correction` makes up for it. On GPUs it needs an H100 or H200
        /// and `dtype = bfloat16`; on a CPU its rounding is simulated.
        pub mixed_precision: MixedPrecision = MixedPrecision::None,
    }
}
