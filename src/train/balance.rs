//! Distributes the sequences of a generation batch over ranks by cost. Every rank knows the whole batch and computes its own part.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::pack::prompt_groups;
use super::sequence::Sequence;
use crate::model::ModelSpec;

/// Cost multiplier of attention's FLOPs: attention reaches about half of the FLOP rate of GEMMs.
const ATTENTION_WEIGHT: f64 = 2.0;

/// Indexes of the part of `all` that this rank trains on. Costs are balanced by the largest differencing method (Karmarkar and Karp, 1982), over
/// groups that share a prompt, which stay together, or over single sequences. Masked sequences cost nothing and go to the end of rank 0's part, so
/// that they are counted. All ranks compute the same partition. The costs of two parts differ by at most the cost of the most expensive group.
pub fn balanced_share(
    all: &[Sequence],
    spec: &ModelSpec,
    share_prompts: bool,
    rank: usize,
    num_ranks: usize,
) -> Vec<usize> {
    let (masked, unmasked): (Vec<usize>, Vec<usize>) = (0..all.len()).partition(|&index| all[index].masked);
    let groups = prompt_groups(all, unmasked, share_prompts);
    // GEMMs take 6 operations per token and weight; attention takes 12 per layer, head width and pair of query and key.
    let of_token = 6 * spec.num_active_params() + spec.training_flop_per_token();
    let pair_cost = ATTENTION_WEIGHT * spec.training_flop_per_pair() as f64 / of_token as f64;
    let costs: Vec<f64> = groups.iter().map(|group| cost(all, group, pair_cost)).collect();
    let own = partition(&costs, num_ranks).swap_remove(rank);
    let own = own.into_iter().flat_map(|group| &groups[group]);
    own.chain(masked.iter().filter(|_| rank == 0)).copied().collect()
}

/// Cost of a group's forward and backward, in units of one token without attention; `pair_cost` is that of a pair of query and key.
fn cost(all: &[Sequence], group: &[usize], pair_cost: f64) -> f64 {
    let prompt_len = all[group[0]].prompt_len as f64;
    let of_prompt = prompt_len + pair_cost * prompt_len * prompt_len / 2.0;
    let of_completion = |index: &usize| {
        let len = all[*index].completion_len() as f64;
        len + pair_cost * len * (prompt_len + len / 2.0)
    };
    of_prompt + group.iter().map(of_completion).sum::<f64>()
}

/// A partial partition: (cost, members) of each part, most expensive first.
type Partition = Vec<(f64, Vec<usize>)>;

/// Partitions `costs` into `num_parts` parts of indexes, each in ascending order. Repeatedly merges the two partial partitions with the largest cost
/// differences, joining the most expensive part of one with the cheapest of the other.
fn partition(costs: &[f64], num_parts: usize) -> Vec<Vec<usize>> {
    let uneven = |parts: &Partition| ordered(parts[0].0 - parts[num_parts - 1].0);
    let mut partitions: Vec<Partition> = (0..costs.len())
        .map(|index| {
            let mut parts = vec![(0.0, Vec::new()); num_parts];
            parts[0] = (costs[index], vec![index]);
            parts
        })
        .collect();
    let mut most_uneven: BinaryHeap<(u64, Reverse<usize>)> =
        partitions.iter().enumerate().map(|(at, parts)| (uneven(parts), Reverse(at))).collect();
    while let Some((_, Reverse(first))) = most_uneven.pop() {
        let Some((_, Reverse(second))) = most_uneven.pop() else {
            let parts = partitions.swap_remove(first);
            return parts.into_iter().map(|(_, members)| sorted(members)).collect();
        };
        let cheap = std::mem::take(&mut partitions[second]);
        for (part, (cost, members)) in partitions[first].iter_mut().zip(cheap.into_iter().rev()) {
            part.0 += cost;
            part.1.extend(members);
        }
        partitions[first].sort_by(|a, b| b.0.total_cmp(&a.0));
        most_uneven.push((uneven(&partitions[first]), Reverse(first)));
    }
    vec![Vec::new(); num_parts]
}

/// Bits that order like the number; costs are not negative.
fn ordered(cost: f64) -> u64 {
    cost.max(0.0).to_bits()
}

fn sorted(mut members: Vec<usize>) -> Vec<usize> {
    members.sort_unstable();
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_divided_evenly_and_completely() {
        assert_eq!(partition(&[8.0, 7.0, 6.0, 5.0, 4.0], 2), [[1, 3, 4].to_vec(), [0, 2].to_vec()]); // 16 and 14
        let costs: Vec<f64> = (0..61).map(|i| f64::from(i * i * 7 % 113 + 1)).collect();
        for num_parts in [1, 2, 3, 8] {
            let parts = partition(&costs, num_parts);
            assert_eq!(sorted(parts.concat()), (0..61).collect::<Vec<_>>());
            let sums = parts.iter().map(|part| part.iter().map(|&index| costs[index]).sum::<f64>());
            let (low, high) = sums.fold((f64::MAX, 0.0f64), |(low, high), sum| (low.min(sum), high.max(sum)));
            assert!(high / low < 1.01, "{num_parts} parts of {low} to {high}");
        }
        assert_eq!(partition(&[1.0], 3), [vec![0], vec![], vec![]]);
        assert_eq!(partition(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
    }
}
