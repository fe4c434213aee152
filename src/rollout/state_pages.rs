//! States of gated delta nets: a page for every running sequence, in an arena of their own. The KV blocks of attention layers are separate.
//!
//! With `mamba_ssm_cache_dtype = bfloat16` a step computes in float32 and rounds each state once at its end. How a prompt is split into steps then
//! changes its bits, so `strict` refuses the setting.
#![allow(unsafe_code)]

use std::collections::HashMap;

use tch::{Device, Kind, Tensor};

use super::kv_cache::KvCache;
use super::options::EngineOptions;
use crate::config::StateDtype;
use crate::cuda::kernels::delta_slots;
use crate::error::Result;
use crate::memory::Arena;
use crate::model::{DeltaNetSpec, Mixer, ModelSpec, Section};
use crate::ops::delta_net::{DeltaHeads, DeltaState, DraftedState};
use crate::torch::{self, accumulation_kind};

/// Maximum number of pages copied at once, because their states of one layer are held twice meanwhile.
const COPIES: usize = 32;
/// Alignment of each tensor, in bytes.
const ALIGNMENT: usize = 256;
/// Alignment of a draft token's inputs, in elements.
const ALIGNED_COLUMNS: usize = 8;

/// Bytes of one sequence's states in all layers, on one rank; 0 for a model without gated delta nets.
pub fn state_page_bytes(
    spec: &ModelSpec,
    tp_size: usize,
    kind: Kind,
    state_dtype: StateDtype,
    device: Device,
) -> usize {
    let kinds = [kind, state_kind(state_dtype, kind)];
    delta_nets(spec, tp_size).flat_map(|(_, delta_net)| sections(delta_net.heads, 1, 0, kinds, device)).map(bytes).sum()
}

/// Additional bytes per sequence for draft tokens: the inputs of those that the states do not include yet, and the hidden states that a draft head
/// reads.
pub fn draft_input_bytes(spec: &ModelSpec, tp_size: usize, kind: Kind, num_drafts: usize, device: Device) -> usize {
    let of_net = |(_, net): (usize, DeltaNetSpec)| {
        let [with, without] = [num_drafts, 0].map(|drafts| bytes(rows(net.heads, 1, drafts, kind, device)));
        with - without + bytes(inputs(net.heads, 1, num_drafts, kind, device))
    };
    delta_nets(spec, tp_size).map(of_net).sum::<usize>() + bytes((hidden_shape(spec, 1, num_drafts), kind))
}

/// Shape of the hidden states that pages keep for a draft head: those of a step's newest token and of its draft tokens. No rows without a head.
fn hidden_shape(spec: &ModelSpec, num_pages: usize, num_drafts: usize) -> Vec<i64> {
    let rows = if spec.draft_head.is_some() { 1 + num_drafts } else { 0 };
    shape(&[num_pages, rows, spec.hidden_size])
}

/// Dtype of the recurrent states for weights of `kind`.
fn state_kind(dtype: StateDtype, kind: Kind) -> Kind {
    match dtype {
        StateDtype::Float32 => accumulation_kind(kind),
        StateDtype::Bfloat16 => Kind::BFloat16,
    }
}

/// Cache memory of the sequences of an awake engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct SequenceMemory<'a> {
    /// Keys and values of layers with attention.
    pub(super) kv_cache: &'a KvCache,
    /// States of gated delta nets, if the model has some.
    pub(super) states: Option<&'a StatePages>,
}

/// One state a page, by layer. The rows of the convolution are the last W - 1 on a CPU; the kernels of a GPU have so many slots, that of position p
/// in slot p % slots, that a step writes none that another block reads. With drafts these rows are among them.
#[derive(Debug)]
pub(super) struct StatePages {
    arena: Arena,
    nets: Vec<(usize, DeltaHeads)>,
    num_pages: usize,
    num_drafts: usize,                  // maximum per sequence
    kinds: [Kind; 2],                   // of the convolution's rows, of the recurrent states
    layers: HashMap<usize, DeltaState>, // while mapped
    inputs: HashMap<usize, Tensor>,     // the same; [pages, drafts, columns] each, on a GPU [pages, slots, 2, H]
    hidden: Section,                    // for a draft head
    kept: Option<Tensor>,               // hidden states while mapped; [pages, rows, D]
}

impl StatePages {
    /// Reserves addresses; `None` for a model without gated delta nets.
    pub(super) fn reserve(
        spec: &ModelSpec,
        tp_size: usize,
        num_pages: usize,
        options: &EngineOptions,
    ) -> Result<Option<Self>> {
        let EngineOptions { kind, device, state_dtype, speculation, .. } = *options;
        let num_drafts = speculation.most_drafts();
        let kinds = [kind, state_kind(state_dtype, kind)];
        let nets: Vec<_> = delta_nets(spec, tp_size).map(|(layer, delta_net)| (layer, delta_net.heads)).collect();
        if nets.is_empty() {
            return Ok(None);
        }
        let of_layer = |&(_, heads): &(usize, DeltaHeads)| {
            let states = sections(heads, num_pages, num_drafts, kinds, device);
            states.into_iter().chain([inputs(heads, num_pages, num_drafts, kind, device)])
        };
        let hidden = (hidden_shape(spec, num_pages, num_drafts), kind);
        let all = nets.iter().flat_map(of_layer).chain([hidden.clone()]);
        let all = all.map(|section| bytes(section).next_multiple_of(ALIGNMENT)).sum();
        let arena = Arena::reserve("state_pages", all, device)?;
        let (layers, inputs, kept) = Default::default();
        Ok(Some(Self { arena, nets, num_pages, num_drafts, kinds, layers, inputs, hidden, kept }))
    }

    /// Maps the memory of all pages. States remain if they were mapped already. The first step of a sequence does not read its page.
    pub(super) fn wake(&mut self) -> Result<()> {
        if !self.layers.is_empty() {
            return Ok(());
        }
        self.arena.map(self.arena.reserved_bytes())?;
        let (arena, mut at) = (&self.arena, 0);
        let mut tensor = |section: Section| {
            let first = at;
            at += bytes(section.clone()).next_multiple_of(ALIGNMENT);
            // SAFETY: sections do not overlap; the tensors stay in this room, and `sleep` drops them before the arena is unmapped.
            unsafe { arena.tensor(first, &section.0, section.1) }
        };
        let (num_pages, num_drafts, kinds, device) = (self.num_pages, self.num_drafts, self.kinds, arena.device());
        for &(layer, heads) in &self.nets {
            let [conv, rule] = sections(heads, num_pages, num_drafts, kinds, device).map(&mut tensor);
            self.layers.insert(layer, DeltaState { conv: conv?, rule: rule? });
            self.inputs.insert(layer, tensor(inputs(heads, num_pages, num_drafts, kinds[0], device))?);
        }
        self.kept = Some(tensor(self.hidden.clone())?);
        Ok(())
    }

    /// Unmaps the memory. Never fails: the arena keeps an error for the next wake.
    pub(super) fn sleep(&mut self) {
        self.layers.clear();
        self.inputs.clear();
        self.kept = None;
        self.arena.unmap();
    }

    /// Bytes that waking has to map.
    pub(super) fn absent_bytes(&self) -> usize {
        self.arena.absent_bytes()
    }

    /// The states of a layer, in all pages.
    ///
    /// # Panics
    /// If the engine is asleep, or the layer has no states.
    pub(super) fn layer(&self, layer: usize) -> &DeltaState {
        self.find(layer).expect("states of a layer that has some, of an engine that is awake")
    }

    /// The states of a layer, in all pages; `None` for a layer with attention.
    pub(super) fn find(&self, layer: usize) -> Option<&DeltaState> {
        self.layers.get(&layer)
    }

    /// What a layer's pages have of drafts on a GPU, beside the rows of the convolution.
    ///
    /// # Panics
    /// If the engine is asleep, or the layer has no states.
    pub(super) fn gates(&self, layer: usize) -> &Tensor /* [pages, slots, 2, H] */ {
        &self.inputs[&layer]
    }

    /// All that steps read and write in the pages of layers.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_layer = move |(layer, _): &(usize, DeltaHeads)| {
            let DeltaState { conv, rule } = self.layer(*layer);
            [conv, rule, self.gates(*layer)]
        };
        self.nets.iter().flat_map(of_layer).chain(&self.kept)
    }

    /// Copies of a layer's states in these pages, as they are stored.
    pub(super) fn read(&self, layer: usize, pages: &Tensor /* [N] i64 */) -> Result<DeltaState> {
        self.layer(layer).fork(pages)
    }

    /// Replaces a layer's states in these pages.
    pub(super) fn write(&self, layer: usize, pages: &Tensor /* [N] i64 */, states: &DeltaState) -> Result<()> {
        let own = self.layer(layer);
        for (all, new) in [(&own.conv, &states.conv), (&own.rule, &states.rule)] {
            let _ = all.shallow_clone().f_index_copy_(0, pages, &new.f_to_kind(all.kind())?)?;
        }
        Ok(())
    }

    /// Whether sequences may have drafts that their states take in.
    pub(super) fn have_drafts(&self) -> bool {
        self.num_drafts > 0
    }

    /// Rows of hidden states that a page keeps for a draft head.
    pub(super) fn num_kept_rows(&self) -> usize {
        self.hidden.0[1] as usize
    }

    /// The hidden states that pages keep for a draft head, page by page. [pages * rows, D]
    ///
    /// # Panics
    /// If the engine is asleep.
    pub(super) fn hidden_rows(&self) -> Tensor {
        self.kept.as_ref().expect("an engine that is awake").flatten(0, 1)
    }

    /// Makes row `rows[i]` of the hidden states in page `pages[i]` the first row of that page.
    pub(super) fn keep_newest(&self, pages: &Tensor /* [N] i64 */, rows: &[i64] /* [N] */) -> Result<()> {
        let first = pages.f_mul_scalar(self.num_kept_rows() as i64)?;
        let newest = first.f_add(&torch::tensor_on(rows, self.arena.device())?)?;
        let hidden = self.hidden_rows();
        let _ = hidden.shallow_clone().f_index_copy_(0, &first, &hidden.f_index_select(0, &newest)?)?;
        Ok(())
    }

    /// Copies of a layer's states in these pages, with the stored draft tokens that they do not include yet.
    pub(super) fn read_drafted(&self, layer: usize, pages: &Tensor /* [N] i64 */) -> Result<DraftedState> {
        let mut state = self.read(layer, pages)?;
        let kind = state.rule.kind();
        state.rule = state.rule.f_to_kind(accumulation_kind(self.kinds[0]))?;
        Ok(DraftedState { state, inputs: self.inputs[&layer].f_index_select(0, pages)?, kind })
    }

    /// Replaces the stored draft tokens that a layer's states in these pages do not include yet.
    pub(super) fn write_inputs(
        &self,
        layer: usize,
        pages: &Tensor, /* [N] i64 */
        new: &DraftedState,
    ) -> Result<()> {
        let _ = self.inputs[&layer].shallow_clone().f_index_copy_(0, pages, &new.inputs)?;
        Ok(())
    }

    /// Copies whole pages (from, to) in all layers. No page is both source and destination, and none has stored draft tokens.
    pub(super) fn copy(&self, copies: &[(u32, u32)]) -> Result<()> {
        for copies in copies.chunks(COPIES) {
            let pages = |page: &dyn Fn(&(u32, u32)) -> u32| {
                let pages: Vec<_> = copies.iter().map(|copy| i64::from(page(copy))).collect();
                torch::tensor_on(&pages, self.arena.device())
            };
            let (from, to) = (pages(&|copy| copy.0)?, pages(&|copy| copy.1)?);
            self.layers.keys().try_for_each(|&layer| self.write(layer, &to, &self.read(layer, &from)?))?;
            if let Some(kept) = self.kept.as_ref().filter(|kept| kept.numel() > 0) {
                let _ = kept.shallow_clone().f_index_copy_(0, &to, &kept.f_index_select(0, &from)?)?;
            }
        }
        Ok(())
    }
}

impl Drop for StatePages {
    fn drop(&mut self) {
        self.sleep();
    }
}

/// Shapes and dtypes of a layer's states, in the order of the fields of [`DeltaState`].
fn sections(
    heads: DeltaHeads,
    num_pages: usize,
    num_drafts: usize,
    [kind, states]: [Kind; 2],
    device: Device,
) -> [Section; 2] {
    let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = heads;
    let of_rule = shape(&[num_pages, num_value_heads, key_dim, value_dim]);
    [rows(heads, num_pages, num_drafts, kind, device), (of_rule, states)]
}

/// Shape and type of a layer's rows before the convolution, on a GPU with those of drafts.
fn rows(heads: DeltaHeads, num_pages: usize, num_drafts: usize, kind: Kind, device: Device) -> Section {
    let slots = if device.is_cuda() { delta_slots(heads, num_drafts) } else { heads.conv_width - 1 };
    (shape(&[num_pages, slots, heads.channels()]), kind)
}

/// Shape and type of a layer's stored inputs of drafts; on a GPU those that are not among its rows.
fn inputs(heads: DeltaHeads, num_pages: usize, num_drafts: usize, kind: Kind, device: Device) -> Section {
    if device.is_cuda() {
        let slots = if num_drafts > 0 { delta_slots(heads, num_drafts) } else { 0 };
        return (shape(&[num_pages, slots, 2, heads.num_value_heads]), kind);
    }
    let columns = DraftedState::input_columns(heads).next_multiple_of(ALIGNED_COLUMNS);
    (shape(&[num_pages, num_drafts, columns]), kind)
}

fn shape(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|&size| size as i64).collect()
}

fn bytes((shape, kind): Section) -> usize {
    shape.iter().map(|&size| size as usize).product::<usize>() * kind.elt_size_in_bytes()
}

fn delta_nets(spec: &ModelSpec, tp_size: usize) -> impl Iterator<Item = (usize, DeltaNetSpec)> + '_ {
    spec.layers.iter().enumerate().filter_map(move |(layer, block)| match block.tp_slice(tp_size).mixer {
        Mixer::DeltaNet(delta_net) => Some((layer, delta_net)),
        Mixer::Attention(_) => None,
    })
}
