//! Simulated routing to experts for benchmarks, instead of that of a random router.

use serde::Deserialize;

use super::{SEED, STREAM};
use crate::error::{Error, Result};
use crate::model::{ExpertsSpec, ModelSpec};
use crate::ops::random::RandomKey;
use crate::types::RoutedExperts;

/// Separates the random numbers of experts from those of tokens and lengths.
const EXPERTS: u64 = u64::from_be_bytes(*b"\0experts");
/// By how many places the most popular expert moves from one layer to the next.
const TURN: usize = 7;

/// How tokens choose experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BenchRouting {
    /// The random-weight router decides.
    Own,
    /// All experts are equally probable.
    Uniform,
    /// The n-th most popular expert of a layer has a probability proportional to 1 / n.
    Zipf,
}

impl BenchRouting {
    /// The name in arguments and results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }

    /// Checks that this model has experts to choose.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `--routing` for a model without experts.
    pub fn check(self, spec: &ModelSpec) -> Result<()> {
        if self == Self::Own || spec.num_expert_layers() > 0 {
            return Ok(());
        }
        Err(Error::invalid_value("--routing", self.name(), "own (the other values need a model with experts)"))
    }

    /// The experts of these tokens in all layers, without repetition within a layer; empty for `Own`.
    pub(super) fn of_tokens(self, spec: &ModelSpec, tokens: impl Iterator<Item = usize>) -> RoutedExperts {
        let mut routed = RoutedExperts::default();
        let (Some(experts), false) = (spec.experts(), self == Self::Own) else { return routed };
        let mut noise = vec![0.0; experts.num_experts];
        for (position, token) in tokens.enumerate() {
            let places = 0..spec.num_expert_layers();
            let own: Vec<u16> = places.flat_map(|place| self.draw(experts, (place, token), &mut noise)).collect();
            routed.push(position, &own);
        }
        routed
    }

    /// Samples a token's experts in one layer without repetition: those with the largest log probability plus Gumbel noise.
    fn draw(self, experts: ExpertsSpec, (place, token): (usize, usize), noise: &mut [f32]) -> Vec<u16> {
        let all = experts.num_experts;
        RandomKey::new(SEED, STREAM).fold(EXPERTS).fold(place as u64).fill_gumbel(token as u64, 0, noise);
        let popularity = |expert: usize| match self {
            Self::Zipf => -(1.0 + ((expert + TURN * place) % all) as f32).ln(),
            Self::Own | Self::Uniform => 0.0,
        };
        let mut order: Vec<u16> = (0..all as u16).collect();
        let key = |expert: &u16| noise[usize::from(*expert)] + popularity(usize::from(*expert));
        order.sort_by(|a, b| key(b).total_cmp(&key(a)));
        order.truncate(experts.router.num_experts_per_tok);
        order
    }
}

/// The most chosen expert's share of its layer's choices, averaged over the layers; `None` without recorded choices.
pub(super) fn busiest_expert_share<'a>(
    spec: &ModelSpec,
    routed: impl Iterator<Item = &'a RoutedExperts>,
) -> Option<f64> {
    let experts = spec.experts()?;
    let (k, places) = (experts.router.num_experts_per_tok, spec.num_expert_layers());
    let mut counts = vec![vec![0usize; experts.num_experts]; places];
    for tokens in routed {
        for (index, &expert) in tokens.experts.iter().enumerate() {
            counts[index / k % places][usize::from(expert)] += 1;
        }
    }
    let share = |of_layer: &Vec<usize>| {
        let (most, all) = (of_layer.iter().max()?, of_layer.iter().sum::<usize>());
        (all > 0).then(|| *most as f64 / all as f64)
    };
    let shares: Vec<f64> = counts.iter().map(share).collect::<Option<_>>()?;
    Some(shares.iter().sum::<f64>() / places as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampled_experts_follow_their_probabilities_without_repeats() {
        let spec = ModelSpec::preset("tiny-moe").unwrap();
        let draw = |routing: BenchRouting| routing.of_tokens(&spec, 0..4000);
        assert_eq!(draw(BenchRouting::Own), RoutedExperts::default());
        for (routing, expected) in [(BenchRouting::Uniform, 1.0 / 8.0), (BenchRouting::Zipf, 1.0 / 2.717_857)] {
            let routed = draw(routing);
            assert_eq!((routed.num_tokens(), routed.per_token), (4000, 8));
            assert!(routed.experts.chunks(2).all(|pair| pair[0] != pair[1] && pair.iter().all(|expert| *expert < 8)));
            for place in 0..4 {
                let popular = (8 - TURN * place % 8) % 8;
                // The first choice of each token is not affected by sampling without repetition.
                let first = routed.experts.iter().skip(2 * place).step_by(8);
                let share = first.filter(|expert| usize::from(**expert) == popular).count() as f64 / 4000.0;
                assert!((share - expected).abs() < 0.03, "{routing:?}, layer {place}: {share}, expected {expected}");
            }
            assert_eq!(routed, draw(routing), "drawn by the token's number");
        }
        let share = |routing| busiest_expert_share(&spec, [draw(routing)].iter()).unwrap();
        assert!(share(BenchRouting::Uniform) < 0.14 && share(BenchRouting::Zipf) > 0.25);
        assert_eq!(busiest_expert_share(&spec, [RoutedExperts::default()].iter()), None);
        let error = BenchRouting::Zipf.check(&ModelSpec::preset("tiny").unwrap()).unwrap_err().to_string();
        assert!(
            error.starts_with("--routing = zipf: expected own (the other values need a model with experts)"),
            "{error}"
        );
    }
}
