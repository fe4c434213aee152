//! A reference model that is synchronized with the policy.

use std::collections::BTreeMap;
use std::path::Path;

use tch::Tensor;

use super::Runs;

fn weights(folder: &Path) -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(folder.join("model.safetensors")).unwrap().into_iter().collect()
}

/// The reference is mixed with the policy at every second update and saved in every checkpoint. A resumed run continues with it, whether it is on
/// the host in shards or on the device.
#[test]
fn a_synchronized_reference_model_is_saved_and_resumed() {
    let runs = Runs::new();
    let keys = ["beta=0.05", "learning_rate=1e-3", "save_steps=1", "max_steps=5"];
    let syncs = ["sync_ref_model=true", "ref_model_sync_steps=2", "ref_model_mixup_alpha=0.7"];
    let common = [&keys[..], &syncs].concat();
    runs.train_to_the_end("straight", 2, &[&common[..], &["zero.stage=3", "residency.reference=host"]].concat());
    let of_step = |step: u64, part: &str| weights(&runs.path(&format!("straight/checkpoint-{step}{part}")));
    let initial = weights(Path::new("configs/arithmetic/model"));
    assert!(of_step(1, "/reference") == initial, "nothing is mixed before the second update");
    let (mixed, policy) = (of_step(2, "/reference"), of_step(2, ""));
    assert_eq!(mixed.len(), initial.len());
    for (name, mixed) in &mixed {
        let expected = &initial[name] * 0.3 + &policy[name] * 0.7;
        assert!((mixed - expected).abs().max().double_value(&[]) < 1e-6, "{name}");
        assert!(*mixed != initial[name] && *mixed != policy[name], "{name}");
    }
    assert!(of_step(3, "/reference") == mixed, "nothing is mixed after an odd update");

    let resumed = [&runs.resume("straight", 3), "zero.stage=1", "residency.reference=resident", "save_async=false"];
    runs.train_to_the_end("resumed", 2, &[&common[..], &resumed].concat());
    runs.assert_same("resumed", "straight", &[4, 5]);
    let reference = |run: &str| weights(&runs.path(&format!("{run}/checkpoint-5/reference")));
    assert!(reference("resumed") == reference("straight"));
}
