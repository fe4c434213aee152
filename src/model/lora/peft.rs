//! Reads and writes adapter folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, with one A [r, in] and one B [out, r]
//! per projection, or per projection and expert.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::spec::{AdaptedProjection, AdapterBase, Fused, LoraSpec};
use crate::config::{MAX_RANK, Quantization, TargetModule};
use crate::data::hub::named_snapshot;
use crate::error::{Error, Result};
use crate::model::files::names::{decoder_module, in_pairs, module_path, pairs};
use crate::model::files::{MappedFile, TORCH_FORMAT, dtype_of, encode_header, sync};
use crate::model::json::{ADAPTER_CONFIG as CONFIG, JsonObject};
use crate::model::params::{ParamTable, UnitLayout};
use crate::model::spec::{ModelSpec, Projection, Unit, product};
use crate::torch;
use crate::untrusted::KeyTable;

/// The configuration key that names how adapters were initialized.
const INIT: &str = "init_lora_weights";
/// Names, or beginnings of names, of initializations that change the base weights.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];
/// Names of initializations that leave the base weights unchanged.
const KEEPS_BASE: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Keys of `adapter_config.json`: every field of PEFT's `LoraConfig`. Which modules are adapted follows from the tensors; it is the same in all
/// layers.
pub(crate) const ADAPTER_KEYS: KeyTable = KeyTable {
    name: "adapter_config.json",
    served: "base_model_name_or_path init_lora_weights lora_alpha lora_dropout peft_type r revision use_rslora",
    harmless: "auto_mapping corda_config ensure_weight_tying eva_config exclude_modules inference_mode loftq_config lora_ga_config \
        megatron_core peft_version qalora_group_size runtime_config target_modules task_type unsloth_fixed velora_config",
    refused: &[
        ("alora_invocation_tokens", &[], "adapters that are active for some tokens only are not supported"),
        ("alpha_pattern", &["{}"], "only one lora_alpha for all modules is supported"),
        ("arrow_config", &[], "routing between adapters is not supported"),
        ("bias", &["\"none\""], "training biases is not supported"),
        ("fan_in_fan_out", &["false"], "transposed weights are not supported"),
        ("kasa_config", &[], "only plain LoRA (B A) is supported, without a matrix in between"),
        ("layer_replication", &["[]"], "replicated layers are not supported"),
        ("layers_pattern", &["[]", "\"\""], "adapters must cover all layers"),
        ("layers_to_transform", &["[]"], "adapters must cover all layers"),
        ("lora_bias", &["false"], "biases in B are not supported"),
        ("megatron_config", &["{}"], "Megatron modules are not supported"),
        ("modules_to_save", &["[]"], "modules that are trained as a whole are not supported"),
        ("monteclora_config", &[], "sampled adapters are not supported"),
        ("rank_pattern", &["{}"], "only one rank for all modules is supported"),
        ("target_parameters", &["[]"], "experts must be adapted by projection (target_modules)"),
        ("trainable_token_indices", &["[]", "{}"], "training embedding rows is not supported"),
        ("use_bdlora", &[], "block-diagonal A and B are not supported"),
        ("use_dora", &["false"], "only plain LoRA (B A) is supported, without a magnitude vector"),
        ("use_qalora", &["false"], "pooled inputs are not supported"),
    ],
    ignores_unknown: false,
};

/// The file with the adapters' weights.
pub(in crate::model) const WEIGHTS: &str = "adapter_model.safetensors";
/// The pickled file that older versions of PEFT wrote.
const PICKLED: &str = "adapter_model.bin";

/// One tensor of `adapter_model.safetensors`.
struct PeftTensor<'a> {
    /// Full name, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    name: String,
    shape: Vec<i64>,
    fused: &'a Fused,
    /// The projections whose rows of B the tensor contains, in order.
    pieces: &'a [AdaptedProjection],
    /// Index of the expert, if the projection belongs to one.
    expert: Option<usize>,
    is_a: bool,
}

impl PeftTensor<'_> {
    /// Views of the unit's flat tensor that, one after the other, contain the tensor's elements in the order of `shape`.
    fn views(&self, spec: &ModelSpec, layout: &UnitLayout, flat: &Tensor) -> Vec<Tensor> {
        let [a, b] = self.fused.views(layout, flat);
        let of_expert = |own: Tensor| self.expert.map_or_else(|| own.shallow_clone(), |expert| own.get(expert as i64));
        if self.is_a {
            return vec![of_expert(self.fused.a_of(&self.pieces[0], &a))];
        }
        let rows = |piece: &AdaptedProjection| {
            let own = of_expert(self.fused.b_of(piece, &b));
            match pairs(spec, layout.unit, Projection::Module(piece.module)) {
                None => own,
                pairs => in_pairs(own, pairs), // experts have no rotary embedding
            }
        };
        self.pieces.iter().map(rows).collect()
    }
}

/// Calls `f` with every tensor of a block, in PEFT's order of names.
fn tensors(
    spec: &ModelSpec,
    lora: &LoraSpec,
    unit: Unit,
    f: &mut dyn FnMut(&PeftTensor<'_>) -> Result<()>,
) -> Result<()> {
    let Unit::Block(layer) = unit else { panic!("the {unit} has no LoRA adapters") };
    for fused in lora.fused(spec, layer) {
        for expert in fused.linear.each_expert() {
            for pieces in fused.pieces.chunk_by(|a, b| a.index == b.index) {
                let [a_shape, b_shape] = fused.shapes_of(pieces);
                let path = pieces[0].within.map_or_else(|| module_path(pieces[0].module, expert), str::to_owned);
                for (is_a, part, shape) in [(true, "lora_A", a_shape), (false, "lora_B", b_shape)] {
                    let name = format!("base_model.model.{}.layers.{layer}.{path}.{part}.weight", decoder_module(spec));
                    f(&PeftTensor { name, shape, fused: &fused, pieces, expert, is_a })?;
                }
            }
        }
    }
    Ok(())
}

/// An opened adapter folder, checked against its base model.
#[derive(Debug)]
pub struct AdapterFiles {
    spec: Arc<ModelSpec>,
    lora: LoraSpec,
    file: MappedFile,
}

impl AdapterFiles {
    /// Reads the configuration and maps the weights into memory.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the adapters are not LoRA, or do not fit this model.
    pub fn open(folder: &Path, spec: Arc<ModelSpec>) -> Result<Self> {
        let pickled = folder.join(PICKLED);
        if pickled.exists() && !folder.join(WEIGHTS).exists() {
            return Err(Error::bad_file(pickled, convert_hint(folder)));
        }
        let file = MappedFile::open(&folder.join(WEIGHTS))?;
        let targets = targets(&file, &spec);
        if targets.is_empty() && file.names().is_empty() {
            return Err(Error::bad_file(&file.path, "no tensors: expected A and B of at least one projection"));
        }
        let lora = read_config(&folder.join(CONFIG), targets)?;
        lora.check(&spec).map_err(|error| Error::bad_file(folder.join(CONFIG), error.to_string()))?;
        let files = Self { spec, lora, file };
        files.check()?;
        Ok(files)
    }

    /// Path of the weights' file.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// How the base weights were stored while the adapters were trained, if the file notes it.
    pub fn base_quantization(&self) -> Quantization {
        let noted = self.file.note(BASE_QUANTIZATION);
        let stored = Quantization::ALL.iter().find(|stored| noted.is_some_and(|name| name == stored.name()));
        stored.copied().unwrap_or(Quantization::None)
    }

    /// The adapters' settings.
    pub fn lora(&self) -> &LoraSpec {
        &self.lora
    }

    /// Reads one unit [layout.len] as `kind` on the CPU, in the layout of [`ParamTable::adapters`], with zeros as padding.
    ///
    /// # Errors
    /// [`Error::BadFile`]; [`Error::Io`].
    pub fn read_unit(&self, layout: &UnitLayout, kind: Kind) -> Result<Tensor> {
        let flat = Tensor::f_zeros([layout.len as i64], (kind, Device::Cpu))?;
        tensors(&self.spec, &self.lora, layout.unit, &mut |tensor| {
            let mut first = 0;
            tensor.views(&self.spec, layout, &flat).iter_mut().try_for_each(|view| {
                let start = first;
                first += view.numel();
                self.file.copy_to(&tensor.name, start, view)
            })
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
            "{other} is not supported: expected the matrices A and B of projections that lora.target_modules can name, \
             in the model's {} layers",
            self.spec.num_layers()
        );
        Err(Error::bad_file(&self.file.path, message))
    }
}

fn convert_hint(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "pickled adapters can run code when opened and are not supported; convert them with: python3 -c \"import \
         torch; from safetensors.torch import save_file; save_file(torch.load('{folder}/{PICKLED}', \
         weights_only=True), '{folder}/{WEIGHTS}')\""
    )
}

/// Metadata key in the weights' header that notes how the base weights were stored in training, if that differs from the checkpoint.
const BASE_QUANTIZATION: &str = "base_quantization";

/// Writes the two files of an adapter folder; `units` yields the units of `table` in order.
///
/// # Errors
/// [`Error::Io`], and the errors of `units`.
pub fn write_adapters(
    folder: &Path,
    table: &ParamTable,
    lora: &LoraSpec,
    AdapterBase { folder: base, quantization: stored }: AdapterBase<'_>,
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
    let all = [TORCH_FORMAT, (BASE_QUANTIZATION, stored.name())];
    let entries = if stored == Quantization::None { &all[..1] } else { &all };
    let path = folder.join(WEIGHTS);
    let mut file = File::create(&path).map_err(Error::io(&path))?;
    file.write_all(&encode_header(infos, entries)).map_err(Error::io(&path))?;
    for (layout, flat) in table.units.iter().zip(units) {
        let flat = flat?;
        tensors(&table.spec, lora, layout.unit, &mut |tensor| {
            for view in tensor.views(&table.spec, layout, &flat) {
                let values = view.f_to_kind(kind)?.f_to_device(Device::Cpu)?.f_contiguous()?;
                // SAFETY: weights change only between steps, and no step runs while they are written.
                let bytes = unsafe { torch::bytes(&values) }?;
                file.write_all(bytes).map_err(Error::io(&path))?;
            }
            Ok(())
        })?;
    }
    sync(&path)?;
    write_config(&folder.join(CONFIG), (&table.spec, lora), base)
}

fn write_config(path: &Path, (spec, lora): (&ModelSpec, &LoraSpec), base: &Path) -> Result<()> {
    let mut names: Vec<&str> = lora.modules(spec).into_iter().map(|module| module_name(spec, module)).collect();
    names.dedup();
    // The tower that reads images has modules of the same names.
    let of_text = format!(r".*language_model\..*\.({})", names.join("|"));
    let whole = std::fs::canonicalize(base).unwrap_or_else(|_| base.to_owned());
    // A base model from the Hub is noted by its name, so that other machines find it too.
    let named = named_snapshot(&whole);
    let config = json!({
        "base_model_name_or_path": named.as_ref().map_or(whole.to_string_lossy(), |named| named.repo.as_str().into()),
        "revision": named.as_ref().map(|named| &named.commit),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": if spec.is_text_part { json!(of_text) } else { json!(names) },
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    std::fs::write(path, format!("{config:#}\n")).map_err(Error::io(path))?;
    sync(path)
}

/// The projections that a file has adapters for. This is read from the tensors, as a configuration may name modules in several ways.
fn targets(file: &MappedFile, spec: &ModelSpec) -> Vec<TargetModule> {
    let names = file.names();
    let mut targets = TargetModule::ALL.to_vec();
    let own = |module| format!(".{}.lora_A.", module_name(spec, module));
    targets.retain(|&module| names.iter().any(|name| name.contains(&own(module))));
    targets
}

/// The name of the checkpoint's module that contains a projection, alone or fused with others.
fn module_name(spec: &ModelSpec, module: TargetModule) -> &'static str {
    let fused = spec.family.traits().fused_tensors.iter().find(|fused| fused.modules.contains(&module));
    let name = fused.and_then(|fused| fused.name.rsplit('.').next());
    name.unwrap_or_else(|| module.name())
}

fn read_config(path: &Path, targets: Vec<TargetModule>) -> Result<LoraSpec> {
    let config = JsonObject::read(path)?;
    config.check(&ADAPTER_KEYS)?;
    if config.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        return Err(config.wrong("peft_type", "\"LORA\""));
    }
    let init = config.get(INIT).and_then(Value::as_str).map(str::to_lowercase).unwrap_or_default();
    if let Some(name) = CHANGES_BASE.into_iter().find(|name| init.starts_with(name)) {
        let expected = format!(
            "an initialization that does not change the base weights: {name} subtracts a part from them, so these \
             adapters only fit the changed base; PEFT converts them to plain LoRA with save_pretrained(.., \
             path_initial_model_for_weight_conversion=..)"
        );
        return Err(config.wrong(INIT, expected));
    }
    if !init.is_empty() && !KEEPS_BASE.contains(&init.as_str()) {
        return Err(config.wrong(INIT, format!("true, false or one of {}", KEEPS_BASE.join(", "))));
    }
    let r = config.size("r", MAX_RANK)?;
    let alpha = config.get("lora_alpha").and_then(Value::as_f64);
    let alpha = alpha.ok_or_else(|| config.wrong("lora_alpha", "a number"))?;
    // The scale of rank-stabilized LoRA is alpha / sqrt(r).
    let alpha = if config.flag("use_rslora")? { alpha * (r as f64).sqrt() } else { alpha };
    let dropout = config.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
    Ok(LoraSpec { r, alpha, dropout, targets })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(more: Value) -> Result<LoraSpec> {
        let folder = tempfile::tempdir().unwrap();
        let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
        read_config(&folder.path().join(CONFIG), vec![TargetModule::QProj])
    }

    /// The golden file from scripts/golden_keys.py lists the fields of PEFT's `LoraConfig`.
    #[test]
    fn every_field_of_pefts_lora_config_is_known() {
        let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/keys.json")).unwrap();
        let theirs: Vec<String> = serde_json::from_value(golden[ADAPTER_KEYS.name].clone()).unwrap();
        let unknown: Vec<_> = theirs.iter().filter(|key| !ADAPTER_KEYS.knows(key)).collect();
        assert!(theirs.len() > 40 && unknown.is_empty(), "{unknown:?}");
        assert_eq!(ADAPTER_KEYS.undocumented(), Vec::<&str>::new());
    }

    #[test]
    fn adapters_other_than_plain_lora_are_refused_by_key() {
        for (config, message) in [
            (json!({"init_lora_weights": "pissa"}), "pissa subtracts a part from them"),
            (json!({"init_lora_weights": "pissa_niter_16"}), "path_initial_model_for_weight_conversion"),
            (json!({"init_lora_weights": "OLoRA"}), "olora subtracts"),
            (json!({"init_lora_weights": "corda"}), "corda subtracts"),
            (json!({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}), "loftq subtracts"),
            (json!({"init_lora_weights": "lora_ga"}), "lora_ga subtracts"),
            (json!({"init_lora_weights": "newer"}), "true, false or one of gaussian, eva, orthogonal, mica"),
            (json!({"use_dora": true}), "use_dora is true: expected false; only plain LoRA (B A) is supported"),
            (json!({"use_qalora": true}), "use_qalora"),
            (json!({"rank_pattern": {"q_proj": 8}}), "rank_pattern"),
            (json!({"alpha_pattern": {"q_proj": 8}}), "alpha_pattern"),
            (json!({"bias": "lora_only"}), "bias is \"lora_only\": expected \"none\""),
            (json!({"lora_bias": true}), "lora_bias"),
            (json!({"modules_to_save": ["lm_head"]}), "modules_to_save"),
            (json!({"layers_to_transform": 0}), "layers_to_transform"),
            (json!({"layer_replication": [[0, 2], [1, 2]]}), "layer_replication"),
            (json!({"trainable_token_indices": [3]}), "trainable_token_indices"),
            (json!({"alora_invocation_tokens": [3]}), "alora_invocation_tokens"),
            (json!({"kasa_config": {"beta": 1e-4}}), "kasa_config"),
            (json!({"use_bdlora": {"nblocks": 2}}), "use_bdlora"),
            (json!({"arrow_config": {"top_k": 3}}), "arrow_config"),
            (json!({"use_newer": true}), "use_newer is true: expected no such key"),
            (json!({"peft_type": "ADALORA"}), "peft_type is \"ADALORA\""),
        ] {
            let error = read(config).unwrap_err();
            assert!(matches!(error, Error::BadFile { .. }) && error.to_string().contains(message), "{error}");
        }
    }

    /// Covers PEFT's default file, initializations that keep the base weights, and rank-stabilized adapters, whose scale is alpha / sqrt(r).
    #[test]
    fn adapters_are_read_whatever_their_initialization() {
        for init in [json!(true), json!(false), json!("gaussian"), json!("eva"), json!("orthogonal"), json!("mica")] {
            let spec = read(json!({"init_lora_weights": init, "eva_config": {"rho": 2.0}, "use_newer": null})).unwrap();
            assert_eq!(spec.scale(), 1.5);
        }
        let stabilized = read(json!({"use_rslora": true})).unwrap();
        assert_eq!((stabilized.scale(), stabilized.r), (6.0 / 2.0, 4));
    }
}
