//! Numbers as operands. A fallible operation of `tch` that takes a `Scalar` panics all the same where libtorch fails: the scalar's
//! destructor runs first and finds the error that is pending. So operations that allocate take their numbers as tensors of no
//! dimension, which libtorch makes of them anyway, or write to memory that was asked for before. In place a `Scalar` is safe:
//! nothing is allocated.

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// A number as an operand of tensors of its own category on any device: it does not change their kind. []
pub fn scalar<T: tch::kind::Element>(number: T) -> Tensor {
    Tensor::from_slice(&[number]).squeeze()
}

/// A tensor filled with a number.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn full(shape: &[i64], number: f64, options: (Kind, Device)) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, options)?.f_fill_(number)?)
}

/// 0, 1, .. below `end`. `[end]` i64
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn arange(end: i64, device: Device) -> Result<Tensor> {
    check_room(&[end], (Kind::Int64, device))?;
    Ok(Tensor::f_arange(end, (Kind::Int64, device))?)
}

/// Fails where a tensor of this shape has no room; what it takes for that, the next allocation of the size finds again. For
/// operations whose numbers must be scalars.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn check_room(shape: &[i64], options: (Kind, Device)) -> Result<()> {
    drop(Tensor::f_empty(shape, options)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_operand_keeps_the_tensor_dtype() {
        for kind in [Kind::BFloat16, Kind::Float, Kind::Double] {
            let x = Tensor::ones([3], (kind, Device::Cpu));
            let y = x.f_mul(&scalar(0.1)).unwrap();
            assert!(y.kind() == kind && y.equal(&(x * 0.1)), "{y}");
        }
        let ids = arange(4, Device::Cpu).unwrap();
        assert!(ids.f_sub(&scalar(1i64)).unwrap().equal(&(&ids - 1)) && ids.kind() == Kind::Int64);
        assert!(full(&[2], f64::INFINITY, (Kind::Float, Device::Cpu)).unwrap().isinf().all().int64_value(&[]) == 1);
    }

    #[test]
    fn out_of_range_scalars_are_an_error() {
        let huge = [1i64 << 50];
        let options = (Kind::Float, Device::Cpu);
        assert!(full(&huge, 0.0, options).is_err() && arange(huge[0], Device::Cpu).is_err());
        assert!(check_room(&huge, options).is_err() && check_room(&[8], options).is_ok());
    }
}
