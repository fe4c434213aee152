//! Compares the HTTP endpoint with the engine alone: as many HTTP streams as sequences in a closed batch. Measures tokens per second of both, and the
//! time to the first token.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tch::Kind;

use super::generate::GenerateBench;
use super::{SEED, device_name, dtype_name, median, token};
use crate::config::{KvCacheDtype, RolloutQuantization, StateDtype};
use crate::data::Tokenizer;
use crate::endpoint::{self, ClientLimits, EngineChannel, ServerOptions, drive, engine_channel};
use crate::error::{Error, Result, panic_message};
use crate::http::{Guard, HttpServer};
use crate::model::ModelSpec;
use crate::ranks::World;
use crate::rollout::SpeculationOptions;
use crate::serve::Served;
use crate::types::SamplingParams;

/// Address on which the server listens.
const HOST: &str = "127.0.0.1";

/// The benchmark of the HTTP server.
#[derive(Debug, Clone)]
pub struct ServeBench {
    /// Name of the model in the output.
    pub model: String,
    /// The model; its end-of-sequence ids are ignored.
    pub spec: Arc<ModelSpec>,
    /// Dtype of weights, activations and cache.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Numbers of concurrent streams; one measurement for each.
    pub streams: Vec<usize>,
    /// Tokens per prompt.
    pub prompt_len: usize,
    /// Tokens per completion.
    pub completion_len: usize,
    /// Number of timed repetitions; medians are returned.
    pub repeats: usize,
}

/// Runs the benchmark in a world of one rank.
///
/// # Errors
/// Errors of insufficient memory; [`Error::InvalidValue`] for a world with several ranks.
pub fn bench_serve(bench: &ServeBench, world: Arc<World>) -> Result<Value> {
    if world.size() > 1 {
        return Err(Error::invalid_value("--nproc", world.size(), "1"));
    }
    let rows = bench.streams.iter().map(|&streams| bench.measure(&world, streams)).collect::<Result<Vec<_>>>()?;
    Ok(json!({
        "benchmark": "serve",
        "model": bench.model,
        "num_params": bench.spec.num_params(),
        "device": device_name(world.device()),
        "dtype": dtype_name(bench.kind),
        "prompt_len": bench.prompt_len,
        "completion_len": bench.completion_len,
        "tokens_per_second": rows.last().map(|row| row["tokens_per_second"].clone()),
        "streams": rows,
    }))
}

/// Times measured by the clients in one repetition.
struct ClientTimes {
    seconds: f64,
    tokens: f64,
    first_token_s: Vec<f64>,
}

impl ServeBench {
    /// Measures the engine alone first, then through the endpoint.
    fn measure(&self, world: &Arc<World>, streams: usize) -> Result<Value> {
        let bare = GenerateBench {
            model: self.model.clone(),
            spec: self.spec.clone(),
            kind: self.kind,
            residual: self.residual,
            quantization: RolloutQuantization::None,
            kv_cache_dtype: KvCacheDtype::Auto,
            state_dtype: StateDtype::Float32,
            prompts: streams,
            group: 1,
            prompt_len: self.prompt_len,
            completion_len: self.completion_len,
            completion_spread: None,
            max_num_seqs: streams,
            engine: 1.into(),
            pipeline_partition: Vec::new(),
            lora_r: None,
            strict: false,
            exact: false,
            speculation: SpeculationOptions::NONE,
            replayed_acceptance: None,
            profile: false,
            steps_only: false,
            repeats: self.repeats,
        };
        let (bare_rate, mut served) = bare.rate(world)?;
        let seen = self.serve(world, &mut served, streams)?;
        let rate = median(seen.iter().map(|seen| seen.tokens / seen.seconds).collect());
        let mut first: Vec<f64> = seen.into_iter().flat_map(|seen| seen.first_token_s).collect();
        first.sort_by(f64::total_cmp);
        Ok(json!({
            "streams": streams,
            "tokens_per_second": rate,
            "bare_tokens_per_second": bare_rate,
            "share_of_bare": rate / bare_rate,
            "first_token_s": {"median": first[first.len() / 2], "worst": first[first.len() - 1]},
        }))
    }

    fn serve(&self, world: &Arc<World>, served: &mut Served, streams: usize) -> Result<Vec<ClientTimes>> {
        let tokenizer = Arc::new(Tokenizer::of_ids(self.spec.vocab_size)?);
        served.with_engine(|rollout| {
            let EngineChannel { client, queue } =
                engine_channel(ClientLimits { max_queue: streams, grace: Duration::ZERO });
            let options = ServerOptions {
                model_name: self.model.clone(),
                adapters: Vec::new(),
                tokenizer,
                grammars: rollout.grammars(),
                tool_calls: None,
                eos_token_ids: rollout.eos_token_ids().to_vec(),
                max_sequence_length: rollout.max_sequence_length(),
                api_key: None,
                guard: Guard::new(HOST, &[], &[]),
                max_body_bytes: 64 << 20,
                sampling: SamplingParams::default(),
                episodes: None,
            };
            let server = endpoint::open(HttpServer::bind(HOST, 0)?, options, client.clone())?;
            let address = server.address();
            std::thread::scope(|scope| {
                let clients = scope.spawn(move || {
                    let seen = (0..=self.repeats).map(|_| self.clients(address, streams)).collect::<Result<Vec<_>>>();
                    client.stop();
                    seen
                });
                drive(rollout, world, Some(queue))?;
                server.finish();
                let mut seen = clients.join().unwrap_or_else(|panic| Err(panicked(&*panic)))?;
                seen.remove(0); // the first repetition warms up
                Ok(seen)
            })
        })
    }

    /// Runs all streams concurrently.
    fn clients(&self, address: SocketAddr, streams: usize) -> Result<ClientTimes> {
        let start = Barrier::new(streams);
        let client = |index: usize| {
            let body = self.body(index);
            start.wait();
            let begun = Instant::now();
            let (first, answer) = read_stream(address, &body).map_err(Error::io("the endpoint"))?;
            let tokens = completion_tokens(&answer).ok_or_else(|| Error::Environment {
                message: format!(
                    "the server's answer reports no usage.completion_tokens: {}",
                    answer.chars().take(400).collect::<String>()
                ),
            })?;
            Ok((first.duration_since(begun).as_secs_f64(), begun.elapsed().as_secs_f64(), tokens))
        };
        let all: Vec<Result<(f64, f64, f64)>> = std::thread::scope(|scope| {
            let client = &client;
            let threads: Vec<_> = (0..streams).map(|index| scope.spawn(move || client(index))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| Err(panicked(&*panic)))).collect()
        });
        let all = all.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(ClientTimes {
            seconds: all.iter().map(|(_, seconds, _)| *seconds).fold(0.0, f64::max),
            tokens: all.iter().map(|(_, _, tokens)| tokens).sum(),
            first_token_s: all.iter().map(|(first, _, _)| *first).collect(),
        })
    }

    fn body(&self, index: usize) -> String {
        let first = index * self.prompt_len;
        let ids: Vec<u32> = (first..first + self.prompt_len).map(|at| token(at, self.spec.vocab_size)).collect();
        let (max_tokens, options) = (self.completion_len, json!({"include_usage": true}));
        let seed = SEED + index as u64;
        json!({"prompt": ids, "max_tokens": max_tokens, "seed": seed, "stream": true, "stream_options": options})
            .to_string()
    }
}

/// Reads a streamed response; returns the time of the first event and the whole response.
fn read_stream(address: SocketAddr, body: &str) -> std::io::Result<(Instant, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())?;
    let (mut answer, mut piece, mut first) = (Vec::new(), vec![0; 1 << 16], None);
    loop {
        let len = stream.read(&mut piece)?;
        if len == 0 {
            break;
        }
        answer.extend(&piece[..len]);
        if first.is_none() && answer.windows(5).any(|part| part == b"data:") {
            first = Some(Instant::now());
        }
    }
    Ok((first.unwrap_or_else(Instant::now), String::from_utf8_lossy(&answer).into_owned()))
}

fn completion_tokens(answer: &str) -> Option<f64> {
    let events = answer.lines().rev().filter_map(|line| line.strip_prefix("data: {"));
    let last: Value = serde_json::from_str(&format!("{{{}", events.into_iter().next()?)).ok()?;
    last["usage"]["completion_tokens"].as_f64()
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    Error::of_panic("a client of the benchmark", panic_message(panic))
}
