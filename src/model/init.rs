//! Random initialization of weights. Random numbers are counter-based, keyed by (seed, unit, parameter, element), so they are the same for any number
//! of shards and ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::config_json::INITIALIZER_RANGE;
use super::files::WeightWriter;
use super::params::{Param, ParamTable, UnitLayout};
use super::spec::{ModelSpec, ParamName, Unit};
use crate::cuda::kernels;
use crate::data::TEMPLATES_FOLDER;
use crate::error::{Error, Result};
use crate::ops::random::RandomKey;
use crate::untrusted::{self, MAX_TOKENIZER_BYTES};

/// Separates these random numbers from other uses of the same seed.
const STREAM: u64 = 0x696e_6974; // "init"

/// Files of a model folder that belong to the tokenizer or to a vision tower's processor.
const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
];

/// Initializes one unit [layout.len] as `kind` on the CPU. Matrices are normal with standard deviation 0.02, norms are 1 (0 if they are
/// zero-centred), biases, sinks and padding 0. In gated delta nets A_log is the logarithm of a uniform number up to 16, and dt_bias 1. In adapters A
/// is uniform in +-1 / sqrt(in), which equals PEFT's kaiming_uniform(a = sqrt(5)), and B is 0. Numbers are drawn in float32, then rounded to `kind`.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn init_unit(layout: &UnitLayout, seed: u64, kind: Kind) -> Result<Tensor> {
    init_unit_on(layout, seed, kind, Device::Cpu)
}

/// Initializes one unit with random weights on `device`. A GPU generates the same numbers, except for the last bit of some.
///
/// # Errors
/// The errors of [`init_unit`]; [`Error::Cuda`].
pub fn init_unit_on(layout: &UnitLayout, seed: u64, kind: Kind, device: Device) -> Result<Tensor> {
    let flat = Tensor::f_zeros([layout.len as i64], (kind, device))?;
    for param in &layout.params {
        let mut target = layout.view(param.name, &flat).expect("the layout lists it");
        match param.name {
            ParamName::QkvBias
            | ParamName::RouterCorrection
            | ParamName::Sinks
            | ParamName::OBias
            | ParamName::RouterBias
            | ParamName::GateUpBias
            | ParamName::DownBias
            | ParamName::QkvB
            | ParamName::OB
            | ParamName::GateUpB
            | ParamName::DownB
            | ParamName::DeltaQkvLoraB
            | ParamName::DeltaZLoraB
            | ParamName::DeltaBLoraB
            | ParamName::DeltaALoraB
            | ParamName::DeltaOutLoraB => {}
            ParamName::InputNorm
            | ParamName::PostNorm
            | ParamName::MixerPostNorm
            | ParamName::MlpPostNorm
            | ParamName::QNorm
            | ParamName::KNorm
            | ParamName::DraftEmbeddingNorm
            | ParamName::DraftHiddenNorm
            | ParamName::FinalNorm => _ = target.f_fill_(if layout.zero_centred_norms { 0.0 } else { 1.0 })?,
            ParamName::DeltaNorm | ParamName::DeltaDtBias => _ = target.f_fill_(1.0)?,
            // Decay rates are uniform in (0, 16].
            ParamName::DeltaALog => fill(&mut target, param, layout.unit, seed, |key, start, out| {
                key.fill_uniform(0, start, out);
                out.iter_mut().for_each(|number| *number = (16.0 * number.max(1e-3)).ln());
            })?,
            ParamName::Embedding
            | ParamName::Qkv
            | ParamName::O
            | ParamName::GateUp
            | ParamName::Down
            | ParamName::Router
            | ParamName::SharedGateUp
            | ParamName::SharedDown
            | ParamName::SharedGate
            | ParamName::DeltaQkv
            | ParamName::DeltaZ
            | ParamName::DeltaB
            | ParamName::DeltaA
            | ParamName::DeltaConv
            | ParamName::DeltaOut
            | ParamName::DraftProjection
            | ParamName::LmHead => match device {
                Device::Cuda(_) => {
                    let key = key_of(param, layout.unit, seed);
                    kernels::fill_normal(&mut target, key.words(), INITIALIZER_RANGE as f32)?;
                }
                _ => fill(&mut target, param, layout.unit, seed, |key, start, out| {
                    key.fill_normal(0, start, out);
                    out.iter_mut().for_each(|number| *number *= INITIALIZER_RANGE as f32);
                })?,
            },
            ParamName::QkvA
            | ParamName::OA
            | ParamName::GateUpA
            | ParamName::DownA
            | ParamName::DeltaQkvLoraA
            | ParamName::DeltaZLoraA
            | ParamName::DeltaBLoraA
            | ParamName::DeltaALoraA
            | ParamName::DeltaOutLoraA => {
                let columns = param.shape.last().expect("a matrix");
                let bound = (*columns as f32).powf(-0.5);
                fill(&mut target, param, layout.unit, seed, |key, start, out| {
                    key.fill_uniform(0, start, out);
                    out.iter_mut().for_each(|number| *number = (2.0 * *number - 1.0) * bound);
                })?;
            }
        }
    }
    Ok(flat)
}

/// Writes a Hugging Face folder with randomly initialized weights in the model's own type: configuration, weights and, if `tokenizer` is given, that
/// folder's tokenizer files. Calls `progress(done, total)`, counted in units.
///
/// # Errors
/// [`Error::Io`]; [`Error::BadFile`] if `tokenizer` has no tokenizer.json.
pub fn init_folder(
    spec: &Arc<ModelSpec>,
    folder: &Path,
    seed: u64,
    tokenizer: Option<&Path>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    if let Some(source) = tokenizer {
        copy_tokenizer(source, folder)?;
    }
    spec.write_config(folder, None)?;
    let mut writer = WeightWriter::create(folder, spec.clone(), spec.dtype, None)?;
    let units = ParamTable::new(spec.clone(), 1).units;
    for (index, layout) in units.iter().enumerate() {
        progress(index, units.len());
        writer.write_unit(layout, &init_unit(layout, seed, Kind::Float)?)?;
    }
    writer.finish()?;
    progress(units.len(), units.len());
    Ok(())
}

/// Copies the tokenizer's files from one model folder to another.
///
/// # Errors
/// [`Error::Io`]; [`Error::BadFile`] if there is no tokenizer.json.
pub fn copy_tokenizer(from: &Path, to: &Path) -> Result<()> {
    let [required, ..] = TOKENIZER_FILES;
    if !from.join(required).exists() {
        return Err(Error::bad_file(from.join(required), "the file is missing: the tokenizer's folder must have it"));
    }
    let templates = from.join(TEMPLATES_FOLDER).read_dir().into_iter().flatten().flatten();
    let templates: Vec<_> = templates.map(|entry| Path::new(TEMPLATES_FOLDER).join(entry.file_name())).collect();
    if !templates.is_empty() {
        std::fs::create_dir_all(to.join(TEMPLATES_FOLDER)).map_err(Error::io(to.join(TEMPLATES_FOLDER)))?;
    }
    for name in TOKENIZER_FILES.iter().map(PathBuf::from).chain(templates) {
        let (name, source) = (&name, from.join(&name));
        if source.exists() {
            let bytes = untrusted::read(&source, MAX_TOKENIZER_BYTES);
            let bytes = bytes.map_err(|error| Error::bad_file(source, error.to_string()))?;
            std::fs::write(to.join(name), bytes).map_err(Error::io(to.join(name)))?;
        }
    }
    Ok(())
}

/// Fills a parameter by calls of `draw(key, first element, out)`, which must generate the same numbers for any division into ranges.
fn fill(
    target: &mut Tensor,
    param: &Param,
    unit: Unit,
    seed: u64,
    draw: impl Fn(RandomKey, u64, &mut [f32]) + Sync,
) -> Result<()> {
    const CHUNK: usize = 1 << 24;
    let key = key_of(param, unit, seed);
    let target = target.view(-1);
    let mut numbers = vec![0f32; CHUNK.min(param.numel())];
    let per_thread = numbers.len().div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
    for start in (0..param.numel()).step_by(CHUNK) {
        let numbers = &mut numbers[..CHUNK.min(param.numel() - start)];
        std::thread::scope(|scope| {
            for (index, part) in numbers.chunks_mut(per_thread).enumerate() {
                let draw = &draw;
                scope.spawn(move || draw(key, (start + index * per_thread) as u64, part));
            }
        });
        target.narrow(0, start as i64, numbers.len() as i64).f_copy_(&Tensor::f_from_slice(numbers)?)?;
    }
    Ok(())
}

fn key_of(param: &Param, unit: Unit, seed: u64) -> RandomKey {
    let unit = match unit {
        Unit::Embedding => 0,
        Unit::Head => 1,
        Unit::Block(layer) => 2 + layer as u64,
        Unit::DraftHead => u64::MAX,
    };
    RandomKey::new(seed, STREAM).fold(unit).fold(param.name as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{QkNorm, WeightFiles};

    /// The same seed must give the same weights in every version.
    #[test]
    fn parameter_counts_of_presets_stay_constant() {
        let numbers = [ParamName::Router, ParamName::SharedGateUp, ParamName::DeltaALog].map(|name| name as u64);
        assert_eq!(numbers, [22, 23, 31]);
    }

    fn params(table: &ParamTable, seed: u64) -> Vec<(Unit, ParamName, Tensor)> {
        let of_unit = |layout: &UnitLayout| {
            let flat = init_unit(layout, seed, Kind::Float).unwrap();
            let names = layout.params.iter().map(|param| param.name).collect::<Vec<_>>();
            names
                .into_iter()
                .map(move |name| (layout.unit, name, layout.view(name, &flat).unwrap()))
                .collect::<Vec<_>>()
        };
        table.units.iter().flat_map(of_unit).collect()
    }

    #[test]
    fn initial_weights_are_independent_of_sharding() {
        let spec = ModelSpec { tie_word_embeddings: false, ..ModelSpec::preset("micro").unwrap() };
        let spec = Arc::new(spec.map_attention(|_, attention| attention.qk_norm = Some(QkNorm::Head)));
        let (one, many) = (ParamTable::new(spec.clone(), 1), ParamTable::new(spec, 7));
        let (ours, theirs, other) = (params(&one, 5), params(&many, 5), params(&one, 6));
        let mut heads = Vec::new();
        for ((ours, theirs), other) in ours.iter().zip(&theirs).zip(&other) {
            let (unit, name, values) = ours;
            assert!(values.equal(&theirs.2), "{unit} {name:?}");
            let is_matrix = values.dim() > 1;
            assert_eq!(values.equal(&other.2), !is_matrix, "{unit} {name:?}");
            if is_matrix {
                heads.push(Vec::<f32>::try_from(values.view(-1).narrow(0, 0, 4)).unwrap());
            } else {
                let constant = if *name == ParamName::QkvBias { 0.0 } else { 1.0 };
                assert!(values.eq(constant).all().int64_value(&[]) == 1, "{unit} {name:?}");
            }
        }
        for (i, head) in heads.iter().enumerate() {
            assert!(heads[i + 1..].iter().all(|later| later != head), "two parameters share their numbers");
        }
    }

    /// The tolerance is five standard errors over 196,608 samples.
    #[test]
    fn initial_matrices_have_standard_deviation_0_02_and_zero_padding() {
        let table = ParamTable::new(Arc::new(ModelSpec::preset("tiny").unwrap()), 1000);
        let layout = table.unit(Unit::Block(0));
        let flat = init_unit(layout, 42, Kind::Float).unwrap();
        let gate_up = layout.view(ParamName::GateUp, &flat).unwrap();
        let (mean, std) = (gate_up.mean(Kind::Double).double_value(&[]), gate_up.std(true).double_value(&[]));
        assert!(mean.abs() < 3.2e-4 && (std - 0.02).abs() < 2.3e-4, "{mean} {std}");
        let end = layout.params.last().map(|param| param.offset + param.numel()).unwrap();
        assert!(end < layout.len);
        assert_eq!(flat.narrow(0, end as i64, (layout.len - end) as i64).abs().max().double_value(&[]), 0.0);
    }

    #[test]
    fn an_initialized_model_folder_opens_with_its_tokenizer() {
        let (source, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = folder.path().join("new/model");
        let spec = Arc::new(ModelSpec { dtype: Kind::BFloat16, ..ModelSpec::preset("micro").unwrap() });
        let missing = init_folder(&spec, &target, 1, Some(source.path()), &mut |_, _| ()).unwrap_err();
        assert!(matches!(&missing, Error::BadFile { path, .. } if path.ends_with("tokenizer.json")), "{missing}");
        std::fs::write(source.path().join("tokenizer.json"), "{}").unwrap();
        let mut told = Vec::new();
        init_folder(&spec, &target, 1, Some(source.path()), &mut |done, total| told.push((done, total))).unwrap();
        let num_units = ParamTable::new(spec.clone(), 1).units.len();
        assert!(told.into_iter().eq((0..=num_units).map(|done| (done, num_units))));
        assert_eq!(std::fs::read_to_string(target.join("tokenizer.json")).unwrap(), "{}");
        assert_eq!(ModelSpec::from_folder(&target).unwrap(), *spec);
        let files = WeightFiles::open(&target, spec.clone()).unwrap();
        for layout in &ParamTable::new(spec, 3).units {
            let read = files.read_unit(layout, Kind::BFloat16).unwrap();
            assert!(read.equal(&init_unit(layout, 1, Kind::BFloat16).unwrap()));
        }
    }
}
