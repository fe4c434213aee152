//! The only integration test binary: tests with real ranks as processes on the CPU backend, and tests of the program.
#![allow(clippy::print_stdout, clippy::print_stderr)] // what a test measures and skips

mod agent;
mod checkpoint;
mod cli;
mod collectives;
mod colocate;
mod demo;
mod display;
mod distillation;
mod docs;
mod early_signals;
mod environments;
mod evaluation;
mod exact;
mod experts;
mod gpu;
mod gpu_all_reduce;
mod gpu_decode;
mod gpu_delta_drafts;
mod gpu_delta_net;
mod gpu_engine;
mod gpu_exact;
mod gpu_expert_adapters;
mod gpu_expert_training;
mod gpu_experts;
mod gpu_experts_fp8;
mod gpu_families;
mod gpu_fp8;
mod gpu_fp8_training;
mod gpu_hybrid_training;
mod gpu_kernels;
mod gpu_lora;
mod gpu_memory;
mod gpu_offload;
mod gpu_products;
mod gpu_sampling;
mod gpu_serving;
mod gpu_survival;
mod gpu_training;
mod hostile;
mod hub;
mod launch;
mod library;
mod lora;
mod model;
mod nodes;
mod on_gpu;
mod program;
mod python_tool;
mod ranks;
mod reports;
mod rewards;
mod rollout;
mod sequence_parallel;
mod serve;
mod signal;
mod speculation;
mod split;
mod survive;
mod tidy;
mod tools;
mod train;
mod watch;

/// The allocator that the program installs, too: it limits the memory of untrusted templates.
#[global_allocator]
static ALLOCATOR: colo_grpo::MeteredAllocator = colo_grpo::MeteredAllocator;
