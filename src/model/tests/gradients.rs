//! Compares gradients written into uninitialized memory with gradients added to zeros.

use super::*;

/// A batch, and the gradients of its log-probabilities and entropies.
type Given = (Batch, [Tensor; 2]);

/// The gradients of two micro-batches. The first is added to zeros, or overwrites memory filled with NaN; the second is added.
fn of_two(table: &ParamTable, flats: &[Tensor], batches: &[Given; 2], onto: Onto) -> Vec<Tensor> {
    let wide = accumulation_kind(flats[0].kind());
    let fill = if onto == Onto::Sum { 0.0 } else { f64::NAN };
    let memory = flats.iter().map(|flat| Tensor::full(flat.size(), fill, (wide, Device::Cpu))).collect();
    let add = |gradients, ((batch, [a, b]), onto): (&Given, Onto)| {
        run_onto(table, flats, batch, (a, b), GradientCheckpointing::None, (gradients, onto)).2
    };
    batches.iter().zip([onto, Onto::Sum]).fold(memory, add)
}

#[test]
fn previous_contents_of_gradient_memory_change_no_bit() {
    for (name, spec) in families().into_iter().chain(with_experts()).chain(others()) {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            let table = ParamTable::new(Arc::new(spec.clone()), 2);
            let flats: Vec<Tensor> = random_flats(&table).iter().map(|flat| flat.to_kind(kind)).collect();
            let batches = [&[150, 21, 2, 30][..], &[7, 90]].map(|lens| {
                let batch = Batch::new(&random_sequences(&table.spec, lens));
                let of_scores = [(); 2].map(|()| rand(&batch.rows.size()));
                (batch, of_scores)
            });
            let [added, written] = [Onto::Sum, Onto::Nothing].map(|onto| of_two(&table, &flats, &batches, onto));
            for (layout, (added, written)) in table.units.iter().zip(added.iter().zip(&written)) {
                assert!(added.abs().max().double_value(&[]) > 0.0, "{name} {kind:?}: {}", layout.unit);
                assert!(added.equal(written), "{name} {kind:?}: {}", layout.unit);
            }
        }
    }
}
