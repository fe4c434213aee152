//! Element-wise reduction of the slots of several ranks, in rank order.
#![allow(unsafe_code)]

use half::bf16;
use tch::Kind;

use crate::dist::ReduceOp;

/// Elements accumulated at once: small enough for the first-level cache, large enough to be vectorised.
const BLOCK: usize = 1024;

/// `output[i] = op(sources[0][i], sources[1][i], ..)` for `count` elements of a reducible `kind`.
///
/// # Safety
/// Every source holds `count` initialised elements and `output` has room for as many; all are aligned for `kind`.
/// `output` overlaps no source.
pub(super) unsafe fn reduce(kind: Kind, op: ReduceOp, sources: &[*const u8], output: *mut u8, count: usize) {
    // SAFETY: the caller's promise, with the element type that belongs to `kind`.
    unsafe {
        match kind {
            Kind::Float => reduce_as::<f32>(op, sources, output.cast(), count),
            Kind::Double => reduce_as::<f64>(op, sources, output.cast(), count),
            Kind::BFloat16 => reduce_as::<bf16>(op, sources, output.cast(), count),
            Kind::Int64 => reduce_as::<i64>(op, sources, output.cast(), count),
            other => unreachable!("{other:?} was refused before"),
        }
    }
}

unsafe fn reduce_as<T: Element>(op: ReduceOp, sources: &[*const u8], output: *mut T, count: usize) {
    match op {
        // SAFETY: the caller's promise is passed on.
        ReduceOp::Sum => unsafe { accumulate(sources, output, count, T::add) },
        // SAFETY: as above.
        ReduceOp::Max => unsafe { accumulate(sources, output, count, T::max) },
        // SAFETY: as above.
        ReduceOp::Min => unsafe { accumulate(sources, output, count, T::min) },
    }
}

unsafe fn accumulate<T: Element>(
    sources: &[*const u8],
    output: *mut T,
    count: usize,
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    let mut wide = [T::Wide::default(); BLOCK];
    for start in (0..count).step_by(BLOCK) {
        let len = BLOCK.min(count - start);
        let wide = &mut wide[..len];
        for (rank, source) in sources.iter().enumerate() {
            // SAFETY: `start + len <= count`, and the caller promised `count` aligned elements.
            let source = unsafe { std::slice::from_raw_parts(source.cast::<T>().add(start), len) };
            for (sum, value) in wide.iter_mut().zip(source) {
                *sum = if rank == 0 { value.widen() } else { combine(*sum, value.widen()) };
            }
        }
        // SAFETY: as above, and nothing else refers to the output.
        let output = unsafe { std::slice::from_raw_parts_mut(output.add(start), len) };
        for (value, sum) in output.iter_mut().zip(wide.iter()) {
            *value = T::narrow(*sum);
        }
    }
}

/// An element and the wider type it is reduced in. Largest and smallest pass NaN on, as libtorch's do.
trait Element: Copy {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float_element {
    ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Wide = $wide;
            fn widen(self) -> $wide {
                $widen(self)
            }
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            fn max(a: $wide, b: $wide) -> $wide {
                if a > b || a.is_nan() { a } else { b }
            }
            fn min(a: $wide, b: $wide) -> $wide {
                if a < b || a.is_nan() { a } else { b }
            }
        }
    };
}

float_element!(f32, f32, std::convert::identity, std::convert::identity);
float_element!(f64, f64, std::convert::identity, std::convert::identity);
float_element!(bf16, f32, bf16::to_f32, bf16::from_f32);

impl Element for i64 {
    type Wide = i64;
    fn widen(self) -> i64 {
        self
    }
    fn narrow(wide: i64) -> i64 {
        wide
    }
    fn add(a: i64, b: i64) -> i64 {
        a.wrapping_add(b)
    }
    fn max(a: i64, b: i64) -> i64 {
        Ord::max(a, b)
    }
    fn min(a: i64, b: i64) -> i64 {
        Ord::min(a, b)
    }
}
