//! What a case sees of its surroundings: which end it is, the peer, the seed, and where results go.

use std::fmt::Display;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Outcome;
use crate::control::{Check, Control};
use crate::options::Options;
use crate::pattern;
use crate::process::{self, Spec};

/// Which end of a case this process is. Both run the same function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The near end: prints results; the requester where a case has one.
    A,
    /// The far end.
    B,
}

impl Role {
    /// 0 for A, 1 for B.
    pub fn index(self) -> usize {
        usize::from(self == Role::B)
    }

    /// The other end.
    pub fn other(self) -> Role {
        if self == Role::A { Role::B } else { Role::A }
    }
}

/// One end of a running case.
#[derive(Debug)]
pub struct Session {
    /// Which end.
    pub role: Role,
    /// Seed of this case; the same at both ends.
    pub seed: u64,
    /// The run's options.
    pub options: Options,
    control: Control,
    more: Option<More>,
}

/// Where further far ends of the same case come from.
#[derive(Debug, Clone)]
pub struct More {
    /// The far end's server.
    pub server: String,
    /// The case's assignment.
    pub spec: Spec,
}

impl Session {
    /// A session over an open control connection.
    pub fn new(role: Role, seed: u64, options: Options, control: Control) -> Self {
        Self { role, seed, options, control, more: None }
    }

    /// The near end of a session that can have further far ends.
    pub fn with_more(mut self, more: More) -> Self {
        self.more = Some(more);
        self
    }

    /// Another process of the far end, which begins the case's function like the first one; ends by itself, or is killed.
    /// Its own `session.finish` waits for [`Session::dismiss`].
    pub fn another(&self) -> Outcome<Self> {
        let more = self.more.as_ref().ok_or("only a near end has further far ends")?;
        let control = process::connect(&more.server, &more.spec, self.stall() * 2)?;
        Ok(Self::new(Role::A, self.seed, self.options.clone(), control))
    }

    /// Ends a further far end that is still there.
    pub fn dismiss(mut self) -> Outcome {
        self.finish(true)?;
        self.wait_peer_gone()
    }

    /// True at the near end.
    pub fn is_a(&self) -> bool {
        self.role == Role::A
    }

    /// A seed for a purpose.
    pub fn seed_for(&self, parts: &[u64]) -> u64 {
        pattern::derive(self.seed, parts)
    }

    /// Records a check: at the near end it is printed, at the far end sent there.
    pub fn check(&mut self, name: impl Into<String>, ok: bool, detail: impl Display) -> bool {
        let mut check = Check { name: name.into(), ok, detail: detail.to_string() };
        if self.is_a() {
            self.print_reported();
            print_check(&check);
        } else {
            check.name += " (far end)";
            // A near end that is gone cannot be told; the next exchange fails and ends the case.
            let _ = self.control.report(&check);
        }
        ok
    }

    /// Exchanges a value with the peer.
    pub fn swap<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Outcome<T> {
        self.control.tell(mine)?;
        let theirs = self.control.hear();
        self.print_reported();
        theirs
    }

    /// Sends a value to the peer.
    pub fn tell<T: Serialize>(&mut self, value: &T) -> Outcome {
        self.control.tell(value)
    }

    /// Waits for a value of the peer.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        let value = self.control.hear();
        self.print_reported();
        value
    }

    /// Waits until both ends are here.
    pub fn barrier(&mut self) -> Outcome {
        self.swap(&())
    }

    /// Waits until the peer process is dead; an error when it is still there at the case's limit.
    pub fn wait_peer_gone(&mut self) -> Outcome {
        self.control.wait_gone()
    }

    /// Without completions for this long, something hangs.
    pub fn stall(&self) -> Duration {
        Duration::from_secs(self.options.stall)
    }

    /// Ends a case that ran to its end; `expect_peer` unless the case killed it.
    pub fn finish(&mut self, expect_peer: bool) -> Outcome {
        let ended = if expect_peer { self.control.finish() } else { Ok(()) };
        self.print_reported();
        ended
    }

    /// Ends a case that failed: tells the peer, and adds what the peer has to say.
    pub fn abort(&mut self, why: &str) -> String {
        self.control.give_up(why);
        let theirs = if self.is_a() { self.control.last_words() } else { None };
        self.print_reported();
        match theirs {
            Some(theirs) if !theirs.contains(why) => format!("{why}; far end: {theirs}"),
            _ => why.to_owned(),
        }
    }

    fn print_reported(&mut self) {
        for check in self.control.reported() {
            print_check(&check);
        }
    }
}

/// A check as a line for the runner.
pub fn print_check(check: &Check) {
    match serde_json::to_string(check) {
        Ok(line) => println!("{line}"),
        Err(error) => eprintln!("metaroce-checker: {error}"),
    }
}
