//! The TCP connection between the two ends of a case: lines of JSON. Values both ways, checks and the final
//! verdict from the far end to the near one.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Outcome;

/// A process that ends, or is killed, is gone by then.
const GONE_LIMIT: Duration = Duration::from_secs(20);

/// One check's result.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// As it should be.
    pub ok: bool,
    /// The numbers.
    pub detail: String,
}

/// What travels on the connection.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
enum Message {
    /// A value the case itself exchanges.
    Value(Value),
    /// The far end checked something.
    Check(Check),
    /// This end gives up, and why.
    Error(String),
    /// This end is through.
    Done,
}

/// One end of the control connection.
#[derive(Debug)]
pub struct Control {
    reader: BufReader<TcpStream>,
    /// Checks the peer reported and nobody has taken yet.
    reported: Vec<Check>,
    done: bool,
}

impl Control {
    /// Takes over a connected stream; no answer for `limit` is an error.
    pub fn new(stream: TcpStream, limit: Duration) -> Outcome<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self { reader: BufReader::new(stream), reported: Vec::new(), done: false })
    }

    fn send(&mut self, message: &Message) -> Outcome {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes())?;
        Ok(())
    }

    fn receive(&mut self) -> Outcome<Message> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).map_err(|e| format!("no word from the peer: {e}"))? == 0 {
            return Err("the peer process is gone".into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// Sends a value.
    pub fn tell<T: Serialize>(&mut self, value: &T) -> Outcome {
        self.send(&Message::Value(serde_json::to_value(value)?))
    }

    /// Waits for the peer's next value.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        loop {
            match self.receive()? {
                Message::Value(value) => return Ok(serde_json::from_value(value)?),
                Message::Check(check) => self.reported.push(check),
                Message::Error(why) => return Err(format!("the peer gave up: {why}").into()),
                Message::Done => return Err("the peer is through already".into()),
            }
        }
    }

    /// Reports a check to the peer.
    pub fn report(&mut self, check: &Check) -> Outcome {
        self.send(&Message::Check(check.clone()))
    }

    /// Tells the peer that this end gives up. The peer may be gone already, which is no further error.
    pub fn give_up(&mut self, why: &str) {
        let _ = self.send(&Message::Error(why.to_owned()));
    }

    /// Ends the session: says so and waits for the peer to say so too. Checks still under way are kept.
    pub fn finish(&mut self) -> Outcome {
        // The peer may have closed after its own Done.
        let _ = self.send(&Message::Done);
        while !self.done {
            match self.receive()? {
                Message::Check(check) => self.reported.push(check),
                Message::Done => self.done = true,
                Message::Error(why) => return Err(format!("the peer gave up: {why}").into()),
                Message::Value(value) => return Err(format!("unexpected value {value}").into()),
            }
        }
        Ok(())
    }

    /// After a failure: what the peer still reports, and its own reason if it has one.
    pub fn last_words(&mut self) -> Option<String> {
        self.reader.get_ref().set_read_timeout(Some(Duration::from_secs(3))).ok()?;
        loop {
            match self.receive() {
                Ok(Message::Check(check)) => self.reported.push(check),
                Ok(Message::Error(why)) => return Some(why),
                Ok(Message::Value(_)) => {}
                Ok(Message::Done) | Err(_) => return None,
            }
        }
    }

    /// Waits until the peer process is gone (its end of the connection closes).
    pub fn wait_gone(&mut self) -> Outcome {
        self.reader.get_ref().set_read_timeout(Some(GONE_LIMIT))?;
        loop {
            let mut line = String::new();
            match self.reader.read_line(&mut line) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Takes the peer's checks.
    pub fn reported(&mut self) -> Vec<Check> {
        std::mem::take(&mut self.reported)
    }
}
