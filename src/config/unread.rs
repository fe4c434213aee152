//! Keys that have no effect in this run, because what they belong to is not configured. They are reported but not refused: a file may be shared by
//! several runs.

use super::Config;
use super::choices::LossType;
use super::field::Field;
use super::raw::RawConfig;
use super::tools::ToolsConfig;

const OF_AGENTS: &[&str] = &["agent_timeout_s", "agent_max_requests", "agent_workers"];
const OF_TURNS: &[&str] =
    &["tool_call_parser", "max_tool_calling_iterations", "max_tool_response_length", "tool_timeout_s", "tool_workers"];

impl Config {
    /// One sentence for each key without effect, with its place in `raw`.
    pub(super) fn unread(&self, raw: &RawConfig) -> Vec<String> {
        let [set, default] = [&self.tools, &ToolsConfig::default()].map(|tools| {
            let mut entries = Vec::new();
            tools.write("", &mut entries);
            entries
        });
        let has_agent = self.tools.agent().is_some();
        let changed = set.into_iter().filter(|entry| !default.contains(entry)).filter_map(|(key, _)| {
            let is_one_of = |keys: &[&str]| keys.contains(&key.as_str());
            let of_agents = (!has_agent && is_one_of(OF_AGENTS)).then_some("the run has no agent");
            let has_turns = has_agent || self.tools.has_turns();
            let of_turns =
                (!has_turns && is_one_of(OF_TURNS)).then_some("the run has no tools, environment_factory or agent");
            of_agents.or(of_turns).map(|why| (key, why))
        });
        let names = self.rewards.names().filter(|name| !self.reward_funcs.contains(name));
        let rewards = names.map(|name| (format!("rewards.{name}"), "reward_funcs does not name it"));
        let sentence = |(key, why): (String, &str)| match raw.origin(&key) {
            Some(origin) => format!("{origin}: {key} has no effect: {why}"),
            None => format!("{key} has no effect: {why}"),
        };
        changed.chain(rewards).map(sentence).chain(self.small_cispo_weights()).collect()
    }

    /// With `loss_type = cispo`, `epsilon_high` bounds the importance weight itself, not its distance from 1 as in other losses. TRL's default of
    /// 0.2, meant for those, would make every weight at most 0.2.
    fn small_cispo_weights(&self) -> Option<String> {
        let most = self.epsilon_high.unwrap_or(self.epsilon);
        let is_small = self.loss_type == LossType::Cispo && most < 1.0;
        is_small.then(|| {
            format!(
                "loss_type = cispo clips the importance weight of each token at epsilon_high = {most}; the paper uses \
                 5, so that only large ratios are clipped"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notices(overrides: &[&str]) -> Vec<String> {
        let required = ["model_name_or_path=m", "train_file=t", "reward_funcs=[a]", "rewards.a.function=f.py:a"];
        let all: Vec<String> = required.iter().chain(overrides).map(|text| (*text).to_owned()).collect();
        let mut notices = Vec::new();
        Config::load_noting(None, &all, &mut notices).unwrap();
        notices
    }

    #[test]
    fn keys_without_effect_are_reported() {
        let alone = notices(&[
            "max_tool_calling_iterations=3",
            "agent_workers=4",
            "rewards.b.function=f.py:b",
            "tool_timeout_s=60",
        ]);
        let expected = [
            "command line: max_tool_calling_iterations has no effect: the run has no tools, environment_factory or \
             agent",
            "command line: agent_workers has no effect: the run has no agent",
            "command line: rewards.b has no effect: reward_funcs does not name it",
        ];
        assert_eq!(alone, expected);
        let with_tools = notices(&["max_tool_calling_iterations=3", "tools=t.py:add", "agent_workers=4"]);
        assert_eq!(with_tools, expected[1..2]);
        assert_eq!(notices(&["agent=a.py:play", "agent_workers=4", "tool_call_parser=hermes"]), [""; 0]);
    }

    #[test]
    fn a_low_cispo_clip_is_reported() {
        for (keys, is_told) in [
            (&["loss_type=cispo"][..], true),
            (&["loss_type=cispo", "epsilon_high=0.28"], true),
            (&["loss_type=cispo", "epsilon_high=5"], false),
            (&["loss_type=dapo"], false),
        ] {
            let notices = notices(keys);
            assert_eq!(
                notices.iter().any(|notice| notice.contains("epsilon_high = ")),
                is_told,
                "{keys:?}: {notices:?}"
            );
        }
    }
}
