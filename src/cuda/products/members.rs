//! Which member of the exact class a GEMM uses: the algorithm in a cache file, or the fastest of those that are compared with the reference now. Runs
//! nothing itself.

use std::path::Path;

use cudarc::cublaslt::sys;

use super::algorithms::kept;
use crate::cuda::cache;
use crate::error::{Error, Result};

/// The rows that a trial compares: all, or only the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrialRows {
    All,
    Ends,
}

/// Trials of one GEMM's algorithms.
pub(super) trait MemberTrials {
    /// M, N and K as text.
    fn name(&self) -> String;

    /// GPU and version of cuBLASLt.
    fn place(&self) -> Result<String>;

    /// All algorithms to try, the most promising first.
    fn tried(&self) -> Result<Vec<sys::cublasLtMatmulAlgo_t>>;

    /// Whether an algorithm gives the same bits as the reference.
    fn is_member(&self, algorithm: &sys::cublasLtMatmulAlgo_t, which: TrialRows) -> Result<bool>;

    /// The fastest of some algorithms; `None` if they are not timed.
    fn fastest(&self, members: &[sys::cublasLtMatmulAlgo_t]) -> Result<Option<sys::cublasLtMatmulAlgo_t>>;
}

/// The algorithm in the file of a part of a bucket, without a trial. If there is none that is `accepted`: the one in the bucket's file, if it is a
/// member for the part's rows too, or else the fastest member. The files then contain what was found, unless they had something before.
pub(super) fn kept_or_found<T: MemberTrials>(
    [of_part, of_bucket]: [&Path; 2],
    accepted: impl Fn(&sys::cublasLtMatmulAlgo_t) -> bool,
    trials: impl FnOnce() -> Result<T>,
) -> Result<sys::cublasLtMatmulAlgo_t> {
    if let Some(algorithm) = kept(of_part, &accepted)? {
        return Ok(algorithm);
    }
    let trials = trials()?;
    let of_both = match kept(of_bucket, &accepted)? {
        Some(found) if trials.is_member(&found, TrialRows::All)? => Some(found),
        _ => None,
    };
    let (algorithm, is_new) = match of_both {
        Some(found) => (found, false),
        None => (fastest_member(&trials)?, true),
    };
    let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
    let repeated = format!("the GEMM {} has to be tested against the exact reference", trials.name());
    if is_new {
        cache::keep(of_bucket, &bytes, &repeated);
    }
    cache::keep(of_part, &bytes, &repeated);
    Ok(kept(of_part, &accepted)?.unwrap_or(algorithm)) // if several engines search at once, the first one's choice is used
}

/// The fastest member of the class, or the first for large GEMMs, which are not timed.
///
/// # Errors
/// [`Error::Unequal`] if no algorithm is a member.
fn fastest_member(trials: &impl MemberTrials) -> Result<sys::cublasLtMatmulAlgo_t> {
    let tried = trials.tried()?;
    let mut members = Vec::new();
    for algorithm in &tried {
        if trials.is_member(algorithm, TrialRows::Ends)? {
            members.push(*algorithm);
        }
    }
    while let Some(&first) = members.first() {
        let fastest = trials.fastest(&members)?.unwrap_or(first);
        if trials.is_member(&fastest, TrialRows::All)? {
            return Ok(fastest);
        }
        members.retain(|member| *member != fastest);
    }
    Err(Error::Unequal {
        message: format!(
            "none of cuBLASLt's {} algorithms for the GEMM {} gives the same bits as the reference ({})",
            tried.len(),
            trials.name(),
            trials.place()?
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::PathBuf;

    use super::*;
    use crate::error::ExitCode;

    fn algorithm(number: u64) -> sys::cublasLtMatmulAlgo_t {
        sys::cublasLtMatmulAlgo_t { data: [number; 8] }
    }

    fn bytes(number: u64) -> Vec<u8> {
        algorithm(number).data.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Algorithms by number, the fastest last. `equal` have the reference's bits in all rows, `equal_at_ends` in the first and last ones.
    #[derive(Default)]
    struct NumberedAlgorithms {
        tried: Vec<u64>,
        equal: Vec<u64>,
        equal_at_ends: Vec<u64>,
        is_untimed: bool,
        compared: RefCell<Vec<(u64, TrialRows)>>,
    }

    impl MemberTrials for &NumberedAlgorithms {
        fn name(&self) -> String {
            "64x3584x18944".to_owned()
        }

        fn place(&self) -> Result<String> {
            Ok("a GPU, cuBLASLt 13".to_owned())
        }

        fn tried(&self) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
            Ok(self.tried.iter().copied().map(algorithm).collect())
        }

        fn is_member(&self, algorithm: &sys::cublasLtMatmulAlgo_t, which: TrialRows) -> Result<bool> {
            let number = algorithm.data[0];
            self.compared.borrow_mut().push((number, which));
            let at_ends = which == TrialRows::Ends && self.equal_at_ends.contains(&number);
            Ok(at_ends || self.equal.contains(&number))
        }

        fn fastest(&self, members: &[sys::cublasLtMatmulAlgo_t]) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
            Ok(members.last().copied().filter(|_| !self.is_untimed))
        }
    }

    /// Cache files of a part of a bucket and of the bucket, with these contents.
    fn files(folder: &Path, contents: [Option<Vec<u8>>; 2]) -> [PathBuf; 2] {
        let paths = ["part", "bucket"].map(|name| folder.join(name));
        for (path, content) in paths.iter().zip(contents) {
            let _ = std::fs::remove_file(path);
            if let Some(content) = content {
                std::fs::write(path, content).unwrap();
            }
        }
        paths
    }

    fn both(paths: &[PathBuf; 2]) -> [&Path; 2] {
        paths.each_ref().map(|path| &**path)
    }

    #[test]
    fn the_fastest_exact_algorithm_is_used_and_cached() {
        let folder = tempfile::tempdir().unwrap();
        // 4 is the fastest and differs; 3 differs in rows between the first and the last.
        let mut trials = NumberedAlgorithms {
            tried: vec![1, 2, 3, 4],
            equal: vec![1, 2],
            equal_at_ends: vec![3],
            ..NumberedAlgorithms::default()
        };
        for (is_untimed, expected) in [(false, 2), (true, 1)] {
            trials.is_untimed = is_untimed;
            let paths = files(folder.path(), [None, None]);
            let found = kept_or_found(both(&paths), |_| true, || Ok(&trials)).unwrap();
            assert_eq!(found, algorithm(expected));
            paths.iter().for_each(|path| assert_eq!(std::fs::read(path).unwrap(), bytes(expected)));
            let kept = kept_or_found::<&NumberedAlgorithms>(
                both(&paths),
                |_| true,
                || panic!("what is cached is not compared again"),
            );
            assert_eq!(kept.unwrap(), found);
        }
    }

    #[test]
    fn cached_algorithms_that_do_not_run_or_differ_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let trials = NumberedAlgorithms {
            tried: vec![1, 2],
            equal: vec![1, 2, 5],
            equal_at_ends: vec![7],
            ..NumberedAlgorithms::default()
        };
        // Algorithms above 8 do not run, as if another version of cuBLASLt had written them.
        let accepted = |algorithm: &sys::cublasLtMatmulAlgo_t| algorithm.data[0] <= 8;
        for (of_part, of_bucket, expected) in [
            (Some(bytes(9)), Some(bytes(5)), 5), // the bucket's is a member for these rows, too
            (Some(vec![1; 40]), Some(bytes(5)), 5), // a truncated file
            (None, Some(bytes(7)), 2),           // the bucket's differs in some of these rows
            (None, Some(bytes(6)), 2),           // .. in all
            (Some(bytes(9)), Some(bytes(9)), 2), // neither runs
            (Some(bytes(9)), Some(vec![0; 7]), 2),
        ] {
            trials.compared.borrow_mut().clear();
            let paths = files(folder.path(), [of_part, of_bucket]);
            let found = kept_or_found(both(&paths), accepted, || Ok(&trials)).unwrap();
            assert_eq!(found, algorithm(expected));
            assert!(trials.compared.borrow().contains(&(expected, TrialRows::All)), "used without a full comparison");
            assert_eq!(std::fs::read(&paths[0]).unwrap(), bytes(expected), "the next start uses it");
        }
    }

    #[test]
    fn a_gemm_without_an_exact_algorithm_ends_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let at_ends_alone =
            NumberedAlgorithms { tried: vec![1, 2, 3], equal_at_ends: vec![2, 3], ..NumberedAlgorithms::default() };
        let none = NumberedAlgorithms { tried: vec![1, 2, 3], ..NumberedAlgorithms::default() };
        for trials in [&at_ends_alone, &none] {
            let paths = files(folder.path(), [None, Some(bytes(3))]);
            let error = kept_or_found(both(&paths), |_| true, || Ok(trials)).unwrap_err();
            assert_eq!(error.exit_code(), ExitCode::Unequal);
            let said = error.to_string();
            for part in
                ["none of cuBLASLt's 3 algorithms for the GEMM 64x3584x18944", "(a GPU, cuBLASLt 13)", "`exact`"]
            {
                assert!(said.contains(part), "{said}");
            }
            assert!(!paths[0].exists(), "nothing is cached");
        }
    }
}
