//! Reports metrics to other services: one Python process reads metrics.jsonl and sends every line to W&B or trackio.
//!
//! The run never waits for it during training and never writes to it, so neither its death nor a slow network affects the run. It ends whenever the
//! run ends, because the run holds the other end of its standard input.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::config::{ReportConfig, ReportService};
use crate::error::{Error, Result};
use crate::untrusted::{Folder, MAX_RUN_CONFIG_BYTES};

/// The program of the process.
const PROGRAM: &str = include_str!("sidecar.py");
/// Name of the process's log in the output folder.
const LOG: &str = "report_to.log";
/// Maximum wait at the end of a run for the process to send the remaining lines.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);
/// Prints the modules among its arguments that cannot be imported, one per line. A folder with such a name, which W&B creates, is not a module.
const FIND: &str = "
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        print(name)
";

/// Which services a run reports to, and under which name.
#[derive(Debug, Clone, Default)]
pub struct Services {
    /// Python modules: `wandb`, `trackio`.
    pub modules: Vec<&'static str>,
    /// The run's name in these services.
    pub run_name: String,
    /// The Python interpreter that has the modules.
    pub python: String,
    /// Whether TensorBoard events are written, which needs no other process.
    pub tensorboard: bool,
}

impl Services {
    /// The configured services, through the interpreter `python`.
    pub fn of(config: &ReportConfig, output_dir: &Path, python: &str) -> Self {
        let name = || output_dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let others = config.report_to.0.iter().filter(|service| **service != ReportService::TensorBoard);
        Self {
            modules: others.map(|service| service.name()).collect(),
            run_name: config.run_name.clone().unwrap_or_else(name),
            python: python.to_owned(),
            tensorboard: config.report_to.0.contains(&ReportService::TensorBoard),
        }
    }

    /// Refuses, before anything is loaded, services whose packages the interpreter lacks. For `all`, as in transformers, only the installed ones are
    /// used, and notices name the others.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] with the command that installs the packages.
    pub fn check(&self, notices: &mut Vec<String>) -> Result<()> {
        if self.modules.is_empty() {
            return Ok(());
        }
        let python = &self.python;
        let missing = match Command::new(python).args(["-c", FIND]).args(&self.modules).stdin(Stdio::null()).output() {
            Ok(output) => String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" "),
            Err(error) => {
                let expected = format!(
                    "a Python interpreter in reward.python that has {}; starting it failed: {error}",
                    self.modules.join(" ")
                );
                return Err(Error::invalid_value("report_to", self.modules.join(" "), expected));
            }
        };
        let installs = format!("{python} -m pip install {missing}");
        if missing.is_empty() {
            return Ok(());
        }
        if self.tensorboard && self.modules.len() + 1 == ReportService::ALL.len() {
            notices.push(format!(
                "report_to = all skips {missing}, which {python} does not have; install with: {installs}"
            ));
            return Ok(());
        }
        let expected = format!("services whose packages are installed in {python}; install with: {installs}");
        Err(Error::invalid_value("report_to", missing, expected))
    }
}

/// The reporting process; empty once it has ended.
#[derive(Debug)]
pub(super) struct Sidecar {
    child: Option<Child>,
    /// The run's output folder, with the process's log.
    folder: Folder,
    services: Services,
}

impl Sidecar {
    /// Starts the process for a run that has finished `last_step`. If it cannot be started, it logs a warning with the reason.
    pub fn start(output_dir: &Path, services: &Services, last_step: Option<u64>) -> Self {
        let folder = Folder::new(output_dir);
        let mut sidecar = Self { child: None, folder: folder.clone(), services: services.clone() };
        if services.modules.is_empty() {
            return sidecar;
        }
        let start = || {
            let output = folder.create(LOG)?;
            let mut command = Command::new(&services.python);
            command.args(["-c", PROGRAM]).arg(output_dir).arg(&services.run_name);
            command.arg(last_step.map_or("-1".to_owned(), |step| step.to_string())).args(&services.modules);
            command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output);
            command.process_group(0).spawn() // so that signals to the run's group do not reach it
        };
        match start() {
            Ok(child) => sidecar.child = Some(child),
            Err(error) => sidecar.warn(&error.to_string()),
        }
        sidecar
    }

    /// Logs a warning, once, if the process has ended before the run.
    pub fn look(&mut self) {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        if let Some(status) = ended {
            self.child = None;
            self.warn(&format!("its process ended with {status}"));
        }
    }

    /// Lets the process send the remaining lines, and waits for a limited time.
    pub fn finish(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        drop(child.stdin.take());
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match child.try_wait() {
                Ok(None) => thread::sleep(LOOK),
                Ok(Some(status)) if !status.success() => return self.warn(&format!("its process ended with {status}")),
                _ => return,
            }
        }
        self.warn(&format!("it has not finished after {} s and continues in the background", PATIENCE.as_secs()));
    }

    fn warn(&self, why: &str) {
        let modules = self.services.modules.join(" ");
        let text = self.folder.read(LOG, MAX_RUN_CONFIG_BYTES).unwrap_or_default();
        let (text, log) = (String::from_utf8_lossy(&text), self.folder.path().join(LOG));
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let hint = match last.contains("ModuleNotFoundError") {
            true => format!("; install with: {} -m pip install {modules}", self.services.python),
            false => String::new(),
        };
        tracing::warn!(
            "report_to {modules}: {why}: {last}{hint} (log: {}); training continues without it",
            log.display()
        );
    }
}
