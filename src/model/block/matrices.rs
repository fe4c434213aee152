//! The matrices of a block one by one, as a checkpoint stores them, for optimizers that need each matrix whole (Muon).

use std::ops::Range;

use tch::Tensor;

use crate::model::params::{UnitLayout, required};
use crate::model::spec::{LinearSpec, ModelSpec, ParamName};

/// One projection of a checkpoint: a range of rows of one of our fused matrices.
#[derive(Debug, Clone)]
pub struct BlockMatrix {
    linear: LinearSpec,
    projection: usize,
}

impl BlockMatrix {
    /// All projections in a layer's block.
    pub fn of_layer(spec: &ModelSpec, layer: usize) -> Vec<Self> {
        let of_linear = |linear: LinearSpec| {
            (0..linear.projections.len()).map(move |projection| Self { linear: linear.clone(), projection })
        };
        spec.layers[layer].linears().into_iter().flat_map(of_linear).collect()
    }

    /// Number of rows: outputs of the projection.
    pub fn rows(&self) -> usize {
        self.linear.groups * self.linear.projections[self.projection].1 * self.linear.inner
    }

    /// Number of columns: inputs of the projection.
    pub fn columns(&self) -> usize {
        self.linear.columns
    }

    /// The projection's elements in row-major order, as a view of a block's flat tensor. [groups, heads, inner, columns]
    pub fn view(&self, layout: &UnitLayout, flat: &Tensor) -> Tensor {
        self.linear.rows_of(self.projection, &required(layout, self.param(), flat))
    }

    /// Ranges of the projection's elements in a block's flat tensor; adjacent rows form one range.
    pub fn ranges(&self, layout: &UnitLayout) -> Vec<Range<usize>> {
        let LinearSpec { groups, inner, columns, projections, .. } = &self.linear;
        let first: usize = projections[..self.projection].iter().map(|(_, heads)| heads).sum();
        let param =
            layout.param(self.param()).unwrap_or_else(|| panic!("the {} has no {:?}", layout.unit, self.param()));
        let range = |group: usize| {
            let start = param.offset + (group * self.linear.heads() + first) * inner * columns;
            start..start + projections[self.projection].1 * inner * columns
        };
        (0..*groups).map(range).collect()
    }

    fn param(&self) -> ParamName {
        self.linear.matrix.weight()
    }
}
