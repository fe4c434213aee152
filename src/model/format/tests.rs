//! Tests that a new format needs only one file: int8 rows with one scale each. It trains, wakes in slices and is stored, and is compared with the
//! dense reference.

use std::sync::Arc;

use super::*;
use crate::config::{GradientCheckpointing, MixedPrecision, Quantization, RolloutQuantization};
use crate::model::tests::sliced_block;
use crate::model::{
    BlockContext, BlockParams, PackedMixer, ParamTable, Unit, UnitLayout, block_backward, block_forward, init_unit,
};

/// The largest int8 code.
const MOST: f64 = 127.0;

#[derive(Debug)]
struct EightBits;

fn rounded(rows: &Tensor /* [R, K] */) -> ScaledRows {
    let scales = rows.abs().amax([1], true).clamp_min(f64::MIN_POSITIVE) / MOST;
    ScaledRows { values: (rows / &scales).round().to_kind(Kind::Int8), scales: scales.view(-1) }
}

fn values(rows: &ScaledRows) -> Tensor {
    rows.values.to_kind(rows.scales.kind()) * rows.scales.unsqueeze(1)
}

fn weight(w: &Piece) -> Tensor {
    w.prepared.as_ref().map_or_else(|| values(&rounded(&w.weight)), values)
}

impl Format for EightBits {
    fn name(&self) -> &'static str {
        "eight_bits"
    }

    fn refusal(&self, _: Use, _: &ModelSpec, on_gpu: bool) -> Option<String> {
        on_gpu.then(|| "no kernel multiplies int8".to_owned())
    }

    fn sections(&self, size: &[i64]) -> [Section; 2] {
        let &[rows, columns] = size else { panic!("a matrix, not {size:?}") };
        [(vec![rows, columns], Kind::Int8), (vec![rows], Kind::Double)]
    }

    fn round(&self, x: &Tensor, to: &ScaledRows) -> Result<()> {
        let from = rounded(x);
        to.values.shallow_clone().f_copy_(&from.values)?;
        Ok(to.scales.shallow_clone().f_copy_(&from.scales)?)
    }

    fn forward(&self, x: &Rows, w: &Piece) -> Result<Tensor> {
        linear::forward(&values(&rounded(x.plain())), &weight(w), w.bias.as_ref())
    }

    fn backward_input(&self, dy: &Tensor, w: &Piece) -> Result<Tensor> {
        linear::backward_input(&values(&rounded(dy)), &weight(w))
    }
}

impl StoredFormat for EightBits {
    fn name(&self) -> &'static str {
        "eight_bits"
    }

    fn multiple(&self) -> usize {
        1
    }

    fn matrix_bytes(&self, [rows, columns]: [usize; 2]) -> usize {
        rows * columns + rows * size_of::<f64>()
    }

    fn encoder(&self, _: Device) -> Result<Box<dyn Encoder>> {
        Ok(Box::new(EightBits))
    }
}

impl Encoder for EightBits {
    fn encode(&self, matrix: &Tensor) -> Result<Box<dyn Encoded>> {
        Ok(Box::new(rounded(matrix)))
    }
}

impl Encoded for ScaledRows {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.values, &self.scales]
    }

    fn decode(&self, y: &mut Tensor) -> Result<()> {
        Ok(y.f_copy_(&values(self).view_as(y))?)
    }
}

/// A model with one block, its layout and its weights.
fn block() -> (Arc<ModelSpec>, ParamTable, Tensor) {
    let spec = Arc::new(ModelSpec::preset("tiny").unwrap().with_num_layers(1));
    let table = ParamTable::new(spec.clone(), 1);
    let flat = init_unit(table.unit(Unit::Block(0)), 3, Kind::Double).unwrap() * 2.0;
    (spec, table, flat)
}

/// Relative error: the norm of the difference divided by the norm of the expected tensor.
fn off(got: &Tensor, expected: &Tensor) -> f64 {
    ((got - expected).norm() / expected.norm()).double_value(&[])
}

fn is_near(got: &Tensor, expected: &Tensor, what: &str) {
    let off = off(got, expected);
    assert!((1e-4..0.05).contains(&off), "{what} is off by {off}");
}

fn tokens(spec: &ModelSpec) -> Tensor {
    Tensor::randn([5, spec.hidden_size as i64], (Kind::Double, Device::Cpu))
}

#[test]
fn every_format_trains_close_to_the_dense_block() {
    let (spec, table, flat) = block();
    let layout: &UnitLayout = table.unit(Unit::Block(0));
    let (x, dy) = (tokens(&spec), tokens(&spec));
    let ropes = spec.ropes().rows(&Tensor::from_slice(&[0i64, 1, 2, 0, 1]), Kind::Double).unwrap();
    let (ctx, packed) =
        (BlockContext::new(&spec, &ropes, None, None), PackedMixer::new(&spec, &[0, 3, 5], Device::Cpu));
    let step = |format: &'static dyn Format, keep| {
        let w = BlockParams::view(&spec, layout, &flat).training_in(format);
        let sums = flat.zeros_like();
        let mut gradients = BlockParams::view(&spec, layout, &sums);
        let (y, saved) = block_forward(&ctx, 0, &w, &x, &packed, Some(keep)).unwrap();
        let dx = block_backward(&ctx, &w, &dy, saved.unwrap(), &packed, &mut gradients).unwrap();
        [y - &x, dx - &dy, sums]
    };
    let dense = step(&Plain, GradientCheckpointing::None);
    let got = step(&EightBits, GradientCheckpointing::None);
    for ((got, dense), what) in got.iter().zip(&dense).zip(["the output", "the input's gradient", "the gradients"]) {
        is_near(got, dense, what);
    }
    assert_eq!(step(&EightBits, GradientCheckpointing::Full), got, "computed again");
}

#[test]
fn tensor_parallel_slices_in_every_format_sum_to_the_dense_block() {
    let (spec, _, flat) = block();
    let (x, flat) = (tokens(&spec), Vec::try_from(&flat).unwrap());
    let entries: Vec<f64> = Vec::try_from(x.flatten(0, 1)).unwrap();
    let added = |format, tp_size| {
        let ranks = sliced_block(format, &spec, tp_size, &flat, &entries);
        assert!(ranks.iter().all(|y| *y == ranks[0]));
        Tensor::from_slice(&ranks[0]) - x.flatten(0, 1)
    };
    let dense = added(&Plain, 1);
    for tp_size in [1, 2] {
        is_near(&added(&EightBits, tp_size), &dense, &format!("of {tp_size} ranks"));
    }
}

#[test]
fn a_block_stored_in_every_format_is_restored() {
    let (spec, table, flat) = block();
    let (layout, format): (_, &dyn StoredFormat) = (table.unit(Unit::Block(0)), &EightBits);
    format.check(&spec).unwrap();
    let stored = StoredBlock::encode(&spec, layout, &flat, &*format.encoder(Device::Cpu).unwrap()).unwrap();
    let back = flat.zeros_like();
    stored.decode(layout, &back).unwrap();
    is_near(&back, &flat, "the block");
    let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
    assert_eq!(stored.tensors().map(bytes).sum::<usize>(), format.block_bytes(&spec, 0, Kind::Double));
}

/// The name of every format equals its configuration value, so that refusals name the value.
#[test]
fn format_names_match_their_config_values() {
    MixedPrecision::ALL.iter().for_each(|key| assert_eq!(key.format().name(), key.name()));
    RolloutQuantization::ALL.iter().for_each(|key| assert_eq!(key.format().name(), key.name()));
    for key in Quantization::ALL {
        assert_eq!(key.format().map_or("none", StoredFormat::name), key.name());
    }
}
