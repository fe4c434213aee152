//! Settings of adapters, and the shapes of their parameters in a given model.

use std::path::Path;

use crate::config::TargetModule::{DownProj, GateProj, UpProj};
use crate::config::{LoraConfig, Quantization, TargetModule};
use crate::error::{Error, Result};
use crate::model::families::FusedTensor;
use crate::model::spec::{LinearSpec, MLP, ModelSpec, ParamName, Projection, Shapes, product, room};

/// Settings of adapters: which projections, with which rank and which scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// Rank of the adapters.
    pub r: usize,
    /// Numerator of the scale, alpha / r.
    pub alpha: f64,
    /// Probability that an element of an adapter's input is dropped in training. The projections of one fused matrix share a mask.
    pub dropout: f64,
    /// Adapted projections, without duplicates, in [`TargetModule`]'s order. `all` includes projections that the model does not have.
    pub targets: Vec<TargetModule>,
}

/// The base model that adapters were trained with.
#[derive(Debug, Clone, Copy)]
pub struct AdapterBase<'a> {
    /// Folder of the base model.
    pub folder: &'a Path,
    /// How the base weights were stored while the adapters were trained.
    pub quantization: Quantization,
}

/// Numbers of elements of the adapters' expanded B.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpandedElements {
    /// Elements in all blocks together.
    pub all: usize,
    /// Elements in the block that has the most.
    pub most: usize,
}

impl LoraSpec {
    /// The adapters that a configuration requests; `None` if all weights are trained.
    pub fn new(config: &LoraConfig) -> Option<Self> {
        let LoraConfig { r, alpha, dropout, target_modules } = config;
        Some(Self { r: (*r)?, alpha: *alpha, dropout: *dropout, targets: target_modules.modules() })
    }

    /// Checks that the adapters fit the model.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `lora.target_modules`, if the model lacks a projection or stores it fused with others that are not adapted; for
    /// `lora.target_modules` and `lora.dropout`, if PEFT could not read the experts' adapters.
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

    /// The adapted projections that this model has, in order.
    pub fn modules(&self, spec: &ModelSpec) -> Vec<TargetModule> {
        modules(spec).into_iter().filter(|module| self.targets.contains(module)).collect()
    }

    /// alpha / r.
    pub fn scale(&self) -> f64 {
        self.alpha / self.r as f64
    }

    /// Names and shapes of a block's adapter parameters, in the order in which the layout stores them.
    pub(in crate::model) fn shapes(&self, spec: &ModelSpec, layer: usize) -> Shapes {
        let shapes = |fused: Fused| [(fused.a, fused.a_shape()), (fused.b, fused.b_shape())];
        self.fused(spec, layer).into_iter().flat_map(shapes).collect()
    }

    /// Counts the elements of the expanded B.
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

/// A matrix with adapted projections, and the parameters of its adapter.
#[derive(Debug)]
pub(in crate::model) struct Fused {
    /// The adapted matrix.
    pub linear: LinearSpec,
    /// Name of the parameter A.
    pub a: ParamName,
    /// Name of the parameter B.
    pub b: ParamName,
    /// The adapted projections of the matrix.
    pub pieces: Vec<AdaptedProjection>,
    pub(super) r: i64,
    pub(super) scale: f64,
    pub(super) adapted_heads: i64,
}

/// One adapted projection of a fused matrix.
#[derive(Debug)]
pub(in crate::model) struct AdaptedProjection {
    /// The projection's name.
    pub module: TargetModule,
    /// The checkpoint's module, if it fuses this projection with others; these share an A.
    pub within: Option<&'static str>,
    /// Index of its A among those stacked for the matrix.
    pub index: i64,
    /// Index of the projection's first head within a group: of the whole matrix, and of the adapted projections alone.
    pub(super) first: i64,
    pub(super) adapted_first: i64,
    pub(super) heads: i64,
}

impl Fused {
    /// Returns `None` if none of the matrix's projections is adapted.
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

    /// Number of columns of the expanded B.
    fn columns(&self) -> i64 {
        self.pieces.last().map_or(0, |last| last.index + 1) * self.r
    }

    /// Prepends the number of experts to a matrix's shape, if there are experts.
    fn of_all(&self, shape: [i64; 2]) -> Vec<i64> {
        self.linear.experts.into_iter().map(|experts| experts as i64).chain(shape).collect()
    }

    /// Number of rows of `heads` heads in every group.
    fn rows_of(&self, heads: i64) -> i64 {
        (self.linear.groups * self.linear.inner) as i64 * heads
    }

    /// Shapes on disk of the A and B of projections that share an A; for experts, of a single expert.
    pub fn shapes_of(&self, pieces: &[AdaptedProjection]) -> [Vec<i64>; 2] {
        let rows = pieces.iter().map(|piece| self.rows_of(piece.heads)).sum();
        [vec![self.r, self.linear.columns as i64], vec![rows, self.r]]
    }
}

/// The projections that any layer of the model has, in order.
fn modules(spec: &ModelSpec) -> Vec<TargetModule> {
    let linears = spec.kinds_of_blocks().into_iter().flat_map(|kind| spec.layers[kind.layer].linears());
    let own = linears.flat_map(|linear| linear.projections).filter_map(|(projection, _)| match projection {
        Projection::Module(module) => Some(module),
        Projection::SharedExpert(_) => None,
    });
    let own: Vec<_> = own.collect();
    TargetModule::ALL.iter().copied().filter(|module| own.contains(module)).collect()
}

/// The modules' names as users write them, separated by commas.
pub(super) fn names(modules: &[TargetModule]) -> String {
    modules.iter().map(|module| module.name()).collect::<Vec<_>>().join(", ")
}
