//! Attention under sequence parallelism: each rank computes some of the heads for all rows.

use tch::Tensor;

use super::exchange::{Arriving, TokenExchange};
use super::linear::part;
use crate::error::Result;
use crate::model::spec::{AttentionSpec, SharedHeads};

impl AttentionSpec {
    /// Number of key/value heads that this rank computes with at once. Without sequence parallelism it is all of them.
    pub(super) fn own_kv_heads(self, exchange: Option<&TokenExchange>) -> usize {
        let own = exchange.map_or(self.num_kv_heads, |ranks| self.shared(ranks, self.num_kv_heads).own);
        own / self.num_parts(exchange)
    }

    /// Number of parts in which this rank's heads are exchanged and computed: two for a long micro-batch, if each has whole key/value heads.
    pub(super) fn num_parts(self, exchange: Option<&TokenExchange>) -> usize {
        let halves =
            |ranks: &TokenExchange| ranks.halves() && self.shared(ranks, self.num_kv_heads).own.is_multiple_of(2);
        if exchange.is_some_and(halves) { 2 } else { 1 }
    }

    fn shared(self, ranks: &TokenExchange, num_heads: usize) -> SharedHeads {
        SharedHeads::new(num_heads, self.head_dim, self.num_heads, ranks.size())
    }

    /// Begins to exchange this rank's rows of all heads, whose number is given with each tensor, for all rows of this rank's heads, part by part. [T, own
    /// heads, hd] each. Without sequence parallelism these are the same tensors.
    pub(super) fn split<const N: usize>(
        self,
        exchange: Option<&TokenExchange>,
        rows: [(Tensor, usize); N],
    ) -> Result<Vec<Arriving<N>>> {
        let Some(ranks) = exchange else { return Ok(vec![Arriving::there(rows.map(|(rows, _)| rows))]) };
        let num_parts = self.num_parts(exchange);
        let part = |index| {
            let shared = |num_heads| self.shared(ranks, num_heads).part(index, num_parts);
            ranks.split(rows.each_ref().map(|(rows, num_heads)| (rows, shared(*num_heads))))
        };
        (0..num_parts).map(part).collect()
    }

    /// Calls `compute` for each part of this rank's heads and begins to exchange all rows of its results for this rank's rows of all heads, whose
    /// numbers are `num_heads`. [T / n, heads, hd] each
    pub(super) fn by_parts<const N: usize>(
        self,
        exchange: Option<&TokenExchange>,
        num_heads: [usize; N],
        mut compute: impl FnMut(usize) -> Result<[Tensor; N]>,
    ) -> Result<Arriving<N>> {
        let Some(ranks) = exchange else { return compute(0).map(Arriving::there) };
        let num_parts = self.num_parts(exchange);
        let shared = num_heads.map(|num_heads| self.shared(ranks, num_heads));
        let mut arriving = None;
        for index in 0..num_parts {
            let own = compute(index)?;
            let mut shared = shared.iter().map(|shared| shared.part(index, num_parts));
            let own = own.each_ref().map(|own| (own, shared.next().expect("one for each")));
            arriving = Some(ranks.join(own, arriving)?);
        }
        Ok(arriving.expect("at least one part"))
    }

    /// The slice of the sinks, or of their gradients, for a part of this rank's heads. Without sequence parallelism it is all of them.
    pub(super) fn own_sinks(
        self,
        exchange: Option<&TokenExchange>,
        index: usize,
        all: &Tensor, /* [H] */
    ) -> Tensor {
        let own =
            exchange.map_or_else(|| all.shallow_clone(), |ranks| part(all, 0, ranks.group().rank(), ranks.size()));
        part(&own, 0, index, self.num_parts(exchange))
    }
}
