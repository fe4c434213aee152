//! One side of a paged cache, keys or values: in the network's type, or in e4m3 or int8 with a scale per token and head.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ops::fp8::{self, ScaledRows};
use crate::ops::int8;

/// Keys or values of a layer, [num_blocks, Hkv, block_size, hd]. An entry is one token's key or value in one head.
pub trait KvEntries {
    /// The shape of the cache.
    fn size(&self) -> Vec<i64>;

    /// Reads entries, given their indices in [num_blocks * Hkv * block_size, hd], as `kind`. [R, hd]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn rows(&self, rows: &Tensor /* [R] */, kind: Kind) -> Result<Tensor>;

    /// Reads whole blocks as `kind`. [n, Hkv, block_size, hd]
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn blocks(&self, blocks: &Tensor /* [n] */, kind: Kind) -> Result<Tensor>;

    /// Writes entries at the given indices.
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

/// An 8-bit cache: values [num_blocks, Hkv, block_size, hd] and scales [num_blocks, Hkv, block_size].
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

/// The values as bytes, a type that all libtorch operations support.
fn codes(rows: &ScaledRows) -> Tensor {
    rows.values.view_dtype(Kind::Uint8)
}

fn widen(codes: &Tensor /* [.., hd] */, scales: &Tensor /* [..] */, of: Kind, kind: Kind) -> Result<Tensor> {
    let values = codes.view_dtype(of).f_to_kind(Kind::Float)?;
    Ok(values.f_mul(&scales.unsqueeze(-1))?.f_to_kind(kind)?)
}
