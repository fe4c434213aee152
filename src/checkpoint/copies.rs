//! Finds the checkpoint to resume from if every node has its own folder: one that all nodes have a whole copy of.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::candidates::{refuse_earlier_run, refuse_what_is_no_checkpoint};
use super::folder;
use super::manifest::Manifest;
use super::waiting::while_others_wait;
use crate::config::OutputConfig;
use crate::console;
use crate::error::{Error, Result};
use crate::ranks::{World, all_gather_json, first_text};

/// The checkpoint that `resume_from_checkpoint` on rank 0 names, or the newest one that all nodes have, verified on each node. A newer one that some
/// node lacks was incomplete when the run ended. Collective over the world.
///
/// # Errors
/// [`Error::Checkpoint`] on all ranks if no checkpoint is on all nodes, with a list of what each node has; on the first rank of a node, also the
/// errors of [`super::open_output`].
pub fn common_checkpoint(output: &OutputConfig, world: &World) -> Result<Option<PathBuf>> {
    let group = world.group();
    let leads = world.local_rank() == 0;
    let from = first_text(&*group, output.resume_from_checkpoint.clone().filter(|_| world.rank() == 0))?;
    let Some(from) = from else {
        return if leads { refuse_earlier_run(&output.output_dir).map(|()| None) } else { Ok(None) };
    };
    if from != "latest" {
        let folder = PathBuf::from(from);
        let faults = faults(&folder, world)?;
        return if faults.is_empty() { Ok(Some(folder)) } else { Err(refuse(&folder, &faults)) };
    }
    let own = if leads { Some(names(&output.output_dir)?) } else { None };
    let all: Vec<Option<Vec<String>>> = all_gather_json(&*group, "checkpoints", &own)?;
    let (mut told, steps) = shared_steps(&all, world);
    if steps.is_empty() && all.iter().flatten().all(Vec::is_empty) {
        return Ok(None);
    }
    for name in steps {
        let folder = output.output_dir.join(&name);
        let faults = faults(&folder, world)?;
        if faults.is_empty() {
            return Ok(Some(folder));
        }
        if world.rank() == 0 {
            console::say(format_args!("warning: {}; trying the checkpoint before it", refuse(&folder, &faults)));
        }
        told.extend(faults.into_iter().map(|fault| format!("{name}: {fault}")));
    }
    Err(refuse(&output.output_dir, &told))
}

/// A description of the checkpoints on each node, and the names of those that all nodes have, newest first.
fn shared_steps(all: &[Option<Vec<String>>], world: &World) -> (Vec<String>, Vec<String>) {
    let of_nodes: Vec<(usize, &Vec<String>)> =
        all.iter().enumerate().filter_map(|(rank, names)| Some((rank, names.as_ref()?))).collect();
    let describe = |(rank, names): &(usize, &Vec<String>)| match names.is_empty() {
        true => format!("{} has none", world.node_of(*rank)),
        false => format!("{} has {}", world.node_of(*rank), names.join(", ")),
    };
    let told = of_nodes.iter().map(describe).collect();
    let sets: Vec<BTreeSet<&String>> = of_nodes.iter().map(|(_, names)| names.iter().collect()).collect();
    let is_everywhere = |name: &&String| sets.iter().all(|set| set.contains(name));
    let first = of_nodes.first().map_or(&[][..], |(_, names)| names.as_slice());
    (told, first.iter().rev().filter(is_everywhere).cloned().collect())
}

/// Names of the checkpoints in a folder, by step.
fn names(output_dir: &Path) -> Result<Vec<String>> {
    let name = |folder: PathBuf| Some(folder.file_name()?.to_string_lossy().into_owned());
    Ok(folder::list(output_dir)?.into_iter().filter_map(name).collect())
}

/// Why the copies of a checkpoint cannot be used, by node; empty if all are whole and equal. Collective over the world.
fn faults(folder: &Path, world: &World) -> Result<Vec<String>> {
    let verify = |moved: &mut dyn FnMut()| {
        refuse_what_is_no_checkpoint(folder)?;
        Manifest::verify(folder, moved)
    };
    let check = |moved: &mut dyn FnMut()| {
        Ok(Some(verify(moved).map(|manifest| manifest.digest()).map_err(|error| error.to_string())))
    };
    let own: Option<Result<String, String>> = while_others_wait(world, (world.local_rank() == 0).then_some(check))?;
    let all: Vec<Option<Result<String, String>>> = all_gather_json(&*world.group(), "copies", &own)?;
    let first = all.iter().flatten().find_map(|copy| copy.as_ref().ok().cloned());
    let fault = |(rank, copy): (usize, Option<Result<String, String>>)| match copy? {
        Ok(digest) if Some(&digest) == first.as_ref() => None,
        Ok(_) => Some(format!("{} has a different checkpoint with the same name", world.node_of(rank))),
        Err(error) => Some(format!("{}: {error}", world.node_of(rank))),
    };
    Ok(all.into_iter().enumerate().filter_map(fault).collect())
}

fn refuse(path: &Path, faults: &[String]) -> Error {
    let message = format!(
        "with save_on_each_node every node needs a complete copy of the checkpoint, but {}; copy the folder of one \
         checkpoint to all nodes",
        faults.join("; ")
    );
    Error::Checkpoint { path: path.to_owned(), message }
}
