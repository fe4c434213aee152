//! Checks that nodes see the output folder as the run requires: all nodes one shared folder, where ranks leave parts of a checkpoint for rank 0, or
//! with `save_on_each_node` each node its own folder.

use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use super::writers::writes_folder;
use crate::error::{Error, Result};
use crate::phase;
use crate::ranks::{World, all_gather_json};

/// Maximum time until a shared disk shows what another node wrote.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// Checks, by writing files with unique names, which nodes see each other's folders. Collective over the world; ranks must agree on the returned
/// result. Does nothing on one node.
///
/// # Errors
/// [`Error::InvalidValue`] on a node that does not see rank 0's file or, with `on_each_node`, sees another node's; [`Error::Io`] if a file cannot be
/// written.
pub fn check_shared(output_dir: &Path, world: &World, on_each_node: bool) -> Result<()> {
    if world.num_nodes() == 1 {
        return Ok(());
    }
    let own = if writes_folder(world, on_each_node) { leave_mark(output_dir).map(Some) } else { Ok(None) };
    let name = own.as_ref().ok().and_then(Option::as_ref).and_then(|file| file.path().file_name());
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let marks: Vec<Option<String>> = all_gather_json(&*world.group(), "check_shared", &name)?;
    let num_expected = if on_each_node { world.num_nodes() } else { 1 };
    let marks: Vec<(usize, String)> =
        marks.into_iter().enumerate().filter_map(|(rank, name)| Some((rank, name?))).collect();
    if marks.len() < num_expected {
        return own.map(drop); // a rank that could not write returns its error
    }
    let seen = match on_each_node {
        _ if world.local_rank() > 0 => Ok(()),
        true => is_own(output_dir, &marks, world),
        false => sees(output_dir, &marks[0], world),
    };
    world.group().barrier()?; // keep files until all have looked
    seen
}

fn leave_mark(output_dir: &Path) -> Result<NamedTempFile> {
    std::fs::create_dir_all(output_dir)
        .and_then(|()| tempfile::Builder::new().prefix(".node-check-").tempfile_in(output_dir))
        .map_err(Error::io(output_dir))
}

fn sees(output_dir: &Path, (rank, name): &(usize, String), world: &World) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !output_dir.join(name).exists() {
        if Instant::now() > deadline {
            let [here, there] = [world.rank(), *rank].map(|rank| world.node_of(rank));
            let expected = format!(
                "a folder on a disk that all nodes share, but {here} does not see the file {name} that {there} wrote \
                 to it; use a shared disk, or set save_on_each_node = true so that each node writes its own checkpoints"
            );
            return Err(Error::invalid_value("output_dir", output_dir.display(), expected));
        }
        phase::beat();
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn is_own(output_dir: &Path, marks: &[(usize, String)], world: &World) -> Result<()> {
    let others = marks.iter().filter(|(rank, _)| *rank != world.rank());
    let Some((rank, name)) = others.into_iter().find(|(_, name)| output_dir.join(name).exists()) else { return Ok(()) };
    let [here, there] = [world.rank(), *rank].map(|rank| world.node_of(rank));
    let expected = format!(
        "false, as the nodes share output_dir: {here} sees the file {name} that {there} wrote to {}",
        output_dir.display()
    );
    Err(Error::invalid_value("save_on_each_node", true, expected))
}
