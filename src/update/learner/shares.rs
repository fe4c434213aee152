//! Which sequences of a generation batch a rank trains on, and how they are packed into micro-batches.

use super::Learner;
use crate::config::LossType;
use crate::error::Result;
use crate::grpo::Denominators;
use crate::train::{
    GatheredSequences, MicroBatch, PackOptions, Reference, Sequence, balanced_share, gather_sequences, pack,
    pad_to_agreed_count,
};
use crate::types::Place;
use crate::update::denominators::{denominators, set_bnpo_divisors};
use crate::update::options::UpdateOptions;

impl Learner {
    /// This rank's sequences in each update of a pass, and the denominators of token losses over all ranks.
    pub(super) fn share_out(
        &self,
        sequences: &[Sequence],
        options: &UpdateOptions,
    ) -> Result<(Vec<Vec<Sequence>>, Vec<Denominators>)> {
        let (num_updates, group) = (options.updates_per_generation, self.world.group());
        let GatheredSequences { sequences: all, experts } = gather_sequences(sequences, &*group)?;
        let mut slices = vec![Vec::new(); num_updates];
        for (index, sequence) in all.into_iter().enumerate() {
            slices[index % num_updates].push(sequence);
        }
        if options.loss.loss_type == LossType::Bnpo {
            slices.iter_mut().for_each(|slice| set_bnpo_divisors(slice, options.bnpo_batch_size));
        }
        let indexes: Vec<Vec<usize>> = slices.iter().map(|slice| self.share_of(slice, options)).collect();
        let in_all = |(update, of_slice): (usize, &Vec<usize>)| -> Vec<usize> {
            of_slice.iter().map(|index| num_updates * index + update).collect()
        };
        let wanted: Vec<usize> = indexes.iter().enumerate().flat_map(in_all).collect();
        let mut experts = experts.fetch(sequences, &wanted, &*group)?.into_iter();
        let with_experts = |(slice, own): (&Vec<Sequence>, Vec<usize>)| -> Vec<Sequence> {
            let sequences = own.into_iter().map(|index| slice[index].clone());
            sequences.zip(&mut experts).map(|(it, routed_experts)| Sequence { routed_experts, ..it }).collect()
        };
        let shares = slices.iter().zip(indexes).map(with_experts).collect();
        Ok((shares, denominators(&slices, options.loss.loss_type)))
    }

    /// Indices of the sequences that this rank computes, together with the ranks with which it shares micro-batches.
    pub(super) fn share_of(&self, all: &[Sequence], options: &UpdateOptions) -> Vec<usize> {
        let Place { rank: group, size: num_groups } = self.mesh.sequence_group();
        balanced_share(all, &self.policy.table().spec, self.shares_prompts(options), group, num_groups)
    }

    /// Packs this rank's micro-batches and reserves memory for them. Every rank gets the same number; surplus ones are empty. No gradients may have
    /// been added yet.
    pub(super) fn micro_batches(&mut self, sequences: &[Sequence], options: &UpdateOptions) -> Result<Vec<MicroBatch>> {
        let pack_options = PackOptions {
            max_tokens: options.max_tokens_per_micro_batch,
            share_prompts: self.shares_prompts(options),
            device: options.device,
        };
        let mut micro_batches = pack(sequences, &pack_options)?;
        pad_to_agreed_count(&mut micro_batches, &*self.mesh.world)?;
        self.policy.keep_block_for(&micro_batches, options.max_tokens_per_micro_batch)?;
        Ok(micro_batches)
    }

    /// Whether completions share the computation of their prompt.
    fn shares_prompts(&self, options: &UpdateOptions) -> bool {
        let mut tables = std::iter::once(self.policy.table()).chain(self.teacher.as_ref().map(Reference::table));
        options.share_prompts && tables.all(|table| table.spec.can_share_prompts())
    }
}
