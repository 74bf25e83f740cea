//! Tag matching: the headers of tagged messages and the list of those an SRQ expects.

use crate::types::*;
use std::collections::VecDeque;

/// Bytes of the header of a tagged message.
pub const TAG_HEADER: u32 = 16;
/// Bytes of a rendezvous request: that header, and where the data is.
const RENDEZVOUS_HEADER: usize = 32;

/// Operations in the header (`ibv_tmh_op`).
const NO_TAG: u8 = 0;
const RENDEZVOUS: u8 = 1;
const FIN: u8 = 2;
const EAGER: u8 = 3;

/// Where the data of a rendezvous is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address.
    pub addr: u64,
    /// Key.
    pub rkey: u32,
    /// Bytes.
    pub len: u32,
}

/// What the beginning of a message says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tagged {
    /// It is not to be matched.
    No,
    /// The data follows.
    Eager(TagInfo),
    /// The data is to be fetched.
    Rendezvous(TagInfo, Remote),
}

/// Reads the header of a message. One that is none is not to be matched.
pub fn tagged(payload: &[u8]) -> Tagged {
    let word =
        |at: usize| payload.get(at..at + 4).and_then(|b| b.first_chunk()).map(|b| u32::from_be_bytes(*b));
    let long = |at: usize| Some(u64::from(word(at)?) << 32 | u64::from(word(at + 4)?));
    let info = || Some(TagInfo { tag: long(8)?, app_ctx: word(4)? });
    match (payload.first(), info()) {
        (Some(&EAGER), Some(info)) => Tagged::Eager(info),
        (Some(&RENDEZVOUS), Some(info)) if payload.len() >= RENDEZVOUS_HEADER => {
            let remote = long(16).zip(word(24)).zip(word(28));
            remote.map_or(Tagged::No, |((addr, rkey), len)| {
                Tagged::Rendezvous(info, Remote { addr, rkey, len })
            })
        }
        (Some(&NO_TAG), _) | (_, _) => Tagged::No,
    }
}

/// The message that tells the sender of a rendezvous that its data was fetched.
pub fn fin(info: TagInfo) -> [u8; TAG_HEADER as usize] {
    let mut b = [0; TAG_HEADER as usize];
    b[0] = FIN;
    b[4..8].copy_from_slice(&info.app_ctx.to_be_bytes());
    b[8..].copy_from_slice(&info.tag.to_be_bytes());
    b
}

/// An expected message.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    /// The application's cookie for its data.
    pub wr_id: u64,
    /// What the bits of the tag must be ...
    pub tag: u64,
    /// ... where this has ones.
    pub mask: u64,
    /// Where the data goes.
    pub sge: Sge,
}

/// Expected messages, oldest first.
#[derive(Debug, Default)]
pub struct TagList {
    /// With the number of each, and whether it takes part in matching yet.
    entries: VecDeque<(u32, bool, Expected)>,
    max: usize,
    next: u32,
    /// Messages that matched nothing. The application must have heard of all of them before what it adds takes part:
    /// one of them might be what it expects.
    missed: u32,
}

impl TagList {
    /// An empty list for at most `max`.
    pub fn new(max: u32) -> Self {
        TagList { max: max as usize, ..TagList::default() }
    }
    /// Adds an expected message. Gives its number, and whether it takes part in matching at once: `heard` of messages
    /// that matched nothing must be all of them.
    pub fn add(&mut self, expected: Expected, heard: u32) -> Result<(u32, bool), Refused> {
        if self.entries.len() >= self.max {
            return Err(Refused::Full);
        }
        self.next = self.next.wrapping_add(1);
        let in_sync = self.sync(heard);
        self.entries.push_back((self.next, in_sync, expected));
        Ok((self.next, in_sync))
    }
    /// Takes one out; false: it is not there (any more).
    pub fn remove(&mut self, number: u32) -> bool {
        let before = self.entries.len();
        self.entries.retain(|e| e.0 != number);
        self.entries.len() < before
    }
    /// The application has heard of so many messages that matched nothing; true: of all.
    pub fn sync(&mut self, heard: u32) -> bool {
        let in_sync = heard == self.missed;
        if in_sync {
            self.entries.iter_mut().for_each(|e| e.1 = true);
        }
        in_sync
    }
    /// Takes the oldest one that a tag matches; counts the message if there is none.
    pub fn take(&mut self, tag: u64) -> Option<Expected> {
        let at = self.entries.iter().position(|(_, active, e)| *active && tag & e.mask == e.tag & e.mask);
        match at {
            Some(at) => self.entries.remove(at).map(|e| e.2),
            None => {
                self.missed = self.missed.wrapping_add(1);
                None
            }
        }
    }
    /// A message counted as matching nothing did not get a receive either: it comes again.
    pub fn untake(&mut self) {
        self.missed = self.missed.wrapping_sub(1);
    }
}

/// What a receive of a tag matching SRQ turned out to be for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TagUse {
    /// Not a matter of tags.
    #[default]
    None,
    /// Matched; the data follows the header.
    Eager,
    /// Matched; the data is to be fetched.
    Rendezvous,
    /// Tagged, and nothing matched.
    Unexpected,
    /// Not to be matched.
    NoTag,
}

impl TagUse {
    /// Bytes at the beginning of the message that the receive does not get.
    pub fn skip(self) -> u32 {
        match self {
            TagUse::Eager => TAG_HEADER,
            TagUse::Rendezvous => u32::MAX,
            _ => 0,
        }
    }
    /// It is an expected message of the list, not a receive of the SRQ.
    pub fn matched(self) -> bool {
        matches!(self, TagUse::Eager | TagUse::Rendezvous)
    }
}

/// A message that was matched and has not completed.
#[derive(Debug, Clone, Copy)]
pub struct Match {
    /// What its header says.
    pub info: TagInfo,
    /// What it was matched to.
    pub expected: Expected,
    /// Where its data is to be fetched.
    pub remote: Option<Remote>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(wr_id: u64, tag: u64, mask: u64) -> Expected {
        Expected { wr_id, tag, mask, sge: Sge::default() }
    }

    #[test]
    fn take__oldest_first_under_masks() {
        let mut list = TagList::new(3);
        list.add(expected(1, 0x10, 0xf0), 0).unwrap();
        let (second, _) = list.add(expected(2, 0x15, 0xff), 0).unwrap();
        list.add(expected(3, 0x20, 0xff), 0).unwrap();
        assert_eq!(list.add(expected(4, 0, 0), 0), Err(Refused::Full));
        assert_eq!(list.take(0x15).map(|e| e.wr_id), Some(1));
        assert_eq!(list.take(0x15).map(|e| e.wr_id), Some(2));
        assert!(!list.remove(second));
        assert_eq!(list.take(0x21).map(|e| e.wr_id), None);
    }

    #[test]
    fn add__waits_until_all_missed_messages_were_heard_of() {
        let mut list = TagList::new(9);
        assert!(list.take(7).is_none());
        assert_eq!(list.add(expected(1, 7, 0xff), 0).map(|r| r.1), Ok(false));
        assert!(list.take(7).is_none(), "it may be the message missed before");
        assert!(!list.sync(1));
        assert!(list.sync(2));
        assert_eq!(list.take(7).map(|e| e.wr_id), Some(1));
    }

    #[test]
    fn tagged__reads_headers_and_tolerates_anything() {
        let mut bytes = [0; 40];
        (bytes[0], bytes[7], bytes[15], bytes[23], bytes[27], bytes[31]) = (RENDEZVOUS, 1, 2, 3, 4, 5);
        let info = TagInfo { tag: 2, app_ctx: 1 };
        assert_eq!(tagged(&bytes), Tagged::Rendezvous(info, Remote { addr: 3, rkey: 4, len: 5 }));
        assert_eq!(tagged(&bytes[..31]), Tagged::No);
        bytes[0] = EAGER;
        assert_eq!(tagged(&bytes[..16]), Tagged::Eager(info));
        assert_eq!(tagged(&bytes[..15]), Tagged::No);
        assert_eq!(tagged(&[]), Tagged::No);
        assert_eq!(tagged(&fin(info)), Tagged::No);
    }
}
