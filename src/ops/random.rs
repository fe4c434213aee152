//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//!
//! A number is a pure function of (key, row, index), so it does not depend on batch composition, tensor-parallel degree or world size. A key is
//! derived from words such as (seed, stream, step, prompt id, sample).

const ROUNDS: usize = 10;
const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns four random words for a counter and a key.
pub fn philox4x32(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let ([mut k0, mut k1], [mut c0, mut c1, mut c2, mut c3]) = (key, counter);
    for _ in 0..ROUNDS {
        let (p0, p1) = (MULTIPLIERS[0] * u64::from(c0), MULTIPLIERS[1] * u64::from(c2));
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [c0, c1, c2, c3]
}

/// The key of one stream of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomKey([u32; 2]);

impl RandomKey {
    /// The root key of a run for one purpose (`stream`) of random numbers.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self([seed as u32, (seed >> 32) as u32]).fold(stream)
    }

    /// Derives a key from this key and `word`.
    pub fn fold(self, word: u64) -> Self {
        // The last counter word separates these numbers from those of `block`.
        let words = philox4x32(self.0, [word as u32, (word >> 32) as u32, 0, u32::MAX]);
        Self([words[0], words[1]])
    }

    /// The words of the key, for random numbers on a device.
    pub fn words(self) -> [u32; 2] {
        self.0
    }

    /// Returns the four words of block `block` of `row`, which must be below 2^63.
    pub fn block(self, row: u64, block: u64) -> [u32; 4] {
        philox4x32(self.0, [block as u32, (block >> 32) as u32, row as u32, (row >> 32) as u32])
    }

    /// Returns the 64-bit word with index `index` of `row`.
    pub fn word(self, row: u64, index: u64) -> u64 {
        let words = self.block(row, index / 2);
        let lane = (index % 2) as usize * 2;
        u64::from(words[lane]) | u64::from(words[lane + 1]) << 32
    }

    /// Fills `out` with the numbers of `row` from index `start` on, uniform in the open interval (0, 1).
    pub fn fill_uniform(self, row: u64, start: u64, out: &mut [f32]) {
        self.fill(row, start, out, |words| words.map(open_unit));
    }

    /// Fills `out` with the numbers of `row` from index `start` on, standard Gumbel: -ln(-ln(1 - u)). Small u, which decide the maximum over a
    /// vocabulary, have their full 32 bits. Always finite.
    pub fn fill_gumbel(self, row: u64, start: u64, out: &mut [f32]) {
        self.fill(row, start, out, |words| words.map(|word| -(-(-open_unit(word)).ln_1p()).ln()));
    }

    /// Fills `out` with the numbers of `row` from index `start` on: 0 with probability `rate`, else 1 / (1 - rate).
    pub fn fill_dropout(self, row: u64, start: u64, rate: f64, out: &mut [f32]) {
        let (threshold, kept) = dropout_scalars(rate);
        self.fill(row, start, out, |words| words.map(|word| if word < threshold { 0.0 } else { kept }));
    }

    /// Fills `out` with the numbers of `row` from index `start` on, standard normal (Box-Muller in f64).
    pub fn fill_normal(self, row: u64, start: u64, out: &mut [f32]) {
        self.fill(row, start, out, |[a, b, c, d]| {
            let ([x, y], [z, w]) = (box_muller(a, b), box_muller(c, d));
            [x, y, z, w]
        });
    }

    /// Number i comes from lane i % 4 of block i / 4, whatever range is requested.
    fn fill(self, row: u64, start: u64, out: &mut [f32], draw: impl Fn([u32; 4]) -> [f32; 4]) {
        let skip = (start % 4) as usize;
        let head = out.len().min((4 - skip) % 4);
        let (head, rest) = out.split_at_mut(head);
        if !head.is_empty() {
            head.copy_from_slice(&draw(self.block(row, start / 4))[skip..skip + head.len()]);
        }
        let first = start.div_ceil(4);
        for (block, out) in rest.chunks_mut(4).enumerate() {
            out.copy_from_slice(&draw(self.block(row, first + block as u64))[..out.len()]);
        }
    }
}

/// Returns (threshold, multiplier): words below the threshold drop an element; others multiply it by 1 / (1 - rate).
pub(super) fn dropout_scalars(rate: f64) -> (u32, f32) {
    ((rate * 4_294_967_296.0) as u32, (1.0 / (1.0 - rate)) as f32)
}

/// Returns (word + 1/2) / 2^32, rounded to f32 and kept below 1: between 2^-33 and 1 - 2^-24.
fn open_unit(word: u32) -> f32 {
    const SCALE: f32 = 1.0 / 4_294_967_296.0;
    ((word as f32 + 0.5) * SCALE).min(1.0 - f32::EPSILON / 2.0)
}

/// Returns two standard normal numbers from two words.
fn box_muller(a: u32, b: u32) -> [f32; 2] {
    const SCALE: f64 = 1.0 / 4_294_967_296.0;
    let radius = (-2.0 * ((f64::from(a) + 0.5) * SCALE).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * f64::from(b) * SCALE).sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of the authors' Random123 library (file kat_vectors, philox4x32 with 10 rounds).
    #[test]
    fn philox_matches_known_answers() {
        let zeros = philox4x32([0; 2], [0; 4]);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox4x32([u32::MAX; 2], [u32::MAX; 4]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox4x32([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn uniform_samples_exclude_0_and_1() {
        assert!(open_unit(0) > 0.0);
        assert!(open_unit(u32::MAX) < 1.0);
        let gumbel = |word| -(-(-open_unit(word)).ln_1p()).ln();
        assert!(gumbel(0).is_finite() && gumbel(u32::MAX).is_finite());
        assert!(gumbel(0) > 20.0 && gumbel(u32::MAX) < -2.0);
    }

    #[test]
    fn filling_a_range_equals_a_slice_of_the_whole() {
        let key = RandomKey::new(42, 1).fold(7);
        let mut whole = [0f32; 23];
        key.fill_uniform(5, 0, &mut whole);
        for start in 0..23 {
            for len in 0..23 - start {
                let mut piece = vec![0f32; len];
                key.fill_uniform(5, start as u64, &mut piece);
                assert_eq!(piece, whole[start..start + len]);
            }
        }
    }

    #[test]
    fn random_streams_differ_by_row_key_and_seed() {
        let draw = |key: RandomKey, row| {
            let mut out = [0f32; 4];
            key.fill_uniform(row, 0, &mut out);
            out
        };
        let key = RandomKey::new(1, 2);
        let others = [
            draw(key, 1),
            draw(RandomKey::new(2, 2), 0),
            draw(RandomKey::new(1, 3), 0),
            draw(RandomKey::new(1 + (1 << 32), 2), 0),
            draw(key.fold(0), 0),
            draw(key.fold(1 << 32), 0),
        ];
        for (i, a) in others.iter().enumerate() {
            assert_ne!(*a, draw(key, 0));
            assert!(others[i + 1..].iter().all(|b| a != b));
        }
        assert_ne!(key.word(0, 0), key.word(0, 1));
    }

    /// Mean and variance must be within five standard errors of 200,000 numbers.
    #[test]
    fn normal_samples_have_mean_0_and_variance_1() {
        let key = RandomKey::new(3, 0);
        let n = 200_000;
        let mut out = vec![0f32; n];
        let moments = |out: &[f32]| {
            let mean = out.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
            (mean, out.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n as f64)
        };
        key.fill_normal(0, 0, &mut out);
        let (mean, variance) = moments(&out);
        assert!(mean.abs() < 0.0112 && (variance - 1.0).abs() < 0.0159, "{mean} {variance}");
        key.fill_gumbel(0, 0, &mut out);
        let (mean, variance) = moments(&out);
        assert!((mean - 0.577_216).abs() < 0.0144 && (variance - 1.644_934).abs() < 0.039, "{mean} {variance}");
        key.fill_uniform(0, 0, &mut out);
        let (mean, variance) = moments(&out);
        assert!((mean - 0.5).abs() < 0.0033 && (variance - 1.0 / 12.0).abs() < 0.00084, "{mean} {variance}");
    }
}
