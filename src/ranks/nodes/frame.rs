//! Messages between ranks and the hub on the wire: a header of fixed size and a payload.

use std::io::{ErrorKind, Read};

/// The kind of a message between a rank and the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// A heartbeat.
    Beat,
    /// Goodbye: the sender ends normally, and nothing follows.
    Bye,
    /// To a rank: it cannot join, with the reason.
    Refused,
    /// To a rank: all ranks have joined.
    Welcome,
    /// A rank's failure, sent to the hub and from there to all.
    Failure,
    /// To all: a rank is permanently gone.
    Lost,
    /// To all: a rank has ended normally. Its earlier messages are forwarded before this.
    Left,
    /// From a node's leader: the node's outcome of an epoch.
    Agree,
    /// To all: the outcome of an epoch over all nodes.
    Verdict,
    /// A rank's part of a gather.
    Gather,
    /// To each rank of a gather: all parts.
    Gathered,
    /// A message from one rank to another.
    Relay,
    /// Asks which ranks are missing in a gather, in an agreement or at the start.
    Query,
    /// The answer to a query.
    Late,
}

const KINDS: [FrameKind; 14] = [
    FrameKind::Beat,
    FrameKind::Bye,
    FrameKind::Refused,
    FrameKind::Welcome,
    FrameKind::Failure,
    FrameKind::Lost,
    FrameKind::Left,
    FrameKind::Agree,
    FrameKind::Verdict,
    FrameKind::Gather,
    FrameKind::Gathered,
    FrameKind::Relay,
    FrameKind::Query,
    FrameKind::Late,
];

/// One message. Fields that a kind of message does not use are 0.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Frame {
    pub kind: FrameKind,
    /// The epoch of failures, or the generation of exchanges, that the message belongs to.
    pub epoch: u64,
    /// The division of the world that the message's group is part of.
    pub division: u32,
    /// The other rank of a relay, or the first rank of a gather's group.
    pub rank: u32,
    /// For a gather, the number of the exchange within its division; for a relay, the packed signature of the collective operation. 0 otherwise.
    pub word: u64,
    pub payload: Vec<u8>,
}

const HEADER_BYTES: usize = 1 + 8 + 4 + 4 + 8 + 8;
/// Maximum accepted payload: 1 TiB, more than any host has to send.
const MAX_PAYLOAD_BYTES: u64 = 1 << 40;
/// Maximum memory that is allocated for a payload before its bytes arrive.
const AHEAD_BYTES: u64 = 16 << 20;

impl Frame {
    pub(super) fn new(kind: FrameKind, epoch: u64, payload: Vec<u8>) -> Self {
        Self { kind, epoch, division: 0, rank: 0, word: 0, payload }
    }

    pub(super) fn empty(kind: FrameKind) -> Self {
        Self::new(kind, 0, Vec::new())
    }

    /// A frame with a JSON payload.
    pub(super) fn json(kind: FrameKind, epoch: u64, value: &impl serde::Serialize) -> Self {
        Self::new(kind, epoch, serde_json::to_vec(value).expect("numbers and text"))
    }

    pub(super) fn read_json<T: serde::de::DeserializeOwned>(&self) -> std::io::Result<T> {
        Ok(serde_json::from_slice(&self.payload)?)
    }

    /// The encoded header.
    pub(super) fn header(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1..9].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[9..13].copy_from_slice(&self.division.to_le_bytes());
        bytes[13..17].copy_from_slice(&self.rank.to_le_bytes());
        bytes[17..25].copy_from_slice(&self.word.to_le_bytes());
        bytes[25..33].copy_from_slice(&(self.payload.len() as u64).to_le_bytes());
        bytes
    }

    /// Reads one frame.
    ///
    /// # Errors
    /// The errors of the reader; [`ErrorKind::InvalidData`] for bytes that are not a frame.
    pub(super) fn read(reader: &mut impl Read) -> std::io::Result<Self> {
        let mut header = [0; HEADER_BYTES];
        reader.read_exact(&mut header)?;
        let four = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let eight = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let refuse = |what: &str| std::io::Error::new(ErrorKind::InvalidData, what.to_owned());
        let kind = *KINDS.get(usize::from(header[0])).ok_or_else(|| refuse("a message of an unknown kind"))?;
        let len = eight(25);
        if len > MAX_PAYLOAD_BYTES {
            return Err(refuse("a message whose length is above the limit"));
        }
        let mut payload = Vec::with_capacity(len.min(AHEAD_BYTES) as usize);
        if (reader.take(len).read_to_end(&mut payload)? as u64) < len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { kind, epoch: eight(1), division: four(9), rank: four(13), word: eight(17), payload })
    }
}

/// Concatenates byte strings, each after its length.
pub(super) fn pack<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

/// The byte strings that [`pack`] concatenated; `None` for bytes that it cannot have produced.
pub(super) fn unpack(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk::<8>() {
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        parts.push(part.to_vec());
        bytes = rest;
    }
    bytes.is_empty().then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_every_kind_round_trip_and_garbage_is_refused() {
        for kind in KINDS {
            let frame = Frame { kind, epoch: 1 << 40, division: 3, rank: 7, word: u64::MAX, payload: vec![5; 9] };
            let bytes = [&frame.header()[..], &frame.payload].concat();
            assert_eq!(Frame::read(&mut &bytes[..]).unwrap(), frame);
            assert!(Frame::read(&mut &bytes[..40]).is_err(), "half a frame");
        }
        assert_eq!(Frame::read(&mut &[77; 99][..]).unwrap_err().kind(), ErrorKind::InvalidData);
        let header = |len: u64| [&Frame::empty(FrameKind::Relay).header()[..25], &len.to_le_bytes()].concat();
        let claims = |len| Frame::read(&mut &header(len)[..]).unwrap_err().kind();
        assert_eq!(claims(MAX_PAYLOAD_BYTES), ErrorKind::UnexpectedEof, "and takes no memory for what does not come");
        assert_eq!(claims(MAX_PAYLOAD_BYTES + 1), ErrorKind::InvalidData);
    }

    #[test]
    fn byte_strings_of_any_length_round_trip() {
        let parts = [&b"one"[..], b"", b"three"];
        assert_eq!(unpack(&pack(parts)).unwrap(), parts);
        assert_eq!(unpack(&pack(parts)[..12]), None);
    }
}
