//! Words of keys about rewards, sandboxes, reports and tools.

use super::choice::choices;

choices! {
    /// What one request to a reward's process contains.
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
        /// Its own user ids, without privileges outside of the sandbox.
        UserNamespace = "user_namespace",
        /// Its own file system: system files are readable, one empty folder is writable.
        MountNamespace = "mount_namespace",
        /// No network devices.
        NetworkNamespace = "network_namespace",
        /// No visible processes outside of the sandbox, and none left behind.
        PidNamespace = "pid_namespace",
        /// File access limited by the kernel's Landlock rules; no TCP.
        Landlock = "landlock",
        /// No system calls for sockets, tracing, mounting or new processes.
        Seccomp = "seccomp",
    }
}

choices! {
    /// Where metrics go besides metrics.jsonl.
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
