//! `serve` and `chat`: the engine of a model folder, used over HTTP or in the terminal.

use std::io::BufRead;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Map;
use tch::Kind;

use super::args::{ChatArgs, HostArgs, ServeArgs, ToolCallFormat};
use super::sample;
use crate::console;
use crate::cuda::residual_kind;
use crate::data::{Message, ToolCallParser};
use crate::endpoint::{self, ClientLimits, Dialogue, EngineChannel, ServerOptions, drive, engine_channel};
use crate::error::{Error, Result};
use crate::http::{Guard, HttpServer};
use crate::ranks::{WorkerEnv, World};
use crate::serve::{ModelService, NamedAdapter, ServeOptions};
use crate::types::SamplingParams;

/// Environment variable for the API key; unlike the command line it is not visible to other users of the machine.
const API_KEY_VARIABLE: &str = "COLO_GRPO_API_KEY";
/// Help on the commands that can be typed instead of a message.
const HELP: &str = "/reset begins a new conversation, /adapter NAME switches to an adapter and /adapter back to the \
                    base model, /exit or the end of input ends the program";

/// The listening socket and API key of rank 0, opened before the model is loaded.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    api_key: Option<String>,
    guard: Guard,
}

impl Door {
    /// Opens the socket, on rank 0.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a key that no client could send; the errors of [`HttpServer::bind`].
    pub fn open(args: &ServeArgs) -> Result<Option<Self>> {
        if WorkerEnv::from_env()?.is_some_and(|env| env.rank != 0) {
            return Ok(None);
        }
        let HostArgs { host, allowed_hosts } = &args.hosts;
        let api_key = api_key(args)?;
        let listener = HttpServer::bind(host, args.port)?;
        let guard = Guard::new(host, allowed_hosts, &args.allowed_origins);
        let guard = if api_key.is_some() { guard.open_to_any_host() } else { guard };
        if api_key.is_none() && !listener.local_addr().is_ok_and(|address| address.ip().is_loopback()) {
            console::say(format_args!(
                "warning: with --host {host} everybody who can reach this port can use the model; require a key with \
                 --api_key or {API_KEY_VARIABLE}"
            ));
        }
        Ok(Some(Self { listener, api_key, guard }))
    }
}

/// The API key, from the command line or its environment variable.
fn api_key(args: &ServeArgs) -> Result<Option<String>> {
    let of_variable = || std::env::var_os(API_KEY_VARIABLE).map(|key| key.to_string_lossy().into_owned());
    let given = args.api_key.clone().map(|key| ("--api_key", key));
    let Some((name, key)) = given.or_else(|| Some((API_KEY_VARIABLE, of_variable()?))) else { return Ok(None) };
    match !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(Some(key)),
        false => {
            // Not as `NAME = value`, which is redacted as a key would be.
            let got = if key.is_empty() {
                "an empty key in"
            } else {
                "a key with spaces or other characters that are not allowed in"
            };
            let expected = "at least one printable ASCII character and no spaces; leave it out to serve without a key";
            Err(Error::invalid_value("serve", format!("{got} {name}"), expected))
        }
    }
}

/// Runs `serve`; collective over the world, whose ranks share one engine.
pub(super) fn serve(args: &ServeArgs, world: Arc<World>, kind: Kind, door: Option<Door>) -> Result<()> {
    let name = args.served_model_name.clone().unwrap_or_else(|| args.source.model.display().to_string());
    let adapters = args.adapters.checked(&name)?;
    let options = ServeOptions {
        model: &args.source.model,
        base_model: args.source.base_model.as_deref(),
        adapters,
        quantization: args.source.quantization,
        template_variables: &Map::new(),
        division: args.division(world.size())?,
        max_model_length: args.max_model_length,
        kind,
        residual: residual_kind(args.residual.residual_dtype, kind),
        formats: args.formats.formats(),
        speculation: args.speculation.options(),
    };
    let defaults = sample::own_sampling(&args.generation, &args.source, &world)?;
    let ModelService { mut served, tokenizer, .. } = sample::load(&options, args.supervision.fault.clone(), &world)?;
    let tool_calls = match args.tool_call_parser {
        ToolCallFormat::Auto => tokenizer.template_source().and_then(ToolCallParser::of_template),
        ToolCallFormat::None => None,
        ToolCallFormat::Named(parser) => Some(parser),
    };
    served.with_engine(|rollout| {
        let Some(Door { listener, api_key, guard }) = door else { return drive(rollout, &world, None) };
        let grace = Duration::from_secs_f64(args.grace_s);
        let EngineChannel { client, queue } = engine_channel(ClientLimits { max_queue: args.max_queue, grace });
        let options = ServerOptions {
            model_name: name,
            adapters: names(adapters),
            tokenizer,
            grammars: rollout.grammars(),
            tool_calls,
            eos_token_ids: rollout.eos_token_ids().to_vec(),
            max_sequence_length: rollout.max_sequence_length(),
            api_key,
            guard,
            max_body_bytes: args.max_body_bytes,
            sampling: defaults.over(SamplingParams::default()),
            episodes: None,
        };
        let server = endpoint::open(listener, options, client)?;
        console::say(format_args!("listening on http://{}/v1", server.address()));
        let outcome = drive(rollout, &world, Some(queue)).inspect_err(|error| world.post_failure(error));
        server.finish();
        outcome
    })
}

/// Runs `chat`, in one process.
pub(super) fn chat(args: &ChatArgs, world: Arc<World>, kind: Kind) -> Result<()> {
    let adapters = args.adapters.checked("")?;
    let kinds = (kind, residual_kind(args.residual.residual_dtype, kind));
    let defaults = sample::own_sampling(&args.generation, &args.source, &world)?;
    let ModelService { mut served, tokenizer, .. } =
        sample::serve((&args.source, adapters), &args.sampling, &Map::new(), &world, kinds)?;
    let system = args.system_prompt.iter().map(|text| Message::new("system", text));
    let system: Vec<Message> = system.collect();
    tokenizer.apply_chat_template(&[&system[..], &[Message::user("")]].concat(), true)?; // a model without one says so now
    served.with_engine(|rollout| {
        let EngineChannel { client, queue } = engine_channel(ClientLimits { max_queue: 1, grace: Duration::ZERO });
        let params = args.sampling.params(1, &defaults);
        let mut dialogue = Dialogue::new(client.clone(), tokenizer, rollout, params, system, names(adapters));
        let talk = move || {
            let outcome = talk(&mut dialogue);
            client.stop();
            outcome
        };
        let thread = std::thread::Builder::new().name("chat".to_owned()).spawn(talk);
        let thread = thread.map_err(|error| Error::Environment {
            message: format!("cannot start the thread that reads standard input: {error}"),
        })?;
        drive(rollout, &world, Some(queue))?;
        thread.join().unwrap_or_else(|panic| Err(Error::of_panic("chat", crate::error::panic_message(&*panic))))
    })
}

fn names(adapters: &[NamedAdapter]) -> Vec<String> {
    adapters.iter().map(|adapter| adapter.name.clone()).collect()
}

/// Reads messages line by line and prints answers while they are generated.
fn talk(dialogue: &mut Dialogue) -> Result<()> {
    let is_shown = console::shows_output();
    if is_shown {
        console::say(HELP);
    }
    let mut input = std::io::stdin().lock();
    loop {
        if is_shown {
            console::print("> ")?;
        }
        let mut line = Vec::new();
        if input.read_until(b'\n', &mut line).map_err(Error::io("standard input"))? == 0 {
            return Ok(());
        }
        let line = String::from_utf8_lossy(&line);
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/reset" => dialogue.reset(),
            "/adapter" => dialogue.choose(None).unwrap_or_default(),
            command if command.starts_with("/adapter ") => {
                if let Err(names) = dialogue.choose(Some(command["/adapter ".len()..].trim())) {
                    let names = if names.is_empty() { "none" } else { &names };
                    console::say(format_args!("there is no adapter of that name; those given with --adapter: {names}"));
                }
            }
            command if command.starts_with('/') => console::say(HELP),
            message => {
                let mut printed = Ok(());
                let outcome = dialogue.say(message, |text| {
                    if printed.is_ok() {
                        printed = console::print(text);
                    }
                });
                printed?;
                console::print("\n")?;
                if let Err(refusal) = outcome {
                    console::say(format_args!("error: {}; /reset begins a new conversation", refusal.message));
                }
            }
        }
    }
}
