//! Finds ranks that had no heartbeat for longer than their phase allows.

use std::time::{Duration, Instant};

use super::{Phase, Pulse};

/// The longest time without a heartbeat, by phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeartbeatLimits(Vec<Duration>);

impl HeartbeatLimits {
    /// Creates limits by calling `limit` for every phase.
    pub fn new(limit: impl Fn(Phase) -> Duration) -> Self {
        Self(Phase::ALL.iter().map(|&phase| limit(phase)).collect())
    }

    /// Limits so long that no rank reaches them.
    pub fn none() -> Self {
        Self::new(|_| Duration::from_secs(365 * 86_400))
    }

    /// The limit of one phase.
    pub fn of(&self, phase: Phase) -> Duration {
        self.0[phase as usize]
    }
}

/// A rank that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stall {
    /// The rank's number.
    pub rank: usize,
    /// Time since its last heartbeat.
    pub stood: Duration,
    /// The limit of its phase.
    pub limit: Duration,
    /// Whether the rank may be waiting for a peer.
    pub is_waiting: bool,
}

/// Tracks the heartbeats of several ranks.
#[derive(Debug)]
pub struct Watch {
    limits: HeartbeatLimits,
    /// Latest number of heartbeats of each rank, and the time at which it changed.
    seen: Vec<(u64, Instant)>,
    /// Whether ranks may wait for peers on other nodes, which are not watched here.
    has_peers_elsewhere: bool,
}

impl Watch {
    /// Starts to watch ranks that start `now`.
    pub fn new(num_ranks: usize, limits: HeartbeatLimits, now: Instant) -> Self {
        Self { limits, seen: vec![(0, now); num_ranks], has_peers_elsewhere: false }
    }

    /// Declares that ranks may wait for a rank of another node, which is watched there.
    pub fn with_peers_elsewhere(self) -> Self {
        Self { has_peers_elsewhere: true, ..self }
    }

    /// Updates the state from every rank's activity (`None` if the rank has ended) and returns the ranks that hang, the likeliest cause first: ranks
    /// over their limit that wait for no peer or, if every rank is over its limit, all of them. A rank that waits for a peer that makes progress does
    /// not hang.
    pub fn look(&mut self, pulses: &[Option<Pulse>], now: Instant) -> Vec<Stall> {
        let mut stalls = Vec::new();
        let mut num_running = 0;
        for (rank, (pulse, seen)) in pulses.iter().zip(&mut self.seen).enumerate() {
            let Some(pulse) = pulse else { continue };
            num_running += 1;
            if pulse.beats != seen.0 {
                *seen = (pulse.beats, now);
            }
            let (stood, limit) = (now - seen.1, self.limits.of(pulse.phase()));
            if stood > limit {
                stalls.push(Stall { rank, stood, limit, is_waiting: pulse.is_waiting() });
            }
        }
        if (stalls.len() < num_running || self.has_peers_elsewhere) && stalls.iter().all(|stall| stall.is_waiting) {
            return Vec::new();
        }
        stalls.sort_by_key(|stall| (stall.is_waiting, std::cmp::Reverse(stall.stood)));
        stalls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::pulse::LastCollective;

    fn pulse(beats: u64, phase: Phase, is_waiting: bool) -> Option<Pulse> {
        let (op, group) = ("barrier".to_owned(), "world".to_owned());
        let collective = Some(LastCollective { op, group, bytes: 0, number: 1, is_waiting });
        Some(Pulse { beats, step: 0, stack: vec![phase], left: Phase::Startup, collective })
    }

    #[test]
    fn a_rank_that_waits_for_an_active_peer_is_not_hanging() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limits = HeartbeatLimits::new(|phase| Duration::from_secs(if phase == Phase::Load { 100 } else { 10 }));
        let mut watch = Watch::new(3, limits, start);
        let ranks = |stall: Vec<Stall>| stall.iter().map(|stall| stall.rank).collect::<Vec<_>>();
        let (waiting, working) = (pulse(1, Phase::Wake, true), |beats| pulse(beats, Phase::Wake, false));
        assert!(watch.look(&[waiting.clone(), working(1), None], at(1)).is_empty());
        assert!(watch.look(&[waiting.clone(), working(2), None], at(12)).is_empty(), "rank 1 moves");
        assert_eq!(ranks(watch.look(&[waiting.clone(), working(2), None], at(23))), [1, 0], "it stands still");
        assert_eq!(ranks(watch.look(&[waiting.clone(), None, None], at(24))), [0], "nobody else is left");
        assert!(watch.look(&[None, pulse(2, Phase::Load, false), None], at(90)).is_empty(), "loading may take long");
        assert_eq!(ranks(watch.look(&[waiting.clone(), pulse(2, Phase::Load, false), None], at(120))), [1, 0]);
        let mut watch = watch.with_peers_elsewhere();
        assert!(watch.look(&[waiting.clone(), waiting.clone(), None], at(200)).is_empty(), "for another node");
        assert_eq!(ranks(watch.look(&[waiting, working(3), None], at(210))), [0; 0]);
    }
}
