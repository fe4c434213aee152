//! Keys that make some rows appear less often (`curriculum.*`).

use super::field::keys;
use super::range::from_to;

keys! {
    /// Rows that are solved too rarely or too often appear less often (`curriculum.*`).
    ///
    /// Rows that are nearly always or nearly never solved come in every eighth epoch:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::CurriculumConfig;
    ///
    /// let words = ["curriculum.solve_rate=[0.1, 0.9]", "curriculum.every=8"].map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let CurriculumConfig { solve_rate, every } = config.curriculum;
    /// assert_eq!((solve_rate, every), (Some([0.1, 0.9]), 8));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct CurriculumConfig {
        /// Bounds of a row's solve rate, inclusive: the fraction of the row's newest completions that the rewards of `eval_solved_by` count as
        /// solved. A row outside of the bounds appears less often until its completions are within them again. `none` treats all rows alike.
        pub solve_rate: Option<[f64; 2]> = None => from_to(0.0, 1.0),
        /// A row outside of `curriculum.solve_rate` appears in one of this many epochs.
        pub every: usize = 4 => from_to(2.0, 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, message};

    #[test]
    fn curriculum_bounds_are_fractions_from_0_to_1() {
        let given = config(&["curriculum.solve_rate=[0.1, 0.9]", "curriculum.every=2"]).curriculum;
        assert_eq!((given.solve_rate, given.every), (Some([0.1, 0.9]), 2));
        for (key, part) in [
            ("curriculum.solve_rate=[0.9, 0.1]", "low not above high"),
            ("curriculum.solve_rate=[0, 2]", "from 0 to 1"),
        ] {
            assert!(message(&[key]).contains(part), "{key}: {}", message(&[key]));
        }
    }
}
