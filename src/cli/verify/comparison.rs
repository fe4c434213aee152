//! How far two sets of logits are apart, and whether that is rounding.

use std::fmt::Write;

use tch::{Kind, Tensor};

use super::OwnOutputs;
use super::peer::PeerOutputs;
use crate::error::Result;
use crate::torch;

/// Figures over all positions of all prompts. KL divergences are of transformers from the trainer, in nats.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    trainer: Vec<Position>,
    engine: Vec<Token>,
    /// Prompts whose tokens are equal; the error is the reason why they were not compared.
    equal_prompts: Option<std::result::Result<(usize, usize), String>>,
}

/// One position of the trainer.
#[derive(Debug)]
struct Position {
    largest: f64,
    mean: f64,
    kl: f64,
    is_equal: bool,
}

/// One greedy token of the engine.
#[derive(Debug)]
struct Token {
    /// Difference of its log-probability.
    difference: f64,
    /// Whether transformers would have taken it, too.
    is_equal: bool,
}

impl Comparison {
    pub fn new(own: &OwnOutputs, theirs: &PeerOutputs) -> Result<Self> {
        let mut compared = Self::default();
        for (index, theirs) in theirs.logits.iter().enumerate() {
            let ours = &own.logits[index];
            let theirs = theirs.narrow(0, 0, ours.size()[0]); // nothing follows the last token
            compared.trainer.extend(positions(ours, &theirs)?);
            let start = own.prompts[index].token_ids.len() - 1;
            let (argmax, logprobs) = (integers(&theirs.argmax(1, false))?, theirs.log_softmax(1, Kind::Double));
            let completion = &own.completions[index];
            for (at, (&token, &ours)) in completion.token_ids.iter().zip(&completion.rollout_logprobs).enumerate() {
                let row = start + at;
                let theirs = logprobs.double_value(&[row as i64, i64::from(token)]);
                let is_equal = argmax[row] == i64::from(token);
                compared.engine.push(Token { difference: (f64::from(ours) - theirs).abs(), is_equal });
            }
        }
        let count = |tokens: &Vec<Vec<u32>>| {
            let equal = own.prompts.iter().zip(tokens).filter(|(ours, theirs)| ours.token_ids == **theirs).count();
            (equal, own.prompts.len())
        };
        compared.equal_prompts = Some(theirs.tokens.as_ref().map(count).map_err(Clone::clone));
        Ok(compared)
    }

    /// Positions that were compared.
    pub fn positions(&self) -> usize {
        self.trainer.len()
    }

    /// One line for each figure.
    pub fn table(&self, tolerance: f64) -> String {
        let mut table = String::new();
        let mut line = |what: &str, measured: String, allowed: String| {
            let _ = writeln!(table, "{}", format!("  {what:<52}{measured:>12}   {allowed}").trim_end());
        };
        let bound = || format!("at most {tolerance}");
        line("", "measured".into(), "allowed".into());
        match &self.equal_prompts {
            Some(Ok((equal, all))) => line("prompts with equal tokens", format!("{equal} of {all}"), "all".into()),
            Some(Err(why)) => line("prompts with equal tokens", "not read".into(), format!("({why:.60})")),
            None => (),
        }
        line("trainer: largest difference of a logit", figure(largest(self.of(|it| it.largest))), String::new());
        line("trainer: mean difference of all logits", figure(mean(self.of(|it| it.mean))), String::new());
        line("trainer: mean at the position that differs most", figure(self.worst()), bound());
        line("trainer: equal most probable token", share(self.trainer.iter().map(|it| it.is_equal)), String::new());
        line("trainer: KL divergence, mean", figure(mean(self.of(|it| it.kl))), String::new());
        line("trainer: KL divergence, largest", figure(largest(self.of(|it| it.kl))), String::new());
        line(
            "engine: greedy tokens that are also transformers'",
            share(self.engine.iter().map(|it| it.is_equal)),
            "".into(),
        );
        line("engine: mean difference of their log-probabilities", figure(self.of_engine()), bound());
        table
    }

    /// The first figure that is more than rounding, if any is. NaN counts as more.
    pub fn fault(&self, tolerance: f64) -> Option<String> {
        let is_within = |figure: f64| figure <= tolerance;
        if let Some(Ok((equal, all))) = self.equal_prompts
            && equal < all
        {
            return Some(format!("{} of {all} prompts have other tokens", all - equal));
        }
        let too_far = |what: &str, figure: f64| {
            format!("{what} differ by {figure:.3e} on average, --tolerance allows {tolerance}")
        };
        if !is_within(self.worst()) {
            return Some(too_far("the trainer's logits at one position", self.worst()));
        }
        (!is_within(self.of_engine())).then(|| too_far("the engine's log-probabilities", self.of_engine()))
    }

    fn of(&self, figure: fn(&Position) -> f64) -> impl Iterator<Item = f64> + '_ {
        self.trainer.iter().map(figure)
    }

    fn worst(&self) -> f64 {
        largest(self.of(|it| it.mean))
    }

    fn of_engine(&self) -> f64 {
        mean(self.engine.iter().map(|it| it.difference))
    }
}

/// Figures of each row of two `[T, V]`.
fn positions(ours: &Tensor, theirs: &Tensor) -> Result<impl Iterator<Item = Position> + use<>> {
    let difference = (ours - theirs).abs();
    let (log_ours, log_theirs) = (ours.log_softmax(1, Kind::Double), theirs.log_softmax(1, Kind::Double));
    let kl = (log_theirs.exp() * (&log_theirs - log_ours)).sum_dim_intlist(1, false, Kind::Double);
    let largest = torch::f32_vec(&difference.amax([1], false))?;
    let mean = torch::f32_vec(&difference.mean_dim(1, false, Kind::Float))?;
    let kl = torch::f32_vec(&kl.f_to_kind(Kind::Float)?)?;
    let (a, b) = (integers(&ours.argmax(1, false))?, integers(&theirs.argmax(1, false))?);
    Ok((0..kl.len()).map(move |row| Position {
        largest: largest[row].into(),
        mean: mean[row].into(),
        kl: kl[row].into(),
        is_equal: a[row] == b[row],
    }))
}

fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    Ok(Vec::try_from(tensor)?)
}

/// The largest figure; none is a number if one of them is none.
fn largest(figures: impl Iterator<Item = f64>) -> f64 {
    figures.fold(0.0, |most, figure| if figure.is_nan() || figure > most { figure } else { most })
}

fn mean(figures: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = figures.fold((0.0, 0), |(sum, count), figure| (sum + figure, count + 1));
    sum / f64::from(count)
}

fn figure(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.2e}") }
}

fn share(equal: impl Iterator<Item = bool>) -> String {
    let (same, all) = equal.fold((0, 0), |(same, all), is_equal| (same + u32::from(is_equal), all + 1));
    format!("{same} of {all}")
}
