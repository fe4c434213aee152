//! Checks of rewards and their rows before a run begins.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::RewardPool;
use crate::error::{Error, MAX_LISTED, Result};
use crate::reward::code;
use crate::types::Prompt;

impl RewardPool {
    /// Whether a reward runs programs written by the model.
    pub(crate) fn runs_programs(&self) -> bool {
        self.tests_column.is_some()
    }

    /// Index of the first of `rows` whose tests are passed by a program that does nothing.
    pub(crate) fn row_of_empty_tests(&self, rows: &[Prompt]) -> Option<usize> {
        let column = self.tests_column.as_ref()?;
        rows.iter().position(|row| code::ask_for_nothing(&row.columns, column))
    }

    /// Indexes of the built-in rewards that say whether an answer is right, and not only if its form is.
    pub(crate) fn judges(&self) -> &[usize] {
        &self.judges
    }

    /// A warning if no sample may ever count as solved by the rewards with the indexes `deciding`: one of them never returns 1, or, if the user did
    /// not choose them (`were_chosen` is false), several rewards decide and none is known to say whether an answer is right.
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

    /// The columns that built-in rewards require.
    pub fn required_columns(&self) -> Vec<String> {
        self.required_columns.clone()
    }

    /// Checks the columns of rows against the parameters of Python reward functions: at least one row must have each required column. Call after
    /// [`start`](Self::start) and before the rows' groups are submitted: a row then has null in each column that only other checked rows have.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the function, the column and the columns that exist.
    pub(crate) fn check_columns(&self, name: &str, rows: &[Prompt]) -> Result<()> {
        let columns: BTreeSet<&str> = rows.iter().flat_map(|row| row.columns.keys().map(String::as_str)).collect();
        let mut state = self.shared.lock();
        Arc::make_mut(&mut state.layout).columns.extend(columns.iter().map(|name| (*name).to_owned()));
        let needed = state.needed_columns.clone();
        drop(state);
        let Some((index, column)) = needed.into_iter().find(|(_, column)| !columns.contains(&**column)) else {
            return Ok(());
        };
        let columns: Vec<&str> = columns.into_iter().take(MAX_LISTED).collect();
        let expected = format!(
            "a function whose arguments are columns or have defaults: no row of {name} has a column '{column}'; its \
             columns are {}",
            columns.join(", ")
        );
        Err(Error::invalid_value("reward_funcs", &self.shared.names[index], expected))
    }
}
