//! Structured output on the GPU: bit masks of the allowed tokens, uploaded before a step that needs them.

use tch::{Kind, Tensor};

use crate::cuda::{PinnedWords, TorchStream};
use crate::error::Result;
use crate::rollout::sampler::Draw;

/// Token masks of a step's draws, at fixed addresses. Allocated for the first request with a structure.
#[derive(Debug)]
pub(super) struct TokenMasks {
    words_per_mask: usize,
    most_draws: usize,
    upload: PinnedWords,
    /// First the index of each draw's mask, -1 for none; then the masks, one bit per token id.
    device: Tensor, // [S + S V / 32] i32
}

impl TokenMasks {
    /// Allocates `most_draws` masks over a vocabulary.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
    pub(super) fn new(stream: &TorchStream, like: &Tensor, most_draws: usize, vocab_size: usize) -> Result<Self> {
        let words_per_mask = vocab_size.div_ceil(32);
        let len = most_draws * (1 + words_per_mask);
        let device = Tensor::f_empty([len as i64], (Kind::Int, like.device()))?;
        Ok(Self { words_per_mask, most_draws, upload: PinnedWords::new(stream.context(), len)?, device })
    }

    /// Queues the upload of the masks of `draws`. Further rows get no mask.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]; the error of `waiting`, which is called while an earlier upload is under way.
    pub(super) fn upload(&mut self, draws: &[Draw], waiting: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let words = self.upload.words(waiting)?;
        let (places, masks) = words.split_at_mut(self.most_draws);
        places.fill(-1);
        let mut num_masks = 0;
        for (place, allowed) in places.iter_mut().zip(draws).filter_map(|(place, draw)| Some((place, draw.allowed?))) {
            *place = num_masks as i32;
            allowed.write_bits(&mut masks[num_masks * self.words_per_mask..][..self.words_per_mask]);
            num_masks += 1;
        }
        let len = self.most_draws + num_masks * self.words_per_mask;
        self.upload.upload(&self.device.narrow(0, 0, len as i64))
    }

    /// Mask indexes of the first `rows` draws. [S] i32
    pub(super) fn places(&self, rows: i64) -> Tensor {
        self.device.narrow(0, 0, rows)
    }

    /// All masks. [S, V / 32] i32
    pub(super) fn words(&self) -> Tensor {
        let (draws, words) = (self.most_draws as i64, self.words_per_mask as i64);
        self.device.narrow(0, draws, draws * words).view([draws, words])
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        self.device.numel() * self.device.kind().elt_size_in_bytes()
    }
}
