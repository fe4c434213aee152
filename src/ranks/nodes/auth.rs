//! Mutual authentication of a rank and the hub: both prove that they have the same token, without sending it.
//!
//! The hub sends a random number. The rank answers with its own random number, its greeting, and an HMAC-SHA256 (RFC 2104) of all three under the
//! token. The hub answers with an HMAC of the two numbers. An eavesdropper learns only random numbers. Later messages are neither encrypted nor
//! signed: as for NCCL's traffic, nobody else may be able to write to the network between the nodes.

use std::io::{Read, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::error::{Error, Result};

/// Environment variable with the secret that all nodes of a run share.
pub(super) const TOKEN_VARIABLE: &str = "COLO_GRPO_TOKEN";

const MAGIC: [u8; 16] = *b"colo-grpo nodes1";
const SHORTEST_TOKEN: usize = 16;
/// Maximum length of a rank's greeting; nothing larger is read before authentication.
const MAX_GREETING_BYTES: u32 = 1 << 20;

type Digest32 = [u8; 32];

/// The shared secret of a run.
#[derive(Clone)]
pub(in crate::ranks) struct Token(Vec<u8>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Refuses to start a run on several nodes without their shared secret.
///
/// # Errors
/// [`Error::Environment`] if COLO_GRPO_TOKEN is not set or too short; the message has a command that creates one.
pub fn require_token() -> Result<()> {
    Token::from_env().map(drop)
}

/// Why authentication failed.
#[derive(Debug)]
pub(super) enum Unproven {
    /// The other side has another token, or is not this program.
    Denied,
    /// The connection broke, or the other side was too slow.
    Broken(std::io::Error),
}

impl From<std::io::Error> for Unproven {
    fn from(error: std::io::Error) -> Self {
        Unproven::Broken(error)
    }
}

impl Token {
    /// Reads the token from the environment.
    ///
    /// # Errors
    /// [`Error::Environment`] if it is not set or too short; the message has a command that creates one.
    pub(in crate::ranks) fn from_env() -> Result<Self> {
        Self::new(&std::env::var(TOKEN_VARIABLE).unwrap_or_default())
    }

    pub(super) fn new(text: &str) -> Result<Self> {
        let found = match text.len() {
            0 => "is not set".to_owned(),
            len if len < SHORTEST_TOKEN => format!("has {len} characters"),
            _ => return Ok(Self(text.as_bytes().to_vec())),
        };
        let message = format!(
            "{TOKEN_VARIABLE} {found}: the nodes of a run authenticate each other with this secret; set the same value \
             of at least {SHORTEST_TOKEN} characters on every node, for example the output of: openssl rand -hex 16"
        );
        Err(Error::Environment { message })
    }

    /// HMAC-SHA256 of the concatenated parts.
    fn mac(&self, parts: &[&[u8]]) -> Digest32 {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key may have any length");
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().into()
    }

    /// The hub's side: authenticates a rank and returns its greeting.
    pub(super) fn admit(&self, stream: &mut (impl Read + Write)) -> Result<Vec<u8>, Unproven> {
        let challenge = random()?;
        stream.write_all(&[&MAGIC[..], &challenge].concat())?;
        let (mut answer, mut proof, mut len) = ([0; 32], [0; 32], [0; 4]);
        stream.read_exact(&mut answer)?;
        stream.read_exact(&mut proof)?;
        stream.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_GREETING_BYTES {
            return Err(Unproven::Denied);
        }
        let mut greeting = vec![0; len as usize];
        stream.read_exact(&mut greeting)?;
        if !bool::from(proof.ct_eq(&self.mac(&[b"rank", &challenge, &answer, &greeting]))) {
            stream.write_all(&[0; 33])?;
            return Err(Unproven::Denied);
        }
        stream.write_all(&[&[1], &self.mac(&[b"hub", &challenge, &answer])[..]].concat())?;
        Ok(greeting)
    }

    /// A rank's side: authenticates with its `greeting`, and checks the hub's answer.
    pub(super) fn greet(&self, stream: &mut (impl Read + Write), greeting: &[u8]) -> Result<(), Unproven> {
        let (mut magic, mut challenge) = ([0; MAGIC.len()], [0; 32]);
        stream.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err(Unproven::Denied);
        }
        stream.read_exact(&mut challenge)?;
        let answer = random()?;
        let proof = self.mac(&[b"rank", &challenge, &answer, greeting]);
        let len = (greeting.len() as u32).to_le_bytes();
        stream.write_all(&[&answer[..], &proof, &len, greeting].concat())?;
        let mut verdict = [0; 33];
        stream.read_exact(&mut verdict)?;
        match verdict[0] == 1 && verdict[1..].ct_eq(&self.mac(&[b"hub", &challenge, &answer])).into() {
            true => Ok(()),
            false => Err(Unproven::Denied),
        }
    }
}

/// 32 unpredictable bytes.
pub(super) fn random() -> std::io::Result<Digest32> {
    let mut bytes = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn token(text: &str) -> Token {
        Token::new(text).unwrap()
    }

    #[test]
    fn hmac_matches_rfc_4231() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let short = Token(b"Jefe".to_vec()).mac(&[b"what do ya want ", b"for nothing?"]);
        assert_eq!(hex(&short), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let long = Token(vec![0xaa; 131]).mac(&[b"Test Using Larger Than Block-Size Key - Hash Key First"]);
        assert_eq!(hex(&long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn both_sides_of_a_connection_must_prove_the_token() {
        let meet = |hub: &str, rank: &str| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (hub, rank, address) = (token(hub), token(rank), listener.local_addr().unwrap());
            let admitted = std::thread::spawn(move || hub.admit(&mut listener.accept().unwrap().0));
            let greeted = rank.greet(&mut TcpStream::connect(address).unwrap(), b"hello");
            (admitted.join().unwrap(), greeted)
        };
        let (admitted, greeted) = meet("0123456789abcdef", "0123456789abcdef");
        assert_eq!(admitted.unwrap(), b"hello");
        greeted.unwrap();
        let (admitted, greeted) = meet("0123456789abcdef", "0123456789abcdeF");
        assert!(matches!((admitted, greeted), (Err(Unproven::Denied), Err(Unproven::Denied))));
    }

    #[test]
    fn a_missing_or_short_token_is_refused_with_a_command() {
        for (text, found) in [("", "is not set"), ("secret", "has 6 characters")] {
            let message = Token::new(text).unwrap_err().to_string();
            assert!(message.contains(found) && message.contains("openssl rand -hex 16"), "{message}");
            assert!(!message.contains("secret\n") && !format!("{:?}", Token(b"abc".to_vec())).contains("97"));
        }
    }
}
