//! Helpers for tests of operations: random tensors in float64, and the error bound of comparisons.

use tch::{Device, Kind, Tensor};

/// Standard normal numbers in float64. Each test thread has its own sequence; no bound depends on the values.
pub(crate) fn rand(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu))
}

/// A copy of the values as a leaf of autograd's graph.
pub(crate) fn leaf(t: &Tensor) -> Tensor {
    t.copy().set_requires_grad(true)
}

/// Largest absolute difference, divided by the largest absolute expected value.
pub(crate) fn relative_error(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.size(), expected.size());
    let (got, expected) = (got.detach().to_kind(Kind::Double), expected.detach().to_kind(Kind::Double));
    let scale = f64::try_from(expected.abs().max()).unwrap().max(1e-300);
    f64::try_from((got - expected).abs().max()).unwrap() / scale
}

/// Asserts that the relative error is below 1e-9 and nothing is non-finite.
#[track_caller]
pub(crate) fn assert_close(got: &Tensor, expected: &Tensor) {
    let error = relative_error(got, expected);
    assert!(error < 1e-9, "relative error {error:e}\ngot {got}\nexpected {expected}");
}

/// Numbers of both signs with magnitudes from 1e-8 to 1, in blocks of 256, the third of which is zero, as in scripts/golden_optim.py.
/// [count] f32
pub(crate) fn wave(count: i64, phase: f64) -> Tensor {
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu));
    let block = (&at / 256.0).floor();
    let power = ((&at * 0.731 + phase).sin() + 1.0) * -4.0;
    let sizes = Tensor::full_like(&at, 10.0).pow(&power);
    let values = (&at * 12.9898 + phase).sin() * sizes * (&block * 0.37).cos();
    values.where_scalarother(&block.not_equal(2.0), 0.0).to_kind(Kind::Float)
}

/// The golden numbers that scripts/golden_optim.py wrote.
pub(crate) fn optim_golden() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/optim.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
