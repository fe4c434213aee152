//! The file format of a trajectory, as stored in checkpoints.

use super::{FinishReason, RoutedExperts, Trajectory};

/// The stored form of an unfinished [`Trajectory`]: numbers as eight hexadecimal digits each on one line, which is compact and exact.
#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct PackedTrajectory {
    token_ids: String,
    rollout_logprobs: String,
    finish_reason: Option<FinishReason>,
    /// Lengths of the sampled turns and of the context between them, in turn; empty if all tokens were sampled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    turns: Vec<usize>,
    /// Weight versions as runs: each version with its number of tokens.
    #[serde(default)]
    weight_versions: Vec<(u64, usize)>,
    /// Number of experts per token, and the experts of all tokens as four hexadecimal digits each.
    #[serde(default, skip_serializing_if = "is_empty")]
    routed_experts: (usize, String),
}

fn is_empty((per_token, _): &(usize, String)) -> bool {
    *per_token == 0
}

/// Run-length encoding: each value with its number of consecutive repetitions.
fn runs<T: Copy + PartialEq>(values: &[T]) -> Vec<(T, usize)> {
    values.chunk_by(T::eq).map(|run| (run[0], run.len())).collect()
}

/// Writes each number as `each` hexadecimal digits without separators, as a trajectory can have hundreds of thousands of experts.
fn digits(each: u32, numbers: impl ExactSizeIterator<Item = u32>) -> String {
    let mut text = String::with_capacity(each as usize * numbers.len());
    for number in numbers {
        for place in (0..each).rev() {
            text.push(char::from(b"0123456789abcdef"[(number >> (4 * place) & 15) as usize]));
        }
    }
    text
}

/// Parses numbers written by [`digits`]; `None` if a number is cut short or contains another character.
fn numbers(text: &str, each: usize) -> Option<Vec<u32>> {
    let digit = |number: u32, byte: &u8| Some(number << 4 | char::from(*byte).to_digit(16)?);
    let numbers = text.as_bytes().chunks(each);
    numbers.map(|own| if own.len() == each { own.iter().try_fold(0, digit) } else { None }).collect()
}

/// The sum of `lens`; `None` on overflow, as in a damaged file.
fn total(mut lens: impl Iterator<Item = usize>) -> Option<usize> {
    lens.try_fold(0_usize, usize::checked_add)
}

impl From<Trajectory> for PackedTrajectory {
    fn from(trajectory: Trajectory) -> Self {
        let Trajectory {
            token_ids, loss_mask, rollout_logprobs, weight_versions, finish_reason, routed_experts, ..
        } = trajectory;
        let experts = digits(4, routed_experts.experts.iter().map(|&expert| u32::from(expert)));
        let begins_with_context = loss_mask.first() == Some(&false);
        let turns = if loss_mask.contains(&false) { runs(&loss_mask) } else { Vec::new() };
        let turns = begins_with_context.then_some(0).into_iter().chain(turns.into_iter().map(|(_, len)| len));
        Self {
            token_ids: digits(8, token_ids.into_iter()),
            rollout_logprobs: digits(8, rollout_logprobs.into_iter().map(f32::to_bits)),
            finish_reason,
            turns: turns.collect(),
            weight_versions: runs(&weight_versions),
            routed_experts: (routed_experts.per_token, experts),
        }
    }
}

impl TryFrom<PackedTrajectory> for Trajectory {
    type Error = String;

    fn try_from(packed: PackedTrajectory) -> Result<Self, String> {
        let PackedTrajectory { token_ids, rollout_logprobs, finish_reason, turns, weight_versions, routed_experts } =
            packed;
        let words = |digits: &str| numbers(digits, 8);
        let (per_token, experts) = routed_experts;
        let experts =
            numbers(&experts, 4).filter(|experts| experts.len().checked_rem(per_token).unwrap_or(experts.len()) == 0);
        let experts = experts.ok_or(
            "malformed experts of a completion: expected four hexadecimal digits each and the same number for every \
             token",
        )?;
        let per_token = if experts.is_empty() { 0 } else { per_token };
        let both =
            words(&token_ids).zip(words(&rollout_logprobs)).filter(|(ids, logprobs)| ids.len() == logprobs.len());
        let (token_ids, logprobs) =
            both.ok_or("malformed tokens of a completion: expected one hexadecimal word each")?;
        let turns = if turns.is_empty() { vec![token_ids.len()] } else { turns };
        let is_as_long = |lens: &mut dyn Iterator<Item = usize>| total(lens) == Some(token_ids.len());
        if !is_as_long(&mut turns.iter().copied()) || !is_as_long(&mut weight_versions.iter().map(|(_, len)| *len)) {
            return Err("the turns or weight versions of a completion do not match its tokens".to_owned());
        }
        let turn = |(index, len): (usize, usize)| std::iter::repeat_n(index % 2 == 0, len);
        Ok(Self {
            loss_mask: turns.into_iter().enumerate().flat_map(turn).collect(),
            rollout_logprobs: logprobs.into_iter().map(f32::from_bits).collect(),
            weight_versions: weight_versions
                .into_iter()
                .flat_map(|(step, len)| std::iter::repeat_n(step, len))
                .collect(),
            token_ids,
            routed_experts: RoutedExperts {
                per_token,
                experts: experts.into_iter().map(|expert| expert as u16).collect::<Vec<_>>().into(),
            },
            finish_reason,
            ..Self::default()
        })
    }
}
