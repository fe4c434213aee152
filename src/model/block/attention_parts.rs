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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::ModelSpec;
    use crate::ranks::{Lane, testing};

    /// Key/value heads that ranks do not divide are one for each query head. Heads are halved from a number of tokens on, if a rank has an even number
    /// of key/value heads.
    #[test]
    fn even_numbers_of_heads_are_halved_in_long_micro_batches() {
        let parts = |num_ranks: usize, tokens: i64, heads: &[[usize; 2]]| {
            let of_ranks = testing::threads(num_ranks, |group| {
                let exchange = TokenExchange::of(&group, &Lane::immediate()).map(|ranks| ranks.halving_from(8));
                let exchange = exchange.map(|ranks| ranks.for_tokens(tokens));
                let parts = heads.iter().map(|&[num_heads, num_kv_heads]| {
                    let attention = ModelSpec::preset("micro").unwrap().attention();
                    AttentionSpec { num_heads, num_kv_heads, ..attention }.num_parts(exchange.as_ref())
                });
                parts.collect::<Vec<_>>()
            });
            assert!(of_ranks.iter().all(|parts| *parts == of_ranks[0]));
            of_ranks[0].clone()
        };
        let of_two = [[4, 4], [28, 4], [12, 12], [12, 3], [4, 2], [6, 6], [6, 3]];
        assert_eq!(parts(2, 8, &of_two), [2, 2, 2, 2, 1, 1, 1]);
        assert_eq!(parts(2, 7, &of_two), [1; 7]);
        assert_eq!(parts(4, 8, &[[8, 8], [24, 8], [24, 6], [12, 4], [12, 12]]), [2, 2, 2, 1, 1]);
        assert_eq!(parts(1, 8, &of_two), [1; 7]);
    }
}
