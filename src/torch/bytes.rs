//! Access to a tensor's memory as host bytes and vectors.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// The memory of a contiguous CPU tensor, without a copy.
///
/// # Safety
/// Nothing may write this memory while the slice lives, through any tensor. Clones and views share the memory, and borrowing one does not restrict
/// the others.
///
/// # Errors
/// [`Error::InvalidArgument`] if the tensor is not contiguous or not on the CPU.
pub unsafe fn bytes(tensor: &Tensor) -> Result<&[u8]> {
    let (pointer, len) = contiguous("torch::bytes", tensor)?;
    // SAFETY: `contiguous` checked that the tensor's elements are `len` bytes from `pointer`; the borrow keeps them alive, and
    // nobody writes them, as the caller promises.
    Ok(if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, len) } })
}

/// A copy of the memory of a contiguous CPU tensor.
///
/// # Errors
/// The errors of [`bytes`].
pub fn byte_vec(tensor: &Tensor) -> Result<Vec<u8>> {
    // SAFETY: the slice is copied at once, by this thread, which writes nothing meanwhile.
    Ok(unsafe { bytes(tensor) }?.to_vec())
}

/// Address and length in bytes of a contiguous CPU tensor's elements.
fn contiguous(op: &'static str, tensor: &Tensor) -> Result<(*mut u8, usize)> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() {
        let got = format!("strides {:?} of shape {:?} on {:?}", tensor.stride(), tensor.size(), tensor.device());
        return Err(Error::InvalidArgument { op, expected: "a contiguous CPU tensor".into(), got });
    }
    Ok((tensor.data_ptr().cast(), tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()))
}

/// The elements as host f32, from any device and kind, in row-major order.
///
/// # Errors
/// [`Error::Torch`], also for work on the tensor's device that failed before.
pub fn f32_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    host_vec(tensor, 0.0)
}

/// The elements as host f64, from any device and kind, in row-major order.
///
/// # Errors
/// The errors of [`f32_vec`].
pub fn f64_vec(tensor: &Tensor) -> Result<Vec<f64>> {
    host_vec(tensor, 0.0)
}

/// The elements as host i64, from any device and kind, in row-major order.
///
/// # Errors
/// The errors of [`f32_vec`].
pub fn i64_vec(tensor: &Tensor) -> Result<Vec<i64>> {
    host_vec(tensor, 0)
}

fn host_vec<T: tch::kind::Element + Clone>(tensor: &Tensor, zero: T) -> Result<Vec<T>> {
    let host = tensor.f_to_device(Device::Cpu)?.f_to_kind(T::KIND)?.f_contiguous()?;
    let mut values = vec![zero; host.numel()];
    if !values.is_empty() {
        let count = values.len();
        host.f_copy_data(&mut values, count)?;
    }
    Ok(values)
}

/// Copies the values to a tensor `[n]` on `device`.
///
/// # Errors
/// [`Error::OutOfMemory`]; [`Error::Torch`], also for earlier work on the device that failed.
pub fn tensor_on<T: tch::kind::Element>(values: &[T], device: Device) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(values)?.f_to_device(device)?)
}

/// Creates a tensor `[len]` on `device` from zeros that `fill` may overwrite, without the host copy that [`tensor_on`] makes.
///
/// # Errors
/// The errors of [`tensor_on`].
pub fn filled_on<T: tch::kind::Element>(len: usize, device: Device, fill: impl FnOnce(&mut [T])) -> Result<Tensor> {
    let host = Tensor::f_zeros([len as i64], (T::KIND, Device::Cpu))?;
    if len > 0 {
        // SAFETY: the tensor is new and contiguous, with so many elements of this type, any bits of which are a value; nobody else has it.
        fill(unsafe { std::slice::from_raw_parts_mut(host.data_ptr().cast(), len) });
    }
    Ok(host.f_to_device(device)?)
}

/// Passes the memory of a contiguous tensor on any device to `read`; a GPU tensor is copied once.
///
/// # Errors
/// The errors of [`bytes`]; [`Error::Torch`], also for earlier work on the device that failed.
pub fn read_bytes<R>(tensor: &Tensor, read: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let host = match tensor.device() {
        Device::Cpu => {
            let mut copy = tensor.f_zeros_like()?;
            copy.f_copy_(tensor)?;
            copy
        }
        _ => tensor.f_to_device(Device::Cpu)?,
    };
    // SAFETY: the copy is nobody else's.
    Ok(read(unsafe { bytes(&host) }?))
}

/// The type in which sums over elements of `kind` are accumulated and normalizations computed: float64 for float64, else float32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_bytes_alias_the_tensor_and_copies_do_not() {
        let tensor = Tensor::from_slice(&[1f32, 2.0]);
        // SAFETY: nobody else has the tensor.
        let first = unsafe { bytes(&tensor) }.unwrap();
        assert_eq!((first.as_ptr(), &first[..4]), (tensor.data_ptr().cast_const().cast(), &1f32.to_le_bytes()[..]));
        let copy = byte_vec(&tensor).unwrap();
        let _ = tensor.shallow_clone().fill_(5.0);
        assert_eq!((&copy[..4], f32_vec(&tensor).unwrap()), (&1f32.to_le_bytes()[..], vec![5.0, 5.0]));
        assert_eq!(read_bytes(&tensor, <[u8]>::to_vec).unwrap(), byte_vec(&tensor).unwrap());
        assert!(byte_vec(&Tensor::zeros([0], (Kind::BFloat16, Device::Cpu))).unwrap().is_empty());
    }

    #[test]
    fn tensor_memory_is_filled_in_place() {
        let filled = filled_on(3, Device::Cpu, |values: &mut [i16]| values[1..].fill(-7)).unwrap();
        assert_eq!((filled.kind(), Vec::<i16>::try_from(&filled).unwrap()), (Kind::Int16, vec![0, -7, -7]));
        assert_eq!(filled_on(0, Device::Cpu, |_: &mut [u8]| panic!("nothing to fill")).unwrap().numel(), 0);
    }

    #[test]
    fn strided_tensors_have_no_byte_view_but_can_be_copied() {
        let tensor = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 3]);
        assert!(byte_vec(&tensor.tr()).unwrap_err().to_string().contains("contiguous"));
        assert_eq!(i64_vec(&tensor.tr()).unwrap(), [0, 3, 1, 4, 2, 5]);
        assert_eq!(f64_vec(&tensor.narrow(1, 2, 1)).unwrap(), [2.0, 5.0]);
    }
}
