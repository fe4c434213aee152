//! Whether all nodes of a run see one output folder: ranks leave parts of a checkpoint in it that the first one looks for.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::dist::{World, first_text};
use crate::error::{Error, Result};
use crate::phase;

/// How long a shared disk may take to show what another node wrote.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// Checks by a file of rank 0's with a name that nobody had before that the first rank of every node sees the folder. Collective over
/// the world, whose ranks are to agree on what it returns; nothing on one node.
///
/// # Errors
/// [`Error::InvalidValue`] on a node that does not see it; [`Error::Io`] where rank 0 cannot write.
pub fn check_shared(output_dir: &Path, world: &World) -> Result<()> {
    if world.num_nodes() == 1 {
        return Ok(());
    }
    let (mut own, mut failed) = (None, Ok(()));
    if world.rank() == 0 {
        let made = std::fs::create_dir_all(output_dir)
            .and_then(|()| tempfile::Builder::new().prefix(".node-check-").tempfile_in(output_dir));
        match made.map_err(Error::io(output_dir)) {
            Ok(file) => own = Some(file),
            Err(error) => failed = Err(error),
        }
    }
    let name = own.as_ref().and_then(|file| Some(file.path().file_name()?.to_string_lossy().into_owned()));
    let Some(name) = first_text(&*world.group(), name)? else { return failed };
    let seen = sees(output_dir, &name, world);
    world.group().barrier()?; // it stays until all have looked
    seen
}

fn sees(output_dir: &Path, name: &str, world: &World) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while world.local_rank() == 0 && !output_dir.join(name).exists() {
        if Instant::now() > deadline {
            let node = world.rank() / world.local_size();
            let expected = format!(
                "a folder on a disk that all nodes share: node {node} does not see the file {name} that node 0 wrote there; \
                 checkpoints are written by all ranks into one folder"
            );
            return Err(Error::invalid_value("output_dir", output_dir.display(), expected));
        }
        phase::beat();
        std::thread::sleep(LOOK);
    }
    Ok(())
}
