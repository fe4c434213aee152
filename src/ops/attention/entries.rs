//! One side of a paged cache, keys or values, as the network's kind, or as e4m3 or whole numbers of eight bits with a scale for each token and head.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ops::fp8::{self, ScaledRows};
use crate::ops::int8;

/// Keys or values of a layer, [num_blocks, Hkv, block_size, hd]. An entry is one token's of one head.
pub trait KvEntries {
    /// The shape.
    fn size(&self) -> Vec<i64>;

    /// Entries by their place in [num_blocks * Hkv * block_size, hd], in `kind`. [R, hd]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn rows(&self, rows: &Tensor /* [R] */, kind: Kind) -> Result<Tensor>;

    /// Whole blocks, in `kind`. [n, Hkv, block_size, hd]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn blocks(&self, blocks: &Tensor /* [n] */, kind: Kind) -> Result<Tensor>;

    /// Writes entries to their places.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn write(&self, rows: &Tensor /* [R] i64 */, new: &Tensor /* [R, hd] */) -> Result<()>;
}

impl KvEntries for Tensor {
    fn size(&self) -> Vec<i64> {
        Tensor::size(self)
    }

    fn rows(&self, rows: &Tensor, kind: Kind) -> Result<Tensor> {
        Ok(self.view([-1, Tensor::size(self)[3]]).f_index_select(0, rows)?.f_to_kind(kind)?)
    }

    fn blocks(&self, blocks: &Tensor, kind: Kind) -> Result<Tensor> {
        Ok(self.f_index_select(0, blocks)?.f_to_kind(kind)?)
    }

    fn write(&self, rows: &Tensor, new: &Tensor) -> Result<()> {
        let _ = self.flatten(0, 2).f_index_copy_(0, rows, &new.f_to_kind(self.kind())?)?;
        Ok(())
    }
}

/// Values [num_blocks, Hkv, block_size, hd], scales [num_blocks, Hkv, block_size].
impl KvEntries for ScaledRows {
    fn size(&self) -> Vec<i64> {
        self.values.size()
    }

    fn rows(&self, rows: &Tensor, kind: Kind) -> Result<Tensor> {
        let values = codes(self).view([-1, self.values.size()[3]]).f_index_select(0, rows)?;
        widen(&values, &self.scales.view(-1).f_index_select(0, rows)?, self.values.kind(), kind)
    }

    fn blocks(&self, blocks: &Tensor, kind: Kind) -> Result<Tensor> {
        widen(
            &codes(self).f_index_select(0, blocks)?,
            &self.scales.f_index_select(0, blocks)?,
            self.values.kind(),
            kind,
        )
    }

    fn write(&self, rows: &Tensor, new: &Tensor) -> Result<()> {
        let values = Tensor::f_empty(new.size(), (self.values.kind(), new.device()))?;
        let rounded = ScaledRows { values, scales: Tensor::f_empty([new.size()[0]], (Kind::Float, new.device()))? };
        match self.values.kind() {
            Kind::Int8 => int8::round_rows(new, &rounded)?,
            _ => fp8::round_rows(&new.f_contiguous()?, &rounded)?,
        }
        let _ = codes(self).flatten(0, 2).f_index_copy_(0, rows, &codes(&rounded))?;
        let _ = self.scales.view(-1).f_index_copy_(0, rows, &rounded.scales)?;
        Ok(())
    }
}

/// The values' bytes, which every operation takes.
fn codes(rows: &ScaledRows) -> Tensor {
    rows.values.view_dtype(Kind::Uint8)
}

fn widen(codes: &Tensor /* [.., hd] */, scales: &Tensor /* [..] */, of: Kind, kind: Kind) -> Result<Tensor> {
    let values = codes.view_dtype(of).f_to_kind(Kind::Float)?;
    Ok(values.f_mul(&scales.unsqueeze(-1))?.f_to_kind(kind)?)
}
