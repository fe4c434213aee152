//! Round trips over shards and units in any order; what the outside sees is tested in tests/it/model.rs.

use std::path::Path;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::{INDEX, SINGLE, WeightFiles, WeightWriter};
use crate::error::Error;
use crate::model::{ModelSpec, ParamTable, QkNorm};

/// Every unit filled with other numbers, padding zero.
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
    Arc::new(ModelSpec { tie_word_embeddings, qk_norm: Some(QkNorm::Head), ..ModelSpec::preset("micro").unwrap() })
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read_back_bit_by_bit() {
    for (kind, tied, shard_bytes) in
        [(Kind::Float, true, usize::MAX), (Kind::BFloat16, false, 8_000), (Kind::Half, false, 20_000)]
    {
        let spec = micro(tied);
        let table = ParamTable::new(spec.clone(), 3);
        let units = random_units(&table, kind);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = WeightWriter::with_shard_bytes(folder.path(), spec.clone(), kind, None, shard_bytes).unwrap();
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
fn reading_rounds_to_the_kind_asked_for() {
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
fn a_unit_too_few_is_an_error_and_leaves_nothing() {
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
fn a_new_model_hides_the_one_before_it() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    for (shard_bytes, sign) in [(usize::MAX, 1.0), (30_000, -1.0), (usize::MAX, 2.0)] {
        let mut writer =
            WeightWriter::with_shard_bytes(folder.path(), spec.clone(), Kind::Float, None, shard_bytes).unwrap();
        for (layout, flat) in table.units.iter().zip(random_units(&table, Kind::Float)) {
            writer.write_unit(layout, &(flat * sign)).unwrap();
        }
        writer.finish().unwrap();
        let read = WeightFiles::open(folder.path(), spec.clone()).unwrap().read_unit(&table.units[0], Kind::Float);
        assert!(read.unwrap().equal(&(&random_units(&table, Kind::Float)[0] * sign)));
    }
}

#[test]
fn a_model_that_cannot_have_its_names_leaves_the_one_before_it() {
    let (spec, folder) = (micro(false), tempfile::tempdir().unwrap());
    let table = ParamTable::new(spec.clone(), 1);
    let write = |shard_bytes| {
        let mut writer =
            WeightWriter::with_shard_bytes(folder.path(), spec.clone(), Kind::Float, None, shard_bytes).unwrap();
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
