//! Completions of a step: finding, filtering, and comparing with another step.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use crate::metrics::report::{completions_of_prompt, escape, number};
use crate::metrics::{COMPLETIONS, CompletionRow, read_rows};
use crate::untrusted::{self, Folder, ThreadLimits};

/// Prefix and suffix of the name of a completions file.
const PREFIX: &str = "completions_";
const SUFFIX: &str = ".parquet";
/// Largest number of completions files listed per run.
const MAX_FILES: usize = 200_000;
/// Largest size in bytes of a file that is read, and of the memory for reading it.
const MAX_BYTES: u64 = 512 << 20;
const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 16 << 20, memory_bytes: 2 << 30, cpu_s: 30 };
/// Number of files whose rows are cached.
const MAX_TABLES: usize = 4;
/// Number of prompts on a page; `COMPLETIONS_PER_PROMPT` of each prompt's completions are shown.
const PROMPTS_PER_PAGE: usize = 6;
const MAX_COMPLETIONS: usize = 64;
/// Largest number of characters shown of a prompt or completion.
const MAX_CHARACTERS: usize = 20_000;

/// Steps with a completions file, in ascending order.
pub(super) fn steps(output_dir: &Folder) -> Vec<u64> {
    let names = output_dir.folder(COMPLETIONS).names(MAX_FILES).unwrap_or_default();
    let step = |name: &str| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok();
    let mut steps: Vec<u64> = names.iter().filter_map(|name| step(name.to_str()?)).collect();
    steps.sort_unstable();
    steps
}

fn name(step: u64) -> String {
    format!("{PREFIX}{step:05}{SUFFIX}")
}

/// A cache of the rows of recently read files.
#[derive(Debug, Default)]
pub(super) struct SampleTables(Vec<(FileVersion, CompletionRows)>);

type CompletionRows = Arc<Vec<CompletionRow>>;
/// Path, size and modification time of a file.
type FileVersion = (PathBuf, u64, Option<SystemTime>);

impl SampleTables {
    /// The completions of a step.
    ///
    /// # Errors
    /// A message that says what is wrong with the file.
    pub fn read(&mut self, output_dir: &Folder, step: u64) -> Result<CompletionRows, String> {
        let (folder, name) = (output_dir.folder(COMPLETIONS), name(step));
        let path = folder.path().join(&name);
        let tell = |error: std::io::Error| format!("completions of step {step}: {error}");
        let file = folder.open(&name).map_err(tell)?;
        let metadata = file.metadata().map_err(tell)?;
        if metadata.len() > MAX_BYTES {
            return Err(format!(
                "the file with the completions of step {step} is too large to show ({} MiB)",
                metadata.len() >> 20
            ));
        }
        let version = (path.clone(), metadata.len(), metadata.modified().ok());
        if let Some((_, rows)) = self.0.iter().find(|(known, _)| *known == version) {
            return Ok(rows.clone());
        }
        let rows = untrusted::once("completions", LIMITS, move || read_rows(file, &path))
            .and_then(|rows| rows.map_err(|error| error.to_string()))
            .map_err(|error| format!("completions of step {step}: {error}; the file may still be being written"))?;
        let rows = Arc::new(rows);
        self.0.insert(0, (version, rows.clone()));
        self.0.truncate(MAX_TABLES);
        Ok(rows)
    }
}

/// Selects the completions to show.
#[derive(Debug, Default)]
pub(super) struct SampleFilter {
    /// Text that the prompt, completion or answer must contain, ignoring case.
    pub text: String,
    pub kind: SampleKind,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum SampleKind {
    #[default]
    All,
    /// Samples with an advantage above 0.
    Better,
    /// Samples with an advantage below 0.
    Worse,
    /// Samples without a known reward.
    Failed,
}

impl SampleKind {
    pub fn new(name: &str) -> Self {
        match name {
            "better" => Self::Better,
            "worse" => Self::Worse,
            "failed" => Self::Failed,
            _ => Self::All,
        }
    }
}

impl SampleFilter {
    fn keeps(&self, row: &CompletionRow) -> bool {
        let is_kind = match self.kind {
            SampleKind::All => true,
            SampleKind::Better => row.advantage > 0.0,
            SampleKind::Worse => row.advantage < 0.0,
            SampleKind::Failed => row.reward.is_none(),
        };
        let wanted = self.text.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        let texts =
            [&row.prompt, &row.completion].map(String::as_str).into_iter().chain(row.reference_answer.as_deref());
        is_kind && (wanted.is_empty() || texts.into_iter().any(has))
    }

    /// The selected completions by prompt, the best first.
    fn groups<'a>(&self, rows: &'a [CompletionRow]) -> Vec<Vec<&'a CompletionRow>> {
        let of_prompt = |group: &'a [CompletionRow]| {
            let mut kept: Vec<&CompletionRow> = group.iter().filter(|row| self.keeps(row)).collect();
            let reward = |row: &CompletionRow| row.reward.unwrap_or(f32::NEG_INFINITY);
            kept.sort_by(|a, b| reward(b).total_cmp(&reward(a)));
            kept
        };
        rows.chunk_by(|a, b| a.prompt == b.prompt).map(of_prompt).filter(|kept| !kept.is_empty()).collect()
    }
}

/// Renders a page of completions as HTML. Returns it with the number of pages.
pub(super) fn page(title: &str, rows: &[CompletionRow], filter: &SampleFilter, page: usize) -> (String, usize) {
    let groups = filter.groups(rows);
    let html: String = on_page(&groups, page).iter().map(|group| article(group)).collect();
    let head = format!("<p class=\"summary\">{}</p>", summary(title, rows, &groups));
    (format!("{head}<div class=\"groups\">{html}</div>"), groups.len().div_ceil(PROMPTS_PER_PAGE))
}

/// Renders samples of two steps side by side: for prompts that occur in both steps, or, if there are none, in order.
pub(super) fn compared(
    titles: [&str; 2],
    rows: [&[CompletionRow]; 2],
    filter: &SampleFilter,
    page: usize,
) -> (String, usize) {
    let [left, right] = rows.map(|rows| filter.groups(rows));
    let with_prompt = |prompt: &str| right.iter().find(|group| group[0].prompt == prompt);
    let mut pairs: Vec<[Option<&Vec<&CompletionRow>>; 2]> =
        left.iter().filter_map(|group| Some([Some(group), Some(with_prompt(&group[0].prompt)?)])).collect();
    let note = match pairs.is_empty() {
        true => "No prompt is in both.".to_owned(),
        false => format!("{} in both.", count(pairs.len(), "prompt")),
    };
    if pairs.is_empty() {
        pairs = (0..left.len().max(right.len())).map(|index| [left.get(index), right.get(index)]).collect();
    }
    let side = |group: Option<&Vec<&CompletionRow>>| group.map_or_else(String::new, |group| article(group));
    let both = |pair: &[_; 2]| format!("<div>{}</div><div>{}</div>", side(pair[0]), side(pair[1]));
    let html: String = on_page(&pairs, page).iter().map(both).collect();
    let [first, second] = [(titles[0], rows[0], &left), (titles[1], rows[1], &right)]
        .map(|(title, rows, groups)| format!("<p class=\"summary\">{}</p>", summary(title, rows, groups)));
    let html = format!("<div class=\"pairs\">{first}{second}{html}</div>");
    (format!("<p>{note}</p>{html}"), pairs.len().div_ceil(PROMPTS_PER_PAGE))
}

/// The prompts on page number `page`; empty after the last page.
fn on_page<T>(prompts: &[T], page: usize) -> &[T] {
    prompts.chunks(PROMPTS_PER_PAGE).nth(page).unwrap_or_default()
}

fn article(group: &[&CompletionRow]) -> String {
    let rows: Vec<CompletionRow> = group.iter().take(MAX_COMPLETIONS).map(|row| (*row).clone()).collect();
    completions_of_prompt(&rows, MAX_CHARACTERS, group.len() - rows.len())
}

fn summary(title: &str, rows: &[CompletionRow], groups: &[Vec<&CompletionRow>]) -> String {
    let num_shown: usize = groups.iter().map(Vec::len).sum();
    let rewards: Vec<f64> = rows.iter().filter_map(|row| row.reward.map(f64::from)).collect();
    let mean = number(rewards.iter().sum::<f64>() / rewards.len() as f64);
    let title = escape(title);
    let prompts = count(groups.len(), "prompt");
    format!("<b>{title}</b>: {num_shown} of {} completions, of {prompts}; mean reward {mean}", rows.len())
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn row(prompt: &str, completion: &str, reward: Option<f32>, advantage: f32) -> CompletionRow {
        CompletionRow {
            step: 3,
            prompt: prompt.to_owned(),
            completion: completion.to_owned(),
            reference_answer: None,
            rewards: vec![("<b>".to_owned(), reward)],
            reward,
            advantage,
            ..CompletionRow::default()
        }
    }

    fn rows() -> Vec<CompletionRow> {
        vec![
            row("one", "bad", Some(0.0), -1.0),
            row("one", "Good", Some(1.0), 1.0),
            row("two", "<script>alert(1)</script>", None, 0.0),
        ]
    }

    #[test]
    fn shown_completions_are_filtered_and_escaped() {
        let shown = |text: &str, kind| {
            let filter = SampleFilter { text: text.to_owned(), kind };
            let (html, pages) = page("run, step 3", &rows(), &filter, 0);
            assert!(!html.contains("<script>") && !html.contains("<b></b>"), "{html}");
            let words = ["bad", "Good", "&lt;script&gt;"].map(|word| html.contains(word));
            (words, pages)
        };
        assert_eq!(shown("", SampleKind::All), ([true, true, true], 1));
        assert_eq!(shown("gOOd", SampleKind::All), ([false, true, false], 1));
        assert_eq!(shown("two", SampleKind::All), ([false, false, true], 1), "a prompt's text");
        assert_eq!(shown("", SampleKind::Better), ([false, true, false], 1));
        assert_eq!(shown("", SampleKind::new("worse")), ([true, false, false], 1));
        assert_eq!(shown("", SampleKind::Failed), ([false, false, true], 1));
        assert_eq!(shown("nowhere", SampleKind::All), ([false, false, false], 0));
        let (html, _) = page("<i>", &rows(), &SampleFilter::default(), 0);
        assert!(html.contains("3 of 3 completions, of 2 prompts; mean reward 0.5") && html.contains("&lt;i&gt;"));
        assert!(html.find("Good") < html.find("bad"), "the best first");
        for behind in [1, usize::MAX] {
            let (html, pages) = page("run, step 3", &rows(), &SampleFilter::default(), behind);
            assert!(pages == 1 && html.ends_with("<div class=\"groups\"></div>"), "page {behind}: {html}");
        }
    }

    #[test]
    fn completions_of_two_steps_are_compared_by_prompt() {
        let other = vec![row("one", "later", Some(1.0), 0.0), row("three", "new", Some(1.0), 0.0)];
        let both = |rows: [&[CompletionRow]; 2]| compared(["a", "b"], rows, &SampleFilter::default(), 0).0;
        let html = both([&rows(), &other]);
        assert!(html.contains("1 prompt in both") && html.contains("later") && !html.contains("new"), "{html}");
        let (behind, _) = compared(["a", "b"], [&rows(), &other], &SampleFilter::default(), usize::MAX);
        assert!(behind.contains("1 prompt in both") && !behind.contains("later"), "{behind}");
        let html = both([&rows()[2..], &other]);
        assert!(html.contains("No prompt is in both") && html.contains("later") && html.contains("new"), "{html}");
    }

    #[test]
    fn incomplete_or_deleted_completion_files_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, run) = (folder.path(), Folder::new(folder.path()));
        let path = |step| folder.join(COMPLETIONS).join(name(step));
        fs::create_dir(folder.join(COMPLETIONS)).unwrap();
        crate::metrics::write_completions(&path(3), &["<b>".to_owned()], &rows()).unwrap();
        fs::write(path(12), "PAR1 torn").unwrap();
        fs::write(folder.join("completions/completions_x.parquet"), "").unwrap();
        assert_eq!(steps(&run), [3, 12]);
        let mut tables = SampleTables::default();
        let first = tables.read(&run, 3).unwrap();
        assert!(Arc::ptr_eq(&first, &tables.read(&run, 3).unwrap()) && first.len() == 3);
        assert!(tables.read(&run, 12).unwrap_err().contains("may still be being written"));
        assert!(tables.read(&run, 4).unwrap_err().contains("completions of step 4: No such file"));
        fs::remove_file(path(3)).unwrap();
        assert!(tables.read(&run, 3).is_err());
        assert!(steps(&run.folder("none")).is_empty());
        let outside = tempfile::NamedTempFile::new().unwrap();
        std::os::unix::fs::symlink(outside.path(), path(5)).unwrap();
        assert!(tables.read(&run, 5).unwrap_err().contains("is a symbolic link, which could lead out of its folder"));
    }
}
