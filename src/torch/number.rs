//! Numbers as operands of tensor operations. A fallible operation of `tch` that takes a `Scalar` panics when libtorch fails, because the scalar's
//! destructor finds the pending error first. So operations that allocate take numbers as zero-dimensional tensors, which libtorch converts them to
//! anyway, or write to memory that was allocated before. In-place operations may take a `Scalar`, as they allocate nothing.

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// A number as a zero-dimensional tensor, to be combined with tensors of the same category (integer or float) on any device without changing their
/// type. []
pub fn scalar<T: tch::kind::Element>(number: T) -> Tensor {
    Tensor::from_slice(&[number]).squeeze()
}

/// Creates a tensor filled with a number.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn full(shape: &[i64], number: f64, options: (Kind, Device)) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, options)?.f_fill_(number)?)
}

/// Creates the tensor 0, 1, .. below `end`. `[end]` i64
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn arange(end: i64, device: Device) -> Result<Tensor> {
    check_room(&[end], (Kind::Int64, device))?;
    Ok(Tensor::f_arange(end, (Kind::Int64, device))?)
}

/// Fails if there is no memory for a tensor of this shape; otherwise leaves the memory cached for the next allocation of that size. For operations
/// whose numbers must be scalars.
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
