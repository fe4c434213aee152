//! Configuration keys of the model and of the precision that it is computed in.

use std::path::PathBuf;

use super::field::keys;
use super::{Device, Dtype, MixedPrecision, ResidualDtype};

keys! {
    /// The model to train, and the device and dtypes for its computation. These are top-level keys.
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
        /// Precision of the GEMMs with block weights in training and in the reference model. `fp8` quantizes both operands to e4m3 in forward and for
        /// the gradients of activations. Gradients of weights are computed from unquantized operands, and master weights and sums stay in float32.
        /// `fp8_all` also quantizes the operands of weight gradients, with one scale per column of a micro-batch, so these gradients depend on how
        /// tokens are packed and accumulated. In experts only the forward is quantized. With FP8, sampler and trainer differ more:
        /// `rollout_quantization` makes the difference small, and `importance_sampling_correction` corrects for it. GPUs must be H100 or H200 with
        /// `dtype = bfloat16`; a CPU simulates the rounding.
        pub mixed_precision: MixedPrecision = MixedPrecision::None,
    }
}
