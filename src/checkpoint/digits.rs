//! Hashes as text.

/// A hash as hexadecimal digits.
pub fn hexadecimal(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
