//! A group whose completions are conversations of its episodes.

use std::sync::Arc;

use crate::data::Tokenizer;
use crate::endpoint::episodes::PlayedConversation;
use crate::error::{Error, Result};
use crate::types::{EnvironmentEnd, FinishReason, Prompt, RolloutGroup, Trajectory};

/// A group whose episodes are being played.
#[derive(Debug)]
pub(super) struct PlayedGroup {
    /// The group. It gets its completions once all of its episodes have ended.
    pub group: RolloutGroup,
    episodes: Vec<Play>, // by sample, while one is played
    num_generations: usize,
    /// Whether all conversations of an episode are kept, or only the first.
    keeps_branches: bool,
}

/// State of an episode.
#[derive(Debug)]
enum Play {
    /// Running: the number of the agent process's request, and the episode's name in its URL.
    Playing(u64, String),
    Ended(Vec<PlayedConversation>),
}

impl PlayedGroup {
    /// A group whose episodes have begun. Each is given by a request number and a name.
    pub fn new(group: RolloutGroup, playing: Vec<(u64, String)>, keeps_branches: bool) -> Self {
        let num_generations = playing.len();
        let episodes = playing.into_iter().map(|(id, name)| Play::Playing(id, name)).collect();
        Self { group, episodes, num_generations, keeps_branches }
    }

    /// The running episodes: request number and name of each.
    pub fn playing(&self) -> impl Iterator<Item = (u64, &str)> {
        self.episodes.iter().filter_map(|play| match play {
            Play::Playing(id, name) => Some((*id, name.as_str())),
            Play::Ended(_) => None,
        })
    }

    /// The name of the episode of a sample; `None` once it has ended.
    pub fn name(&self, sample: usize) -> Option<&str> {
        match self.episodes.get(sample)? {
            Play::Playing(_, name) => Some(name),
            Play::Ended(_) => None,
        }
    }

    /// The sample to which a request's sample index belongs. The indexes of an episode's requests differ by multiples of `num_generations`.
    pub fn sample_of(&self, first_sample: usize) -> usize {
        first_sample % self.num_generations
    }

    /// Whether all episodes have ended.
    pub fn is_complete(&self) -> bool {
        self.playing().next().is_none()
    }

    /// Trajectories of the episodes that have ended, while others are running.
    pub fn ended(&self) -> impl Iterator<Item = &Trajectory> {
        let ended = self.episodes.iter().filter_map(|play| match play {
            Play::Ended(played) => Some(played),
            Play::Playing(..) => None,
        });
        ended.flatten().map(|conversation| &conversation.trajectory)
    }

    /// Records the end of an episode; after the last one, sets the group's completions. Returns the reason if the episode failed.
    pub fn take(
        &mut self,
        sample: usize,
        end: Result<EnvironmentEnd, String>,
        mut played: Vec<PlayedConversation>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<String>> {
        let (environment, failure) = match end {
            Ok(_) if played.is_empty() => {
                (None, Some("agent: the episode ended without a request to the model".to_owned()))
            }
            Ok(end) => (Some(Arc::new(end)), None),
            Err(failure) => (None, Some(failure)),
        };
        if !self.keeps_branches {
            played.truncate(1);
        }
        if played.is_empty() {
            let trajectory = Trajectory { finish_reason: Some(FinishReason::Eos), ..Trajectory::default() };
            played.push(PlayedConversation { prompt: Vec::new(), trajectory });
        }
        for PlayedConversation { trajectory, .. } in &mut played {
            trajectory.text = tokenizer.decode(&trajectory.token_ids)?;
            (trajectory.environment, trajectory.failure) = (environment.clone(), failure.clone());
        }
        self.episodes[sample] = Play::Ended(played);
        if self.is_complete() {
            let conversations = std::mem::take(&mut self.episodes).into_iter().flat_map(|play| match play {
                Play::Ended(played) => played,
                Play::Playing(..) => Vec::new(),
            });
            assemble(&mut self.group, conversations.collect(), tokenizer)?;
        }
        Ok(failure)
    }
}

/// Sets a group's completions to the conversations, in the order of episodes. The group's prompt becomes their longest common prefix; the rest of
/// a conversation's own prompt becomes context before its first turn. Conversations without sampled tokens do not affect the prefix.
fn assemble(group: &mut RolloutGroup, played: Vec<PlayedConversation>, tokenizer: &Tokenizer) -> Result<()> {
    let begins = |conversation: &&PlayedConversation| !conversation.trajectory.token_ids.is_empty();
    let prompts = || played.iter().filter(begins).map(|conversation| &conversation.prompt[..]);
    if let Some(first) = prompts().next() {
        let common = |prompt: &[u32]| first.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let token_ids = first[..prompts().map(common).min().unwrap_or(0)].to_vec();
        if token_ids.is_empty() {
            let message = "agent: the conversations of a row begin with different tokens, but they must share at least \
                           the first token of their prompt";
            return Err(Error::Environment { message: message.to_owned() });
        }
        if token_ids != group.prompt.token_ids {
            let text = tokenizer.decode_all(&token_ids)?;
            group.prompt = Prompt { text, token_ids, ..group.prompt.clone() };
        }
    }
    let num_common = group.prompt.token_ids.len();
    let whole =
        |played: PlayedConversation| whole(played.prompt.get(num_common..).unwrap_or_default(), played.trajectory);
    group.completions = played.into_iter().map(whole).collect();
    Ok(())
}

/// A trajectory with additional context before its first turn.
fn whole(context: &[u32], trajectory: Trajectory) -> Trajectory {
    if context.is_empty() {
        return trajectory;
    }
    let version = trajectory.weight_versions.first().copied().unwrap_or_default();
    let mut before = Trajectory::default();
    before.push_context(context, version);
    Trajectory {
        token_ids: [&before.token_ids[..], &trajectory.token_ids].concat(),
        loss_mask: [&before.loss_mask[..], &trajectory.loss_mask].concat(),
        rollout_logprobs: [&before.rollout_logprobs[..], &trajectory.rollout_logprobs].concat(),
        weight_versions: [&before.weight_versions[..], &trajectory.weight_versions].concat(),
        ..trajectory
    }
}
