//! A few completions from the first and the last logged step.

use std::path::Path;

use super::super::columns::CompletionRow;
use super::super::completions::read_rows;
use crate::error::Error;
use crate::untrusted::Folder;

/// Maximum number of files searched for the first and the last.
const MAX_FILES: usize = 1_000_000;

/// Number of prompts shown per step.
const MAX_PROMPTS: usize = 2;
/// Number of completions shown per prompt.
const MAX_COMPLETIONS: usize = 4;

/// Groups of one step: prompts, each with its completions.
#[derive(Debug)]
pub(super) struct Samples {
    pub step: u64,
    pub groups: Vec<Vec<CompletionRow>>,
}

/// Samples from the first and the last file in `completions/`; empty if there are no files. Unreadable files are skipped with a warning.
pub(super) fn first_and_last(folder: &Folder) -> Vec<Samples> {
    let tell = |path: &Path, error: &Error| {
        tracing::warn!("the report shows no completions of {}: {error}", path.display());
    };
    let names = folder.names(MAX_FILES).map_err(Error::io(folder.path()));
    let names = names.inspect_err(|error| tell(&folder.path(), error)).unwrap_or_default();
    let mut names: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.ends_with(".parquet"));
    names.sort();
    let (Some(first), Some(last)) = (names.first(), names.last()) else { return Vec::new() };
    let chosen = if first == last { vec![last] } else { vec![first, last] };
    let read = |name: &String| {
        let path = folder.path().join(name);
        let rows = folder.open(name).map_err(Error::io(&path)).and_then(|file| read_rows(file, &path));
        rows.inspect_err(|error| tell(&path, error)).ok()
    };
    chosen.into_iter().filter_map(read).filter_map(choose).collect()
}

/// Chooses groups whose completions differ in reward, which are the most informative; other groups only if there are none.
fn choose(rows: Vec<CompletionRow>) -> Option<Samples> {
    let step = rows.first()?.step;
    let groups: Vec<&[CompletionRow]> = rows.chunk_by(|a, b| a.prompt == b.prompt).collect();
    let is_telling = |group: &&&[CompletionRow]| group.iter().any(|row| row.advantage != 0.0);
    let telling: Vec<_> = groups.iter().filter(is_telling).collect();
    let shown = if telling.is_empty() { groups.iter().collect() } else { telling };
    let groups = shown.into_iter().take(MAX_PROMPTS).map(|group| spread(group)).collect();
    Some(Samples { step, groups })
}

/// Some completions from the best reward to the worst.
fn spread(group: &[CompletionRow]) -> Vec<CompletionRow> {
    let mut sorted = group.to_vec();
    let reward = |row: &CompletionRow| row.reward.unwrap_or(f32::NEG_INFINITY);
    sorted.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
    let last = sorted.len() - 1;
    let count = sorted.len().min(MAX_COMPLETIONS);
    (0..count).map(|index| sorted[if count > 1 { index * last / (count - 1) } else { 0 }].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(prompt: &str, reward: f32, advantage: f32) -> CompletionRow {
        CompletionRow {
            step: 3,
            prompt: prompt.to_owned(),
            reward: Some(reward),
            advantage,
            ..CompletionRow::default()
        }
    }

    #[test]
    fn the_report_shows_groups_with_unequal_rewards_first() {
        let rows = vec![row("a", 1.0, 0.0), row("a", 1.0, 0.0), row("b", 0.0, -1.0), row("b", 2.0, 1.0)];
        let samples = choose(rows).unwrap();
        let rewards: Vec<_> = samples.groups[0].iter().map(|row| row.reward).collect();
        assert_eq!((samples.step, samples.groups.len(), rewards), (3, 1, vec![Some(2.0), Some(0.0)]));
    }
}
