//! Values that are created once per distinct property of layers and shared by them: rotary tables by rope settings, layouts by sliding window.

use tch::{Device, Kind, Tensor};

use super::spec::{ModelSpec, RopeSpec};
use crate::error::Result;
use crate::ops::rope::{Rope, RopeRows};

/// A value for each distinct key among a model's layers.
#[derive(Debug)]
pub struct Distinct<K, T>(Vec<(K, T)>);

/// A value for each sliding window; the key `None` is full attention.
pub type ByWindow<T> = Distinct<Option<usize>, T>;

/// A value for each rotary embedding; the key `None` is a layer without one.
pub type ByRope<T> = Distinct<Option<RopeSpec>, T>;

/// Rotary frequencies of a model's layers. A layer without a rotary embedding has the angle 0 at every position, which leaves all bits unchanged, so
/// kernels need no special case.
pub type Ropes = ByRope<Rope>;

impl<K: Copy + PartialEq + std::fmt::Debug, T> Distinct<K, T> {
    /// Creates one value for each of `keys`.
    pub fn new(keys: Vec<K>, make: impl Fn(K) -> T) -> Self {
        Self(keys.into_iter().map(|key| (key, make(key))).collect())
    }

    /// Creates one value for each of `keys`, with a function that may fail.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn try_new(keys: Vec<K>, make: impl Fn(K) -> Result<T>) -> Result<Self> {
        Ok(Self(keys.into_iter().map(|key| Ok((key, make(key)?))).collect::<Result<_>>()?))
    }

    /// The value of the layers with this key.
    ///
    /// # Panics
    /// If no layer has it.
    pub fn of(&self, key: K) -> &T {
        let found = self.0.iter().find(|(own, _)| *own == key);
        &found.unwrap_or_else(|| panic!("no layer of the model has {key:?}")).1
    }

    /// All values, in the order of the first layer that uses each.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }

    fn map<U>(&self, make: impl Fn(&T) -> Result<U>) -> Result<Distinct<K, U>> {
        Ok(Distinct(self.0.iter().map(|(key, value)| Ok((*key, make(value)?))).collect::<Result<_>>()?))
    }
}

impl ModelSpec {
    /// The distinct rotary embeddings of the model's layers.
    pub fn ropes(&self) -> Ropes {
        Ropes::of_layers(self)
    }
}

impl Ropes {
    fn of_layers(spec: &ModelSpec) -> Self {
        let head_dim = spec.attention().head_dim;
        let rope = |rope: Option<RopeSpec>| match rope {
            Some(rope) => Rope::new(rope.columns(head_dim), rope.theta, rope.scaling.as_ref()),
            None => Rope::still(head_dim),
        };
        Self::new(spec.rotations(), rope)
    }

    /// Total number of columns of all tables.
    pub fn columns(&self) -> usize {
        self.iter().map(Rope::columns).sum()
    }

    /// Creates [`Rope::table`] for each rotary embedding.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn tables(&self, len: usize, device: Device) -> Result<ByRope<Tensor>> {
        self.map(|rope| rope.table(len, device))
    }

    /// Creates [`Rope::exact_table`] for each rotary embedding.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn exact_tables(&self, len: usize, device: Device) -> Result<ByRope<Tensor>> {
        self.map(|rope| rope.exact_table(len, device))
    }

    /// Creates [`Rope::rows`] for each rotary embedding.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn rows(&self, positions: &Tensor /* [T] i64 */, kind: Kind) -> Result<ByRope<RopeRows>> {
        self.map(|rope| rope.rows(positions, kind))
    }

    /// Creates [`Rope::exact_rows`] for each rotary embedding.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn exact_rows(&self, positions: &Tensor /* [T] i64 */, kind: Kind) -> Result<ByRope<RopeRows>> {
        self.map(|rope| rope.exact_rows(positions, kind))
    }
}
