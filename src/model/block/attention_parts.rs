//! Attention of ranks that share rows: each has some of the heads, for all rows.

use tch::Tensor;

use super::exchange::TokenExchange;
use super::linear::part;
use crate::error::Result;
use crate::model::spec::{AttentionSpec, SharedHeads};
use crate::ops::heads::Heads;

impl AttentionSpec {
    /// Key and value heads that this rank computes with, of those that share the rows.
    pub(super) fn own_kv_heads(self, exchange: Option<&TokenExchange>) -> usize {
        exchange.map_or(self.num_kv_heads, |ranks| self.shared(ranks, self.num_kv_heads).own)
    }

    pub(super) fn queries(self, ranks: &TokenExchange) -> SharedHeads {
        self.shared(ranks, self.num_heads)
    }

    pub(super) fn shared(self, ranks: &TokenExchange, num_heads: usize) -> SharedHeads {
        SharedHeads::new(num_heads, self.head_dim, self.num_heads, ranks.size())
    }

    /// All rows of this rank's heads, where ranks share the rows.
    pub(super) fn split(self, exchange: Option<&TokenExchange>, mut heads: Heads) -> Result<Heads> {
        let Some(ranks) = exchange else { return Ok(heads) };
        let keys = self.shared(ranks, self.num_kv_heads);
        heads.q = ranks.split(&heads.q, self.queries(ranks))?;
        heads.k = ranks.split(&heads.k, keys)?;
        heads.v = ranks.split(&heads.v, keys)?;
        Ok(heads)
    }

    /// This rank's rows of all `num_heads` heads, where ranks share the rows. [T, num_heads, hd]
    pub(super) fn join(self, exchange: Option<&TokenExchange>, own: Tensor, num_heads: usize) -> Result<Tensor> {
        exchange.map_or(Ok(own.shallow_clone()), |ranks| ranks.join(&own, self.shared(ranks, num_heads)))
    }
}

/// The sinks of this rank's heads, or their gradients, where ranks share the rows.
pub(super) fn own_sinks(exchange: Option<&TokenExchange>, all: &Tensor /* [H] */) -> Tensor {
    exchange.map_or_else(|| all.shallow_clone(), |ranks| part(all, 0, ranks.group().rank(), ranks.size()))
}
