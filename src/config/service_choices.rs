//! The words of keys about what stands around training: rewards, sandboxes, reports, tools.

use super::choice::choices;

choices! {
    /// The completions of one request to a reward's process (`rewards.NAME.batch`).
    RewardBatch {
        /// One completion: a failure masks it alone.
        Completion = "completion",
        /// All completions of a prompt, for rewards that compare them: a failure masks them all.
        Group = "group",
    }
}
choices! {
    /// A wall around model-written code (`reward.code.may_lack`).
    SandboxLayer {
        /// No privileges outside: ids of its own.
        UserNamespace = "user_namespace",
        /// A file system of its own: the system's files to read, an empty folder to write.
        MountNamespace = "mount_namespace",
        /// No network devices.
        NetworkNamespace = "network_namespace",
        /// No other processes to be seen, none left behind.
        PidNamespace = "pid_namespace",
        /// File access by path rules of the kernel, no TCP.
        Landlock = "landlock",
        /// No system calls for sockets, tracing, mounting or new processes.
        Seccomp = "seccomp",
    }
}

choices! {
    /// Where metrics go beside metrics.jsonl (`report_to`).
    ReportService {
        /// Event files of TensorBoard.
        TensorBoard = "tensorboard",
        /// Weights & Biases, whose variables (`WANDB_PROJECT`, `WANDB_MODE`) hold.
        Wandb = "wandb",
        /// trackio.
        Trackio = "trackio",
    }
}
choices! {
    /// The format of a model's tool calls, under vLLM's names (`tool_call_parser`).
    ToolCallParser {
        /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Qwen2.5, Qwen3, Hermes.
        Hermes = "hermes",
        /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.
        Qwen3Xml = "qwen3_xml",
        /// `{"name": .., "parameters": {..}}`, several with `;` between them: Llama 3.
        Llama3Json = "llama3_json",
        /// `[name(key=value), ..]`: Llama 3.2 and 4, OLMo 3.
        Pythonic = "pythonic",
        /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]` or `[TOOL_CALLS]name{..}`: Mistral.
        Mistral = "mistral",
        /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5.
        Glm45 = "glm45",
        /// `<|channel|>commentary to=functions.name<|message|>{..}<|call|>`, the format of harmony: gpt-oss.
        OpenAi = "openai",
    }
}
