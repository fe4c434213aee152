//! Words of keys about rewards, sandboxes, reports and tools.

use super::choice::choices;

choices! {
    /// The completions in one request to a reward's process.
    RewardBatch {
        /// One completion; a failure masks only that completion.
        Completion = "completion",
        /// All completions of a prompt, for rewards that compare them; a failure masks them all.
        Group = "group",
    }
}
choices! {
    /// A protection layer around code written by the model.
    SandboxLayer {
        /// The program has its own user ids, without privileges outside of the sandbox.
        UserNamespace = "user_namespace",
        /// The program has its own file system: system files are readable, one empty folder is writable.
        MountNamespace = "mount_namespace",
        /// The program has no network devices.
        NetworkNamespace = "network_namespace",
        /// The program sees no processes outside of the sandbox, and none of its own outlives it.
        PidNamespace = "pid_namespace",
        /// The program's file access is limited by the kernel's Landlock rules; no TCP.
        Landlock = "landlock",
        /// The program cannot use system calls for sockets, tracing, mounting or new processes.
        Seccomp = "seccomp",
    }
}

choices! {
    /// A service to which metrics are sent in addition to metrics.jsonl.
    ReportService {
        /// Event files of TensorBoard.
        TensorBoard = "tensorboard",
        /// Weights & Biases; its environment variables (`WANDB_PROJECT`, `WANDB_MODE`) apply.
        Wandb = "wandb",
        /// The experiment tracker trackio.
        Trackio = "trackio",
    }
}
choices! {
    /// The format of a model's tool calls, with vLLM's names.
    ToolCallParser {
        /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Qwen2.5, Qwen3, Hermes.
        Hermes = "hermes",
        /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.
        Qwen3Xml = "qwen3_xml",
        /// `{"name": .., "parameters": {..}}`, several separated by `;`: Llama 3.
        Llama3Json = "llama3_json",
        /// `[name(key=value), ..]`: Llama 3.2 and 4, OLMo 3.
        Pythonic = "pythonic",
        /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]` or `[TOOL_CALLS]name{..}`: Mistral.
        Mistral = "mistral",
        /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5.
        Glm45 = "glm45",
        /// `<|channel|>commentary to=functions.name<|message|>{..}<|call|>`, the harmony format: gpt-oss.
        OpenAi = "openai",
    }
}
