//! MXFP4 ([`crate::ops::mxfp4`]) in checkpoints. A file stores a matrix's numbers row by row, two per byte with the lower 4 bits first, in NAME_blocks,
//! and the scales in NAME_scales.

use tch::Tensor;

use crate::error::Result;
use crate::ops::mxfp4::{BIAS, BLOCK, E2M1};

const ENDINGS: [&str; 2] = ["_blocks", "_scales"];

/// Names and shapes of the two tensors that store matrices [E, N, K].
pub(super) fn parts(name: &str, [experts, rows, columns]: [i64; 3]) -> [(String, Vec<i64>); 2] {
    let scales = vec![experts, rows, columns / BLOCK as i64];
    let blocks = [&scales[..], &[BLOCK as i64 / 2]].concat();
    let [of_blocks, of_scales] = ENDINGS.map(|ending| format!("{name}{ending}"));
    [(of_blocks, blocks), (of_scales, scales)]
}

/// Whether a tensor's name is that of an MXFP4 tensor.
pub(super) fn is_part(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Decodes the numbers into a tensor whose type represents them exactly, such as bfloat16.
///
/// # Errors
/// [`crate::Error::Torch`] if memory is exhausted.
pub(super) fn decode(
    blocks: &[u8], // [E, N, K / 32, 16]
    scales: &[u8], // [E, N, K / 32]
    to: &Tensor,   // [E, N, K]
) -> Result<()> {
    let [experts, rows, columns] = to.size()[..] else { panic!("matrices of experts, not {:?}", to.size()) };
    let (numel, mut numbers) = ((rows * columns) as usize, Vec::new());
    for expert in 0..experts as usize {
        let [blocks, scales] =
            [(blocks, numel / 2), (scales, numel / BLOCK)].map(|(all, own)| &all[expert * own..(expert + 1) * own]);
        numbers.clear();
        for (block, &scale) in blocks.chunks_exact(BLOCK / 2).zip(scales) {
            let scale = 2f32.powi(i32::from(scale) - BIAS);
            let both = |&byte: &u8| [byte & 15, byte >> 4].map(|bits| E2M1[usize::from(bits)] * scale);
            numbers.extend(block.iter().flat_map(both));
        }
        to.get(expert as i64).f_copy_(&Tensor::f_from_slice(&numbers)?.f_view([rows, columns])?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn mxfp4_codes_are_unpacked_low_nibble_first_and_scaled_by_block() {
        let (mut blocks, scales) = (vec![0u8; 2 * 2 * 16], [127u8, 128, 120, 127]);
        blocks[0] = 0x72; // 1, 6
        blocks[16] = 0x91; // 0.5, -0.5 of the second block, scaled by 2
        blocks[32 + 15] = 0xf0; // -6 at the end of the third, scaled by 2^-7
        let to = Tensor::zeros([2, 32, 2], (Kind::BFloat16, Device::Cpu)).transpose(1, 2); // the memory layout of a file's tensor
        decode(&blocks, &scales, &to).unwrap();
        let rows = Vec::<Vec<f32>>::try_from(to.to_kind(Kind::Float).reshape([4, 32])).unwrap();
        assert_eq!((rows[0][0], rows[0][1], rows[1][0], rows[1][1]), (1.0, 6.0, 1.0, -1.0));
        assert_eq!((rows[2][31], rows[3][0]), (-6.0 / 128.0, 0.0));
        let [blocks, scales] = parts("x", [2, 2, 32]);
        assert_eq!((blocks, scales), (("x_blocks".into(), vec![2, 2, 1, 16]), ("x_scales".into(), vec![2, 2, 1])));
    }
}
