//! The modes and their cases. A case is one function that both ends run; a mode is one file.

pub mod api;
pub mod data;
pub mod errors;
pub mod identity;
pub mod idle;
pub mod messages;
pub mod poll;
pub mod scale;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::options::Options;
use crate::session::Session;

/// A mode of the checker.
#[derive(ValueEnum, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Every opcode, every byte compared.
    Data,
    /// Numbered messages over every service and kind of receive queue.
    Messages,
    /// Programs that poll memory.
    Poll,
    /// Restarts, resets, lost handshakes: right data or the right error.
    Identity,
    /// Failures: statuses, events, flush order, times.
    Errors,
    /// Many QPs.
    Scale,
    /// Limits, errnos, completion events.
    Api,
    /// An idle device does nothing.
    Idle,
    /// All of them, one after the other.
    All,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("?", |value| value.get_name()))
    }
}

/// One case.
pub struct Case {
    /// Its name, unique in the mode.
    pub name: String,
    /// It is through by then, or it hangs.
    pub limit: Duration,
    /// The far end dies in it by design.
    pub kills_peer: bool,
    /// What both ends do.
    pub run: Box<dyn Fn(&mut Session) -> Outcome>,
}

impl Case {
    /// A case that takes `limit_s` seconds at most.
    pub fn new(
        name: impl Into<String>,
        limit_s: u64,
        run: impl Fn(&mut Session) -> Outcome + 'static,
    ) -> Self {
        Self { name: name.into(), limit: Duration::from_secs(limit_s), kills_peer: false, run: Box::new(run) }
    }

    /// The same, but the far end does not live to its end.
    pub fn kills_peer(mut self) -> Self {
        self.kills_peer = true;
        self
    }
}

impl Mode {
    /// Every case with the mode it belongs to.
    pub fn each(self, options: &Options) -> Vec<(Mode, Case)> {
        match self {
            Mode::All => {
                [Mode::Data, Mode::Messages, Mode::Poll, Mode::Errors, Mode::Scale, Mode::Api, Mode::Idle]
                    .into_iter()
                    .flat_map(|mode| mode.each(options))
                    .collect()
            }
            mode => mode.cases(options).into_iter().map(|case| (mode, case)).collect(),
        }
    }

    /// The cases.
    pub fn cases(self, options: &Options) -> Vec<Case> {
        match self {
            Mode::Data => data::cases(options),
            Mode::Messages => messages::cases(options),
            Mode::Poll => poll::cases(options),
            Mode::Identity => identity::cases(options),
            Mode::Errors => errors::cases(options),
            Mode::Scale => scale::cases(options),
            Mode::Api => api::cases(options),
            Mode::Idle => idle::cases(options),
            Mode::All => self.each(options).into_iter().map(|(_, case)| case).collect(),
        }
    }

    /// The case called `name`.
    pub fn case(self, options: &Options, name: &str) -> Outcome<Case> {
        let found = self.cases(options).into_iter().find(|case| case.name == name);
        found.ok_or_else(|| format!("mode {self} has no case {name}").into())
    }
}
