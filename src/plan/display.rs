//! Prints a plan as a table, with its choices.

use std::fmt;

use super::{ClassBytes, MemoryPlan, Role, classes, human};

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<34} {:>11} {:>11} {:>11}", self.role.of_whom(), "train", "rollout", "host")?;
        for class in &self.classes {
            let [train, rollout, host] = [class.train_bytes, class.rollout_bytes, class.host_bytes].map(human);
            writeln!(f, "{:<34} {train:>11} {rollout:>11} {host:>11}", class.class)?;
        }
        let sum = |bytes: fn(&ClassBytes) -> usize| human(self.sum(bytes));
        let (train, rollout) = (sum(|class| class.train_bytes), sum(|class| class.rollout_bytes));
        writeln!(f, "{:<34} {train:>11} {rollout:>11} {:>11}", "sum", sum(|class| class.host_bytes))?;
        writeln!(f, "peak {} of {} available", human(self.peak_bytes()), human(self.room.available_bytes))?;
        let (blocks, size, longest) = (self.num_kv_blocks, self.kv_block_size, self.max_model_length);
        let cache = format!(
            "KV cache: {blocks} blocks of {size} tokens, {} sequences of {longest} tokens at once; a batch has {} an engine",
            blocks / longest.div_ceil(size).max(1),
            self.num_seqs
        );
        if self.role == Role::Generates {
            return write!(f, "{cache}");
        }
        if self.role == Role::Both {
            writeln!(f, "{cache}")?;
        }
        match self.largest_micro_batch {
            0 => writeln!(f, "largest micro-batch: no size leaves a tenth of the memory free")?,
            tokens => writeln!(f, "largest micro-batch: {tokens} tokens, with a tenth of the memory still free")?,
        }
        if !self.micro_batch_advice.is_empty() {
            writeln!(f, "{}", self.micro_batch_advice)?;
        }
        writeln!(f, "{}", self.formula)?;
        write!(f, "residency: optimizer state {}", self.optimizer.name())?;
        if self.classes.iter().any(|class| [classes::REFERENCE, classes::TEACHER].contains(&class.class)) {
            let whose =
                self.classes.iter().filter(|class| [classes::REFERENCE, classes::TEACHER].contains(&class.class));
            let whose: Vec<&str> = whose.map(|class| class.class).collect();
            write!(f, ", {} {}", whose.join(" and "), self.reference.name())?;
        }
        if !self.reason.is_empty() {
            write!(f, ": {}", self.reason)?;
        }
        writeln!(f)?;
        write!(f, "gradient_checkpointing: {}", self.gradient_checkpointing.name())?;
        match self.sequence_parallel_size {
            1 => Ok(()),
            size => write!(f, ", sequence_parallel_size: {size}"),
        }
    }
}
