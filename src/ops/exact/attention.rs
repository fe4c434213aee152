//! Bit-exact attention, one query at a time, over keys in two runs of rows: those of a prompt, then the sequence's own.

use std::cell::OnceCell;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::dot;
use super::gpu::PagedRows;
use super::tiles::TiledRows;
use crate::cuda::kernels;
use crate::error::Result;
use crate::ops::attention::{Attended, Bounds, PackedLayout, SharedBounds, packed_forward};
use crate::torch::{f32_vec, tensor_on};

/// The rows of the keys that a query attends to, in order of position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VisibleKeys {
    /// Rows of the shared prompt.
    pub prompt: Range<usize>,
    /// Rows after the prompt, up to the query's own key.
    pub own: Range<usize>,
}

impl VisibleKeys {
    /// Restricts the keys to the last `window` ones.
    fn within(self, window: Option<usize>) -> Self {
        let Self { prompt, own } = self;
        let most = window.unwrap_or(usize::MAX);
        let from_own = own.len().min(most);
        let from_prompt = prompt.len().min(most - from_own);
        Self { prompt: prompt.end - from_prompt..prompt.end, own: own.end - from_own..own.end }
    }

    /// Contexts of consecutive tokens: those from row `first` on, in a sequence whose own keys are the rows `own`, after a prompt's.
    pub fn of_tokens(prompt: Range<usize>, own: Range<usize>, first: usize, window: Option<usize>) -> Vec<Self> {
        let context = |last: usize| Self { prompt: prompt.clone(), own: own.start..last + 1 };
        (first..own.end).map(|last| context(last).within(window)).collect()
    }
}

/// The context of every row of a packed micro-batch.
fn packed_contexts(bounds: &Bounds, window: Option<usize>) -> Vec<VisibleKeys> {
    let run = |pair: &[i64]| pair[0] as usize..pair[1] as usize;
    let alone = |own: Range<usize>| VisibleKeys::of_tokens(0..0, own.clone(), own.start, window);
    match bounds {
        Bounds::Separate(bounds) => bounds.windows(2).flat_map(|pair| alone(run(pair))).collect(),
        Bounds::Shared(SharedBounds { prompts, groups, completions }) => {
            let of_prompts = prompts.windows(2).flat_map(|pair| alone(run(pair)));
            let of_completions = completions.windows(2).flat_map(|pair| {
                let own = run(pair);
                let group = groups.windows(2).position(|rows| (rows[0]..rows[1]).contains(&pair[0]));
                let prompt = group.map_or(0..0, |group| run(&prompts[group..group + 2]));
                VisibleKeys::of_tokens(prompt, own.clone(), own.start, window)
            });
            of_prompts.chain(of_completions).collect()
        }
    }
}

/// Bit-exact attention of a packed micro-batch.
#[derive(Debug)]
pub struct ExactAttention(AttentionPath);

#[derive(Debug)]
enum AttentionPath {
    Host(Vec<VisibleKeys>), // [T]
    Gpu(Box<GpuAttention>),
}

/// On a GPU, rows are processed in tiles if the tiled kernel supports a layer, otherwise one by one over a paged cache.
#[derive(Debug)]
struct GpuAttention {
    tiled: TiledRows,
    bounds: Bounds,
    window: Option<usize>,
    device: Device,
    paged: OnceCell<PagedRows>,
}

impl GpuAttention {
    fn paged(&self) -> Result<&PagedRows> {
        let made = match self.paged.get() {
            Some(_) => None,
            None => Some(PagedRows::new(&self.bounds, self.window, self.device)?),
        };
        Ok(self.paged.get_or_init(|| made.expect("made where there was none")))
    }
}

impl ExactAttention {
    /// Creates the attention. A token attends to itself and to the `window - 1` tokens before it, or to all before it.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(bounds: &Bounds, window: Option<usize>, device: Device) -> Result<Self> {
        Ok(Self(match device {
            Device::Cuda(_) => AttentionPath::Gpu(Box::new(GpuAttention {
                tiled: TiledRows::new(bounds, window, device)?,
                bounds: bounds.clone(),
                window,
                device,
                paged: OnceCell::new(),
            })),
            _ => AttentionPath::Host(packed_contexts(bounds, window)),
        }))
    }

    /// Computes exact attention. The log-sum-exp is only for a backward; if a GPU processes rows one by one, it comes from `layout`'s kernels.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; on a GPU the errors of its kernels.
    pub fn attend(
        &self,
        qkv: [&Tensor; 3], // [T, H, hd], [T, Hkv, hd] twice
        layout: &PackedLayout,
        scale: f64,
    ) -> Result<Attended> {
        let [q, k, v] = qkv;
        match &self.0 {
            AttentionPath::Host(contexts) => attend(q, k, v, contexts, scale),
            AttentionPath::Gpu(gpu) => {
                if kernels::tiled_attention_serves(q.kind(), q.size()[2]) {
                    return gpu.tiled.attend(qkv, scale);
                }
                let o = gpu.paged()?.attend(qkv, scale)?;
                Ok(Attended { o, lse: packed_forward(q, k, v, layout, scale)?.lse })
            }
        }
    }
}

/// Computes softmax(scale q k^T) v for each query over its context, on a CPU, in the type of q; also the log-sum-exp of the scores in float32.
/// Scores, weights and outputs are summed in the order of the keys.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn attend(
    q: &Tensor,               // [T, H, hd]
    k: &Tensor,               // [R, Hkv, hd]
    v: &Tensor,               // [R, Hkv, hd]
    contexts: &[VisibleKeys], // [T]
    scale: f64,
) -> Result<Attended> {
    let [tokens, heads, head_dim] = q.size()[..] else { panic!("queries [T, H, hd], not {:?}", q.size()) };
    let (kv_heads, dim) = (k.size()[1] as usize, head_dim as usize);
    let group = heads as usize / kv_heads;
    let [q_host, k_host, v_host] = [f32_vec(q)?, f32_vec(k)?, f32_vec(v)?];
    let (mut o, mut lse) = (vec![0.0f32; q_host.len()], Vec::with_capacity((tokens * heads) as usize));
    let mut scores = Vec::new();
    for (index, (q, o)) in q_host.chunks_exact(dim).zip(o.chunks_exact_mut(dim)).enumerate() {
        let (token, kv_head) = (index / heads as usize, index % heads as usize / group);
        let VisibleKeys { prompt, own } = &contexts[token];
        let rows = || prompt.clone().chain(own.clone()).map(move |row| (row * kv_heads + kv_head) * dim);
        scores.clear();
        scores.extend(rows().map(|at| dot(q, &k_host[at..at + dim]) * scale as f32));
        let peak = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0f32;
        for (score, at) in scores.iter().zip(rows()) {
            let weight = (score - peak).exp();
            sum += weight;
            o.iter_mut().zip(&v_host[at..at + dim]).for_each(|(o, v)| *o += weight * v);
        }
        o.iter_mut().for_each(|o| *o /= sum);
        lse.push(peak + sum.ln());
    }
    let o = tensor_on(&o, q.device())?.view([tokens, heads, head_dim]).f_to_kind(q.kind())?;
    let lse = tensor_on(&lse, q.device())?.view([tokens, heads]).f_to_kind(Kind::Float)?;
    Ok(Attended { o, lse })
}
