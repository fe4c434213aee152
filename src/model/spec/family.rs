//! The model families by name. The details of each family are in its own file in `families`.

/// Calls the macro `$call` with a list of all families: each family's variant and its module.
macro_rules! families {
    ($call:ident) => {
        $call! {
            /// Qwen2 and Qwen2.5.
            Qwen2: qwen2,
            /// Qwen2 MoE.
            Qwen2Moe: qwen2_moe,
            /// Qwen3.
            Qwen3: qwen3,
            /// Qwen3 MoE.
            Qwen3Moe: qwen3_moe,
            /// Qwen3.5 and Qwen3.6, text part.
            Qwen3_5: qwen3_5,
            /// Qwen3.5 and Qwen3.6 MoE, text part.
            Qwen3_5Moe: qwen3_5_moe,
            /// Qwen3-Next.
            Qwen3Next: qwen3_next,
            /// Llama 3.x.
            Llama: llama,
            /// Mistral.
            Mistral: mistral,
            /// OLMo 2.
            Olmo2: olmo2,
            /// SmolLM3.
            SmolLm3: smollm3,
            /// Granite 3.
            Granite: granite,
            /// Gemma 3, text part.
            Gemma3: gemma3,
            /// GLM-4, released in 2024.
            Glm: glm,
            /// GLM-4, released in 2025.
            Glm4: glm4,
            /// GLM-4.5 and GLM-4.6.
            Glm4Moe: glm4_moe,
            /// Ministral.
            Ministral: ministral,
            /// Phi-3 and Phi-4.
            Phi3: phi3,
            /// gpt-oss.
            GptOss: gpt_oss,
        }
    };
}
pub(in crate::model) use families;

macro_rules! declare {
    ($($(#[$doc:meta])* $name:ident: $file:ident,)*) => {
        /// The supported model families. All run on the same decoder implementation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Family {
            $($(#[$doc])* $name,)*
        }

        impl Family {
            pub(in crate::model) const ALL: &[Family] = &[$(Family::$name,)*];
        }
    };
}

families!(declare);
