//! The fullest moment of training. Units are walked in the network's own order, and at each are added up what is gathered, what
//! gradients there are and what activations: the maxima of the three need not fall together.

use std::borrow::Cow;

use tch::Kind;

use super::activations::{ActivationBytes, MicroBatchShape};
use super::bytes::TrainedModel;
use super::policy::GradientOptions;
use crate::config::{GradientCheckpointing, Quantization};
use crate::model::{ParamTable, Unit};

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
    /// Of the gradients, those that are made on the stream of collectives, whose memory libtorch caches apart.
    #[serde(skip)]
    pub reduced_apart: usize,
}

impl Moment {
    /// All of them.
    pub fn total(&self) -> usize {
        self.gathered + self.gradients + self.activations + self.buckets
    }

    /// Of libtorch's own stream.
    fn on_own_stream(&self) -> usize {
        self.total() - self.reduced_apart
    }
}

/// How an update comes by its gradients.
#[derive(Debug, Clone, Copy)]
pub struct UpdateCourse<'a> {
    /// What backward computes again.
    pub keep: GradientCheckpointing,
    /// Its micro-batches, in order.
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
        let full = [MicroBatchShape { tokens, scored_tokens: tokens, shares_prompts }; 2];
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

/// The fullest moment of a [`super::Reference`]'s scoring: one on the host comes to the device unit by unit.
pub fn fullest_of_reference(
    table: &ParamTable,
    (kind, residual): (Kind, Kind),
    on_host: bool,
    shape: MicroBatchShape,
) -> Moment {
    let model = TrainedModel { residual, ..TrainedModel::whole(table, 3, kind, GradientOptions::default()) };
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
    /// The same when its backward ends.
    activations_at_end: usize,
}

impl<'a> Walk<'a> {
    fn new(model: &'a TrainedModel<'a>, gathers: bool) -> Self {
        Self { model, trained: model.trained(), gathers, scatters: model.trained_stage() > 1 }
    }

    fn num_layers(&self) -> usize {
        self.model.table.spec.num_layers
    }

    /// A forward without backward.
    fn forward(&self, activations: &ActivationBytes) -> Vec<Moment> {
        let moment =
            |gathered, beside: usize| Moment { gathered, activations: activations.pass + beside, ..Moment::default() };
        let num_layers = self.num_layers();
        let mut moments = vec![moment(self.whole(Unit::Embedding) + self.upcoming(0), 0)];
        for layer in 0..num_layers {
            let next = if layer + 1 < num_layers { self.upcoming(layer + 1) } else { self.head() };
            moments.push(moment(self.block(layer) + next, activations.block_forward));
        }
        moments.push(moment(self.head(), activations.head_forward));
        moments
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
                moments.push(Moment { gathered: visit.gathered, gradients, activations, buckets: 0, reduced_apart });
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
        let ActivationBytes { saved, pass, stream, head, block_backward, .. } = *activations;
        let num_layers = self.num_layers();
        let last = num_layers.checked_sub(1).map_or(0, |last| self.block(last));
        let mut visits = vec![Visit {
            unit: Unit::Head,
            gathered: self.head() + last,
            activations: num_layers * saved + pass + head,
            activations_at_end: num_layers * saved + pass + stream,
        }];
        visits.extend((0..num_layers).rev().map(|layer| Visit {
            unit: Unit::Block(layer),
            gathered: self.block(layer) + layer.checked_sub(1).map_or(0, |next| self.upcoming(next)),
            activations: (layer + 1) * saved + pass + block_backward,
            activations_at_end: layer * saved + pass + stream,
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
        let buckets = if streams { self.model.bytes().optimizer_buckets } else { 0 };
        let gradients = self.kept_gradients();
        let reduced_apart = if self.scatters { gradients } else { 0 };
        Moment { gradients, buckets, reduced_apart, ..Moment::default() }
    }

    /// A gathered unit.
    fn whole(&self, unit: Unit) -> usize {
        if self.gathers { self.model.kind.elt_size_in_bytes() * self.model.table.unit(unit).len } else { 0 }
    }

    /// A gathered or dequantised block.
    fn block(&self, layer: usize) -> usize {
        match self.model.quantization {
            Quantization::None => self.whole(Unit::Block(layer)),
            Quantization::Nf4 => self.model.kind.elt_size_in_bytes() * self.model.table.unit(Unit::Block(layer)).len,
        }
    }

    /// The block on its way beside another; quantised ones come one at a time.
    fn upcoming(&self, layer: usize) -> usize {
        if self.gathers { self.block(layer) } else { 0 }
    }

    /// The units that logits need.
    fn head(&self) -> usize {
        let tied = self.model.table.spec.tie_word_embeddings;
        self.whole(Unit::Head) + if tied { self.whole(Unit::Embedding) } else { 0 }
    }

    /// A whole unit's gradient; 0 for a frozen one.
    fn gradient(&self, unit: Unit) -> usize {
        let layout = self.trained.units.iter().find(|layout| layout.unit == unit);
        self.model.gradient_kinds().accumulated.elt_size_in_bytes() * layout.map_or(0, |layout| layout.len)
    }

    /// What this rank keeps of it.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::TargetModule;
    use crate::model::{LoraSpec, ModelSpec};
    use crate::train::WORKSPACE_BYTES;
    use GradientCheckpointing::{Full, None as Nothing, Selective};

    const KIND: Kind = Kind::BFloat16;

    /// What `bench train` ran and libtorch held at most, in GB (docs/benchmarks.md).
    struct Measured {
        model: &'static str,
        ranks: usize,
        stage: u8,
        adapters: Option<Quantization>,
        keep: Option<GradientCheckpointing>, // None: scores alone
        tokens: &'static [(usize, usize)],   // of each micro-batch: all, and the scored ones
        shares_prompts: bool,
        residual: Kind,
        gb: f64,
    }

    impl Measured {
        fn predicted_gb(&self) -> f64 {
            let spec = Arc::new(ModelSpec::preset(self.model).unwrap());
            let table = ParamTable::new(spec, self.ranks);
            let targets = TargetModule::ALL.to_vec();
            let model = TrainedModel {
                lora: self.adapters.map(|_| LoraSpec { r: 64, alpha: 32.0, dropout: 0.0, targets }),
                quantization: self.adapters.unwrap_or(Quantization::None),
                residual: self.residual,
                ..TrainedModel::whole(&table, self.stage, KIND, GradientOptions::default())
            };
            let shape = |&(tokens, scored_tokens): &(usize, usize)| MicroBatchShape {
                tokens,
                scored_tokens,
                shares_prompts: self.shares_prompts,
            };
            let shapes: Vec<_> = self.tokens.iter().map(shape).collect();
            let fullest = match self.keep {
                None => model.fullest_of_scores(shapes[0]),
                Some(keep) => {
                    model.fullest(&UpdateCourse { keep, micro_batches: &shapes, is_warm: true, streams: false })
                }
            };
            (model.bytes().weights + fullest.total() + WORKSPACE_BYTES) as f64 / 1e9
        }
    }

    #[test]
    fn peaks_are_those_that_were_measured_on_gpus() {
        const ONE: &[(usize, usize)] = &[(16_384, 8_192)];
        const GROUPS: &[(usize, usize)] = &[(17_408, 16_384); 2];
        const SEPARATE: &[(usize, usize)] = &[(16_896, 11_264), (16_896, 11_264), (15_360, 10_240)];
        let row = |model, ranks, stage, keep, tokens, gb| Measured {
            model,
            ranks,
            stage,
            adapters: None,
            keep,
            tokens,
            shares_prompts: false,
            residual: KIND,
            gb,
        };
        let adapted = |model, quantization, keep, gb| Measured {
            adapters: Some(quantization),
            ..row(model, 1, 2, Some(keep), ONE, gb)
        };
        let shared = |row| Measured { shares_prompts: true, ..row };
        let of_float32 = |row| Measured { residual: Kind::Float, ..row };
        let rows = [
            row("qwen2.5-1.5b", 1, 2, Some(Nothing), ONE, 32.65),
            row("qwen2.5-1.5b", 1, 2, Some(Selective), ONE, 16.79),
            row("qwen2.5-1.5b", 1, 2, Some(Full), ONE, 12.24),
            row("qwen2.5-0.5b", 1, 2, Some(Nothing), ONE, 14.24),
            row("qwen2.5-0.5b", 1, 2, Some(Full), &[(8_192, 4_096); 2], 3.86),
            shared(row("qwen2.5-1.5b", 1, 2, Some(Nothing), GROUPS, 34.15)),
            row("qwen2.5-1.5b", 1, 2, Some(Nothing), SEPARATE, 33.39),
            shared(row("qwen2.5-7b", 2, 2, Some(Selective), GROUPS, 51.70)),
            row("qwen2.5-7b", 2, 2, Some(Selective), SEPARATE, 51.15),
            row("qwen2.5-7b", 2, 3, Some(Full), ONE, 27.13),
            row("qwen2.5-7b", 1, 2, None, ONE, 17.77),
            adapted("qwen2.5-1.5b", Quantization::None, Selective, 11.08),
            adapted("qwen2.5-7b", Quantization::None, Full, 22.81),
            adapted("qwen2.5-7b", Quantization::None, Nothing, 66.80),
            adapted("qwen2.5-7b", Quantization::Nf4, Full, 13.62),
            adapted("qwen2.5-14b", Quantization::None, Full, 42.27),
            of_float32(row("qwen2.5-1.5b", 1, 2, Some(Nothing), ONE, 35.51)),
            of_float32(row("qwen2.5-1.5b", 1, 2, Some(Full), ONE, 13.75)),
            of_float32(adapted("qwen2.5-1.5b", Quantization::None, Selective, 13.95)),
        ];
        for row in rows {
            let (predicted, Measured { model, ranks, stage, adapters, keep, gb, .. }) = (row.predicted_gb(), &row);
            let off = predicted / gb - 1.0;
            println!("{model}, {ranks} ranks, stage {stage}, {adapters:?}, {keep:?}: {predicted:.2}, measured {gb:.2}");
            assert!(off.abs() < 0.01, "{model}, {ranks} ranks, {stage}, {adapters:?}, {keep:?}: {predicted}, not {gb}");
        }
    }

    /// The block of an update is the fullest moment of its largest micro-batch less what collectives hold, and of one size for
    /// all micro-batches that round up alike.
    #[test]
    fn a_block_holds_the_largest_micro_batch_and_seldom_grows() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 4);
        let of_stage = |stage| TrainedModel::whole(&table, stage, KIND, GradientOptions::default());
        let shape = |tokens| MicroBatchShape { tokens, scored_tokens: tokens / 2, shares_prompts: false };
        let block = |stage, tokens: &[usize]| {
            let micro_batches: Vec<_> = tokens.iter().map(|&tokens| shape(tokens)).collect();
            let course = UpdateCourse { keep: Nothing, micro_batches: &micro_batches, is_warm: true, streams: false };
            of_stage(stage).block_bytes(&course, 16_384)
        };
        let sizes = [[16_384, 16_384], [15_500, 700], [3_000, 16_000]].map(|tokens| block(2, &tokens));
        assert!(sizes.iter().all(|&size| size == sizes[0]), "{sizes:?}");
        assert!(block(2, &[15_000, 700]) < sizes[0] && block(2, &[20_000]) > sizes[0]);

        let full = [MicroBatchShape { scored_tokens: 16_384, ..shape(16_384) }; 2];
        let course = UpdateCourse { keep: Nothing, micro_batches: &full, is_warm: false, streams: false };
        let model = of_stage(2);
        let (fullest, slices) = (model.fullest(&course).total(), model.bytes().gradients);
        let ratio = sizes[0] as f64 / (fullest - slices) as f64;
        assert!((ratio - 1.0 - BLOCK_MARGIN).abs() < 1e-6, "{ratio}: slices lie in memory of the collectives' stream");
        assert!(block(1, &[16_384, 16_384]) > sizes[0] + slices, "kept whole, gradients lie in the block");
    }

    /// Gradients grow while activations go: with one micro-batch the sum is below both maxima together, with two it is not.
    #[test]
    fn maxima_of_classes_need_not_fall_together() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-7b").unwrap()), 2);
        let model = TrainedModel::whole(&table, 3, KIND, GradientOptions::default());
        let shape = MicroBatchShape { tokens: 16_384, scored_tokens: 8_192, shares_prompts: false };
        let fullest = |keep, count| {
            let micro_batches = &[shape; 2][..count];
            model.fullest(&UpdateCourse { keep, micro_batches, is_warm: false, streams: false })
        };
        for keep in [Nothing, Selective, Full] {
            let (one, two) = (fullest(keep, 1), fullest(keep, 2));
            assert!(one.total() < two.total() && two.gradients > model.bytes().gradients, "{one:?} {two:?}");
        }
        let (early, late) = (fullest(Nothing, 1), fullest(Full, 1));
        assert!(early.activations > late.activations && early.gradients < late.gradients, "{early:?} {late:?}");
        let step = UpdateCourse { keep: Full, micro_batches: &[], is_warm: false, streams: true };
        assert_eq!(model.fullest(&step).buckets, model.bytes().optimizer_buckets);
    }
}
