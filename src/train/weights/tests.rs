use super::*;
use crate::model::{ModelSpec, init_unit};
use crate::ranks::testing;

#[test]
fn each_rank_receives_only_the_weights_it_requested() {
    let spec = Arc::new(ModelSpec::preset("micro").unwrap());
    let source = |layout: &UnitLayout| init_unit(layout, 3, Kind::Float);
    for stage in [2, 3] {
        testing::worlds(3, |world| {
            let mesh = world.mesh(1, 3).unwrap();
            let table = Arc::new(ParamTable::new(spec.clone(), 3));
            let sharding = Sharding::new(&table, &mesh, stage).unwrap();
            let place = (Kind::Float, Device::Cpu);
            let weights = Weights::load("a test", table.clone(), sharding, place, &source, |_, _| Ok(())).unwrap();
            for wanted in [
                [Some(Unit::Embedding), Some(Unit::Block(1)), None],
                [None, Some(Unit::Head), Some(Unit::Block(0))],
                [Some(Unit::Head); 3],
                [None; 3],
            ] {
                let got = weights.gather_wanted(&wanted).unwrap();
                let expected = wanted[world.rank()].map(|unit| source(table.unit(unit)).unwrap());
                assert_eq!(got, expected, "{wanted:?}");
            }
        });
    }
}

/// Compares with numbers of TRL 1.16's `SyncRefModelCallback` (`scripts/golden_trl.py`).
#[test]
fn reference_weights_are_mixed_as_in_trl() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/golden/reference_sync.json")).unwrap();
    for (name, kind, tolerance) in [("float32", Kind::Float, 0.0), ("bfloat16", Kind::BFloat16, 0.02)] {
        let case = &golden[name];
        let rows = |key: &str| -> Vec<Tensor> {
            let row = |row: &serde_json::Value| {
                let values = row.as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
                Tensor::from_slice(&values.collect::<Vec<_>>()).to_kind(kind)
            };
            case[key].as_array().unwrap().iter().map(row).collect()
        };
        let reference = rows("initial").remove(0);
        let mixed = rows("mixed");
        assert!(mixed.len() >= 3);
        for (policy, expected) in rows("policies").iter().zip(mixed) {
            mix(&reference, policy, golden["alpha"].as_f64().unwrap()).unwrap();
            let difference = (reference.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs();
            assert!(difference.max().double_value(&[]) <= tolerance, "{name}: {difference}");
        }
    }
}
