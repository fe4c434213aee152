//! What a run asks of its rewards before it begins.

use std::collections::BTreeSet;

use super::RewardPool;
use crate::error::{Error, MAX_LISTED, Result};
use crate::reward::code;
use crate::types::Prompt;

impl RewardPool {
    /// Whether a reward runs programs that the model wrote.
    pub(crate) fn runs_programs(&self) -> bool {
        self.tests_column.is_some()
    }

    /// The first of `rows` whose tests a program passes that does nothing, by its place.
    pub(crate) fn row_of_empty_tests(&self, rows: &[Prompt]) -> Option<usize> {
        let column = self.tests_column.as_ref()?;
        rows.iter().position(|row| code::ask_for_nothing(&row.columns, column))
    }

    /// Which of the rewards are built in and say whether an answer is right, not only how it is given.
    pub(crate) fn judges(&self) -> &[usize] {
        &self.judges
    }

    /// A warning where no sample may ever count as solved by the rewards at `deciding`: one of them never gives 1, or, where nobody
    /// chose them, all rewards decide though none is known to be a verdict.
    pub fn doubt_of_solving(&self, deciding: &[usize], were_chosen: bool) -> Option<String> {
        let name = |index: &usize| self.names()[*index].as_str();
        let advice = "set eval_solved_by to the rewards that decide whether a sample is correct";
        if let Some(index) = deciding.iter().find(|index| self.capped.contains(index)) {
            let name = name(index);
            return Some(format!(
                "pass@k and maj@n will be 0: a sample counts as solved if {name} gives 1, which this reward never \
                 does; {advice}"
            ));
        }
        let is_guess = !were_chosen && deciding.len() > 1 && !deciding.iter().any(|it| self.judges.contains(it));
        let names = deciding.iter().map(name).collect::<Vec<_>>().join(", ");
        is_guess.then(|| {
            format!(
                "pass@k and maj@n count a sample as solved if each of {names} gives 1; if one of them cannot, {advice}"
            )
        })
    }

    /// Columns that the built-in ones among them cannot do without.
    pub fn required_columns(&self) -> Vec<String> {
        self.required_columns.clone()
    }

    /// Refuses data of which no row has a column that a Python function among the rewards cannot do without, once
    /// [`start`](Self::start) has returned. A function may leave out what some rows lack by a default for it.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the function, the column and the columns that there are.
    pub(crate) fn check_columns(&self, name: &str, rows: &[Prompt]) -> Result<()> {
        let needed = self.shared.lock().needed_columns.clone();
        let Some((index, column)) =
            needed.into_iter().find(|(_, column)| rows.iter().all(|row| !row.columns.contains_key(column)))
        else {
            return Ok(());
        };
        let columns: BTreeSet<&str> = rows.iter().flat_map(|row| row.columns.keys().map(String::as_str)).collect();
        let columns: Vec<&str> = columns.into_iter().take(MAX_LISTED).collect();
        let expected = format!(
            "a function whose arguments are columns or have defaults: no row of {name} has a column '{column}'; its \
             columns are {}",
            columns.join(", ")
        );
        Err(Error::invalid_value("reward_funcs", &self.shared.names[index], expected))
    }
}
