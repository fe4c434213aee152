//! Sends a response as a stream of server-sent events.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Bytes;
use futures_core::Stream;

use super::answer::{Answer, event, gone};
use super::client::{RequestHandle, RequestUpdate};
use super::refusal::Refusal;

/// Largest number of updates in one chunk.
const MAX_UPDATES: usize = 256;

/// A response that is sent while it is generated. Dropping it cancels the request.
#[derive(Debug)]
pub(super) struct Events {
    answer: Answer,
    ticket: RequestHandle,
    /// The first update, which was received before the HTTP status was sent.
    first: Option<RequestUpdate>,
    is_over: bool,
}

impl Events {
    /// Waits for the first update, so that a rejected request gets an HTTP error status.
    pub async fn open(answer: Answer, mut ticket: RequestHandle) -> Result<Self, Refusal> {
        match ticket.next().await {
            Some(RequestUpdate::Refused(refusal)) => Err(refusal),
            Some(first) => Ok(Self { answer, ticket, first: Some(first), is_over: false }),
            None => Err(gone()),
        }
    }

    fn take_ready(&mut self, first: RequestUpdate) -> Result<(), Refusal> {
        self.answer.take(first)?;
        for _ in 0..MAX_UPDATES {
            match self.ticket.ready() {
                Some(update) => self.answer.take(update)?,
                None => break,
            }
        }
        Ok(())
    }
}

impl Stream for Events {
    type Item = std::result::Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.is_over {
                return Poll::Ready(None);
            }
            let update = match self.first.take() {
                Some(first) => Some(first),
                None => ready!(self.ticket.poll(cx)),
            };
            let taken = update.ok_or_else(gone).and_then(|update| self.take_ready(update));
            let chunks = match taken {
                Ok(()) => self.answer.chunks(),
                Err(refusal) => {
                    self.is_over = true;
                    event(&refusal.json())
                }
            };
            self.is_over |= self.answer.is_over();
            if !chunks.is_empty() {
                return Poll::Ready(Some(Ok(Bytes::from(chunks))));
            }
        }
    }
}
