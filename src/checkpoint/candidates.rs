//! Checks of folders that a run may resume from or start in.

use std::path::Path;

use super::manifest::written;
use super::{FINAL, TrainerState, list};
use crate::console;
use crate::error::{Error, Result};
use crate::model::is_model_folder;

/// Refuses to start a new run in a folder with another run's checkpoints, because a later `latest` could not tell them apart.
pub fn refuse_earlier_run(output_dir: &Path) -> Result<()> {
    let Some(newest) = list(output_dir)?.pop() else {
        let model = output_dir.join(FINAL);
        if model.exists() {
            console::say(format_args!(
                "warning: the model of an earlier run, {}, will be replaced at the end of this run; its metrics are \
                 replaced now",
                model.display()
            ));
        }
        return Ok(());
    };
    let expected = format!(
        "a folder without checkpoints of an earlier run (found {}); resume that run with \
         resume_from_checkpoint=latest, remove its checkpoints, or choose another folder",
        newest.display()
    );
    Err(Error::invalid_value("output_dir", output_dir.display(), expected))
}

/// Refuses folders that are not checkpoints, such as a run's output folder or a model folder; the error says what to pass instead.
pub fn refuse_what_is_no_checkpoint(folder: &Path) -> Result<()> {
    if written(folder).is_some() || TrainerState::file(folder).exists() {
        return Ok(()); // a checkpoint, even if damaged
    }
    let expected = match list(folder).ok().and_then(|mut checkpoints| checkpoints.pop()) {
        Some(newest) => format!(
            "the folder of one checkpoint, not the output folder of the run; its newest checkpoint is {}",
            newest.display()
        ),
        None if is_model_folder(folder) => {
            "a checkpoint's folder; this one holds a model without optimizer state: to train from it set \
             model_name_or_path"
                .to_owned()
        }
        None => return Ok(()),
    };
    Err(Error::invalid_value("resume_from_checkpoint", folder.display(), expected))
}

/// Refuses a missing folder; the error lists the checkpoints beside it.
pub fn refuse_what_is_missing(folder: &Path) -> Result<()> {
    let beside = folder.parent().and_then(|run| list(run).ok()).filter(|_| !folder.exists()).unwrap_or_default();
    let names: Vec<_> = beside.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy()).collect();
    let expected = || format!("an existing checkpoint folder, or latest; the run has {}", names.join(", "));
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::invalid_value("resume_from_checkpoint", folder.display(), expected()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_checkpoint_lists_existing_ones() {
        let run = tempfile::tempdir().unwrap();
        let folder = |step: u64| run.path().join(format!("checkpoint-{step}"));
        refuse_what_is_missing(&folder(7)).unwrap();
        [10, 5].into_iter().for_each(|step| std::fs::create_dir(folder(step)).unwrap());
        refuse_what_is_missing(&folder(10)).unwrap();
        let told = refuse_what_is_missing(&folder(7)).unwrap_err().to_string();
        assert!(told.ends_with("the run has checkpoint-5, checkpoint-10"), "{told}");
    }
}
