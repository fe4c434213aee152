//! Whether a step is faster with this crate's own products or with cuBLASLt's: found once, and kept as algorithms are.

use std::path::Path;

use super::Products;
use super::algorithms::lock;
use crate::cuda::{cache, kernels};
use crate::error::Result;

/// How a file says which products are faster.
const WORDS: [(bool, &str); 2] = [(true, "own\n"), (false, "cuBLASLt\n")];

impl Products {
    /// Whether a step of `rows` is faster with the products of [`kernels`], as an earlier start has found it or as `compare` finds it now,
    /// against algorithms that are [`Tuning::Timed`](super::Tuning::Timed). `step` names all shapes of the step.
    ///
    /// # Errors
    /// Those of `compare`; [`Error::Environment`](crate::Error::Environment) where the user has no cache folder.
    pub fn own_are_faster(&self, rows: usize, step: &str, compare: impl FnOnce() -> Result<bool>) -> Result<bool> {
        let capability = self.context.compute_capability()?;
        let own = format!("{} {}", kernels::product_key(capability)?, kernels::gate_up_key(capability)?);
        let key = format!("{} {rows} {step} {own}", self.key()?);
        if let Some(&known) = lock(&self.own_are_faster).get(&key) {
            return Ok(known);
        }
        let found = kept_or(&cache::path("products", &format!("{rows}-rows"), &key)?, compare)?;
        lock(&self.own_are_faster).insert(key, found);
        Ok(found)
    }
}

/// What the file says, or else what `compare` finds, which it then says.
fn kept_or(path: &Path, compare: impl FnOnce() -> Result<bool>) -> Result<bool> {
    let kept = cache::read(path)?;
    if let Some((kept, _)) = WORDS.into_iter().find(|(_, word)| kept.as_deref() == Some(word.as_bytes())) {
        return Ok(kept);
    }
    let found = compare()?;
    let (_, word) = WORDS[usize::from(!found)];
    cache::keep(path, word.as_bytes(), "which products are faster is timed");
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn what_was_found_is_kept_and_not_asked_again() {
        let folder = tempfile::tempdir().unwrap();
        for found in [true, false] {
            let path = folder.path().join(found.to_string());
            let failed = kept_or(&path, || Err(Error::Injected { phase: "test" }));
            assert!(failed.is_err() && !path.exists());
            assert_eq!(kept_or(&path, || Ok(found)).unwrap(), found);
            assert_eq!(kept_or(&path, || panic!("timed again")).unwrap(), found);
            std::fs::write(&path, "of an earlier form").unwrap();
            assert_eq!(kept_or(&path, || Ok(!found)).unwrap(), !found);
        }
    }
}
