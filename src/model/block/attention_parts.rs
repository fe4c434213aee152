//! Attention under sequence parallelism: each rank computes some of the heads for all rows.

use tch::Tensor;

use super::exchange::TokenExchange;
use super::linear::part;
use crate::error::Result;
use crate::model::spec::{AttentionSpec, SharedHeads};
use crate::ops::heads::Heads;

impl AttentionSpec {
    /// Number of key/value heads that this rank computes with. Without sequence parallelism it is all of them.
    pub(super) fn own_kv_heads(self, exchange: Option<&TokenExchange>) -> usize {
        exchange.map_or(self.num_kv_heads, |ranks| self.shared(ranks, self.num_kv_heads).own)
    }

    pub(super) fn queries(self, ranks: &TokenExchange) -> SharedHeads {
        self.shared(ranks, self.num_heads)
    }

    pub(super) fn shared(self, ranks: &TokenExchange, num_heads: usize) -> SharedHeads {
        SharedHeads::new(num_heads, self.head_dim, self.num_heads, ranks.size())
    }

    /// Exchanges this rank's rows of all heads for all rows of this rank's heads. Without sequence parallelism returns `heads` unchanged.
    pub(super) fn split(self, exchange: Option<&TokenExchange>, mut heads: Heads) -> Result<Heads> {
        let Some(ranks) = exchange else { return Ok(heads) };
        let keys = self.shared(ranks, self.num_kv_heads);
        heads.q = ranks.split(&heads.q, self.queries(ranks))?;
        heads.k = ranks.split(&heads.k, keys)?;
        heads.v = ranks.split(&heads.v, keys)?;
        Ok(heads)
    }

    /// Exchanges all rows of this rank's heads for this rank's rows of all `num_heads` heads. [T, num_heads, hd] Without sequence parallelism returns
    /// `own` unchanged.
    pub(super) fn join(self, exchange: Option<&TokenExchange>, own: Tensor, num_heads: usize) -> Result<Tensor> {
        exchange.map_or(Ok(own.shallow_clone()), |ranks| ranks.join(&own, self.shared(ranks, num_heads)))
    }
}

/// This rank's slice of the sinks or of their gradients. Without sequence parallelism it is all of them.
pub(super) fn own_sinks(exchange: Option<&TokenExchange>, all: &Tensor /* [H] */) -> Tensor {
    exchange.map_or_else(|| all.shallow_clone(), |ranks| part(all, 0, ranks.group().rank(), ranks.size()))
}
