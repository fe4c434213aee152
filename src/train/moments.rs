//! Predicts the peak memory of training. It walks the units in the order of the network, and at each adds up gathered weights, gradients and
//! activations. The maxima of the three need not coincide.

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use super::activations::{ActivationBytes, MicroBatchShape};
use super::bytes::TrainedModel;
use super::gradients::GradientOptions;
use super::upcoming::{head_units, upcoming};
use crate::config::{GradientCheckpointing, Quantization};
use crate::model::{Format, ParamTable, Unit};

/// Bytes that a rank holds at one moment, in addition to what it holds between uses; gradients are included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Moment {
    /// Bytes of whole units of weights that are otherwise sharded, quantized or on the host.
    pub gathered: usize,
    /// Bytes of this rank's gradients so far, and of whole units that are being computed or reduced.
    pub gradients: usize,
    /// Bytes of activations.
    pub activations: usize,
    /// Bytes of optimizer state that is streamed through the device.
    pub buckets: usize,
    /// Bytes of whole matrices that Muon orthogonalises.
    pub orthogonalized: usize,
    /// Bytes of gradients allocated on the stream of collectives, which libtorch's allocator caches separately.
    #[serde(skip)]
    pub reduced_apart: usize,
}

impl Moment {
    /// Sum of all bytes.
    pub fn total(&self) -> usize {
        self.gathered + self.gradients + self.activations + self.buckets + self.orthogonalized
    }

    /// Bytes on libtorch's main stream.
    fn on_own_stream(&self) -> usize {
        self.total() - self.reduced_apart
    }
}

/// The parts of an update that its memory depends on.
#[derive(Debug, Clone, Copy)]
pub struct UpdateCourse<'a> {
    /// Which activations backward recomputes.
    pub keep: GradientCheckpointing,
    /// Micro-batches of the update, in order.
    pub micro_batches: &'a [MicroBatchShape],
    /// Whether the memory of whole gradients is already allocated by an earlier update.
    pub is_warm: bool,
    /// Whether optimizer state on the host is streamed through the device in the step.
    pub streams: bool,
}

/// Maximum share of fragmentation when tensors of many sizes are cut from one block. In a simulation of libtorch's allocator over long-tailed updates
/// of 7B and 1.5B models it was 0.1 to 1.8 %.
const BLOCK_MARGIN: f64 = 0.03;
/// The block is sized for micro-batches rounded up to a multiple of this many tokens, so that it need not grow at every step.
const BLOCK_TOKENS: usize = 1024;

impl TrainedModel<'_> {
    /// The moment of an update with the most memory.
    pub fn fullest(&self, course: &UpdateCourse<'_>) -> Moment {
        fullest(self.moments(course))
    }

    /// Every moment of an update at which memory is allocated or freed.
    fn moments(&self, course: &UpdateCourse<'_>) -> Vec<Moment> {
        let walk = Walk::new(self, self.shards_weights());
        let is_warm = course.is_warm && !walk.scatters;
        let passes = course.micro_batches.iter().enumerate().flat_map(|(index, shape)| {
            let activations = ActivationBytes::new(self, course.keep, *shape);
            walk.forward_backward(&activations, is_warm || index > 0)
        });
        passes.chain([walk.step(course.streams)]).collect()
    }

    /// Size of one block that holds all memory that an update adds. It is computed for the largest micro-batch, rounded up to at most `max_tokens`
    /// and with all tokens scored.
    pub fn block_bytes(&self, course: &UpdateCourse<'_>, max_tokens: usize) -> usize {
        let most = course.micro_batches.iter().map(|shape| shape.tokens).max().unwrap_or(0);
        let tokens = most.next_multiple_of(BLOCK_TOKENS).min(max_tokens.max(most));
        let shares_prompts = course.micro_batches.iter().any(|shape| shape.shares_prompts);
        // As if all tokens were scored and sequences half as long as the shortest, so that the block need not grow for later micro-batches.
        let mean_tokens = course.micro_batches.iter().map(MicroBatchShape::mean_tokens).min().unwrap_or(1);
        let (scored_tokens, num_sequences) = (tokens, tokens.div_ceil((mean_tokens / 2).max(1)));
        let full = [MicroBatchShape { tokens, scored_tokens, num_sequences, shares_prompts, num_top: 0 }; 2];
        let micro_batches = &full[..course.micro_batches.len().min(2)];
        let moments = self.moments(&UpdateCourse { micro_batches, is_warm: false, ..*course });
        let most = moments.iter().map(Moment::on_own_stream).max().unwrap_or(0);
        (most as f64 * (1.0 + BLOCK_MARGIN)) as usize
    }

    /// The moment with the most memory while a micro-batch is scored.
    pub fn fullest_of_scores(&self, shape: MicroBatchShape) -> Moment {
        let activations = ActivationBytes::new(self, GradientCheckpointing::Full, shape);
        fullest(Walk::new(self, self.shards_weights()).forward(&activations))
    }
}

/// The moment with the most memory while a [`super::Reference`] scores beside a model that trains. A reference on the host is copied to the device
/// unit by unit.
pub fn fullest_of_reference(
    table: &ParamTable,
    &TrainedModel { kind, residual, sharers, .. }: &TrainedModel<'_>,
    format: &'static dyn Format,
    on_host: bool,
    shape: MicroBatchShape,
) -> Moment {
    let model =
        TrainedModel { residual, format, sharers, ..TrainedModel::whole(table, 3, kind, GradientOptions::default()) };
    let activations = ActivationBytes::new(&model, GradientCheckpointing::Full, shape);
    fullest(Walk::new(&model, on_host || table.shards > 1).forward(&activations))
}

fn fullest(moments: impl IntoIterator<Item = Moment>) -> Moment {
    moments.into_iter().max_by_key(Moment::total).unwrap_or_default()
}

/// Walks a model's units in the order of the network.
struct Walk<'a> {
    model: &'a TrainedModel<'a>,
    trained: Cow<'a, ParamTable>,
    /// Whether units are gathered for use, overlapping the use of the previous one.
    gathers: bool,
    /// Whether gradients are scattered as each unit's backward ends, overlapping the next unit's.
    scatters: bool,
}

/// One unit in a backward pass.
struct Visit {
    unit: Unit,
    gathered: usize,
    activations: usize,
    /// Bytes of activations at the end of the unit's backward.
    activations_at_end: usize,
}

impl<'a> Walk<'a> {
    fn new(model: &'a TrainedModel<'a>, gathers: bool) -> Self {
        Self { model, trained: model.trained(), gathers, scatters: model.trained_stage() > 1 }
    }

    /// A forward pass without backward.
    fn forward(&self, activations: &ActivationBytes) -> Vec<Moment> {
        let moment =
            |gathered, beside: usize| Moment { gathered, activations: activations.pass + beside, ..Moment::default() };
        let spec = &self.model.table.spec;
        let units = self.model.table.units.iter().map(|layout| layout.unit).filter(|unit| *unit != Unit::DraftHead);
        let at = |unit| {
            let gathered = self.in_use(unit) + self.upcoming(&upcoming(spec, unit, false));
            match unit {
                Unit::Embedding => moment(gathered, 0),
                Unit::Block(layer) => moment(gathered, activations.block_forward[layer]),
                Unit::DraftHead | Unit::Head => moment(gathered, activations.head_forward),
            }
        };
        units.map(at).collect()
    }

    /// A forward and backward pass. With `held` gradients, it starts with the sums of an earlier micro-batch.
    fn forward_backward(&self, activations: &ActivationBytes, held: bool) -> Vec<Moment> {
        let tied = self.model.table.spec.tie_word_embeddings;
        // The gradient of a tied table is held from the head to the end.
        let table = if tied { self.gradient(Unit::Embedding) } else { 0 };
        let mut kept = if held { self.kept_gradients() } else { 0 };
        // The last unit's gradient is still being reduced when the next micro-batch reaches the head.
        let mut reduced = if held && self.scatters { self.gradient(self.trained.units[0].unit) } else { 0 };
        let mut moments = Vec::new();
        for visit in self.visits(activations) {
            let open = if tied && visit.unit == Unit::Embedding { 0 } else { self.gradient(visit.unit) };
            let mut moment = |[gradients, reduced_apart]: [usize; 2], activations| {
                moments.push(Moment {
                    gathered: visit.gathered,
                    gradients,
                    activations,
                    reduced_apart,
                    ..Moment::default()
                });
            };
            let fresh = if held { 0 } else { self.kept_gradient(visit.unit) };
            if self.scatters {
                let whole = table + open + reduced;
                moment([kept + whole, kept], visit.activations);
                kept += fresh;
                let apart = kept + self.sent(visit.unit);
                moment([whole + apart, apart], visit.activations_at_end);
                reduced = open;
            } else {
                kept += fresh;
                moment([kept, 0], visit.activations);
                let apart = self.sent(visit.unit);
                moment([kept + apart, apart], visit.activations_at_end);
            }
        }
        moments
    }

    /// The units of a backward pass, beginning with the head.
    fn visits(&self, activations: &ActivationBytes) -> Vec<Visit> {
        let ActivationBytes { ref saved, ref arriving, pass, stream, head, ref block_backward, .. } = *activations;
        let spec = &self.model.table.spec;
        let num_layers = spec.num_layers();
        let last = num_layers.checked_sub(1).map_or(0, |last| self.block(last));
        let mut visits = vec![Visit {
            unit: Unit::Head,
            gathered: self.in_use(Unit::Head) + last,
            activations: saved[num_layers] + pass + head,
            activations_at_end: saved[num_layers] + pass + stream,
        }];
        visits.extend(spec.draft_head.map(|_| Visit {
            unit: Unit::DraftHead,
            gathered: self.in_use(Unit::DraftHead) + last,
            activations: saved[num_layers] + pass + stream + head.max(activations.most_of_block_backward()),
            activations_at_end: saved[num_layers] + pass + stream,
        }));
        visits.extend((0..num_layers).rev().map(|layer| Visit {
            unit: Unit::Block(layer),
            gathered: self.block(layer) + self.upcoming(&upcoming(spec, Unit::Block(layer), true)),
            activations: saved[layer + 1] + arriving[layer] + pass + block_backward[layer],
            activations_at_end: saved[layer] + pass + stream,
        }));
        visits.push(Visit {
            unit: Unit::Embedding,
            gathered: if num_layers > 0 { self.block(0) } else { 0 },
            activations: pass + stream,
            activations_at_end: pass + stream,
        });
        visits
    }

    /// The optimizer step.
    fn step(&self, streams: bool) -> Moment {
        let buckets = if streams { self.model.optimizer_buckets() } else { 0 };
        let gradients = self.kept_gradients();
        let reduced_apart = if self.scatters { gradients } else { 0 };
        Moment { gradients, buckets, orthogonalized: self.model.orthogonal_bytes(), reduced_apart, ..Moment::default() }
    }

    /// Bytes of a gathered unit.
    fn whole(&self, unit: Unit) -> usize {
        if self.gathers { self.model.kind.elt_size_in_bytes() * self.model.table.unit(unit).len } else { 0 }
    }

    /// Bytes of a gathered or dequantized block.
    fn block(&self, layer: usize) -> usize {
        match self.model.quantization {
            Quantization::None => self.whole(Unit::Block(layer)),
            _ => self.model.kind.elt_size_in_bytes() * self.model.table.unit(Unit::Block(layer)).len,
        }
    }

    /// Bytes of units that are gathered ahead; quantized blocks are dequantized one at a time.
    fn upcoming(&self, units: &[Unit]) -> usize {
        units.iter().map(|&unit| self.whole(unit)).sum()
    }

    /// Bytes of weights that a pass needs at a unit, including a tied table for the logits.
    fn in_use(&self, unit: Unit) -> usize {
        match unit {
            Unit::Embedding => self.whole(unit),
            Unit::Block(layer) => self.block(layer),
            Unit::DraftHead => self.upcoming(&[Unit::Embedding, Unit::DraftHead, Unit::Head]),
            Unit::Head => self.upcoming(&head_units(&self.model.table.spec)),
        }
    }

    /// Bytes of a whole unit's gradient; 0 for a frozen unit.
    fn gradient(&self, unit: Unit) -> usize {
        let layout = self.trained.units.iter().find(|layout| layout.unit == unit);
        self.model.gradient_kinds().accumulated.elt_size_in_bytes() * layout.map_or(0, |layout| layout.len)
    }

    /// Bytes of a unit's gradient that this rank keeps.
    fn kept_gradient(&self, unit: Unit) -> usize {
        self.gradient(unit) / if self.scatters { self.trained.shards } else { 1 }
    }

    fn kept_gradients(&self) -> usize {
        self.trained.units.iter().map(|layout| self.kept_gradient(layout.unit)).sum()
    }

    /// Bytes of a copy of a unit's gradient in the dtype that ranks exchange.
    fn sent(&self, unit: Unit) -> usize {
        let kinds = self.model.gradient_kinds();
        let is_cast = kinds.reduced != kinds.accumulated && self.trained.shards > 1;
        let [sent, own] = [kinds.reduced, kinds.accumulated].map(|kind| kind.elt_size_in_bytes());
        if is_cast { self.gradient(unit) / own * sent } else { 0 }
    }
}
