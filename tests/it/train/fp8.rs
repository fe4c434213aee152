//! FP8 training as simulated on a CPU: its gradients compared with unrounded ones, and equal bits for any sharding of state and any
//! recomputation of activations.

use colo_grpo::internal::config::{GradientCheckpointing, MixedPrecision, Quantization, TargetModule};
use colo_grpo::internal::model::{
    BlockParams, Fp8, LoraSpec, Matrix, ModelSpec, ParamName, Plain, Unit, UnitLayout, Use,
};
use colo_grpo::internal::ranks::{Mesh, World};
use colo_grpo::internal::train::{AdapterOptions, OptimizerHome, Policy};
use tch::{Kind, Tensor};

use super::run::{Run, initial, weights};
use super::stages_equal;
use super::state::state;
use crate::ranks;

fn fp8(stage: u8, kind: Kind) -> Run {
    Run { format: &Fp8::ROWS, ..Run::new(stage, kind) }
}

/// A run in which GEMMs for weight gradients are in FP8, too.
fn fp8_all(stage: u8, kind: Kind) -> Run {
    Run { format: &Fp8::ALL, ..Run::new(stage, kind) }
}

#[test]
fn zero_stages_in_fp8_are_bitwise_equal() {
    ranks::run(2, "train::fp8::zero_stages_in_fp8_are_bitwise_equal", |world: World| {
        let mesh = world.mesh(1, 2).unwrap();
        for run in [
            fp8(0, Kind::Float),
            Run { tied: true, ..fp8(0, Kind::BFloat16) },
            Run { delta_nets: true, ..fp8(0, Kind::Float) },
            Run { experts: true, ..fp8(0, Kind::Float) },
            Run { tied: true, ..fp8_all(0, Kind::BFloat16) },
            Run { delta_nets: true, ..fp8_all(0, Kind::Float) },
            Run { experts: true, ..fp8_all(0, Kind::Float) },
        ] {
            stages_equal(&mesh, Run { budget: 1000, ..run });
        }
    });
}

#[test]
fn recomputation_in_fp8_changes_no_bit() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for run in [
        fp8(0, Kind::Float),
        Run { tied: true, ..fp8(0, Kind::BFloat16) },
        Run { delta_nets: true, ..fp8(0, Kind::Float) },
        Run { experts: true, ..fp8(0, Kind::BFloat16) },
        Run { tied: true, ..fp8_all(0, Kind::BFloat16) },
        Run { delta_nets: true, ..fp8_all(0, Kind::Float) },
        Run { experts: true, ..fp8_all(0, Kind::BFloat16) },
    ] {
        let after = |recompute| {
            let run = Run { recompute, ..run };
            let mut policy = run.policy(&mesh);
            let norms: Vec<f64> = (0..2).map(|_| run.step(&mut policy, &mesh).grad_norm).collect();
            (norms, weights(&policy))
        };
        let expected = after(GradientCheckpointing::None);
        for recompute in [GradientCheckpointing::Selective, GradientCheckpointing::Full] {
            assert!(after(recompute) == expected, "{recompute:?}, {run:?}");
        }
        let rounds_all = run.format == MixedPrecision::Fp8All.format();
        let fewer = Run { format: if rounds_all { &Fp8::ROWS } else { &Plain }, ..run };
        let mut policy = fewer.policy(&mesh);
        let _ = (fewer.step(&mut policy, &mesh), fewer.step(&mut policy, &mesh));
        assert!(weights(&policy) != expected.1, "nothing more is rounded");
    }
}

/// Weights with which blocks add little to their input, as in trained models. With `outliers`, some channels are 100 times as large, and the weights
/// for
/// them 100 times smaller.
fn model(spec: &ModelSpec, layout: &UnitLayout, outliers: bool) -> Tensor {
    let flat = initial(layout);
    let Unit::Block(_) = layout.unit else { return flat };
    let block = BlockParams::view(spec, layout, &flat);
    let scale = |part: Tensor, factor: f64| drop(part.shallow_clone().g_mul_scalar_(factor));
    for matrix in [Matrix::O, Matrix::Down] {
        scale(block.linear(matrix).weight().shallow_clone(), 0.3);
    }
    if outliers {
        for (norm, matrix) in [(ParamName::InputNorm, Matrix::Qkv), (ParamName::PostNorm, Matrix::GateUp)] {
            scale(block.norm(norm).unwrap().get(3), 100.0);
            scale(block.linear(matrix).weight().select(1, 3), 0.01);
        }
        scale(block.linear(Matrix::GateUp).weight().get(11), 100.0); // up 5
        scale(block.linear(Matrix::Down).weight().select(1, 5), 0.01);
    }
    flat
}

/// The gradients of all matrices in blocks after one backward, up to a constant: AdamW's first moments.
fn gradients(mesh: &Mesh, run: Run, outliers: bool) -> Vec<Vec<f64>> {
    let table = run.table(1);
    let spec = table.spec.clone();
    let source = |layout: &UnitLayout| Ok(model(&spec, layout, outliers));
    let mut policy = Policy::with_home(table, mesh, run.options(mesh), OptimizerHome::Resident, &source).unwrap();
    let _ = run.step(&mut policy, mesh);
    let matrices = [ParamName::Qkv, ParamName::O, ParamName::GateUp, ParamName::Down];
    let pieces = state(&policy).into_iter().filter(|(_, name, ..)| matrices.contains(name));
    pieces.map(|(.., parts)| parts["m"].iter().map(|bits| f64::from_bits(*bits)).collect()).collect()
}

/// Norm of the gradients' difference divided by the norm of `expected`.
fn distance(got: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter().flatten().zip(expected.iter().flatten()).map(|(&a, &b)| of(a, b)).sum()
    };
    (sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b.powi(2))).sqrt()
}

#[test]
fn fp8_gradients_stay_close_with_outliers() {
    let mesh = World::single().mesh(1, 1).unwrap();
    for outliers in [false, true] {
        let exact = gradients(&mesh, Run::new(0, Kind::Double), outliers);
        let plain = distance(&gradients(&mesh, Run::new(0, Kind::BFloat16), outliers), &exact);
        for kind in [Kind::Float, Kind::BFloat16] {
            let [rounded, all] =
                [fp8(0, kind), fp8_all(0, kind)].map(|run| distance(&gradients(&mesh, run, outliers), &exact));
            println!("outliers {outliers}: {kind:?} {rounded:.4}, all products {all:.4}, bfloat16 alone {plain:.4}");
            assert!(rounded > 0.01 && rounded != all, "nothing is rounded");
            assert!(rounded < 0.25 && all < 1.1 * rounded, "outliers {outliers}, {kind:?}: {rounded}, {all}");
        }
    }
}

/// Adapters are not rounded, although their frozen base is in FP8.
#[test]
fn adapters_train_on_a_base_in_fp8() {
    let mesh = World::single().mesh(1, 1).unwrap();
    let after = |run: Run, recompute| {
        let run = Run { recompute, ..run };
        let lora = LoraSpec { r: 3, alpha: 6.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() };
        let source = |layout: &UnitLayout| Ok(initial(layout));
        let quantization = Quantization::None;
        let adapters = AdapterOptions { lora, quantization, seed: 5, keeps_initial: false, source: &source };
        let (table, options) = (run.table(1), run.options(&mesh));
        let base = |layout: &UnitLayout| Ok(model(&run.table(1).spec, layout, false));
        let home = OptimizerHome::Resident;
        let mut policy = Policy::with_adapters(table, &mesh, options, home, &base, adapters).unwrap();
        let _ = run.step(&mut policy, &mesh);
        let first_moments = state(&policy).into_iter().map(|(.., parts)| parts["m"].clone());
        let floats = |bits: Vec<u64>| bits.into_iter().map(f64::from_bits).collect();
        first_moments.map(floats).collect::<Vec<Vec<f64>>>()
    };
    let exact = after(Run::new(0, Kind::Double), GradientCheckpointing::None);
    let rounded = after(fp8(0, Kind::Float), GradientCheckpointing::None);
    let off = distance(&rounded, &exact);
    assert!((0.01..0.25).contains(&off), "{off}");
    assert!(after(fp8(0, Kind::Float), GradientCheckpointing::Full) == rounded);
}

#[test]
fn unsupported_fp8_training_is_refused_by_key() {
    let [dense, hybrid] = ["tiny", "tiny-hybrid"].map(|name| ModelSpec::preset(name).unwrap());
    let check = |spec: &ModelSpec, on_gpu| MixedPrecision::Fp8.format().check(Use::Training, spec, on_gpu);
    let refused = |spec: &ModelSpec| check(spec, true).unwrap_err().to_string();
    let key = "mixed_precision = fp8: expected none: ";
    let of_sides = "on GPUs both dimensions of a matrix must be multiples of 16 and at most 65536; ";
    let odd = dense.clone().with_widths(dense.hidden_size, 392);
    assert_eq!(refused(&odd), format!("{key}{of_sides}Down is [128, 392]"));
    let wide = dense.clone().with_widths(dense.hidden_size, 32_784);
    assert_eq!(refused(&wide), format!("{key}{of_sides}GateUp is [65568, 128]"));
    for spec in [&dense, &hybrid, &odd, &wide] {
        assert!(check(spec, false).is_ok());
    }
    for spec in [&dense, &hybrid, &ModelSpec::preset("qwen2.5-32b").unwrap()] {
        assert!(check(spec, true).is_ok());
    }
    assert!(MixedPrecision::None.format().check(Use::Training, &odd, true).is_ok());
    let experts = ModelSpec::preset("tiny-moe").unwrap();
    assert!(check(&experts, false).is_ok() && check(&experts, true).is_ok());
    for on_gpu in [false, true] {
        assert!(MixedPrecision::Fp8All.format().check(Use::Training, &experts, on_gpu).is_ok());
    }
}
