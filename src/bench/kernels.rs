//! The kernels of a decode step measured separately, compared with the bytes that each must move. Graphs with one launch per layer are replayed, with
//! a separate cache for every layer, so the GPU's caches hold nothing that they would not hold in a real step. Also the limits of a step: rate and
//! energy of reading weights, and of multiplying many rows with them, in sustained operation.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::limits::GpuLimits;
use super::median;
use crate::cuda::kernels::{
    self, Activation, AttentionPlan, AttentionShape, CANDIDATE_WORDS, DeltaOptions, DeltaPages, DeltaRows, DeltaRuns,
    DeltaWeights, Draws, FILTER_HEAD_WORDS, Filters, HeadTransform, KvBlocks, QkvViews, SharedPrefixes,
};
use crate::cuda::{Context, EnergyMeter, Graph, Sustained, TorchStream};
use crate::error::{Error, Result};
use crate::model::{AttentionSpec, ModelSpec};

/// Number of launches in a graph.
const LAYERS: usize = 8;
const REPLAYS: usize = 7;
/// Tokens per block of the KV cache.
const BLOCK_SIZE: usize = 16;
/// Bytes of the weights for measuring limits: far more than the GPU's caches hold.
const LIMIT_BYTES: usize = 2 << 30;
/// Number of rows of a GEMM with the highest efficiency.
const LIMIT_ROWS: usize = 8192;

/// The benchmark of kernels.
#[derive(Debug, Clone)]
pub struct KernelsBench {
    /// Name of the model in the output.
    pub model: String,
    /// The model.
    pub spec: Arc<ModelSpec>,
    /// Dtype of weights, activations and cache.
    pub kind: Kind,
    /// Number of sequences in a step.
    pub rows: usize,
    /// Number of tokens of every sequence.
    pub context: usize,
    /// Number of sequences that share a prompt.
    pub group: usize,
    /// Number of tokens of the shared prompt.
    pub prompt_len: usize,
}

/// Runs all kernels; returns one JSON object for each kernel and for each limit.
///
/// # Errors
/// [`Error::Environment`] without a GPU, or if the GPU does not measure its energy; errors of insufficient memory.
pub fn bench_kernels(bench: &KernelsBench, device: Device) -> Result<Vec<Value>> {
    let (Device::Cuda(ordinal), Some(limits)) = (device, GpuLimits::of(device)?) else {
        return Err(Error::Environment {
            message: "bench kernels measures GPU kernels, but this process runs on the CPU: use a machine with a GPU \
                      and --device cuda"
                .into(),
        });
    };
    kernels::prepare(ordinal, 1)?;
    let stream = TorchStream::new(&Context::retain(ordinal)?)?;
    let mut step = DecodeStep { bench, device, stream, limits, results: Vec::new() };
    step.rows_alone()?;
    let cache = [step.cache()?, step.cache()?];
    step.rope_write_kv(&cache)?;
    step.paged_attention(&cache)?;
    drop(cache);
    step.delta_step()?;
    step.sampling()?;
    let meter = EnergyMeter::new(ordinal)?;
    step.products(&meter)?;
    step.limits(&meter)?;
    Ok(step.results)
}

pub(super) struct DecodeStep<'a> {
    pub(super) bench: &'a KernelsBench,
    pub(super) device: Device,
    pub(super) stream: TorchStream,
    limits: GpuLimits,
    pub(super) results: Vec<Value>,
}

impl KernelsBench {
    /// Width of an MLP, or of an expert if all layers have experts.
    fn mlp_width(&self) -> usize {
        let expert = || self.spec.experts().map(|experts| experts.expert);
        self.spec.dense().or_else(expert).map_or(0, |mlp| mlp.intermediate)
    }
}

impl DecodeStep<'_> {
    /// Times `work` on every layer, and records it with the time that its bytes take at the memory's rate.
    fn time(&mut self, kernel: &str, bytes: usize, mut work: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let mut graph = self.record(LAYERS, &mut work)?;
        let mut times = Vec::with_capacity(REPLAYS);
        for replay in 0..=REPLAYS {
            self.stream.context().synchronize()?;
            let start = Instant::now();
            // SAFETY: the tensors that `work` names outlive it, and it outlives this loop.
            unsafe { graph.replay(&self.stream)? };
            self.stream.context().synchronize()?;
            if replay > 0 {
                times.push(start.elapsed().as_secs_f64() / LAYERS as f64);
            }
        }
        let (seconds, floor) = (median(times), self.limits.floor_s(bytes as f64, 0.0));
        self.results.push(json!({
            "benchmark": "kernel",
            "kernel": kernel,
            "model": self.bench.model,
            "rows": self.bench.rows,
            "context": self.bench.context,
            "us": seconds * 1e6,
            "bytes": bytes,
            "share_of_floor": floor / seconds,
        }));
        Ok(())
    }

    /// Captures a graph of `work` with every number below `count`, after one warm-up call.
    pub(super) fn record(&self, count: usize, mut work: impl FnMut(usize) -> Result<()>) -> Result<Graph> {
        {
            let _current = self.stream.make_current()?;
            work(0)?;
        }
        Graph::capture(&self.stream, || (0..count).try_for_each(&mut work))
    }

    /// Measures the GPU's limits in sustained operation with libtorch, on weights as large as those of gate and up: reading them, and multiplying
    /// many rows with them.
    fn limits(&mut self, meter: &EnergyMeter) -> Result<()> {
        let KernelsBench { spec, kind, .. } = self.bench;
        let (features, hidden) = (2 * self.bench.mlp_width(), spec.hidden_size);
        let bytes = features * hidden * kind.elt_size_in_bytes();
        let weights: Vec<Tensor> =
            (0..LIMIT_BYTES.div_ceil(bytes)).map(|_| self.tensor(&[features, hidden])).collect::<Result<_>>()?;
        let x = self.tensor(&[LIMIT_ROWS, hidden])?;
        let (row, of_row, of_all) = (x.get(0), self.tensor(&[features])?, self.tensor(&[LIMIT_ROWS, features])?);
        let read = |copy: usize| Ok(weights[copy].f_mv_out(&of_row, &row).map(drop)?);
        let multiply = |copy: usize| Ok(x.f_mm_out(&of_all, &weights[copy].tr()).map(drop)?);
        let (bytes, flop) = (bytes as f64, 2.0 * (LIMIT_ROWS * features * hidden) as f64);
        self.limit(meter, ("read", "byte"), bytes, weights.len(), read)?;
        self.limit(meter, ("product", "flop"), flop, weights.len(), multiply)
    }

    /// Records units per second, and the energy per unit, where each of `count` calls of `work` does `many` units.
    fn limit(
        &mut self,
        meter: &EnergyMeter,
        (name, unit): (&str, &str),
        many: f64,
        count: usize,
        work: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let mut graph = self.record(count, work)?;
        // SAFETY: the caller's tensors, that `work` names, outlive this call, at whose end the stream has passed the graph.
        let mut replay = || unsafe { graph.replay(&self.stream) };
        let start = Instant::now();
        replay()?;
        self.stream.synchronize()?;
        let Sustained { us, joules } =
            Sustained::measure(meter, &self.stream, start.elapsed().as_secs_f64() * 1e6, replay)?;
        let many = many * count as f64;
        self.results.push(json!({
            "benchmark": "limit",
            "limit": name,
            "model": self.bench.model,
            "watts": 1e6 * joules / us,
            format!("{unit}s_per_second"): 1e6 * many / us,
            format!("pj_per_{unit}"): 1e12 * joules / many,
        }));
        Ok(())
    }

    fn tensor(&self, shape: &[usize]) -> Result<Tensor> {
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_randn(shape, (self.bench.kind, self.device))?)
    }

    fn ints(&self, values: impl IntoIterator<Item = usize>) -> Tensor {
        let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
        Tensor::from_slice(&values).to_device(self.device)
    }

    /// Times kernels that process every row independently.
    fn rows_alone(&mut self) -> Result<()> {
        let KernelsBench { spec, rows, .. } = self.bench;
        let (rows, hidden, mlp) = (*rows, spec.hidden_size, self.bench.mlp_width());
        let unit = self.bench.kind.elt_size_in_bytes();
        let table = self.tensor(&[spec.vocab_size, hidden])?;
        let ids = self.ints((0..rows).map(|row| row * 131 % spec.vocab_size));
        let [mut x, delta, mut y] =
            [self.tensor(&[rows, hidden])?, self.tensor(&[rows, hidden])?, self.tensor(&[rows, hidden])?];
        self.time("embed", 2 * rows * hidden * unit, |_| kernels::embed(&ids, &table, 0, &mut x))?;
        let weight = self.tensor(&[hidden])?;
        self.time("add_rms_norm", (4 * rows + 1) * hidden * unit, |_| {
            kernels::add_rms_norm(&mut x, Some(&delta), &weight, &mut y, spec.norm())
        })?;
        let (gate_up, mut act) = (self.tensor(&[rows, 2 * mlp])?, self.tensor(&[rows, mlp])?);
        self.time("silu_mul", 3 * rows * mlp * unit, |_| kernels::silu_mul(Activation::Silu, &gate_up, &mut act))
    }

    fn rope_write_kv(&mut self, [k_cache, v_cache]: &[Tensor; 2]) -> Result<()> {
        let KernelsBench { spec, kind, rows, context, .. } = self.bench;
        let (rows, context, unit) = (*rows, *context, kind.elt_size_in_bytes());
        let AttentionSpec { num_heads: heads, num_kv_heads: kv_heads, head_dim, rope, .. } = spec.attention();
        let (positions, slots) = (self.ints(vec![context - 1; rows]), self.ints((0..rows).map(|row| row * BLOCK_SIZE)));
        let product = self.tensor(&[rows, (heads + 2 * kv_heads) * head_dim])?;
        let views = QkvViews::grouped(&product, kv_heads, heads / kv_heads, false);
        let rope = spec.ropes().of(rope).table(context, self.device)?;
        let transform = HeadTransform { norms: None, rope: &rope };
        let mut q = self.tensor(&[rows, heads, head_dim])?;
        self.time("rope_write_kv", rows * (2 * heads + 6 * kv_heads) * head_dim * unit, |layer| {
            let (k, v) = (k_cache.get(layer as i64), v_cache.get(layer as i64));
            kernels::rope_write_kv(&views, &transform, &positions, &slots, &mut q, &k, &v)
        })
    }

    fn paged_attention(&mut self, [k_cache, v_cache]: &[Tensor; 2]) -> Result<()> {
        let KernelsBench { spec, kind, rows, context, .. } = self.bench;
        let (rows, context, group, shared_blocks) = (*rows, *context, self.bench.group.max(1), self.shared_blocks());
        let AttentionSpec { num_heads, num_kv_heads, head_dim, window: sliding_window, scale, .. } = spec.attention();
        let shape = AttentionShape { num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE, sliding_window, scale };
        let plan = AttentionPlan::new(shape, (*kind, self.device), rows, self.max_blocks(), None)?;
        let lens = self.ints(vec![context; rows]);
        let [own, shared] = [0, shared_blocks].map(|shared_blocks| self.block_tables(shared_blocks));
        let q = self.tensor(&[rows, num_heads, head_dim])?;
        let mut o = q.empty_like();
        let mut attend = |tables: &Tensor, layer: usize| {
            let (k, v) = (k_cache.get(layer as i64), v_cache.get(layer as i64));
            kernels::paged_attention(&plan, &q, KvBlocks::plain(&k, &v), tables, &lens, None, &mut o)
        };
        let token_bytes = 2 * num_kv_heads * head_dim * kind.elt_size_in_bytes();
        self.time("plan_attention", 0, |_| plan.update(&lens, None))?;
        self.time("paged_attention", rows * context * token_bytes, |layer| attend(&own, layer))?;
        if group == 1 || shared_blocks == 0 || sliding_window.is_some() {
            return Ok(());
        }
        let (groups, blocks) = (self.ints((0..rows).map(|row| row / group)), self.ints(vec![shared_blocks; rows]));
        let read_once = rows * context - (rows - rows.div_ceil(group)) * shared_blocks * BLOCK_SIZE;
        for (name, is_told) in [("paged_attention_shared", true), ("paged_attention_shared_untold", false)] {
            let prefixes = SharedPrefixes { groups: &groups, num_shared_blocks: &blocks };
            {
                let _current = self.stream.make_current()?;
                plan.update(&lens, is_told.then_some(prefixes))?;
            }
            self.time(name, read_once * token_bytes, |layer| attend(&shared, layer))?;
        }
        Ok(())
    }

    /// Times the step of gated delta nets, which reads and writes their states. Does nothing for models without them.
    fn delta_step(&mut self) -> Result<()> {
        let KernelsBench { spec, rows, context, .. } = self.bench;
        let (Some(heads), rows) = (spec.delta_net().map(|delta_net| delta_net.heads), *rows) else {
            return Ok(());
        };
        let (value_heads, channels) = (heads.num_value_heads, heads.channels());
        let values = value_heads * heads.value_dim;
        let of_tokens = DeltaRows {
            qkv: self.tensor(&[rows, channels])?,
            z: self.tensor(&[rows, values])?,
            b: self.tensor(&[rows, value_heads])?,
            a: self.tensor(&[rows, value_heads])?,
        };
        let weights = DeltaWeights {
            conv: self.tensor(&[channels, heads.conv_width])?,
            a_log: self.tensor(&[value_heads])?,
            dt_bias: self.tensor(&[value_heads])?,
            norm: self.tensor(&[heads.value_dim])?,
        };
        let of_state = [LAYERS, rows, value_heads, heads.key_dim, heads.value_dim];
        let last_rows = self.tensor(&[LAYERS, rows, heads.conv_width, channels])?;
        let (pages, positions) = (self.ints(0..rows), self.ints(vec![context - 1; rows]));
        let runs = DeltaRuns { pages: &pages, bounds: None, positions: &positions };
        let options = DeltaOptions { heads, eps: spec.rms_norm_eps };
        let mut out = self.tensor(&[rows, values])?;
        for (name, kind) in [("delta_step", Kind::Float), ("delta_step_states_bf16", Kind::BFloat16)] {
            let states = Tensor::f_zeros(of_state.map(|size| size as i64), (kind, self.device))?;
            let bytes = 2 * states.numel() / LAYERS * kind.elt_size_in_bytes();
            self.time(name, bytes, |layer| {
                let own = [&last_rows, &states].map(|pages| pages.get(layer as i64));
                let pages = DeltaPages { rows: &own[0], states: &own[1] };
                kernels::delta_step(&of_tokens, &weights, options, pages, runs, &mut out)
            })?;
        }
        Ok(())
    }

    /// Allocates keys or values for every layer. [LAYERS, blocks, Hkv, BLOCK_SIZE, hd]
    fn cache(&self) -> Result<Tensor> {
        let KernelsBench { spec, rows, .. } = self.bench;
        self.tensor(&[
            LAYERS,
            rows * self.max_blocks(),
            spec.attention().num_kv_heads,
            BLOCK_SIZE,
            spec.attention().head_dim,
        ])
    }

    /// Number of KV blocks of a sequence.
    fn max_blocks(&self) -> usize {
        self.bench.context.div_ceil(BLOCK_SIZE)
    }

    /// Number of KV blocks of the prompt that a group shares.
    fn shared_blocks(&self) -> usize {
        (self.bench.prompt_len / BLOCK_SIZE).min((self.bench.context - 1) / BLOCK_SIZE)
    }

    /// Block tables with scattered blocks. Rows of a group use the blocks of its first row for their first `shared_blocks` entries. [rows, blocks]
    /// i32
    fn block_tables(&self, shared_blocks: usize) -> Tensor {
        let (rows, group, max_blocks) = (self.bench.rows, self.bench.group.max(1), self.max_blocks());
        let block = |place: usize| {
            let (row, at) = (place / max_blocks, place % max_blocks);
            let owner = if at < shared_blocks { row / group * group } else { row };
            (owner * max_blocks + at) * 7919 % (rows * max_blocks)
        };
        self.ints((0..rows * max_blocks).map(block)).view([rows as i64, max_blocks as i64])
    }

    fn sampling(&mut self) -> Result<()> {
        let KernelsBench { spec, rows, context, .. } = self.bench;
        let (rows, vocab) = (*rows, spec.vocab_size);
        let options = (Kind::Float, self.device);
        let logits = Tensor::f_randn([rows as i64, vocab as i64], options)?;
        let (keys, positions) = (self.ints(0..2 * rows), self.ints(vec![*context; rows]));
        let temperatures = Tensor::f_ones([rows as i64], options)?;
        let draws =
            Draws { keys: &keys, positions: &positions, temperatures: &temperatures, penalties: None, cuts: None };
        let parts = kernels::sample_parts(rows, vocab) as i64;
        let mut candidates = Tensor::f_empty([parts, rows as i64, CANDIDATE_WORDS], (Kind::Double, self.device))?;
        self.time("sample", rows * vocab * 4, |_| kernels::sample(&logits, 0, &draws, &mut candidates))?;

        let float = |value: f64| Tensor::f_full([rows as i64], value, options);
        let (min_p, top_p, cut_top_p, top_k) = (float(0.0)?, float(1.0)?, float(0.95)?, self.ints(vec![50; rows]));
        let no_top_k = self.ints(vec![0; rows]);
        let shape = [rows as i64, kernels::filter_parts(rows, vocab) as i64, FILTER_HEAD_WORDS];
        let mut heads = Tensor::f_empty(shape, (Kind::Int64, self.device))?;
        let (mut cuts, whole_rows) = (self.ints(vec![0; 2 * rows]), logits.f_unsqueeze(0)?);
        for (name, top_k, top_p) in [
            ("filter: top-k 50", &top_k, &top_p),
            ("filter: top-k 50, top-p 0.95", &top_k, &cut_top_p),
            ("filter: top-p 0.95", &no_top_k, &cut_top_p),
        ] {
            let filters = Filters { min_p: &min_p, top_k, top_p };
            let filter = |_: usize| kernels::filter(&whole_rows, vocab, 0, &draws, &filters, &mut heads, &mut cuts);
            self.time(name, rows * vocab * 4, filter)?;
        }

        let (mut token_ids, mut logprobs) = (self.ints(vec![0; rows]), Tensor::f_zeros([rows as i64], options)?);
        self.time("combine", 0, |_| kernels::combine(&candidates, &mut token_ids, &mut logprobs))
    }
}
