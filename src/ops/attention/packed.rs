//! Causal attention within each sequence of a packed micro-batch. A prompt that completions share is computed once. This takes three attentions on
//! contiguous rows: prompts on themselves, each group's completions on their prompt, and each completion on itself; the last two are merged by their
//! log-sum-exps.

use tch::{Device, Tensor};

use super::bounds::{Bounds, SharedBounds};
use super::merge::merge_into;
use super::planned::PlannedRuns;
use super::runs::{Runs, Sees};
use super::varlen;
use crate::error::Result;
use crate::torch::{Attended, QkvGradients, SavedAttention};

/// The layout of a packed micro-batch for attention. It is created once and used by all layers, in forward and backward.
#[derive(Debug)]
pub struct PackedLayout {
    parts: PackedRuns,
}

#[derive(Debug)]
enum PackedRuns {
    Separate(Box<PlannedRuns>),
    Shared(Box<SharedRuns>),
}

/// Layouts for P prompt rows and C completion rows.
#[derive(Debug)]
struct SharedRuns {
    num_prompt_tokens: i64,
    /// Prompts attending to themselves: [P] on [P].
    prompts: PlannedRuns,
    /// All completions of a group, as one run, attending to their prompt: [C] on [P].
    on_prompt: PlannedRuns,
    /// Completions attending to themselves: [C] on [C].
    completions: PlannedRuns,
}

impl PackedLayout {
    /// Creates the layout of separate sequences. `cu_seqlens` [N + 1] starts with 0 and does not decrease; sequence n has the rows
    /// `cu_seqlens[n]..cu_seqlens[n + 1]`. A token attends to itself and to the `sliding_window - 1` tokens before it, or to all before it.
    pub fn new(cu_seqlens: &[i64], num_kv_heads: usize, sliding_window: Option<usize>, device: Device) -> Self {
        let sees = Sees::Before { window: sliding_window.map(|window| window as i64) };
        let runs = Runs::new(cu_seqlens, cu_seqlens, sees, num_kv_heads as i64, device);
        Self { parts: PackedRuns::Separate(Box::new(PlannedRuns::new(runs))) }
    }

    /// Creates the layout for the sequences of a micro-batch. With shared prompts a window is not supported: it must be wider than every sequence.
    pub fn of(bounds: &Bounds, num_kv_heads: usize, sliding_window: Option<usize>, device: Device) -> Self {
        let SharedBounds { prompts, groups, completions } = match bounds {
            Bounds::Separate(cu_seqlens) => return Self::new(cu_seqlens, num_kv_heads, sliding_window, device),
            Bounds::Shared(bounds) => bounds,
        };
        let runs = |q: &[i64], k: &[i64], sees| PlannedRuns::new(Runs::new(q, k, sees, num_kv_heads as i64, device));
        let before = Sees::Before { window: None };
        Self {
            parts: PackedRuns::Shared(Box::new(SharedRuns {
                num_prompt_tokens: prompts.last().copied().unwrap_or(0),
                prompts: runs(prompts, prompts, before),
                on_prompt: runs(groups, prompts, Sees::All),
                completions: runs(completions, completions, before),
            })),
        }
    }
}

/// Computes attention within each sequence; the log-sum-exp is in the accumulation type. o [T, H, hd], lse [T, H]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn packed_forward(
    q: &Tensor, // [T, H, hd]
    k: &Tensor, // [T, Hkv, hd]
    v: &Tensor, // [T, Hkv, hd]
    layout: &PackedLayout,
    scale: f64,
) -> Result<Attended> {
    let shared = match &layout.parts {
        PackedRuns::Separate(runs) => return varlen::forward(q, k, v, runs, scale),
        PackedRuns::Shared(shared) => shared,
    };
    let size = q.size();
    let [(q_prompt, q), (k_prompt, k), (v_prompt, v)] = [q, k, v].map(|t| shared.split(t));
    let prompt = varlen::forward(&q_prompt, &k_prompt, &v_prompt, &shared.prompts, scale)?;
    let on_prompt = varlen::forward(&q, &k_prompt, &v_prompt, &shared.on_prompt, scale)?;
    let on_itself = varlen::forward(&q, &k, &v, &shared.completions, scale)?;
    let o = Tensor::f_empty(&size, (q.kind(), q.device()))?;
    let lse = Tensor::f_empty(&size[..2], (prompt.lse.kind(), q.device()))?;
    let [(mut o_prompt, o_rest), (mut lse_prompt, lse_rest)] = [&o, &lse].map(|t| shared.split(t));
    o_prompt.f_copy_(&prompt.o)?;
    lse_prompt.f_copy_(&prompt.lse)?;
    merge_into(&on_prompt, &on_itself, Attended { o: o_rest, lse: lse_rest })?;
    Ok(Attended { o, lse })
}

/// Computes gradients from the inputs and results of [`packed_forward`]. A shared prompt's dk and dv are summed over all sequences that attend to it.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn packed_backward(
    d_o: &Tensor,          // [T, H, hd]
    saved: SavedAttention, // q, o [T, H, hd], k, v [T, Hkv, hd], lse [T, H]
    layout: &PackedLayout,
    scale: f64,
) -> Result<QkvGradients> {
    let shared = match &layout.parts {
        PackedRuns::Separate(runs) => return varlen::backward(d_o, saved, runs, scale),
        PackedRuns::Shared(shared) => shared,
    };
    let SavedAttention { q, k, v, o, lse } = saved;
    let [(d_o_prompt, d_o), (q_prompt, q), (k_prompt, k), (v_prompt, v), (o_prompt, o), (lse_prompt, lse)] =
        [d_o, q, k, v, o, lse].map(|t| shared.split(t));
    let prompts = SavedAttention { q: &q_prompt, k: &k_prompt, v: &v_prompt, o: &o_prompt, lse: &lse_prompt };
    let on_itself = SavedAttention { q: &q, k: &k, v: &v, o: &o, lse: &lse };
    let on_prompt = SavedAttention { k: &k_prompt, v: &v_prompt, ..on_itself };
    let of_prompts = varlen::backward(&d_o_prompt, prompts, &shared.prompts, scale)?;
    let on_prompt = varlen::backward(&d_o, on_prompt, &shared.on_prompt, scale)?;
    let on_itself = varlen::backward(&d_o, on_itself, &shared.completions, scale)?;
    Ok(QkvGradients {
        dq: shared.join(&[&of_prompts.dq], &[&on_prompt.dq, &on_itself.dq])?,
        dk: shared.join(&[&of_prompts.dk, &on_prompt.dk], &[&on_itself.dk])?,
        dv: shared.join(&[&of_prompts.dv, &on_prompt.dv], &[&on_itself.dv])?,
    })
}

impl SharedRuns {
    /// Splits rows into those of prompts and those of completions.
    fn split(&self, t: &Tensor) -> (Tensor, Tensor) {
        let (prompts, all) = (self.num_prompt_tokens, t.size()[0]);
        (t.narrow(0, 0, prompts), t.narrow(0, prompts, all - prompts))
    }

    /// Concatenates the sum of `prompts` and the sum of `completions`.
    fn join(&self, prompts: &[&Tensor], completions: &[&Tensor]) -> Result<Tensor> {
        let like = prompts[0];
        let mut size = like.size();
        size[0] += completions[0].size()[0];
        let all = Tensor::f_empty(size, (like.kind(), like.device()))?;
        let (mut of_prompts, mut rest) = self.split(&all);
        for (rows, parts) in [(&mut of_prompts, prompts), (&mut rest, completions)] {
            match parts {
                [first, second] => drop(first.f_add_out(rows, second)?),
                parts => parts.iter().try_for_each(|part| rows.f_copy_(part))?,
            }
        }
        Ok(all)
    }
}
