//! Tests operations whose results would need more memory than any machine has. Their inputs are views of one number with 2^50 rows.

use tch::{Device, Kind, Tensor};

use super::heads::{self, HeadGradients};
use super::rope::Rope;
use super::swiglu::{Activation, GateUp};
use super::{attention, embedding, head, linear, norm, rms_norm, rope, try_map};
use crate::error::{Error, Result};

const ROWS: i64 = 1 << 50;

/// A tensor [2^50, columns] that uses the memory of one element.
fn rows(columns: i64, kind: Kind) -> Tensor {
    Tensor::zeros([1, 1], (kind, Device::Cpu)).expand([ROWS, columns], false)
}

fn small(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, Device::Cpu))
}

#[test]
fn operations_out_of_memory_return_an_error() {
    let (x, ids) = (rows(8, Kind::Float), rows(1, Kind::Int64).select(1, 0));
    let half = rows(8, Kind::BFloat16);
    let (square, few, vector) = (small(&[8, 8]), small(&[3, 8]), small(&[8]));
    let split = || GateUp::Split { gate: x.shallow_clone(), up: x.shallow_clone() };
    let rope = Rope::new(8, 1e4, None).rows(&Tensor::zeros([1], (Kind::Int64, Device::Cpu)), Kind::Float).unwrap();
    let qkv = || x.view([ROWS, 1, 1, 8]).expand([ROWS, 1, 3, 8], false);
    type Operation<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;
    let of = |name: &'static str, run: Operation<'_>| match run() {
        Err(Error::OutOfMemory { requested_bytes, .. }) => {
            assert!(requested_bytes >= 1 << 50, "{name}: {requested_bytes}")
        }
        other => panic!("{name}: {other:?}"),
    };
    of("linear::forward", Box::new(|| linear::forward(&x, &square, Some(&vector)).map(drop)));
    of("linear::forward_onto", Box::new(|| linear::forward_onto(&x, &x, &square).map(drop)));
    of("linear::forward_wide", Box::new(|| linear::forward_wide(&x, &square).map(drop)));
    of("linear::backward_input", Box::new(|| linear::backward_input(&x, &square).map(drop)));
    of("rms_norm::forward", Box::new(|| rms_norm::forward(&half, &vector, 1e-6).map(drop)));
    of(
        "rms_norm::backward",
        Box::new(|| {
            let rstd = rows(1, Kind::Float);
            rms_norm::backward(&half, &half, &vector, &rstd, None, &mut vector.copy()).map(drop)
        }),
    );
    of("heads::forward", Box::new(|| heads::forward(qkv(), None, &rope).map(drop)));
    of(
        "heads::backward",
        Box::new(|| {
            let d = x.view([ROWS, 1, 8]);
            let grads = HeadGradients { bias: None, norms: None };
            heads::backward([&d, &d, &d], None, None, &rope, grads).map(drop)
        }),
    );
    of("rope::forward", Box::new(|| rope::forward(&x.view([ROWS, 1, 8]), &rope).map(drop)));
    of("Rope::rows", Box::new(|| Rope::new(8, 1e4, None).rows(&ids, Kind::Float).map(drop)));
    of("GateUp::project", Box::new(|| GateUp::project(&x, &small(&[16, 8])).map(drop)));
    of("GateUp::activate", Box::new(|| split().activate(Activation::Silu).map(drop)));
    of("GateUp::backward", Box::new(|| split().backward(Activation::Silu, &x).map(drop)));
    of("GateUp::backward_input", Box::new(|| split().backward_input(&small(&[16, 8])).map(drop)));
    of("embedding::forward", Box::new(|| embedding::forward(&ids, &few).map(drop)));
    of("embedding::forward_shard", Box::new(|| embedding::forward_shard(&ids, &few, 0).map(drop)));
    of("embedding::accumulate", Box::new(|| embedding::accumulate(&half, &ids, &mut few.copy())));
    of(
        "head::forward",
        Box::new(|| head::forward(&x, &few, &ids, 1.0, head::TopTokens::MostProbable(2), 8, true).map(drop)),
    );
    of("attention::kv_rows", Box::new(|| attention::kv_rows(&ids, 16, 2).map(drop)));
    of("try_map", Box::new(|| try_map([&x, &x], |x| Ok(x.f_neg()?)).map(drop)));
    assert!(norm::sums_of_squares(&[vector]).is_ok());
}
