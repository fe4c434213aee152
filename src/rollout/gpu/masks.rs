//! The tokens that structures allow, as bits on the device: uploaded before a step whose draws have some.

use tch::{Kind, Tensor};

use crate::cuda::{PinnedWords, TorchStream};
use crate::error::Result;
use crate::rollout::sampler::Draw;

/// Masks of a step's draws, at addresses that stay. Made for the first request with a structure.
#[derive(Debug)]
pub(super) struct TokenMasks {
    words_per_mask: usize,
    most_draws: usize,
    upload: PinnedWords,
    /// The place of each draw's mask, -1 where it has none; then the masks, one bit an id.
    device: Tensor, // [S + S V / 32] i32
}

impl TokenMasks {
    /// Room for `most_draws` masks over a vocabulary.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
    pub(super) fn new(stream: &TorchStream, like: &Tensor, most_draws: usize, vocab_size: usize) -> Result<Self> {
        let words_per_mask = vocab_size.div_ceil(32);
        let len = most_draws * (1 + words_per_mask);
        let device = Tensor::f_empty([len as i64], (Kind::Int, like.device()))?;
        Ok(Self { words_per_mask, most_draws, upload: PinnedWords::new(stream.context(), len)?, device })
    }

    /// Queues the copy of the masks of `draws`. Rows behind them have none.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]; what `waiting` returns while an earlier copy is under way.
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

    /// The places of the first `rows` draws' masks. [S] i32
    pub(super) fn places(&self, rows: i64) -> Tensor {
        self.device.narrow(0, 0, rows)
    }

    /// The masks. [S, V / 32] i32
    pub(super) fn words(&self) -> Tensor {
        let (draws, words) = (self.most_draws as i64, self.words_per_mask as i64);
        self.device.narrow(0, draws, draws * words).view([draws, words])
    }

    /// Bytes on the device.
    pub(super) fn bytes(&self) -> usize {
        self.device.numel() * self.device.kind().elt_size_in_bytes()
    }
}
