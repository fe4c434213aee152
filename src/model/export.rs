//! A folder that stands on its own: a model, adapters, or both merged.

use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::block::BlockParams;
use super::files::{WeightFiles, WeightWriter};
use super::format::BaseRounding;
use super::init::copy_tokenizer;
use super::lora::{AdapterFiles, BlockLora, write_adapters};
use super::params::ParamTable;
use super::source::ModelSource;
use super::spec::{ModelSpec, Unit};
use crate::config::Quantization;
use crate::error::{Error, Result};

/// Writes the adapters of `source` as PEFT does; or, with `merge` or where there are none, a model folder of the base's type
/// whose weights are W + (alpha / r) B A, added in float32, W rounded as `quantization` asks for it, and with `fp8` rounded to blocks of e4m3, as Qwen's
/// checkpoints in FP8. `progress` is told `(done, total)` in units.
///
/// # Errors
/// What is wrong with the folders; [`Error::Io`].
pub fn export_folder(
    source: &ModelSource,
    output: &Path,
    merge: bool,
    (quantization, fp8): (Quantization, bool),
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
    let adapters = source.adapters.as_ref().map(|folder| AdapterFiles::open(folder, spec.clone())).transpose()?;
    std::fs::create_dir_all(output).map_err(Error::io(output))?;
    copy_tokenizer(&source.base, output)?;
    match &adapters {
        Some(files) if !merge => {
            let table = ParamTable::adapters(spec.clone(), files.lora(), 1);
            let num_units = table.units.len();
            let units = &mut table.units.iter().enumerate().map(|(index, layout)| {
                progress(index, num_units);
                files.read_unit(layout, Kind::Float)
            });
            let base = (source.base.as_path(), files.base_quantization());
            write_adapters(output, &table, files.lora(), base, Kind::Float, units)?;
            progress(num_units, num_units);
            Ok(())
        }
        _ => write_model((&spec, quantization, fp8), &source.base, adapters.as_ref(), output, progress),
    }
}

fn write_model(
    (spec, quantization, fp8): (&Arc<ModelSpec>, Quantization, bool),
    base: &Path,
    adapters: Option<&AdapterFiles>,
    output: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let (files, table) = (WeightFiles::open(base, spec.clone())?, ParamTable::new(spec.clone(), 1));
    let mut writer = match fp8 {
        true => WeightWriter::create_fp8(output, spec.clone(), spec.dtype, Some(base))?,
        false => WeightWriter::create(output, spec.clone(), spec.dtype, Some(base))?,
    };
    match fp8 {
        true => spec.write_config_fp8(output, Some(base))?,
        false => spec.write_config(output, Some(base))?,
    }
    let adapter_table = adapters.map(|files| ParamTable::adapters(spec.clone(), files.lora(), 1));
    let rounding = BaseRounding::new(spec, quantization)?;
    for (index, layout) in table.units.iter().enumerate() {
        progress(index, table.units.len());
        let flat = files.read_unit(layout, Kind::Float)?;
        rounding.apply(spec, layout, &flat)?;
        if let (Some(files), Some(table), Unit::Block(_)) = (adapters, &adapter_table, layout.unit) {
            let own = table.unit(layout.unit);
            let lora = BlockLora::expand(spec, files.lora(), own, &files.read_unit(own, Kind::Float)?, None)?;
            for (_, linear) in BlockParams::view(spec, layout, &flat).with_adapters(lora).linears() {
                if let Some(lora) = &linear.lora {
                    lora.merge_into(&mut linear.weight().shallow_clone())?;
                }
            }
        }
        writer.write_unit(layout, &flat)?;
    }
    writer.finish()?;
    progress(table.units.len(), table.units.len());
    Ok(())
}
