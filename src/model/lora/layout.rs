//! Where adapters lie in their unit's flat tensor, and their expansion to the rows of the fused matrices.

use tch::Tensor;

use super::{LoraSpec, Matrix};
use crate::config::TargetModule;
use crate::error::Result;
use crate::model::params::{ParamName, Shapes, UnitLayout};
use crate::model::spec::ModelSpec;
use crate::ops::dropout::Dropout;
use crate::torch::scalar;

/// The adapter of one matrix [N, K] as it is computed with: y += (x A^T) B^T. Of gradients: those of A and of the expanded
/// B, before [`BlockLora::add_to`].
#[derive(Debug)]
pub struct Lora {
    /// Stacked A. [k, K]; a column range in a row-parallel slice
    pub a: Tensor,
    /// Expanded B times alpha / r. [N, k]
    pub b: Tensor,
    /// In training.
    pub(super) dropout: Option<Dropout>,
}

/// The adapters of a block; empty where nothing is adapted. Slices have their share of rows (B of Qkv and GateUp) or
/// columns (A of O and Down); B of a [`super::super::Qkv::Split`] has the query rows before those of k and v.
#[derive(Debug, Default)]
pub struct BlockLora {
    /// Beside the fused query, key and value projection.
    pub qkv: Option<Lora>,
    /// Beside the attention output projection.
    pub o: Option<Lora>,
    /// Beside the interleaved gate and up projection.
    pub gate_up: Option<Lora>,
    /// Beside the MLP output projection.
    pub down: Option<Lora>,
}

impl LoraSpec {
    /// Parameters of a block's adapters, in layout order.
    pub(in crate::model) fn shapes(&self, spec: &ModelSpec) -> Shapes {
        let fused = Matrix::ALL.into_iter().filter_map(|matrix| Fused::new(spec, self, matrix));
        fused.flat_map(|fused| [(fused.a, fused.a_shape()), (fused.b, fused.b_shape())]).collect()
    }

    /// Elements of the expanded B of all blocks.
    pub fn num_expanded(&self, spec: &ModelSpec) -> usize {
        let fused = Matrix::ALL.into_iter().filter_map(|matrix| Fused::new(spec, self, matrix));
        let columns = |fused: &Fused| fused.pieces.len() * self.r;
        spec.num_layers * fused.map(|fused| fused.num_rows() as usize * columns(&fused)).sum::<usize>()
    }
}

impl BlockLora {
    /// What a block computes with, from its adapters' flat tensor [layout.len]: A as views, B expanded and scaled.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn expand(
        spec: &ModelSpec,
        lora: &LoraSpec,
        layout: &UnitLayout,
        flat: &Tensor,
        dropout: Option<Dropout>,
    ) -> Result<Self> {
        Self::each(|matrix| {
            let Some(fused) = Fused::new(spec, lora, matrix) else { return Ok(None) };
            let (a, b) = fused.views(layout, flat);
            let dropout = dropout.map(|dropout| dropout.fold(matrix as u64));
            Ok(Some(Lora { a, b: fused.expand(&b)?, dropout }))
        })
    }

    /// For one backward's gradients: A as views of the gradients' flat tensor, zeros for the expanded B.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn gradients(spec: &ModelSpec, lora: &LoraSpec, layout: &UnitLayout, flat: &Tensor) -> Result<Self> {
        Self::each(|matrix| {
            let Some(fused) = Fused::new(spec, lora, matrix) else { return Ok(None) };
            let (a, b) = fused.views(layout, flat);
            let columns = a.size()[0];
            let b = Tensor::f_zeros([fused.num_rows(), columns], (b.kind(), b.device()))?;
            Ok(Some(Lora { a, b, dropout: None }))
        })
    }

    /// Adds the gradients of the expanded B to those of B in the flat tensor.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn add_to(&self, spec: &ModelSpec, lora: &LoraSpec, layout: &UnitLayout, flat: &Tensor) -> Result<()> {
        for matrix in Matrix::ALL {
            if let (Some(own), Some(fused)) = (self.get(matrix), Fused::new(spec, lora, matrix)) {
                fused.fold(&own.b, &fused.views(layout, flat).1)?;
            }
        }
        Ok(())
    }

    /// The same adapters with B in `kept`'s memory, which is made where it is empty: recorded GPU work holds its address.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn kept_in(&self, kept: &mut BlockLora) -> Result<Self> {
        if Matrix::ALL.iter().all(|&matrix| kept.get(matrix).is_none()) {
            *kept = self.map(|_, lora| Ok(lora.with(lora.a.shallow_clone(), lora.b.f_empty_like()?)))?;
        }
        self.map(|matrix, lora| {
            let b = &kept.get(matrix).expect("adapters beside the same matrices").b;
            b.shallow_clone().f_copy_(&lora.b)?;
            Ok(lora.with(lora.a.shallow_clone(), b.shallow_clone()))
        })
    }

    /// The adapter beside a matrix.
    pub fn get(&self, matrix: Matrix) -> Option<&Lora> {
        match matrix {
            Matrix::Qkv => self.qkv.as_ref(),
            Matrix::O => self.o.as_ref(),
            Matrix::GateUp => self.gate_up.as_ref(),
            Matrix::Down => self.down.as_ref(),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Lora> {
        Matrix::ALL.into_iter().filter_map(|matrix| self.get(matrix))
    }

    pub(in crate::model) fn get_mut(&mut self, matrix: Matrix) -> Option<&mut Lora> {
        match matrix {
            Matrix::Qkv => self.qkv.as_mut(),
            Matrix::O => self.o.as_mut(),
            Matrix::GateUp => self.gate_up.as_mut(),
            Matrix::Down => self.down.as_mut(),
        }
    }

    /// The adapters with each replaced by `f` of it.
    pub(in crate::model) fn map(&self, f: impl Fn(Matrix, &Lora) -> Result<Lora>) -> Result<Self> {
        Self::each(|matrix| self.get(matrix).map(|lora| f(matrix, lora)).transpose())
    }

    fn each(mut f: impl FnMut(Matrix) -> Result<Option<Lora>>) -> Result<Self> {
        Ok(Self { qkv: f(Matrix::Qkv)?, o: f(Matrix::O)?, gate_up: f(Matrix::GateUp)?, down: f(Matrix::Down)? })
    }
}

impl Lora {
    /// With another A or B.
    pub(in crate::model) fn with(&self, a: Tensor, b: Tensor) -> Self {
        Self { a, b, dropout: self.dropout }
    }
}

/// A fused matrix and its adapter's parameters. Its rows are [groups, heads, inner], and a projection is some consecutive
/// heads of every group: Qkv has Hkv groups of G query heads, a key and a value head of hd rows each; GateUp has F groups of
/// a gate and an up row; O and Down are one projection.
#[derive(Debug)]
pub(in crate::model) struct Fused {
    /// A's parameter.
    pub a: ParamName,
    /// B's parameter.
    pub b: ParamName,
    /// Adapted projections.
    pub pieces: Vec<Piece>,
    r: i64,
    scale: f64,
    columns: i64,
    groups: i64,
    inner: i64,
    heads: i64,
    adapted_heads: i64,
}

/// An adapted projection.
#[derive(Debug)]
pub(in crate::model) struct Piece {
    /// Which.
    pub module: TargetModule,
    /// Its place among the adapted ones.
    index: i64,
    /// Its first head in a group of the matrix, and in a group of the adapted projections alone.
    first: i64,
    adapted_first: i64,
    heads: i64,
}

impl Fused {
    /// `None` where none of the matrix's projections is adapted.
    pub fn new(spec: &ModelSpec, lora: &LoraSpec, matrix: Matrix) -> Option<Self> {
        use TargetModule::{DownProj, GateProj, KProj, OProj, QProj, UpProj, VProj};
        let [hidden, mlp, head_dim, kv_heads] =
            [spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.num_kv_heads].map(|size| size as i64);
        let (query_heads, width) = (spec.heads_per_group() as i64, (spec.num_heads * spec.head_dim) as i64);
        let (a, b, columns, groups, inner, projections) = match matrix {
            Matrix::Qkv => {
                let projections = vec![(QProj, query_heads), (KProj, 1), (VProj, 1)];
                (ParamName::QkvA, ParamName::QkvB, hidden, kv_heads, head_dim, projections)
            }
            Matrix::O => (ParamName::OA, ParamName::OB, width, 1, hidden, vec![(OProj, 1)]),
            Matrix::GateUp => {
                (ParamName::GateUpA, ParamName::GateUpB, hidden, mlp, 1, vec![(GateProj, 1), (UpProj, 1)])
            }
            Matrix::Down => (ParamName::DownA, ParamName::DownB, mlp, 1, hidden, vec![(DownProj, 1)]),
        };
        let (mut pieces, mut first, mut adapted_first) = (Vec::new(), 0, 0);
        for (module, heads) in projections {
            if lora.targets.contains(&module) {
                pieces.push(Piece { module, index: pieces.len() as i64, first, adapted_first, heads });
                adapted_first += heads;
            }
            first += heads;
        }
        let (r, scale, heads, adapted_heads) = (lora.r as i64, lora.scale(), first, adapted_first);
        (!pieces.is_empty()).then_some(Self { a, b, pieces, r, scale, columns, groups, inner, heads, adapted_heads })
    }

    fn a_shape(&self) -> Vec<i64> {
        vec![self.pieces.len() as i64 * self.r, self.columns]
    }

    fn b_shape(&self) -> Vec<i64> {
        vec![self.groups * self.adapted_heads * self.inner, self.r]
    }

    /// Rows of the matrix.
    fn num_rows(&self) -> i64 {
        self.groups * self.heads * self.inner
    }

    /// A and B in a flat tensor of their unit.
    pub fn views(&self, layout: &UnitLayout, flat: &Tensor) -> (Tensor, Tensor) {
        let view = |name| layout.view(name, flat).expect("the layout is that of these adapters");
        (view(self.a), view(self.b))
    }

    /// A projection's A [r, K].
    pub fn a_of(&self, piece: &Piece, a: &Tensor) -> Tensor {
        a.narrow(0, piece.index * self.r, self.r)
    }

    /// Shapes of a projection's own A and B, as on disk.
    pub fn shapes_of(&self, piece: &Piece) -> [Vec<i64>; 2] {
        [vec![self.r, self.columns], vec![self.groups * piece.heads * self.inner, self.r]]
    }

    /// A projection's B [groups, heads, inner, r].
    pub fn b_of(&self, piece: &Piece, b: &Tensor) -> Tensor {
        b.view([self.groups, self.adapted_heads, self.inner, self.r]).narrow(1, piece.adapted_first, piece.heads)
    }

    /// A projection's rows and columns of the expanded B [groups, heads, inner, r].
    fn expanded_of(&self, piece: &Piece, expanded: &Tensor) -> Tensor {
        let whole = expanded.view([self.groups, self.heads, self.inner, -1]);
        whole.narrow(1, piece.first, piece.heads).narrow(3, piece.index * self.r, self.r)
    }

    /// The B of all adapted projections, scaled, on all rows of the matrix [N, n r].
    fn expand(&self, b: &Tensor) -> Result<Tensor> {
        let shape = [self.num_rows(), self.pieces.len() as i64 * self.r];
        let expanded = Tensor::f_zeros(shape, (b.kind(), b.device()))?;
        for piece in &self.pieces {
            self.expanded_of(piece, &expanded).f_copy_(&self.b_of(piece, b).f_mul(&scalar(self.scale))?)?;
        }
        Ok(expanded)
    }

    /// Adds the gradient of the expanded B to that of B.
    fn fold(&self, expanded: &Tensor, b: &Tensor) -> Result<()> {
        for piece in &self.pieces {
            let _ = self.b_of(piece, b).f_add_(&self.expanded_of(piece, expanded).f_mul(&scalar(self.scale))?)?;
        }
        Ok(())
    }
}
