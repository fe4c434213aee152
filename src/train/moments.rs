//! The fullest moment of training. Units are walked in the network's own order, and at each are added up what is gathered, what
//! gradients there are and what activations: the maxima of the three need not fall together.

#[cfg(test)]
mod tests;

use std::borrow::Cow;

use super::activations::{ActivationBytes, MicroBatchShape};
use super::bytes::TrainedModel;
use super::gradients::GradientOptions;
use super::upcoming::{head_units, upcoming};
use crate::config::{GradientCheckpointing, Quantization};
use crate::model::{Format, ParamTable, Unit};

/// Bytes that a rank holds at one moment beside what it holds between uses, gradients included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Moment {
    /// Whole units of weights that are sharded, quantised or on the host.
    pub gathered: usize,
    /// This rank's gradients so far, and those of whole units that are being made or reduced.
    pub gradients: usize,
    /// Activations.
    pub activations: usize,
    /// Optimizer state that flows through the device.
    pub buckets: usize,
    /// Whole matrices that Muon orthogonalises.
    pub orthogonalized: usize,
    /// Bytes of gradients that are made on the stream of collectives, whose memory libtorch caches apart.
    #[serde(skip)]
    pub reduced_apart: usize,
}

impl Moment {
    /// All of them.
    pub fn total(&self) -> usize {
        self.gathered + self.gradients + self.activations + self.buckets + self.orthogonalized
    }

    /// Bytes on libtorch's own stream.
    fn on_own_stream(&self) -> usize {
        self.total() - self.reduced_apart
    }
}

/// How an update comes by its gradients.
#[derive(Debug, Clone, Copy)]
pub struct UpdateCourse<'a> {
    /// The activations that backward recomputes.
    pub keep: GradientCheckpointing,
    /// Micro-batches of the update, in order.
    pub micro_batches: &'a [MicroBatchShape],
    /// Whether the memory of whole gradients is there from the update before.
    pub is_warm: bool,
    /// Whether optimizer state lives on the host and flows through the device in the step.
    pub streams: bool,
}

/// Most that tensors of many sizes, cut from one block in turn, leave unused between them. A simulation of libtorch's allocator over
/// long-tailed updates of 7B and 1.5B had 0.1 to 1.8 %.
const BLOCK_MARGIN: f64 = 0.03;
/// Tokens that the micro-batches of a block are rounded up to, so that it need not grow at every step.
const BLOCK_TOKENS: usize = 1024;

impl TrainedModel<'_> {
    /// The fullest moment of an update.
    pub fn fullest(&self, course: &UpdateCourse<'_>) -> Moment {
        fullest(self.moments(course))
    }

    /// Every moment of an update at which something comes or goes.
    fn moments(&self, course: &UpdateCourse<'_>) -> Vec<Moment> {
        let walk = Walk::new(self, self.shards_weights());
        let is_warm = course.is_warm && !walk.scatters;
        let passes = course.micro_batches.iter().enumerate().flat_map(|(index, shape)| {
            let activations = ActivationBytes::new(self, course.keep, *shape);
            walk.forward_backward(&activations, is_warm || index > 0)
        });
        passes.chain([walk.step(course.streams)]).collect()
    }

    /// Size of one block that holds everything an update makes beside what there is between updates: that of its largest
    /// micro-batch, rounded up towards the budget of `max_tokens` and with all tokens scored.
    pub fn block_bytes(&self, course: &UpdateCourse<'_>, max_tokens: usize) -> usize {
        let most = course.micro_batches.iter().map(|shape| shape.tokens).max().unwrap_or(0);
        let tokens = most.next_multiple_of(BLOCK_TOKENS).min(max_tokens.max(most));
        let shares_prompts = course.micro_batches.iter().any(|shape| shape.shares_prompts);
        let full = [MicroBatchShape { tokens, scored_tokens: tokens, shares_prompts, num_top: 0 }; 2];
        let micro_batches = &full[..course.micro_batches.len().min(2)];
        let moments = self.moments(&UpdateCourse { micro_batches, is_warm: false, ..*course });
        let most = moments.iter().map(Moment::on_own_stream).max().unwrap_or(0);
        (most as f64 * (1.0 + BLOCK_MARGIN)) as usize
    }

    /// The fullest moment of scoring a micro-batch.
    pub fn fullest_of_scores(&self, shape: MicroBatchShape) -> Moment {
        let activations = ActivationBytes::new(self, GradientCheckpointing::Full, shape);
        fullest(Walk::new(self, self.shards_weights()).forward(&activations))
    }
}

/// The fullest moment of the scoring of a [`super::Reference`] beside a model that trains, in a format: one on the host comes to the device
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

/// A model on its way through the network.
struct Walk<'a> {
    model: &'a TrainedModel<'a>,
    trained: Cow<'a, ParamTable>,
    /// Units are gathered for use, the next one beside the one in use.
    gathers: bool,
    /// Gradients are scattered as each unit's backward ends, beside the next unit's.
    scatters: bool,
}

/// A unit's part of a backward pass.
struct Visit {
    unit: Unit,
    gathered: usize,
    activations: usize,
    /// Bytes of activations when the unit's backward ends.
    activations_at_end: usize,
}

impl<'a> Walk<'a> {
    fn new(model: &'a TrainedModel<'a>, gathers: bool) -> Self {
        Self { model, trained: model.trained(), gathers, scatters: model.trained_stage() > 1 }
    }

    /// A forward without backward.
    fn forward(&self, activations: &ActivationBytes) -> Vec<Moment> {
        let moment =
            |gathered, beside: usize| Moment { gathered, activations: activations.pass + beside, ..Moment::default() };
        let spec = &self.model.table.spec;
        let units = self.model.table.units.iter().map(|layout| layout.unit).filter(|unit| *unit != Unit::DraftHead);
        let at = |unit| {
            let gathered = self.in_use(unit) + self.upcoming(&upcoming(spec, unit, false));
            match unit {
                Unit::Embedding => moment(gathered, 0),
                Unit::Block(_) => moment(gathered, activations.block_forward),
                Unit::DraftHead | Unit::Head => moment(gathered, activations.head_forward),
            }
        };
        units.map(at).collect()
    }

    /// A forward and its backward. With gradients `held`, they begin as sums of an earlier micro-batch.
    fn forward_backward(&self, activations: &ActivationBytes, held: bool) -> Vec<Moment> {
        let tied = self.model.table.spec.tie_word_embeddings;
        // A tied table's gradient is open from the head to the end.
        let table = if tied { self.gradient(Unit::Embedding) } else { 0 };
        let mut kept = if held { self.kept_gradients() } else { 0 };
        // The last unit's is still being reduced when the next micro-batch comes to its head.
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

    /// The units of a backward pass, from the head.
    fn visits(&self, activations: &ActivationBytes) -> Vec<Visit> {
        let ActivationBytes { ref saved, ref arriving, pass, stream, head, block_backward, .. } = *activations;
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
            activations: saved[num_layers] + pass + stream + head.max(block_backward),
            activations_at_end: saved[num_layers] + pass + stream,
        }));
        visits.extend((0..num_layers).rev().map(|layer| Visit {
            unit: Unit::Block(layer),
            gathered: self.block(layer) + self.upcoming(&upcoming(spec, Unit::Block(layer), true)),
            activations: saved[layer + 1] + arriving[layer] + pass + block_backward,
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

    /// The optimizer's step.
    fn step(&self, streams: bool) -> Moment {
        let buckets = if streams { self.model.optimizer_buckets() } else { 0 };
        let gradients = self.kept_gradients();
        let reduced_apart = if self.scatters { gradients } else { 0 };
        Moment { gradients, buckets, orthogonalized: self.model.orthogonal_bytes(), reduced_apart, ..Moment::default() }
    }

    /// A gathered unit.
    fn whole(&self, unit: Unit) -> usize {
        if self.gathers { self.model.kind.elt_size_in_bytes() * self.model.table.unit(unit).len } else { 0 }
    }

    /// A gathered or dequantised block.
    fn block(&self, layer: usize) -> usize {
        match self.model.quantization {
            Quantization::None => self.whole(Unit::Block(layer)),
            _ => self.model.kind.elt_size_in_bytes() * self.model.table.unit(Unit::Block(layer)).len,
        }
    }

    /// Units on their way beside the one in use; quantised blocks come one at a time.
    fn upcoming(&self, units: &[Unit]) -> usize {
        units.iter().map(|&unit| self.whole(unit)).sum()
    }

    /// Bytes that a pass needs at a unit; logits need a tied table, too.
    fn in_use(&self, unit: Unit) -> usize {
        match unit {
            Unit::Embedding => self.whole(unit),
            Unit::Block(layer) => self.block(layer),
            Unit::DraftHead => self.upcoming(&[Unit::Embedding, Unit::DraftHead, Unit::Head]),
            Unit::Head => self.upcoming(&head_units(&self.model.table.spec)),
        }
    }

    /// A whole unit's gradient; 0 for a frozen one.
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

    /// A copy of a unit's gradient in the kind that ranks send.
    fn sent(&self, unit: Unit) -> usize {
        let kinds = self.model.gradient_kinds();
        let is_cast = kinds.reduced != kinds.accumulated && self.trained.shards > 1;
        let [sent, own] = [kinds.reduced, kinds.accumulated].map(|kind| kind.elt_size_in_bytes());
        if is_cast { self.gradient(unit) / own * sent } else { 0 }
    }
}
