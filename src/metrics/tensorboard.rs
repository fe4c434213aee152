//! TensorBoard event files: TFRecords of `tensorflow.Event` messages, with the four fields that are needed.

use std::io;

use super::lasting::LastingFile;
use super::step::MetricValues;
use crate::untrusted::Folder;

/// An event file, open for appending.
#[derive(Debug)]
pub(super) struct EventFile {
    file: LastingFile,
}

impl EventFile {
    /// Creates a file in `folder` and tells TensorBoard to discard values of earlier files from `first_step` on.
    pub fn create(folder: Folder, time: f64, first_step: u64) -> io::Result<Self> {
        let name = format!("events.out.tfevents.{:.0}.colo-grpo.{}", time.floor(), std::process::id());
        let mut events = Self { file: LastingFile::open(folder, &name)? };
        events.record(&event(time, 0, |message| message.bytes(3, b"brain.Event:2")))?;
        let session_start = ProtoMessage::default().tap(|message| message.varint(1, 1));
        events.record(&event(time, first_step, |message| message.bytes(7, &session_start)))?;
        Ok(events)
    }

    /// Writes the finite values of a step under `train/` and `eval/`, as Hugging Face's trainers do.
    pub fn scalars(&mut self, time: f64, step: u64, values: &MetricValues) -> io::Result<()> {
        let mut summary = ProtoMessage::default();
        for (name, value) in values.iter().filter(|(_, value)| value.is_finite()) {
            let tag = name.strip_prefix("eval_").map_or(format!("train/{name}"), |name| format!("eval/{name}"));
            let scalar = ProtoMessage::default().tap(|message| {
                message.bytes(1, tag.as_bytes());
                message.float(2, *value as f32);
            });
            summary.bytes(1, &scalar);
        }
        self.record(&event(time, step, |message| message.bytes(5, &summary.0)))
    }

    /// Writes a TFRecord: length, its checksum, data, its checksum; little-endian.
    fn record(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc32c(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc32c(data).to_le_bytes());
        self.file.append(&record)
    }
}

/// Encodes a `tensorflow.Event`: wall_time = 1, step = 2, what = file_version 3, summary 5 or session_log 7.
fn event(time: f64, step: u64, what: impl FnOnce(&mut ProtoMessage)) -> Vec<u8> {
    ProtoMessage::default().tap(|message| {
        message.double(1, time);
        message.varint(2, step);
        what(message);
    })
}

/// A protocol-buffer message under construction.
#[derive(Debug, Default)]
struct ProtoMessage(Vec<u8>);

impl ProtoMessage {
    fn tap(mut self, fill: impl FnOnce(&mut Self)) -> Vec<u8> {
        fill(&mut self);
        self.0
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.raw_varint(field << 3);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.raw_varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.raw_varint(field << 3 | 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.raw_varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }
}

/// CRC-32C (Castagnoli), rotated and offset as the TFRecord format requires.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, byte| CRC_TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let (mut crc, mut bit) = (index as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Field numbers and payloads: 8 or 4 bytes, a varint as 8 bytes, or the delimited bytes.
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn varint(data: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = data[0];
                *data = &data[1..];
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        let mut found = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let size = match key & 7 {
                0 => {
                    found.push((key >> 3, varint(&mut data).to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                2 => varint(&mut data) as usize,
                5 => 4,
                other => panic!("wire type {other}"),
            };
            let (payload, rest) = data.split_at(size);
            found.push((key >> 3, payload.to_vec()));
            data = rest;
        }
        found
    }

    fn records(mut data: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while !data.is_empty() {
            let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
            assert_eq!(data[8..12], masked_crc32c(&data[..8]).to_le_bytes());
            let record = &data[12..12 + length];
            assert_eq!(data[12 + length..16 + length], masked_crc32c(record).to_le_bytes());
            found.push(record.to_vec());
            data = &data[16 + length..];
        }
        found
    }

    #[test]
    fn event_file_checksums_are_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283); // RFC 3720, appendix B.4
    }

    #[test]
    fn tensorboard_event_files_decode_to_the_written_values() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(Folder::new(folder.path()), 12.5, 0).unwrap();
        let values = [("reward", 0.5), ("eval_reward", 0.25), ("kl", f64::NAN)];
        events.scalars(13.0, 300, &values.map(|(name, value)| (name.to_owned(), value)).into()).unwrap();
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let records = records(&std::fs::read(path).unwrap());
        assert_eq!(records.len(), 3);
        assert!(fields(&records[0]).contains(&(3, b"brain.Event:2".to_vec())));
        assert!(fields(&records[1]).contains(&(7, vec![8, 1])));

        let event = fields(&records[2]);
        assert_eq!(event[0], (1, 13.0_f64.to_le_bytes().to_vec()));
        assert_eq!(event[1], (2, 300_u64.to_le_bytes().to_vec()));
        let scalars: Vec<_> = fields(&event[2].1).iter().map(|(_, scalar)| fields(scalar)).collect();
        let expected = [("eval/reward", 0.25_f32), ("train/reward", 0.5)]
            .map(|(tag, value)| vec![(1, tag.as_bytes().to_vec()), (2, value.to_le_bytes().to_vec())]);
        assert_eq!(scalars, expected);
    }
}
