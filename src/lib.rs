//! colo-grpo trains a language model with GRPO. In colocated mode every GPU does both jobs in turn: all ranks generate rollouts, then all
//! ranks train on them.
//!
//! A program of its own, with a reward of its own; `docs/library.md` has losses, advantages and loops, too:
//!
//! ```no_run
//! use std::sync::Arc;
//! use colo_grpo::{Config, Result, Trainer, World};
//!
//! fn main() {
//!     colo_grpo::main(train) // prints an error as the program does, and ends with its exit code
//! }
//!
//! fn train() -> Result<()> {
//!     let config = Config::load(Some("run.toml".as_ref()), &["reward_funcs=[\"brevity\"]".to_owned()])?;
//!     let world = Arc::new(World::for_run(&config)?);
//!     let mut trainer = Trainer::builder(config, world)
//!         .reward("brevity", |input| Ok(1.0 / (1.0 + input.token_ids.len() as f32)))
//!         .build()?;
//!     println!("{}", trainer.run()?.model_dir.display());
//!     Ok(())
//! }
//! ```
//!
//! The folders are the architecture: each is a module on a layer. A file may import only from modules on lower layers; `tests/it/tidy.rs`
//! checks this.
//!
//! | layer | modules |
//! |---|---|
//! | 0 | [`error`] |
//! | 1 | [`types`], [`phase`], [`console`], [`untrusted`], [`process`], [`migration`], [`http`] |
//! | 2 | [`config`] |
//! | 3 | [`torch`], [`data`], [`sandbox`] |
//! | 4 | [`cuda`], [`reward`] |
//! | 5 | [`memory`], [`ranks`], [`ops`], [`tools`] |
//! | 6 | [`model`], [`grpo`], [`metrics`] |
//! | 7 | [`rollout`], [`train`], [`eval`] |
//! | 8 | [`plan`], [`update`], [`serve`], [`endpoint`], [`watch`], [`checkpoint`] |
//! | 9 | [`colocate`], [`split`] |
//! | 10 | [`trainer`], [`sft`], [`launch`] |
//! | 11 | [`bench`](mod@bench) |
//! | 12 | [`cli`] |
//!
//! One training step ([`trainer::Trainer::train_step`]) takes the next prompts; `with_rollout` wakes the engine, generates and puts it to
//! sleep; then rewards are awaited, advantages computed, sequences packed and the policy updated. Programs that use the library start at
//! [`Trainer::builder`] and [`main`]; the types are in [`mod@config`], [`data`], [`engine`], [`grpo`], [`ranks`], [`reward`] and [`trainer`].

#![allow(rustdoc::private_intra_doc_links)] // the table of layers is for readers of the source

mod bench;
mod checkpoint;
mod cli;
mod colocate;
pub mod config;
mod console;
mod cuda;
pub mod data;
mod endpoint;
mod error;
mod eval;
pub mod grpo;
mod http;
mod launch;
mod memory;
mod metrics;
mod migration;
mod model;
mod ops;
mod phase;
mod plan;
mod process;
pub mod ranks;
pub mod reward;
mod rollout;
mod sandbox;
mod serve;
mod sft;
mod split;
mod tools;
mod torch;
mod train;
pub mod trainer;
mod types;
mod untrusted;
mod update;
mod watch;

#[doc(hidden)]
pub mod internal;

pub use colocate::Colocated;
pub use config::Config;
pub use error::{Error, ExitCode, Result};
pub use launch::main;
pub use plan::MemoryPlan;
pub use ranks::World;
pub use rollout::RolloutEngine;
pub use trainer::Trainer;
pub use types::Trajectory;
pub use untrusted::MeteredAllocator;

/// The rollout engine, its requests and its results.
///
/// [`RolloutEngine`] is an engine that is awake. [`RolloutEngine::generate`] samples whole batches; a [`Session`](engine::Session) takes requests one
/// by one, and each of its steps returns their events:
///
/// ```no_run
/// use std::sync::Arc;
/// use colo_grpo::data::{Prompt, Trajectory};
/// use colo_grpo::engine::{Event, Request, RequestId, SamplingParams, Session, SessionLoad, Structure, TokenLogprob};
/// use colo_grpo::{Result, RolloutEngine};
///
/// /// A number of up to four digits, with the two most probable tokens at each place.
/// fn number(engine: &mut RolloutEngine<'_>, prompt: &Prompt) -> Result<Vec<Trajectory>> {
///     let structure = Some(Structure::Regex("[0-9]{1,4}".to_owned()));
///     let params = SamplingParams { structure, top_logprobs: 2, num_generations: 1, ..SamplingParams::default() };
///     let mut session: Session<'_> = engine.session()?;
///     let id: RequestId = session.submit(Request {
///         prompt_id: prompt.id,
///         token_ids: prompt.token_ids.clone(),
///         first_step: 0,
///         first_sample: 0,
///         params: Arc::new(params),
///         begun: Vec::new(),
///         adapter: None,
///     })?;
///     while session.has_work() {
///         for event in session.step()? {
///             if let Event::Token { token_id, top_logprobs, .. } = event {
///                 let first: Option<&TokenLogprob> = top_logprobs.first();
///                 println!("{token_id}, the most probable {first:?}");
///             }
///         }
///     }
///     let SessionLoad { num_free_blocks, num_blocks, .. } = session.load();
///     println!("{num_free_blocks} of {num_blocks} blocks are free");
///     let completions = session.completions(id)?;
///     session.close()?;
///     Ok(completions)
/// }
/// ```
///
/// Batches report statistics. With pipeline stages these include how long each stage computed and waited:
///
/// ```no_run
/// use colo_grpo::data::{Prompt, RolloutGroup};
/// use colo_grpo::engine::{EngineStats, Rollout, SamplingParams, StageTimes};
/// use colo_grpo::{Result, RolloutEngine};
///
/// fn first(engine: &mut RolloutEngine<'_>, prompt: Prompt) -> Result<usize> {
///     let unfinished = vec![RolloutGroup::new(prompt)];
///     let Rollout { complete, stats, .. } = engine.generate_first(unfinished, 1, &SamplingParams::default(), |_| ())?;
///     let EngineStats { num_generated_tokens, stage: StageTimes { computing, waiting }, .. } = stats;
///     println!("{num_generated_tokens} tokens; this stage computed for {computing:?} and waited for {waiting:?}");
///     Ok(complete.len())
/// }
/// ```
///
/// [`Engine`](engine::Engine) owns the GPU memory and [`EngineSlices`](engine::EngineSlices) the weights that it reads; a [`Colocated`] owns both and
/// a learner:
///
/// ```no_run
/// use colo_grpo::Colocated;
/// use colo_grpo::engine::{Engine, EngineSlices};
/// use colo_grpo::trainer::Learner;
///
/// fn colocated(learner: Learner, engine: Engine, slices: EngineSlices) -> Colocated {
///     Colocated::new(learner, engine, slices)
/// }
/// ```
///
pub mod engine {
    pub use crate::rollout::{
        Engine, EngineStats, Event, Request, RequestId, Rollout, RolloutEngine, Session, SessionLoad, StageTimes,
    };
    pub use crate::serve::EngineSlices;
    pub use crate::types::{SamplingParams, Structure, TokenLogprob};
}

/// Compiles the example of docs/library.md as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../docs/library.md")]
struct Library;
