//! Corrections of a router's scores. They are float32 whatever type the weights have. To store them without loss among bfloat16 weights, each is
//! split into three summands with 8 bits of the mantissa each.

use tch::{Kind, Tensor};

use crate::error::Result;

/// Number of summands per correction.
pub const PARTS: usize = 3;

/// Adds the summands up to the corrections [E], in `kind`.
pub fn sum(parts: &Tensor /* [3 E] */, kind: Kind) -> Result<Tensor> {
    Ok(parts.f_view([PARTS as i64, -1])?.f_to_kind(kind)?.f_sum_dim_intlist(0, false, kind)?)
}

/// Splits corrections [E] into their summands [3 E], in float32.
pub fn split(corrections: &Tensor) -> Result<Tensor> {
    let mut rest = corrections.f_to_kind(Kind::Float)?;
    let mut parts = Vec::new();
    for _ in 0..PARTS {
        let part = rest.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Float)?;
        rest = rest.f_sub(&part)?;
        parts.push(part);
    }
    Ok(Tensor::f_cat(&parts, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn router_corrections_round_trip_through_bfloat16_files() {
        let all = Tensor::from_slice(&[8.123_456f32, -0.000_123_456_7, 1e-7, 0.0, 123.456, 1.0]);
        let parts = split(&all).unwrap().to_kind(Kind::BFloat16);
        assert!(sum(&parts, Kind::Float).unwrap().equal(&all));
    }
}
