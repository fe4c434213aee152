//! Predicted step times in the output of `plan`.

use super::args::PlanArgs;
use crate::console;
use crate::cuda::{self, Placement};
use crate::error::{Error, Result};
use crate::plan::{Gpu, StepSeconds};
use crate::trainer::{ExpectedStep, PlannedRun};

/// The GPU model for the prediction: the one given, or this machine's if the plan is for this machine.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) if the driver does not respond.
pub(super) fn gpu_of_plan(args: &PlanArgs, placement: Placement) -> Result<Option<Gpu>> {
    match args.gpu {
        None if placement.on_cuda && args.gpu_memory_gib.is_none() => {
            Ok(cuda::first_name()?.and_then(|name| Gpu::named(&name)))
        }
        given => Ok(given),
    }
}

/// Refuses expected lengths that do not fit into the model's context together.
///
/// # Errors
/// [`Error::InvalidValue`].
pub(super) fn check_lengths(args: &PlanArgs, context: usize) -> Result<()> {
    let (prompt, completion) =
        (args.expected_prompt_length, args.expected_completion_length.map(|lengths| lengths.longest));
    let sum = prompt.unwrap_or(0).saturating_add(completion.unwrap_or(0));
    let given = [("--expected_prompt_length", prompt), ("--expected_completion_length", completion)];
    match given.into_iter().max_by_key(|(_, length)| *length) {
        Some((name, Some(length))) if sum > context => {
            let expected = format!("prompt and completion of at most {context} tokens together, the model's context");
            Err(Error::invalid_value(name, length, expected))
        }
        _ => Ok(()),
    }
}

/// Lengths and GPU for the prediction; `None` for several nodes or without a known prompt length.
pub(super) fn expected(args: &PlanArgs, gpu: Option<Gpu>, planned: &PlannedRun) -> Option<ExpectedStep> {
    let gpu = gpu.filter(|_| args.run.launch.nnodes == 1)?;
    planned.expected(gpu, args.expected_prompt_length, args.expected_completion_length)
}

/// Prints the prediction, or why there is none, if the GPU model is known.
///
/// # Errors
/// Returns the errors of the terminal.
pub(super) fn tell_seconds(
    args: &PlanArgs,
    gpu: Option<Gpu>,
    predicted: Option<std::result::Result<StepSeconds, &'static str>>,
) -> Result<()> {
    match (gpu, predicted) {
        (Some(gpu), Some(Ok(seconds))) => console::print(format_args!("{seconds}, predicted for {}\n", gpu.name))?,
        (Some(_), Some(Err(what))) => {
            console::say(format_args!("the duration of a step cannot be predicted with {what}"))
        }
        (Some(_), None) if args.run.launch.nnodes > 1 => {
            console::say("the duration of a step cannot be predicted for several nodes");
        }
        (Some(_), None) => {
            console::say("to predict the duration of a step give the length of prompts with --expected_prompt_length")
        }
        (None, _) => {}
    }
    Ok(())
}
