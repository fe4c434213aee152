//! Exports a self-contained folder: a model, adapters, or both merged.

use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::block::BlockParams;
use super::files::{WeightFiles, WeightWriter};
use super::format::BaseRounding;
use super::init::copy_tokenizer;
use super::lora::{AdapterBase, AdapterFiles, BlockLora, write_adapters};
use super::params::ParamTable;
use super::source::ModelSource;
use super::spec::{ModelSpec, Unit};
use crate::config::Quantization;
use crate::error::{Error, Result};

/// Options for an export.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// Add the adapters to the base model's weights.
    pub merge: bool,
    /// How the base weights are rounded before adapters are added.
    pub quantization: Quantization,
    /// Quantize matrices to e4m3 blocks, as in Qwen's FP8 checkpoints.
    pub fp8: bool,
}

/// Writes the adapters of `source` in PEFT's format. If they are merged or absent, writes a model folder in the base model's type with weights W +
/// (alpha / r) B A, added in float32. Calls `progress(done, total)`, counted in units.
///
/// # Errors
/// The errors of invalid folders; [`Error::Io`].
pub fn export_folder(
    source: &ModelSource,
    output: &Path,
    options: ExportOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
    let adapters = source.adapters.as_ref().map(|folder| AdapterFiles::open(folder, spec.clone())).transpose()?;
    std::fs::create_dir_all(output).map_err(Error::io(output))?;
    copy_tokenizer(&source.base, output)?;
    match &adapters {
        Some(files) if !options.merge => {
            let table = ParamTable::adapters(spec.clone(), files.lora(), 1);
            let num_units = table.units.len();
            let units = &mut table.units.iter().enumerate().map(|(index, layout)| {
                progress(index, num_units);
                files.read_unit(layout, Kind::Float)
            });
            let base = AdapterBase { folder: &source.base, quantization: files.base_quantization() };
            write_adapters(output, &table, files.lora(), base, Kind::Float, units)?;
            progress(num_units, num_units);
            Ok(())
        }
        _ => write_model(&spec, options, &source.base, adapters.as_ref(), output, progress),
    }
}

fn write_model(
    spec: &Arc<ModelSpec>,
    ExportOptions { quantization, fp8, .. }: ExportOptions,
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
