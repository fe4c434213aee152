//! Checks of a data set when it is loaded: reference answers that cannot be parsed, and code tests that a program without output would pass.

use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::ranks::{ReduceOp, World, all_reduce_f64, first_text};
use crate::reward::RewardPool;

/// The notice about reference answers that a reward cannot parse, if there are any; each rank checks its share of the rows. Collective over the
/// world.
///
/// # Errors
/// [`Error::Environment`] where math-verify is missing; [`Error::BadFile`] for a row whose tests a program without output would pass.
pub fn unreadable_notice(name: &str, dataset: &Dataset, rewards: &RewardPool, world: &World) -> Result<Option<String>> {
    let own = &dataset.prompts()[world.place().share(dataset.len())];
    let empty = rewards.row_of_empty_tests(own).map(|place| (own[place].id + 1).to_string());
    if let Some(row) = first_text(&*world.group(), empty)? {
        let message = format!(
            "row {row}: every test expects an empty output, so a program that does nothing would pass; remove the row \
             or add a test that expects output"
        );
        return Err(Error::bad_file(name, message));
    }
    let Some(unreadable) = rewards.unreadable_answers(own.iter().map(|prompt| &*prompt.columns))? else {
        return Ok(None);
    };
    let mut count = [unreadable.len() as f64];
    all_reduce_f64(&*world.group(), &mut count, ReduceOp::Sum)?;
    let first = unreadable.first().map(|place| (own[*place].id + 1).to_string());
    let first = first_text(&*world.group(), first)?;
    Ok(first.map(|row| {
        format!(
            "warning: {name}: {} of {} reference answers could not be parsed; their samples are masked (the first is \
             in row {row})",
            count[0],
            dataset.len()
        )
    }))
}
