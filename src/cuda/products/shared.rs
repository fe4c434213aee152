//! GEMMs on libtorch's current stream, for training and other users without an engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::Products;
use crate::cuda::context::Context;
use crate::error::Result;
use crate::torch;

/// GEMM handles by GPU and stream.
type OfStreams = HashMap<(usize, usize), Arc<Products>>;

impl Products {
    /// The GEMM handle of libtorch's current stream on a GPU. It is created on first use and kept until the process ends, like libtorch's streams.
    ///
    /// # Errors
    /// The errors of [`Products::new`].
    pub fn of_current_stream(ordinal: usize) -> Result<Arc<Self>> {
        static MADE: Mutex<Option<OfStreams>> = Mutex::new(None);
        let stream = torch::current_cuda_stream(ordinal)?;
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        let made = made.get_or_insert_default();
        let key = (ordinal, stream as usize);
        if let Some(products) = made.get(&key) {
            return Ok(products.clone());
        }
        let products = Arc::new(Self::on(Context::retain(ordinal)?, stream)?);
        made.insert(key, products.clone());
        Ok(products)
    }
}
