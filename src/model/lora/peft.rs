//! Adapter folders as PEFT writes and reads them: `adapter_config.json` and `adapter_model.safetensors`, one A [r, in] and
//! one B [out, r] a projection, or a projection of an expert.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::LoraSpec;
use super::layout::{AdaptedProjection, Fused};
use crate::config::{MAX_RANK, Quantization, TargetModule};
use crate::data::hub::named_snapshot;
use crate::error::{Error, Result};
use crate::model::files::names::{decoder, module_path};
use crate::model::files::{MappedFile, TORCH_FORMAT, dtype_of, encode_header, sync};
use crate::model::json::{ADAPTER_CONFIG as CONFIG, JsonObject};
use crate::model::params::{ParamTable, Unit, UnitLayout};
use crate::model::spec::{ModelSpec, product};
use crate::torch;

/// Weights of adapters.
pub(in crate::model) const WEIGHTS: &str = "adapter_model.safetensors";
/// The file that older versions of PEFT wrote.
const PICKLED: &str = "adapter_model.bin";

/// One tensor of `adapter_model.safetensors`.
struct PeftTensor<'a> {
    /// `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`
    name: String,
    shape: Vec<i64>,
    fused: &'a Fused,
    piece: &'a AdaptedProjection,
    /// The index of the expert, of an expert's projection.
    expert: Option<usize>,
    is_a: bool,
}

impl PeftTensor<'_> {
    /// The tensor as a view of its unit's flat tensor; its elements are in the order of `shape`.
    fn view(&self, layout: &UnitLayout, flat: &Tensor) -> Tensor {
        let (a, b) = self.fused.views(layout, flat);
        let own = if self.is_a { self.fused.a_of(self.piece, &a) } else { self.fused.b_of(self.piece, &b) };
        self.expert.map_or_else(|| own.shallow_clone(), |expert| own.get(expert as i64))
    }
}

/// Calls `f` with every tensor of a block, in PEFT's order of names.
fn tensors(
    spec: &ModelSpec,
    lora: &LoraSpec,
    unit: Unit,
    f: &mut dyn FnMut(&PeftTensor<'_>) -> Result<()>,
) -> Result<()> {
    let Unit::Block(layer) = unit else { panic!("the {unit} has no adapters") };
    for fused in lora.fused(spec, layer) {
        for expert in fused.linear.each_expert() {
            for piece in &fused.pieces {
                let [a_shape, b_shape] = fused.shapes_of(piece);
                for (is_a, part, shape) in [(true, "lora_A", a_shape), (false, "lora_B", b_shape)] {
                    let path = module_path(piece.module, expert);
                    let name = format!("base_model.model.{}.layers.{layer}.{path}.{part}.weight", decoder(spec));
                    f(&PeftTensor { name, shape, fused: &fused, piece, expert, is_a })?;
                }
            }
        }
    }
    Ok(())
}

/// An adapter folder, checked against the model it is for.
#[derive(Debug)]
pub struct AdapterFiles {
    spec: Arc<ModelSpec>,
    lora: LoraSpec,
    file: MappedFile,
}

impl AdapterFiles {
    /// Reads the configuration and maps the weights.
    ///
    /// # Errors
    /// [`Error::BadFile`] for adapters of another kind than LoRA's, or that are not of this model.
    pub fn open(folder: &Path, spec: Arc<ModelSpec>) -> Result<Self> {
        let pickled = folder.join(PICKLED);
        if pickled.exists() && !folder.join(WEIGHTS).exists() {
            return Err(Error::bad_file(pickled, convert_hint(folder)));
        }
        let file = MappedFile::open(&folder.join(WEIGHTS))?;
        let targets = targets(&file);
        if targets.is_empty() && file.names().is_empty() {
            return Err(Error::bad_file(&file.path, "no tensors: expected A and B of at least one projection"));
        }
        let lora = read_config(&folder.join(CONFIG), targets)?;
        lora.check(&spec).map_err(|error| Error::bad_file(folder.join(CONFIG), error.to_string()))?;
        let files = Self { spec, lora, file };
        files.check()?;
        Ok(files)
    }

    /// The file of the weights.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// How the base was stored while the adapters were trained, as far as they say.
    pub fn base_quantization(&self) -> Quantization {
        match self.file.note(BASE_QUANTIZATION) {
            Some(name) if name == Quantization::Nf4.name() => Quantization::Nf4,
            _ => Quantization::None,
        }
    }

    /// The adapters' settings.
    pub fn lora(&self) -> &LoraSpec {
        &self.lora
    }

    /// One unit [layout.len] of `kind` on the CPU, in the layout of [`ParamTable::adapters`], padding zero.
    ///
    /// # Errors
    /// [`Error::BadFile`]; [`Error::Io`].
    pub fn read_unit(&self, layout: &UnitLayout, kind: Kind) -> Result<Tensor> {
        let flat = Tensor::f_zeros([layout.len as i64], (kind, Device::Cpu))?;
        tensors(&self.spec, &self.lora, layout.unit, &mut |tensor| {
            self.file.copy_to(&tensor.name, 0, &mut tensor.view(layout, &flat))
        })?;
        Ok(flat)
    }

    fn check(&self) -> Result<()> {
        let mut expected = BTreeSet::new();
        for layer in 0..self.spec.num_layers() {
            tensors(&self.spec, &self.lora, Unit::Block(layer), &mut |tensor| {
                expected.insert(tensor.name.clone());
                self.file.check(&tensor.name, &tensor.shape)
            })?;
        }
        let Some(other) = self.file.names().into_iter().find(|name| !expected.contains(name)) else { return Ok(()) };
        let message = format!(
            "{other} is not served: expected A and B of projections that lora.target_modules can name, in the model's {} layers",
            self.spec.num_layers()
        );
        Err(Error::bad_file(&self.file.path, message))
    }
}

fn convert_hint(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "pickled adapters can run code when they are opened and are not read; convert them with: python3 -c \"import torch; \
         from safetensors.torch import save_file; \
         save_file(torch.load('{folder}/{PICKLED}', weights_only=True), '{folder}/{WEIGHTS}')\""
    )
}

/// The entry of the weights' header that says how the base was stored in training, where it was not as its files have it.
const BASE_QUANTIZATION: &str = "base_quantization";

/// Writes an adapter folder's two files; `units` gives those of `table` in turn. `base` is the base's folder, and how it was stored while
/// the adapters were trained.
///
/// # Errors
/// [`Error::Io`], what `units` returns.
pub fn write_adapters(
    folder: &Path,
    table: &ParamTable,
    lora: &LoraSpec,
    (base, stored): (&Path, Quantization),
    kind: Kind,
    units: &mut dyn Iterator<Item = Result<Tensor>>,
) -> Result<()> {
    let dtype = dtype_of(kind)?;
    let (mut infos, mut end) = (Vec::new(), 0);
    for layout in &table.units {
        tensors(&table.spec, lora, layout.unit, &mut |tensor| {
            let start = end;
            end += product(&tensor.shape) * kind.elt_size_in_bytes();
            let shape = tensor.shape.iter().map(|&size| size as usize).collect();
            infos.push((tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
            Ok(())
        })?;
    }
    let entries: &[_] = match stored {
        Quantization::None => &[TORCH_FORMAT],
        Quantization::Nf4 => &[TORCH_FORMAT, (BASE_QUANTIZATION, Quantization::Nf4.name())],
    };
    let path = folder.join(WEIGHTS);
    let mut file = File::create(&path).map_err(Error::io(&path))?;
    file.write_all(&encode_header(infos, entries)).map_err(Error::io(&path))?;
    for (layout, flat) in table.units.iter().zip(units) {
        let flat = flat?;
        tensors(&table.spec, lora, layout.unit, &mut |tensor| {
            let values = tensor.view(layout, &flat).f_to_kind(kind)?.f_to_device(Device::Cpu)?.f_contiguous()?;
            // SAFETY: weights change between steps alone, and no step runs while they are written.
            let bytes = unsafe { torch::bytes(&values) }?;
            file.write_all(bytes).map_err(Error::io(&path))
        })?;
    }
    sync(&path)?;
    write_config(&folder.join(CONFIG), (&table.spec, lora), base)
}

fn write_config(path: &Path, (spec, lora): (&ModelSpec, &LoraSpec), base: &Path) -> Result<()> {
    let names: Vec<&str> = lora.modules(spec).into_iter().map(TargetModule::name).collect();
    let whole = std::fs::canonicalize(base).unwrap_or_else(|_| base.to_owned());
    // A base from the Hub goes by its name, so that the adapters find it on other machines, too.
    let (name, commit) = named_snapshot(&whole).unzip();
    let config = json!({
        "base_model_name_or_path": name.unwrap_or_else(|| whole.to_string_lossy().into_owned()),
        "revision": commit,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": names,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    std::fs::write(path, format!("{config:#}\n")).map_err(Error::io(path))?;
    sync(path)
}

/// The projections that a file has adapters of: the tensors are the truth, a configuration may name them in several ways.
fn targets(file: &MappedFile) -> Vec<TargetModule> {
    let names = file.names();
    let mut targets = TargetModule::ALL.to_vec();
    targets.retain(|module| names.iter().any(|name| name.contains(&format!(".{}.lora_A.", module.name()))));
    targets
}

fn read_config(path: &Path, targets: Vec<TargetModule>) -> Result<LoraSpec> {
    let config = JsonObject::read(path)?;
    let is_off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        other => other == "none",
    };
    let unserved = [
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "layers_pattern",
        "layers_to_transform",
        "lora_bias",
        "modules_to_save",
        "rank_pattern",
        "target_parameters",
        "use_dora",
        "use_rslora",
    ];
    if let Some(key) = unserved.into_iter().find(|key| config.get(key).is_some_and(|value| !is_off(value))) {
        return Err(config.wrong(key, "it to be off: only plain LoRA is served, of experts projection by projection"));
    }
    if config.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return Err(config.wrong("peft_type", "\"LORA\""));
    }
    let r = config.size("r", MAX_RANK)?;
    let alpha = config.get("lora_alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or_else(|| config.wrong("lora_alpha", "a number"))?;
    let dropout = config.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
    Ok(LoraSpec { r, alpha, dropout, targets })
}
