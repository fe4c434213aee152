//! Decides whether a step is faster with this crate's own GEMM kernels or with cuBLASLt: measured once, and cached like algorithms.

use std::path::Path;

use super::Products;
use super::algorithms::lock;
use crate::cuda::{cache, kernels};
use crate::error::Result;

/// The contents of a cache file for each answer.
const WORDS: [(bool, &str); 2] = [(true, "own\n"), (false, "cuBLASLt\n")];

impl Products {
    /// Whether a step of `rows` is faster with the GEMMs in [`kernels`], from the cache or as measured now by `compare`, against algorithms with
    /// [`Tuning::Timed`](super::Tuning::Timed). `step` names all shapes of the step. If several ranks run the step together, all must call this at
    /// once; `agree` returns to each of them the first rank's answer.
    ///
    /// # Errors
    /// The errors of `agree` and `compare`; [`Error::Environment`](crate::Error::Environment) if the user has no cache folder.
    pub fn own_are_faster(
        &self,
        rows: usize,
        step: &str,
        agree: impl Fn(Option<bool>) -> Result<Option<bool>>,
        compare: impl FnOnce() -> Result<bool>,
    ) -> Result<bool> {
        let of_step = (rows, step.to_owned());
        if let Some(&known) = lock(&self.own_are_faster).get(&of_step) {
            return Ok(known);
        }
        let capability = self.context.compute_capability()?;
        let [few, gate_up, wide] = [kernels::product_key, kernels::gate_up_key, kernels::wide_product_key];
        let own = format!("{} {} {}", few(capability)?, gate_up(capability)?, wide(capability)?);
        let key = format!("{} {rows} {step} {own}", self.key()?);
        let found = kept_or(&cache::path("products", &format!("{rows}-rows"), &key)?, agree, compare)?;
        lock(&self.own_are_faster).insert(of_step, found);
        Ok(found)
    }
}

/// The answer in the file, or else that of `compare`, which is then written to the file. If several engines compare at once, all use the first one's
/// answer, so that they decode alike, now and when they are resumed.
fn kept_or(
    path: &Path,
    agree: impl Fn(Option<bool>) -> Result<Option<bool>>,
    compare: impl FnOnce() -> Result<bool>,
) -> Result<bool> {
    if let Some(kept) = agree(kept(path)?)? {
        return Ok(kept);
    }
    let found = compare()?;
    let (_, word) = WORDS[usize::from(!found)];
    cache::keep(path, word.as_bytes(), "own GEMM kernels have to be timed");
    Ok(agree(Some(kept(path)?.unwrap_or(found)))?.unwrap_or(found))
}

fn kept(path: &Path) -> Result<Option<bool>> {
    let said = |bytes: Vec<u8>| WORDS.into_iter().find(|(_, word)| word.as_bytes() == bytes);
    Ok(cache::read(path, said)?.map(|(own, _)| own))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::error::Error;

    #[test]
    fn timing_results_are_cached() {
        let folder = tempfile::tempdir().unwrap();
        for found in [true, false] {
            let path = folder.path().join(found.to_string());
            let failed = kept_or(&path, Ok, || Err(Error::Injected { phase: "test" }));
            assert!(failed.is_err() && !path.exists());
            assert_eq!(kept_or(&path, Ok, || Ok(found)).unwrap(), found);
            assert_eq!(kept_or(&path, Ok, || panic!("timed again")).unwrap(), found);
            std::fs::write(&path, "of an earlier form").unwrap();
            assert_eq!(kept_or(&path, Ok, || Ok(!found)).unwrap(), !found);
        }
    }

    #[test]
    fn engines_that_time_concurrently_agree_on_one_result() {
        let folder = tempfile::tempdir().unwrap();
        let (path, both_compare) = (folder.path().join("rows"), Barrier::new(2));
        let find = |own: bool| {
            let compare = || {
                both_compare.wait();
                Ok(own)
            };
            kept_or(&path, Ok, compare).unwrap()
        };
        let found = std::thread::scope(|scope| {
            [true, false].map(|own| scope.spawn(move || find(own))).map(|it| it.join().unwrap())
        });
        assert_eq!(found[0], found[1]);
        assert_eq!(kept_or(&path, Ok, || panic!("timed again")).unwrap(), found[0], "resumed");
    }

    #[test]
    fn all_ranks_of_an_engine_use_the_timing_file_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let (first, other) = (folder.path().join("first"), folder.path().join("other"));
        // The other rank has no file or a different one: it neither compares nor uses its own.
        for of_other in [None, Some(false)] {
            if let Some(found) = of_other {
                assert_eq!(kept_or(&other, Ok, || Ok(found)).unwrap(), found);
            }
            assert!(kept_or(&first, Ok, || Ok(true)).unwrap());
            assert!(kept_or(&other, |_| kept(&first), || panic!("timed alone")).unwrap());
        }
        // The first rank has no file: the other rank, which has one, compares too and takes the first rank's answer.
        let unknown = folder.path().join("unknown");
        let said = std::cell::RefCell::new(vec![Some(true), None]);
        let agree = |_| Ok(said.borrow_mut().pop().unwrap());
        let compared = std::cell::Cell::new(false);
        let found = kept_or(&unknown, agree, || {
            compared.set(true);
            Ok(false)
        });
        assert!(found.unwrap() && compared.get(), "the first rank's finding is every one's");
    }
}
