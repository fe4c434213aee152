//! Round trips over shards, with units in any order. The public behaviour is tested in tests/it/model.rs.

use std::path::Path;
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use tch::{Device, Kind, Tensor};

use super::names::tensors;
use super::{INDEX, SINGLE, WeightFiles, WeightWriter};
use crate::error::Error;
use crate::model::{ModelSpec, ParamTable, QkNorm};

/// Units filled with distinct random numbers, with zeros as padding.
fn random_units(table: &ParamTable, kind: Kind) -> Vec<Tensor> {
    let fill = |layout: &crate::model::UnitLayout| {
        let flat = Tensor::zeros([layout.len as i64], (kind, Device::Cpu));
        for param in &layout.params {
            let mut view = layout.view(param.name, &flat).unwrap();
            let values = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)) + layout.offset as f64;
            view.copy_(&(values * 0.37).sin().view_as(&view));
        }
        flat
    };
    table.units.iter().map(fill).collect()
}

fn micro(tie_word_embeddings: bool) -> Arc<ModelSpec> {
    let spec = ModelSpec { tie_word_embeddings, ..ModelSpec::preset("micro").unwrap() };
    Arc::new(spec.map_attention(|_, attention| attention.qk_norm = Some(QkNorm::Head)))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn written_weights_are_read_back_bit_for_bit() {
    for (kind, tied, shard_bytes) in
        [(Kind::Float, true, usize::MAX), (Kind::BFloat16, false, 8_000), (Kind::Half, false, 20_000)]
    {
        let spec = micro(tied);
        let table = ParamTable::new(spec.clone(), 3);
        let units = random_units(&table, kind);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = WeightWriter::with_shard_bytes(folder.path(), spec.clone(), kind, shard_bytes).unwrap();
        for (layout, flat) in table.units.iter().zip(&units).rev() {
            writer.write_unit(layout, flat).unwrap();
        }
        writer.finish().unwrap();
        let sharded = shard_bytes < usize::MAX;
        assert_eq!(names(folder.path()).contains(&INDEX.to_owned()), sharded);
        assert_eq!(names(folder.path()).contains(&SINGLE.to_owned()), !sharded);
        let files = WeightFiles::open(folder.path(), spec).unwrap();
        for (layout, flat) in table.units.iter().zip(&units) {
            assert!(files.read_unit(layout, kind).unwrap().equal(flat), "{} as {kind:?}", layout.unit);
        }
    }
}

#[test]
fn reading_converts_to_the_requested_dtype() {
    let (spec, folder) = (micro(true), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let units = random_units(&table, Kind::Float);
    let mut writer = WeightWriter::create(folder.path(), spec.clone(), Kind::Float, None).unwrap();
    for (layout, flat) in table.units.iter().zip(&units) {
        writer.write_unit(layout, flat).unwrap();
    }
    writer.finish().unwrap();
    let files = WeightFiles::open(folder.path(), spec).unwrap();
    let read = files.read_unit(&table.units[1], Kind::BFloat16).unwrap();
    assert!(read.equal(&units[1].to_kind(Kind::BFloat16)));
}

#[test]
fn a_missing_unit_is_an_error_and_leaves_no_files() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let units = random_units(&table, Kind::Float);
    let mut writer = WeightWriter::create(folder.path(), spec, Kind::Float, None).unwrap();
    writer.write_unit(&table.units[0], &units[0]).unwrap();
    writer.write_unit(&table.units[2], &units[2]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(matches!(&error, Error::InvalidArgument { got, .. } if got == "no block 0, head"), "{error}");
    assert_eq!(names(folder.path()), Vec::<String>::new());
}

#[test]
fn writing_a_model_replaces_the_previous_one() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    for (shard_bytes, sign) in [(usize::MAX, 1.0), (30_000, -1.0), (usize::MAX, 2.0)] {
        let mut writer = WeightWriter::with_shard_bytes(folder.path(), spec.clone(), Kind::Float, shard_bytes).unwrap();
        for (layout, flat) in table.units.iter().zip(random_units(&table, Kind::Float)) {
            writer.write_unit(layout, &(flat * sign)).unwrap();
        }
        writer.finish().unwrap();
        let read = WeightFiles::open(folder.path(), spec.clone()).unwrap().read_unit(&table.units[0], Kind::Float);
        assert!(read.unwrap().equal(&(&random_units(&table, Kind::Float)[0] * sign)));
    }
}

#[test]
fn a_failed_rename_keeps_the_previous_model() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let write = |shard_bytes| {
        let mut writer = WeightWriter::with_shard_bytes(folder.path(), spec.clone(), Kind::Float, shard_bytes).unwrap();
        for (layout, flat) in table.units.iter().zip(random_units(&table, Kind::Float)) {
            writer.write_unit(layout, &flat).unwrap();
        }
        writer
    };
    write(usize::MAX).finish().unwrap();
    let writer = write(30_000);
    let shards = names(folder.path())
        .into_iter()
        .filter_map(|name| Some(name.strip_prefix('.')?.strip_suffix(".tmp")?.to_owned()));
    let last = shards.max().unwrap();
    std::fs::create_dir(folder.path().join(&last)).unwrap();
    assert!(matches!(writer.finish().unwrap_err(), Error::Io { .. }));
    assert_eq!(names(folder.path()), [last, SINGLE.to_owned()]);
}

/// One tensor contains the matrices of all experts, with an expert's gate rows before its up rows, as in Qwen3.5's files.
#[test]
fn stacked_experts_are_read_like_separate_ones() {
    let spec = Arc::new(ModelSpec::preset("tiny-moe").unwrap().with_num_layers(1));
    let (table, folder) = (ParamTable::new(spec.clone(), 1), tempfile::tempdir().unwrap());
    let units = random_units(&table, Kind::BFloat16);
    let mut writer = WeightWriter::create(folder.path(), spec.clone(), Kind::BFloat16, None).unwrap();
    for (layout, flat) in table.units.iter().zip(&units) {
        writer.write_unit(layout, flat).unwrap();
    }
    writer.finish().unwrap();
    let path = folder.path().join(SINGLE);
    let whole = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&whole).unwrap();
    let of_experts = |modules: &[&str]| -> Vec<u8> {
        let names = (0..8).flat_map(|expert| {
            modules.iter().map(move |module| format!("model.layers.0.mlp.experts.{expert}.{module}.weight"))
        });
        names.flat_map(|name| file.tensor(&name).unwrap().data().to_vec()).collect()
    };
    let (gate_up, down) = (of_experts(&["gate_proj", "up_proj"]), of_experts(&["down_proj"]));
    let fused = |shape: Vec<usize>, bytes| TensorView::new(Dtype::BF16, shape, bytes).unwrap();
    let mut all: Vec<(String, TensorView<'_>)> = file.tensors();
    all.retain(|(name, _)| !name.contains(".experts."));
    let place = "model.layers.0.mlp.experts";
    all.push((format!("{place}.gate_up_proj"), fused(vec![8, 384, 128], &gate_up)));
    all.push((format!("{place}.down_proj"), fused(vec![8, 128, 192], &down)));
    let write = |all: Vec<(String, TensorView<'_>)>| std::fs::write(&path, safetensors::serialize(all, None).unwrap());
    write(all.clone()).unwrap();
    let files = WeightFiles::open(folder.path(), spec.clone()).unwrap();
    for (layout, flat) in table.units.iter().zip(&units) {
        assert!(files.read_unit(layout, Kind::BFloat16).unwrap().equal(flat), "{}", layout.unit);
    }
    let refused = |all| {
        write(all).unwrap();
        WeightFiles::open(folder.path(), spec.clone()).unwrap_err().to_string()
    };
    let mut wide = all.clone();
    let at = wide.iter().position(|(name, _)| name.ends_with("gate_up_proj")).unwrap();
    wide[at].1 = fused(vec![8, 128, 384], &gate_up);
    let message = refused(wide);
    assert!(message.contains("experts.gate_up_proj has shape [8, 128, 384], expected [8, 384, 128]"), "{message}");
    let twice = (format!("{place}.3.up_proj.weight"), file.tensor(&format!("{place}.3.up_proj.weight")).unwrap());
    let message = refused(all.into_iter().chain([twice]).collect());
    assert!(message.contains("unexpected model.layers.0.mlp.experts.3.up_proj.weight [192, 128]"), "{message}");
}

/// Weights written in FP8 and read back must equal the rounded values: blocks times their scales, all other tensors bit for bit, also over several
/// files.
#[test]
fn fp8_weights_round_trip_through_files() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let units = random_units(&table, Kind::Float);
    let mut writer = WeightWriter::create_fp8(folder.path(), spec.clone(), Kind::BFloat16, None).unwrap();
    for (layout, flat) in table.units.iter().zip(&units) {
        writer.write_unit(layout, flat).unwrap();
    }
    writer.finish().unwrap();
    let bytes = std::fs::read(folder.path().join(SINGLE)).unwrap();
    let raw = SafeTensors::deserialize(&bytes).unwrap();
    let files = WeightFiles::open(folder.path(), spec.clone()).unwrap();
    let mut rounded = 0;
    for (layout, flat) in table.units.iter().zip(&units) {
        let read = files.read_unit(layout, Kind::Float).unwrap();
        for tensor in tensors(&spec, layout.unit) {
            let [own, before] = [&read, flat].map(|flat| tensor.view(layout, flat).reshape(tensor.shape.as_slice()));
            let Ok(scales) = raw.tensor(&format!("{}_scale_inv", tensor.name)) else {
                assert!(own.equal(&before.to_kind(Kind::BFloat16).to_kind(Kind::Float)), "{}", tensor.name);
                continue;
            };
            rounded += 1;
            let codes = raw.tensor(&tensor.name).unwrap();
            assert_eq!((codes.dtype(), scales.dtype()), (Dtype::F8_E4M3, Dtype::F32));
            let columns = tensor.shape[1] as usize;
            let value = |code: u8| Tensor::from_slice(&[code]).view_dtype(Kind::Float8e4m3fn).double_value(&[0]) as f32;
            let scale = |at: usize| {
                let block = at / columns / 128 * scales.shape()[1] + at % columns / 128;
                f32::from_le_bytes(scales.data()[4 * block..4 * block + 4].try_into().unwrap())
            };
            let values =
                codes.data().iter().enumerate().map(|(at, code)| value(*code) * scale(at)).collect::<Vec<f32>>();
            assert!(own.reshape([-1]).equal(&Tensor::from_slice(&values)), "{}", tensor.name);
            let cost = f64::try_from((&own - &before).norm() / before.norm()).unwrap();
            assert!((0.001..0.05).contains(&cost), "{}: {cost}", tensor.name);
        }
    }
    assert_eq!(rounded, 7 * spec.num_layers());
}

#[test]
fn fp8_without_scales_is_refused_by_name() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let mut writer = WeightWriter::create_fp8(folder.path(), spec.clone(), Kind::BFloat16, None).unwrap();
    for (layout, flat) in table.units.iter().zip(random_units(&table, Kind::Float)) {
        writer.write_unit(layout, &flat).unwrap();
    }
    writer.finish().unwrap();
    let path = folder.path().join(SINGLE);
    let name = "model.layers.1.mlp.down_proj.weight";
    let text = std::fs::read(&path).unwrap();
    let at = text.windows(name.len() + 10).position(|part| part == format!("{name}_scale_inv").as_bytes()).unwrap();
    let mut other = text.clone();
    other[at + name.len()..at + name.len() + 10].copy_from_slice(b"_other_nam");
    std::fs::write(&path, other).unwrap();
    let error = WeightFiles::open(folder.path(), spec).unwrap_err().to_string();
    assert!(error.contains("unexpected") && error.contains(&format!("{name}_other_nam")), "{error}");
}
