//! Pipeline stages: consecutive layers, with each stage on its own ranks. The first stage has the embedding, the last the head.

use std::ops::Range;

use super::spec::{ModelSpec, Unit};
use crate::config::PipelinePartition;
use crate::error::{Error, Result};

/// The partition of a model's layers into pipeline stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    bounds: Vec<usize>, // stage s has the layers bounds[s]..bounds[s + 1]
}

/// One stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Index of the stage in the pipeline, from 0.
    pub index: usize,
    /// Number of stages in the pipeline.
    pub num_stages: usize,
    /// Indices of the layers that the stage computes.
    pub layers: Range<usize>,
}

impl Stages {
    /// A single stage with all layers.
    pub fn one(spec: &ModelSpec) -> Self {
        Self { bounds: vec![0, spec.num_layers()] }
    }

    /// Partitions a model into `num_stages` stages with the numbers of layers in `partition`. If `partition` is empty, minimizes the predicted time
    /// of the slowest stage, where a layer or the head takes the time needed to read its weights.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `pipeline_parallel_size`, if there are more stages than attention layers; for `pipeline_partition`, if it does not
    /// have one number per stage, if the sum is not the model's number of layers, or if a stage has no attention layer.
    pub fn new(spec: &ModelSpec, num_stages: usize, partition: &[usize]) -> Result<Self> {
        let (num_layers, most) = (spec.num_layers(), spec.attention_layers().count());
        if !(1..=most).contains(&num_stages) {
            let numbers = if most > 1 { format!("1 to {most}") } else { "1".to_owned() };
            let expected = format!("{numbers}, as every stage needs at least one layer with attention");
            return Err(Error::invalid_value("pipeline_parallel_size", num_stages, expected));
        }
        let sizes = match partition {
            [] => sizes_by_time(spec, num_stages),
            sizes => sizes.to_vec(),
        };
        let refuse = |expected: String| {
            Err(Error::invalid_value("pipeline_partition", PipelinePartition(sizes.clone()), expected))
        };
        if sizes.len() != num_stages || sizes.contains(&0) {
            return refuse(match num_stages {
                1 => format!("none, or pipeline_parallel_size = {}: by default there is one stage", sizes.len()),
                _ => format!("the numbers of layers of {num_stages} stages (pipeline_parallel_size), at least 1 each"),
            });
        }
        let sum = sizes.iter().try_fold(0, |sum: usize, size| sum.checked_add(*size));
        if sum != Some(num_layers) {
            return refuse(format!("a sum of {num_layers}, the model's number of layers"));
        }
        let bounds = std::iter::once(0).chain(sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        }));
        let stages = Self { bounds: bounds.collect() };
        let has_attention =
            |index: &usize| spec.attention_layers().any(|layer| stages.stage(*index).layers.contains(&layer));
        match (0..num_stages).find(|index| !has_attention(index)) {
            Some(index) => {
                refuse(format!("a layer with attention in every stage, but stage {index} has only gated delta nets"))
            }
            None => Ok(stages),
        }
    }

    /// Number of stages.
    pub fn count(&self) -> usize {
        self.bounds.len() - 1
    }

    /// The stage with this index.
    ///
    /// # Panics
    /// If there is no such stage.
    pub fn stage(&self, index: usize) -> Stage {
        Stage { index, num_stages: self.count(), layers: self.bounds[index]..self.bounds[index + 1] }
    }

    /// All stages, in order.
    pub fn iter(&self) -> impl Iterator<Item = Stage> + '_ {
        (0..self.count()).map(|index| self.stage(index))
    }
}

impl Stage {
    /// Whether this is the first stage, which embeds the tokens.
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Whether this is the last stage, which samples tokens.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.num_stages
    }

    /// Whether the stage needs the embedding table: the first stage embeds tokens; the last uses it as its head if the two are tied.
    pub fn has_table(&self, spec: &ModelSpec) -> bool {
        self.is_first() || (self.is_last() && spec.tie_word_embeddings)
    }

    /// The units of the model that the stage computes with, in order.
    pub fn units(&self, spec: &ModelSpec) -> Vec<Unit> {
        let embedding = self.has_table(spec).then_some(Unit::Embedding);
        let draft_head = spec.draft_head.filter(|_| self.is_last()).map(|_| Unit::DraftHead);
        let head = draft_head.into_iter().chain(self.is_last().then_some(Unit::Head));
        embedding.into_iter().chain(self.layers.clone().map(Unit::Block)).chain(head).collect()
    }
}

impl ModelSpec {
    /// The model reduced to a range of its layers, numbered from 0.
    pub fn of_layers(&self, layers: &Range<usize>) -> Self {
        Self { layers: self.layers[layers.clone()].to_vec(), ..self.clone() }
    }
}

/// Numbers of layers per stage that minimize the weights read by the slowest stage; among these, the partition whose stages differ least.
///
/// # Panics
/// If there are more stages than attention layers, since each stage needs at least one.
fn sizes_by_time(spec: &ModelSpec, num_stages: usize) -> Vec<usize> {
    let numel = |unit| spec.shapes(unit).iter().map(|(_, shape)| shape.iter().product::<i64>() as f64).sum::<f64>();
    let head = spec.vocab_size as f64 * spec.hidden_size as f64; // its table may be tied to the embedding's
    let mut read = vec![0.0]; // weights read by the layers before each index
    for layer in 0..spec.num_layers() {
        read.push(read[layer] + numel(Unit::Block(layer)));
    }
    let attention: Vec<usize> = spec.attention_layers().collect();
    let time = |from: usize, to: usize| {
        let has_attention = attention.iter().any(|layer| (from..to).contains(layer));
        has_attention.then(|| read[to] - read[from] + if to == spec.num_layers() { head } else { 0.0 })
    };
    let cut = || {
        let (slowest, _) = best_cut(spec.num_layers(), num_stages, time, f64::max)?;
        let within = |from, to| time(from, to).filter(|time| *time <= slowest).map(|time| time * time);
        best_cut(spec.num_layers(), num_stages, within, |a, b| a + b)
    };
    cut().expect("every stage can have a layer with attention").1
}

/// Finds the cheapest partition of `len` layers into `count` parts and returns its cost and the parts' sizes. `join` adds a part's cost to that of
/// the parts before it. Returns `None` if `cost` permits no partition.
fn best_cut(
    len: usize,
    count: usize,
    cost: impl Fn(usize, usize) -> Option<f64>,
    join: impl Fn(f64, f64) -> f64,
) -> Option<(f64, Vec<usize>)> {
    let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; len + 1]; // for the layers before each index
    best[0] = Some((0.0, Vec::new()));
    for _ in 0..count {
        let extend = |to: usize| {
            let cuts = (0..to).filter_map(|from| {
                let (before, sizes) = best[from].as_ref()?;
                Some((join(*before, cost(from, to)?), sizes, to - from))
            });
            // Among equally cheap partitions, take the one with the smallest last part.
            let least = cuts.min_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
            least.map(|(cost, sizes, size)| (cost, [sizes.as_slice(), &[size]].concat()))
        };
        best = (0..=len).map(extend).collect();
    }
    best.pop().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(stages: &Stages) -> Vec<usize> {
        stages.iter().map(|stage| stage.layers.len()).collect()
    }

    #[test]
    fn pipeline_stages_account_for_the_cost_of_the_head() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let cut = |num_stages| sizes(&Stages::new(&spec, num_stages, &[]).unwrap());
        assert_eq!(cut(1), [28]);
        assert_eq!(cut(2), [15, 13]);
        assert_eq!(cut(3), [10, 10, 8]);
        assert_eq!(cut(28), [1; 28]);
        let four = cut(4);
        assert_eq!((four.iter().sum::<usize>(), four[3] < four[0]), (28, true), "{four:?}");
        assert_eq!(Stages::one(&spec), Stages::new(&spec, 1, &[28]).unwrap());
    }

    #[test]
    fn pipeline_stages_share_only_a_tied_embedding() {
        let spec = ModelSpec::preset("micro").unwrap().with_num_layers(5);
        let stages = Stages::new(&spec, 3, &[1, 3, 1]).unwrap();
        let units: Vec<_> = stages.iter().map(|stage| stage.units(&spec)).collect();
        assert_eq!(units[0], [Unit::Embedding, Unit::Block(0)]);
        assert_eq!(units[1], [1, 2, 3].map(Unit::Block));
        assert_eq!(units[2], [Unit::Embedding, Unit::Block(4), Unit::Head]);
        let untied = ModelSpec { tie_word_embeddings: false, ..spec };
        assert_eq!(stages.stage(2).units(&untied), [Unit::Block(4), Unit::Head]);
    }

    #[test]
    fn a_pipeline_stage_has_the_blocks_of_its_layers() {
        for name in ["qwen3.5-9b", "qwen3-30b-a3b"] {
            let spec = ModelSpec::preset(name).unwrap();
            for stage in Stages::new(&spec, 3, &[]).unwrap().iter() {
                let own = spec.of_layers(&stage.layers);
                assert_eq!(own.num_layers(), stage.layers.len());
                for (place, layer) in stage.layers.clone().enumerate() {
                    assert_eq!(own.layers[place], spec.layers[layer], "{name}, layer {layer}");
                }
            }
        }
    }

    #[test]
    fn errors_about_pipeline_partitions_state_the_valid_range() {
        let spec = ModelSpec::preset("qwen2.5-7b").unwrap();
        let refused = |spec: &ModelSpec, num_stages, partition: &[usize]| {
            Stages::new(spec, num_stages, partition).unwrap_err().to_string()
        };
        let too_many = refused(&spec, 29, &[]);
        assert!(too_many.starts_with("pipeline_parallel_size = 29: expected 1 to 28"), "{too_many}");
        let sum = refused(&spec, 3, &[10, 10, 9]);
        assert_eq!(sum, "pipeline_partition = 10,10,9: expected a sum of 28, the model's number of layers");
        assert!(refused(&spec, 2, &[10, 10, 8]).contains("layers of 2 stages"));
        assert!(refused(&spec, 2, &[28, 0]).contains("at least 1 each"));
        assert!(refused(&spec, 2, &[usize::MAX, 29]).contains("a sum of 28"));
        let hybrid = ModelSpec::preset("qwen3.5-9b").unwrap();
        let rest = hybrid.num_layers() - 1;
        assert!(refused(&hybrid, 2, &[1, rest]).contains("stage 0 has only gated delta nets"));
        assert_eq!(Stages::new(&hybrid, 8, &[]).unwrap().count(), 8);
        let few = refused(&hybrid, 9, &[]);
        assert_eq!(
            few,
            "pipeline_parallel_size = 9: expected 1 to 8, as every stage needs at least one layer with attention"
        );
    }
}
