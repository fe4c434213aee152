//! Adapters that PEFT wrote: scripts/golden_peft.py recorded the log-likelihood, every gradient, the files and the merged weights.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use colo_grpo::internal::config::{Quantization, TargetModule};
use colo_grpo::internal::model::{
    AdapterBase, LoraSpec, ModelSource, ModelSpec, ParamTable, Plain, Unit, UnitLayout, WeightFiles, write_adapters,
};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::train::{NetworkOptions, OptimizerHome, Policy, PolicyStart, Reference, Sequence, StatePart};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{ADAM, backward, options, packed, sequence, tensors, units};
use crate::program::{golden_model, stdout_of};

/// A folder that PEFT wrote, with its settings.
type Case = (&'static str, usize, f64, &'static [TargetModule]);

const ATTENTION: &[TargetModule] =
    &[TargetModule::QProj, TargetModule::KProj, TargetModule::VProj, TargetModule::OProj];

#[rustfmt::skip]
fn cases() -> Vec<Case> {
    use TargetModule::{DownProj, GateProj, KProj, OProj, QProj, UpProj, VProj};
    vec![
        ("lora_all", 4, 12.0, TargetModule::ALL),
        ("lora_hybrid", 4, 12.0, TargetModule::ALL),
        ("lora_fused", 4, 6.0, TargetModule::ALL),
        // A head's columns that are turned together are neighbours in the files.
        ("lora_pairs", 2, 3.0, &[QProj, KProj, OProj, DownProj]),
        ("lora_some", 2, 3.0, &[QProj, VProj, UpProj]),
        ("lora_experts", 2, 5.0, &[QProj, GateProj, UpProj, DownProj]),
        ("lora_gemma3", 1, 2.0, TargetModule::ALL),
        ("lora_gemma3_vision", 2, 3.0, &[QProj, VProj, GateProj, DownProj]),
        ("lora_glm4_moe", 2, 5.0, ATTENTION),
        ("lora_gpt_oss", 3, 4.0, ATTENTION),
        ("lora_ministral", 2, 3.0, TargetModule::ALL),
        ("lora_mistral", 3, 2.0, &[QProj, KProj, OProj, UpProj]),
        ("lora_mistral3_vision", 2, 3.0, &[KProj, OProj, UpProj]),
    ]
}

/// The numbers that PEFT computed, and the folders.
struct Golden {
    name: &'static str,
    lora: LoraSpec,
    folder: PathBuf,
    numbers: Value,
    source: ModelSource,
    files: WeightFiles,
    table: Arc<ParamTable>,
}

impl Golden {
    fn of((name, r, alpha, targets): Case) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let source = ModelSource::new(&folder, None).unwrap();
        let table = Arc::new(ParamTable::new(Arc::new(ModelSpec::from_folder(&source.base).unwrap()), 1));
        Self {
            name,
            lora: LoraSpec { r, alpha, dropout: 0.0, targets: targets.to_vec() },
            numbers: serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap(),
            files: WeightFiles::open(&source.base, table.spec.clone()).unwrap(),
            folder,
            source,
            table,
        }
    }

    fn input_ids(&self) -> Vec<Vec<u32>> {
        serde_json::from_value(self.numbers["input_ids"].clone()).unwrap()
    }

    fn sequences(&self) -> Vec<Sequence> {
        self.input_ids().into_iter().map(sequence).collect()
    }

    fn by_tensor(&self, key: &str) -> BTreeMap<String, f64> {
        serde_json::from_value(self.numbers[key].clone()).unwrap()
    }

    /// A policy that begins with the folder's adapters.
    fn policy(&self, lora: Option<LoraSpec>) -> colo_grpo::Result<Policy> {
        let mesh = World::single().mesh(1, 1)?;
        let adapters = self.source.adapters.as_deref();
        let start = PolicyStart { lora, quantization: Quantization::None, seed: 1, adapters, keeps_initial: false };
        let weights = |layout: &UnitLayout| self.files.read_unit(layout, Kind::Float);
        let options = options(0, (Kind::Float, Kind::Float));
        Policy::start(self.table.clone(), &mesh, options, OptimizerHome::Resident, &weights, start)
    }

    /// The tensors of a folder with these adapters, as this program writes them.
    fn written(&self, policy: &Policy, units: &BTreeMap<Unit, Tensor>) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
        let folder = tempfile::tempdir().unwrap();
        let units = &mut units.values().map(|flat| Ok(flat.shallow_clone()));
        let base = AdapterBase { folder: &self.source.base, quantization: Quantization::None };
        write_adapters(folder.path(), policy.trained_table(), &self.lora, base, Kind::Float, units).unwrap();
        let config: Value =
            serde_json::from_slice(&std::fs::read(folder.path().join("adapter_config.json")).unwrap()).unwrap();
        // Not the modules of the same names in the tower that reads images.
        let is_of_text = config["target_modules"].as_str().is_some_and(|names| names.contains("language_model"));
        assert_eq!(is_of_text, self.name.ends_with("_vision"), "{config}");
        tensors(folder.path())
    }
}

#[test]
fn lora_adapters_load_score_and_save_as_in_peft() {
    for golden in cases().into_iter().map(Golden::of) {
        let (name, lora) = (golden.name, golden.lora.clone());
        let mut policy = golden.policy(Some(lora.clone())).unwrap();
        let micro_batches = packed(&golden.sequences(), 30);
        let (nll, expected) = (backward(&mut policy, &micro_batches), golden.numbers["nll"].as_f64().unwrap());
        assert!((nll - expected).abs() < 1e-5 * expected, "{name}: {nll}, expected {expected}");

        let weights = units(&policy, |state| state.part(StatePart::Master).unwrap().shallow_clone());
        assert_eq!(golden.written(&policy, &weights), tensors(&golden.folder), "{name}");

        let _ = policy.optimizer_step(0.0, 0.0).unwrap();
        let gradients = units(&policy, |state| state.part(StatePart::M).unwrap() / (1.0 - ADAM.beta1));
        let (gradients, expected) = (golden.written(&policy, &gradients), golden.by_tensor("gradients"));
        assert!(gradients.keys().eq(expected.keys()), "{name}");
        for (tensor, (_, gradient)) in gradients {
            let (weighed, expected) = (weighed(gradient.iter().copied()), expected[&tensor]);
            let scale = gradient.iter().fold(1e-3f32, |max, g| max.max(g.abs()));
            let error = (weighed - expected).abs();
            assert!(
                error < 1e-4 * f64::from(scale) * (gradient.len() as f64).sqrt(),
                "{name}, {tensor}: {weighed}, {expected}"
            );
        }
        let refused = golden.policy(None).unwrap_err().to_string();
        assert!(refused.contains("expected a full model, or lora.r"), "{refused}");
        let refused = golden.policy(Some(LoraSpec { r: 8, ..lora })).unwrap_err().to_string();
        assert!(refused.contains("the settings of these adapters: lora.r = "), "{refused}");
    }
}

/// `export --merge` changes the tensors that PEFT's merge changes, to the same values rounded to the base's type. The merged model has the
/// recorded logits.
#[test]
fn merged_adapters_are_pefts() {
    for golden in cases().into_iter().map(Golden::of) {
        let (name, spec, merged) = (golden.name, golden.table.spec.clone(), tempfile::tempdir().unwrap());
        let [base, merged] = ["base", "merged"].map(|name| merged.path().join(name));
        golden_model(&base, golden.source.base.file_name().and_then(OsStr::to_str).unwrap());
        let words = format!("export --model {} --output {} --merge", golden.folder.display(), merged.display());
        stdout_of(&format!("{words} --base_model {}", base.display()));
        let (before, after) = (weights(&golden.source.base), weights(&merged));
        assert!(before.keys().eq(after.keys()), "{name}");
        let changed = after.keys().filter(|tensor| !before[*tensor].equal(&after[*tensor]));
        let expected = golden.by_tensor("merged");
        assert_eq!(changed.collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{name}");
        // In bfloat16 a sum that lies between two values may be rounded to either.
        let (rounding, of_logits) = if spec.dtype == Kind::Float { (1e-5, 1e-4) } else { (1.0 / 128.0, 0.02) };
        let (num_changed, mut num_distinct) = (expected.len(), 0);
        for (tensor, expected) in expected {
            let [before, after] = [&before, &after].map(|all| {
                let values = Vec::<f32>::try_from(all[&tensor].to_kind(Kind::Float).flatten(0, -1)).unwrap();
                (weighed(values.iter().copied()), values.iter().fold(0f32, |max, value| max.max(value.abs())))
            });
            let limit = rounding * f64::from(after.1);
            assert!((after.0 - expected).abs() < limit, "{name}, {tensor}: {after:?}, expected {expected}");
            num_distinct += usize::from((before.0 - expected).abs() > 2.0 * limit);
        }

        assert!(
            10 * num_distinct >= 8 * num_changed,
            "{name}: {num_distinct} of {num_changed} sums tell a merge from none"
        );

        let files = WeightFiles::open(&merged, spec.clone()).unwrap();
        let read = |layout: &UnitLayout| files.read_unit(layout, Kind::Float);
        let options = NetworkOptions { kind: Kind::Float, residual: Kind::Float, device: Device::Cpu, format: &Plain };
        let mesh = World::single().mesh(1, 1).unwrap();
        let mut network = Reference::new(golden.table.clone(), &mesh, options, &read).unwrap();
        let mut logits: Vec<Vec<f32>> = serde_json::from_value(golden.numbers["last_logits"].clone()).unwrap();
        if spec.dtype != Kind::Float {
            logits = vec![serde_json::from_value(golden.numbers["merged_logits"].clone()).unwrap()];
        }
        for (mut ids, expected) in golden.input_ids().into_iter().rev().zip(logits.into_iter().rev()) {
            ids.push(1); // logits of the last position are not computed
            let found = network.forward_logits(&ids).unwrap().get(-1);
            let error = (found - Tensor::from_slice(&expected)).abs().max().double_value(&[]);
            assert!(error < of_logits, "{name}: {error}");
        }
    }
}

/// All tensors of a model folder.
fn weights(folder: &Path) -> BTreeMap<String, Tensor> {
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|end| end == "safetensors"));
    files.flat_map(|file| Tensor::read_safetensors(file).unwrap()).collect()
}

/// The sum by which a tensor is recorded.
fn weighed(values: impl Iterator<Item = f32>) -> f64 {
    values.enumerate().map(|(index, value)| f64::from(value) * (index as f64).cos()).sum()
}
