//! Benchmarks on random weights and tokens. Each returns one JSON object; medians of several repetitions after a warm-up.

mod generate;
mod train;

pub use generate::{GenerateBench, bench_generate};
pub use train::{TrainBench, bench_train};

/// The middle value; of an even number the mean of the two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Numbers that look random and are the same every time (the finaliser of splitmix64).
fn token(index: usize, vocab_size: usize) -> u32 {
    let mut word = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((word ^ (word >> 31)) % vocab_size as u64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_tokens() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!((0..1000).map(|index| token(index, 7)).all(|token| token < 7));
        assert_ne!(token(1, 1 << 20), token(2, 1 << 20));
    }
}
