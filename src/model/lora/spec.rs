//! Settings of adapters, and the shapes of their parameters beside a model's matrices.

use std::path::Path;

use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::config::{LoraConfig, Quantization, TargetModule};
use crate::error::{Error, Result};
use crate::model::families::FusedTensor;
use crate::model::spec::{LinearSpec, MLP, ModelSpec, ParamName, Projection, Shapes, product, room};

/// Settings of adapters: which projections, of which rank, with which scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// Rank.
    pub r: usize,
    /// Numerator of the scale, alpha / r.
    pub alpha: f64,
    /// Chance that an element of an adapter's input is dropped in training. The projections of one fused matrix share
    /// their input's mask.
    pub dropout: f64,
    /// Adapted projections, each once, in [`TargetModule`]'s order; all of them are those that the model has.
    pub targets: Vec<TargetModule>,
}

/// The model that adapters were trained beside.
#[derive(Debug, Clone, Copy)]
pub struct AdapterBase<'a> {
    /// The folder of the model.
    pub folder: &'a Path,
    /// How its weights were stored while the adapters were trained.
    pub quantization: Quantization,
}

/// Elements of what adapters' B is expanded to.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpandedElements {
    /// Of all blocks.
    pub all: usize,
    /// Of the block that has the most.
    pub most: usize,
}

impl LoraSpec {
    /// The adapters that a configuration asks for; `None` trains all weights.
    pub fn new(config: &LoraConfig) -> Option<Self> {
        let LoraConfig { r, alpha, dropout, target_modules } = config;
        Some(Self { r: (*r)?, alpha: *alpha, dropout: *dropout, targets: target_modules.modules() })
    }

    /// Whether a model's matrices can be adapted so.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `lora.target_modules` for projections that the model does not have or has in one tensor with others, and on
    /// `lora.target_modules` and `lora.dropout` for experts' adapters that PEFT would not read.
    pub fn check(&self, spec: &ModelSpec) -> Result<()> {
        let refuse = |expected: &str| Err(Error::invalid_value("lora.target_modules", names(&self.targets), expected));
        let own = modules(spec);
        let strange = self.targets.iter().find(|module| !own.contains(module));
        if let Some(module) = strange.filter(|_| self.targets != TargetModule::ALL) {
            return refuse(&format!("modules among {}: this model has no {}", names(&own), module.name()));
        }
        let targets: Vec<_> = self.targets.iter().map(|module| module.name()).collect();
        let settings =
            [("lora.r", self.r.into()), ("lora.dropout", self.dropout.into()), ("lora.target_modules", targets.into())];
        spec.check_with(settings)?;
        for fused in spec.family.traits().fused_tensors {
            let count = fused.modules.iter().filter(|module| self.targets.contains(module)).count();
            if count > 0 && count < fused.modules.len() {
                return refuse(&format!(
                    "all of {} or none: PEFT adapts {} as one module",
                    names(fused.modules),
                    fused.name
                ));
            }
        }
        if !self.adapts_experts(spec) {
            return Ok(());
        }
        let of_mlp: Vec<_> = self.targets.iter().filter(|&&module| room(module) == MLP).collect();
        if ![&[GateProj, UpProj, DownProj][..], &[DownProj]].iter().any(|all| of_mlp.iter().copied().eq(*all)) {
            return refuse(
                "gate_proj, up_proj and down_proj together, down_proj alone, or none of them: PEFT supports no other \
                 adapters of experts",
            );
        }
        Ok(())
    }

    /// Whether projections of experts are adapted.
    pub(super) fn adapts_experts(&self, spec: &ModelSpec) -> bool {
        spec.num_expert_layers() > 0 && self.targets.iter().any(|&module| room(module) == MLP)
    }

    /// The adapted projections that the model has, in order.
    pub fn modules(&self, spec: &ModelSpec) -> Vec<TargetModule> {
        modules(spec).into_iter().filter(|module| self.targets.contains(module)).collect()
    }

    /// alpha / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.r as f64
    }

    /// Parameters of a block's adapters, in layout order.
    pub(in crate::model) fn shapes(&self, spec: &ModelSpec, layer: usize) -> Shapes {
        let shapes = |fused: Fused| [(fused.a, fused.a_shape()), (fused.b, fused.b_shape())];
        self.fused(spec, layer).into_iter().flat_map(shapes).collect()
    }

    /// Elements of the expanded B.
    pub fn num_expanded(&self, spec: &ModelSpec) -> ExpandedElements {
        let of_block =
            |layer| self.fused(spec, layer).iter().map(|fused| product(&fused.expanded_shape())).sum::<usize>();
        spec.kinds_of_blocks().into_iter().fold(ExpandedElements::default(), |sum, kind| {
            let elements = of_block(kind.layer);
            ExpandedElements { all: sum.all + kind.count * elements, most: sum.most.max(elements) }
        })
    }

    /// The matrices of a block that have adapted projections.
    pub(in crate::model) fn fused(&self, spec: &ModelSpec, layer: usize) -> Vec<Fused> {
        let tensors = spec.family.traits().fused_tensors;
        spec.layers[layer].linears().into_iter().filter_map(|linear| Fused::new(linear, self, tensors)).collect()
    }
}

/// A matrix and its adapter's parameters.
#[derive(Debug)]
pub(in crate::model) struct Fused {
    /// The matrix.
    pub linear: LinearSpec,
    /// A's parameter.
    pub a: ParamName,
    /// B's parameter.
    pub b: ParamName,
    /// Adapted projections.
    pub pieces: Vec<AdaptedProjection>,
    pub(super) r: i64,
    pub(super) scale: f64,
    pub(super) adapted_heads: i64,
}

/// An adapted projection.
#[derive(Debug)]
pub(in crate::model) struct AdaptedProjection {
    /// Which.
    pub module: TargetModule,
    /// The module that a checkpoint has it in together with others, which share an A.
    pub within: Option<&'static str>,
    /// Place of its A among those of its matrix.
    pub index: i64,
    /// First head of the projection in a group of the matrix, and in a group of the adapted projections alone.
    pub(super) first: i64,
    pub(super) adapted_first: i64,
    pub(super) heads: i64,
}

impl Fused {
    /// `None` where none of the matrix's projections is adapted.
    pub fn new(linear: LinearSpec, lora: &LoraSpec, tensors: &[FusedTensor]) -> Option<Self> {
        let (mut pieces, mut first, mut adapted_first) = (Vec::<AdaptedProjection>::new(), 0, 0);
        let [a, b] = linear.matrix.adapter()?;
        for &(projection, heads) in &linear.projections {
            let heads = heads as i64;
            match projection {
                Projection::Module(module) if lora.targets.contains(&module) => {
                    let within =
                        tensors.iter().find(|tensor| tensor.modules.contains(&module)).map(|tensor| tensor.name);
                    let index = match pieces.last() {
                        Some(last) if within.is_some() && last.within == within => last.index,
                        last => last.map_or(0, |last| last.index + 1),
                    };
                    pieces.push(AdaptedProjection { module, within, index, first, adapted_first, heads });
                    adapted_first += heads;
                }
                _ => {}
            }
            first += heads;
        }
        let (r, scale, adapted_heads) = (lora.r as i64, lora.scale(), adapted_first);
        (!pieces.is_empty()).then_some(Self { linear, a, b, pieces, r, scale, adapted_heads })
    }

    fn a_shape(&self) -> Vec<i64> {
        self.of_all([self.columns(), self.linear.columns as i64])
    }

    fn b_shape(&self) -> Vec<i64> {
        self.of_all([self.rows_of(self.adapted_heads), self.r])
    }

    pub(super) fn expanded_shape(&self) -> Vec<i64> {
        self.of_all([self.linear.rows() as i64, self.columns()])
    }

    /// Columns of the expanded B.
    fn columns(&self) -> i64 {
        self.pieces.last().map_or(0, |last| last.index + 1) * self.r
    }

    /// The shape of such a matrix for each expert, one after the other, or of one where there are none.
    fn of_all(&self, shape: [i64; 2]) -> Vec<i64> {
        self.linear.experts.into_iter().map(|experts| experts as i64).chain(shape).collect()
    }

    /// Rows of so many heads of every group.
    fn rows_of(&self, heads: i64) -> i64 {
        (self.linear.groups * self.linear.inner) as i64 * heads
    }

    /// Shapes of the A and B of projections that share an A, as on disk; of an expert's, one by one.
    pub fn shapes_of(&self, pieces: &[AdaptedProjection]) -> [Vec<i64>; 2] {
        let rows = pieces.iter().map(|piece| self.rows_of(piece.heads)).sum();
        [vec![self.r, self.linear.columns as i64], vec![rows, self.r]]
    }
}

/// The projections that a model has in any of its layers, in order.
fn modules(spec: &ModelSpec) -> Vec<TargetModule> {
    let linears = spec.kinds_of_blocks().into_iter().flat_map(|kind| spec.layers[kind.layer].linears());
    let own = linears.flat_map(|linear| linear.projections).filter_map(|(projection, _)| match projection {
        Projection::Module(module) => Some(module),
        Projection::SharedExpert(_) => None,
    });
    let own: Vec<_> = own.collect();
    TargetModule::ALL.iter().copied().filter(|module| own.contains(module)).collect()
}

/// Names as a user writes them.
pub(super) fn names(modules: &[TargetModule]) -> String {
    modules.iter().map(|module| module.name()).collect::<Vec<_>>().join(", ")
}
