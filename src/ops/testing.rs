//! Helpers of the operations' tests: random tensors in float64 and the bound they are held to.

use tch::{Device, Kind, Tensor};

/// Standard normal, float64. Each test thread draws its own sequence; no bound depends on the values.
pub(crate) fn rand(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu))
}

/// A copy of the values as a leaf of autograd's graph.
pub(crate) fn leaf(t: &Tensor) -> Tensor {
    t.copy().set_requires_grad(true)
}

/// Largest absolute difference over the largest absolute expected value.
pub(crate) fn relative_error(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.size(), expected.size());
    let (got, expected) = (got.detach().to_kind(Kind::Double), expected.detach().to_kind(Kind::Double));
    let scale = f64::try_from(expected.abs().max()).unwrap().max(1e-300);
    f64::try_from((got - expected).abs().max()).unwrap() / scale
}

/// Relative error below 1e-9, and nothing non-finite.
#[track_caller]
pub(crate) fn assert_close(got: &Tensor, expected: &Tensor) {
    let error = relative_error(got, expected);
    assert!(error < 1e-9, "relative error {error:e}\ngot {got}\nexpected {expected}");
}

/// Numbers of both signs, between 1e-8 and 1 in size, by blocks of 256 of which the third is zero, as scripts/golden_optim.py has them.
/// [count] f32
pub(crate) fn wave(count: i64, phase: f64) -> Tensor {
    let at = Tensor::arange(count, (Kind::Double, Device::Cpu));
    let block = (&at / 256.0).floor();
    let power = ((&at * 0.731 + phase).sin() + 1.0) * -4.0;
    let sizes = Tensor::full_like(&at, 10.0).pow(&power);
    let values = (&at * 12.9898 + phase).sin() * sizes * (&block * 0.37).cos();
    values.where_scalarother(&block.not_equal(2.0), 0.0).to_kind(Kind::Float)
}

/// Numbers that scripts/golden_optim.py wrote.
pub(crate) fn optim_golden() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/optim.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
