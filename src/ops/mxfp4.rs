//! MXFP4 (OCP microscaling) of matrices of experts: blocks of 32 numbers of a row in 4 bits (e2m1), each block with a power of two (e8m0).
//!
//! A block's scale is 2^(floor(log2 m) - 2) for its largest absolute value m, which is the specification's rule. Numbers are divided by it and rounded
//! to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to even codes; what is above 6 becomes 6. Numbers that were decoded from MXFP4 are represented
//! again exactly, whatever the scale with which they were stored: the rule may halve or quarter a scale, but then all numbers of the block still have
//! codes. Scales range from 2^-90 to 2^33; a block with a number that is not finite has none, and is decoded as NaN.
//!
//! Matrices are kept in the order in which the GPU's kernel reads them (`src/kernels/mxfp4.cuh`): units of 64 rows and 64 columns, padded with zeros.
//! On a GPU a kernel quantizes; the CPU operations are its reference, bit for bit, and decode for an engine on a CPU.

use std::sync::LazyLock;

use tch::{Kind, Tensor};

use crate::cuda::kernels;
pub use crate::cuda::kernels::mxfp4_bytes as bytes;
use crate::cuda::kernels::{MXFP4_UNIT as UNIT, MXFP4_UNIT_BYTES as UNIT_BYTES};
use crate::error::Result;

/// Numbers in a block.
pub const BLOCK: usize = 32;
/// The exponent that means a scale of 1.
pub const BIAS: i32 = 127;
/// The value of each 4-bit code.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Bytes per weight, without padding.
pub const WEIGHT_BYTES: f64 = 0.5 + 1.0 / BLOCK as f64;
/// Bytes of a unit's codes.
const UNIT_CODES: usize = UNIT * UNIT / 2;
/// Threads among which a unit's codes are divided, and words of a thread, each with codes of 16 columns.
const THREADS: usize = 128;
const WORDS: usize = 4;
/// A unit has the exponents of bfloat16 numbers with which the kernel multiplies: those of the scales + this.
const FROM_SCALE: i32 = 94;
/// The exponent in a unit is that of the block's largest number, as float32 stores it, plus this.
const TO_FACTOR: i32 = 92;
/// Smallest and largest exponent in a unit; others are moved to these.
const LEAST_FACTOR: i32 = 131;
const MOST_FACTOR: i32 = 254;
/// The exponent of blocks with a number that is not finite.
const NO_FACTOR: u8 = 255;
/// Places of the sign and of the other bits of a code in a bfloat16 number.
const PLACES: u32 = 0x81c0;

/// Values that separate the codes, and whether a number that equals them has the larger code.
const BETWEEN: [(f32, bool); 7] =
    [(0.25, false), (0.75, true), (1.25, false), (1.75, true), (2.5, false), (3.5, true), (5.0, false)];

/// Quantizes matrices [E, N, K] whose rows are contiguous into existing memory of [`bytes`] bytes. K must be a multiple of [`BLOCK`].
///
/// # Errors
/// [`crate::Error::InvalidArgument`] on a GPU for matrices that are not bfloat16; [`crate::Error::OutOfMemory`].
pub fn round(w: &Tensor /* [E, N, K] */, to: &Tensor /* [bytes] u8 */) -> Result<()> {
    if w.device().is_cuda() {
        return kernels::mxfp4_quantize(w, to);
    }
    let [experts, rows, columns] = sizes(w);
    let mut packed = Vec::with_capacity(to.numel());
    for expert in 0..experts {
        let matrix = w.get(expert as i64).f_to_kind(Kind::Float)?.f_contiguous()?.f_view([-1])?;
        ExpertMatrix { values: &Vec::<f32>::try_from(&matrix)?, rows, columns }.pack(&mut packed);
    }
    Ok(to.shallow_clone().f_copy_(&Tensor::f_from_slice(&packed)?)?)
}

/// Decodes matrices [E, N, K] to a type that represents the values exactly, such as bfloat16. CPU only.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn values(packed: &Tensor /* [bytes] u8 */, size: [i64; 3], kind: Kind) -> Result<Tensor> {
    let [experts, rows, columns] = size.map(|size| size as usize);
    let packed = Vec::<u8>::try_from(packed)?;
    let mut all = vec![0f32; experts * rows * columns];
    for (expert, own) in packed.chunks_exact(packed.len() / experts).enumerate() {
        let matrix = &mut all[expert * rows * columns..][..rows * columns];
        let steps = columns.div_ceil(UNIT);
        for (at, unit) in own.chunks_exact(UNIT_BYTES).enumerate() {
            let (first_row, first_column) = (at / steps * UNIT, at % steps * UNIT);
            let (words, factors) = unit.split_at(UNIT_CODES);
            let scales: Vec<f32> = factors.iter().map(|&factor| scale(factor)).collect();
            for (places, word) in PLACES_OF_WORDS.iter().zip(words.chunks_exact(4)) {
                let codes = codes_of(u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
                for (place, code) in places.as_flattened().iter().zip(codes.as_flattened()) {
                    let (row, column) = (first_row + place.row, first_column + place.column);
                    if row < rows && column < columns {
                        matrix[row * columns + column] = E2M1[usize::from(*code)] * scales[place.factor()];
                    }
                }
            }
        }
    }
    Ok(Tensor::f_from_slice(&all)?.f_view(size)?.f_to_kind(kind)?)
}

fn sizes(w: &Tensor) -> [usize; 3] {
    let &[experts, rows, columns] = &w.size()[..] else { panic!("matrices of experts, not {:?}", w.size()) };
    [experts, rows, columns].map(|size| size as usize)
}

/// The scale that a unit's byte means.
fn scale(factor: u8) -> f32 {
    if factor == NO_FACTOR { f32::NAN } else { 2f32.powi(i32::from(factor) - FROM_SCALE - BIAS) }
}

/// The byte for a block's scale.
fn factor(block: &[f32]) -> u8 {
    let largest = block.iter().map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    match (largest >> 23) as i32 {
        255 => NO_FACTOR,
        exponent => (exponent + TO_FACTOR).clamp(LEAST_FACTOR, MOST_FACTOR) as u8,
    }
}

/// 1 / the scale that a unit's byte means.
fn inverse_scale(factor: u8) -> f32 {
    2f32.powi(BIAS + FROM_SCALE - i32::from(factor))
}

/// The code of a number, given 1 / its block's scale.
fn code(value: f32, inverse_scale: f32) -> u8 {
    let size = value.abs() * inverse_scale;
    let above = |&(edge, is_above): &(f32, bool)| if is_above { size >= edge } else { size > edge };
    BETWEEN.partition_point(above) as u8 | u8::from(value.is_sign_negative()) << 3
}

/// A place of a unit.
#[derive(Debug, Clone, Copy)]
struct UnitPlace {
    row: usize,
    column: usize,
}

impl UnitPlace {
    /// The index of the exponent for this place among those of the unit.
    fn factor(self) -> usize {
        self.row / 2 * 4 + self.column / BLOCK * 2 + self.row % 2
    }
}

/// The four pairs of places whose codes a unit's word holds. Word `word % 4` of thread `word / 4`, whose warp has 16 rows and whose lane has two of them.
fn places(word: usize) -> [[UnitPlace; 2]; 4] {
    let (thread, step) = (word / WORDS, word % WORDS);
    let (lane, row) = (thread % 32, thread / 32 * 16 + thread % 32 / 4 * 2);
    [(0, 0), (1, 0), (0, 8), (1, 8)].map(|(odd, later)| {
        [0, 1].map(|half| UnitPlace { row: row + odd, column: step * 16 + lane % 4 * 2 + later + half })
    })
}

/// The places of all words of a unit.
static PLACES_OF_WORDS: LazyLock<Vec<[[UnitPlace; 2]; 4]>> =
    LazyLock::new(|| (0..THREADS * WORDS).map(places).collect());

/// A word from its codes; both halves, of even and of odd columns, have the same form. The kernel takes the first code from its places, the second by
/// a shift of 3, the third by the exclusive or of shifts of 6 and 1, and the fourth by that of shifts of -3 and 2.
fn word_of(codes: [[u8; 2]; 4]) -> u32 {
    let mut word = 0u32;
    for half in [1, 0] {
        let [a, b, c, d] = codes.map(|pair| u32::from(pair[half]));
        let mut w = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3;
        w |= (c ^ w >> 5) & 7;
        w |= ((d << 3 ^ w >> 1) & 0x38) << 6;
        w |= (c << 11 ^ w << 5) & 0x4000;
        w |= (d << 10 ^ word >> 16 << 11) & 0x2000; // the shift to the right brings a bit of the upper half
        word |= w << (16 * half);
    }
    word
}

/// The codes of a word.
fn codes_of(w: u32) -> [[u8; 2]; 4] {
    let code = |bits: u32| {
        let bits = bits & PLACES;
        (bits >> 12 | bits >> 6 & 7) as u8
    };
    [w, w << 3, w << 6 ^ w << 1, w >> 3 ^ w << 2].map(|number| [code(number), code(number >> 16)])
}

/// One expert's matrix.
struct ExpertMatrix<'a> {
    values: &'a [f32], // [N, K]
    rows: usize,
    columns: usize,
}

impl ExpertMatrix<'_> {
    fn pack(&self, to: &mut Vec<u8>) {
        for first_row in (0..self.rows).step_by(UNIT) {
            for first_column in (0..self.columns).step_by(UNIT) {
                self.pack_unit(first_row, first_column, to);
            }
        }
    }

    fn pack_unit(&self, first_row: usize, first_column: usize, to: &mut Vec<u8>) {
        let mut factors = [0; UNIT * UNIT / BLOCK];
        for row in 0..UNIT {
            for column in [0, BLOCK] {
                let block: Vec<f32> = (0..BLOCK).map(|k| self.at(first_row + row, first_column + column + k)).collect();
                factors[UnitPlace { row, column }.factor()] = factor(&block);
            }
        }
        let inverse_scales = factors.map(inverse_scale);
        for places in PLACES_OF_WORDS.iter() {
            let codes = places.map(|pair| {
                pair.map(|place| {
                    let value = self.at(first_row + place.row, first_column + place.column);
                    code(value, inverse_scales[place.factor()])
                })
            });
            to.extend(word_of(codes).to_le_bytes());
        }
        to.extend(factors);
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        if row < self.rows && column < self.columns { self.values[row * self.columns + column] } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn round_trip(w: &Tensor) -> Tensor {
        let size = sizes(w).map(|size| size as i64);
        let packed = Tensor::zeros([bytes(size)], (Kind::Uint8, Device::Cpu));
        round(w, &packed).unwrap();
        values(&packed, size, w.kind()).unwrap()
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_code_and_ties_to_even_codes() {
        let mut block = [0f32; 32];
        let pairs = [
            (4.0, 4.0f32), // gives the scale 1
            (0.25, 0.0),
            (0.26, 0.5),
            (0.74, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.26, 1.5),
            (1.75, 2.0),
            (2.5, 2.0),
            (2.6, 3.0),
            (3.5, 4.0),
            (5.0, 4.0),
            (5.1, 6.0),
            (7.9, 6.0),
            (-0.3, -0.5),
            (-3.4, -3.0),
            (-0.1, -0.0),
        ];
        pairs.iter().enumerate().for_each(|(at, (value, _))| block[at] = *value);
        let got = Vec::<f32>::try_from(round_trip(&Tensor::from_slice(&block).view([1, 1, 32])).view(-1)).unwrap();
        for (at, (value, expected)) in pairs.iter().enumerate() {
            assert_eq!(got[at].to_bits(), expected.to_bits(), "{value}");
        }
        // The scale is a power of two: the same numbers times 2^-9 have the same codes.
        let small = round_trip(&(Tensor::from_slice(&block).view([1, 1, 32]) * 2f64.powi(-9)));
        assert_eq!(Vec::<f32>::try_from(small.view(-1) * 512.0).unwrap(), got);
    }

    /// Every multiset of codes is a block whose largest code decides the scale; each code stands beside each largest one, at several scales.
    #[test]
    fn weights_that_were_decoded_from_mxfp4_are_kept_exactly() {
        for exponent in [-80, -14, -7, 0, 3, 30] {
            for largest in 0..16 {
                let mut codes: Vec<usize> = (0..16).filter(|code| code % 8 <= largest % 8).collect();
                codes.push(largest);
                let block: Vec<f32> = (0..32).map(|k| E2M1[codes[k % codes.len()]] * 2f32.powi(exponent)).collect();
                let w = Tensor::from_slice(&block).view([1, 1, 32]).to_kind(Kind::BFloat16);
                let got = round_trip(&w);
                let bits = |tensor: &Tensor| Vec::<i16>::try_from(tensor.view_dtype(Kind::Int16).view(-1)).unwrap();
                assert_eq!(bits(&got), bits(&w), "{largest} at 2^{exponent}, with signs of zeros");
            }
        }
    }

    #[test]
    fn odd_sizes_are_padded_and_extremes_keep_their_meaning() {
        for size in [[1, 1, 32], [3, 70, 96], [2, 64, 160], [2, 130, 64]] {
            let w = Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16);
            let got = round_trip(&w);
            let most = (&w.view([-1, 32]).abs().amax([1], true) / 4.0).to_kind(Kind::Float); // half of the widest gap, 2 scales, and saturation
            let off = (got - &w).view([-1, 32]).abs().to_kind(Kind::Float);
            assert!(off.le_tensor(&(most + 1e-6)).all().int64_value(&[]) == 1, "{size:?}");
            assert!(round_trip(&round_trip(&w)).equal(&round_trip(&w)), "{size:?}");
        }
        let w = Tensor::zeros([1, 2, 64], (Kind::Float, Device::Cpu));
        let _ = w.get(0).get(1).narrow(0, 40, 1).fill_(f64::INFINITY);
        let _ = w.get(0).get(0).narrow(0, 0, 1).fill_(1e-30);
        let got = round_trip(&w);
        let own = got.isnan().sum(Kind::Int64).int64_value(&[]);
        assert_eq!(own, 32, "the whole block of a number that is not finite");
        assert_eq!(got.get(0).get(0).abs().sum(Kind::Float).double_value(&[]), 0.0, "far below the smallest scale");
    }
}
