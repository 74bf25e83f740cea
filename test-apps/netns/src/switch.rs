//! What lies between the hosts where links have a rate: a bridge per plane, each port a queue that drains at the rate.

use std::fs::File;

use crate::command::{CannotHere, Failure, run_in};
use crate::fabric::interface;
use crate::system;

/// Bytes a port may send at once after a pause: two jumbo frames; tbf needs at least one.
const BURST_BYTES: u32 = 20_000;

/// Rate of the links, both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Megabits per second of each port; a machine of two cores carries some 1.5 Gb/s of all ports together, cut into
    /// packets.
    pub mbit: u32,
    /// Bytes that a port's queue holds before it drops.
    pub queue_bytes: u32,
}

impl Rate {
    /// A rate with a queue of 10 ms.
    pub fn mbit(mbit: u32) -> Rate {
        Rate { mbit, queue_bytes: mbit * 1_000_000 / 8 / 100 }
    }
}

/// The switches of all planes, in a namespace of their own.
#[derive(Debug)]
pub struct Switch {
    namespace: File,
}

/// Name of the port of a plane's switch that leads to a host.
fn port(plane: usize, host: usize) -> String {
    format!("p{plane}h{host}")
}

impl Switch {
    pub(crate) fn new() -> Result<Self, Failure> {
        let namespace = system::new_network().map_err(|e| Failure::CannotHere(CannotHere(e.to_string())))?;
        Ok(Self { namespace })
    }

    /// Connects a plane's interface on the hosts, which are these namespaces as `ip` names them.
    pub(crate) fn connect(&self, plane: usize, mtu: u32, hosts: [String; 2]) -> Result<(), Failure> {
        let (bridge, name, mtu) = (format!("switch{plane}"), interface(plane), mtu.to_string());
        self.ip(&["link", "add", &bridge, "type", "bridge"]).map_err(|error| match error {
            Failure::Broken(text) if text.contains("Unknown device type") => {
                Failure::CannotHere(CannotHere("the kernel has no bridges".into()))
            }
            other => other,
        })?;
        for (host, namespace) in hosts.iter().enumerate() {
            let port = port(plane, host);
            self.ip(&[
                "link", "add", &port, "mtu", &mtu, "type", "veth", "peer", "name", &name, "mtu", &mtu,
                "netns", namespace,
            ])?;
            self.ip(&["link", "set", &port, "master", &bridge, "up"])?;
        }
        self.ip(&["link", "set", &bridge, "up"])
    }

    /// From now on the ports of a plane have this rate.
    pub(crate) fn set_rate(&self, plane: usize, rate: Rate) -> Result<(), Failure> {
        for host in 0..2 {
            self.set_port_rate(plane, host, rate)?;
        }
        Ok(())
    }

    /// From now on the port that leads to a host has this rate.
    pub fn set_port_rate(&self, plane: usize, host: usize, rate: Rate) -> Result<(), Failure> {
        let (mbit, burst) = (format!("{}mbit", rate.mbit), BURST_BYTES.to_string());
        let (port, limit) = (port(plane, host), rate.queue_bytes.to_string());
        let words = [
            "qdisc", "replace", "dev", &port, "root", "tbf", "rate", &mbit, "burst", &burst, "limit", &limit,
        ];
        run_in(&self.namespace, "tc", &words).map(|_| ()).map_err(|error| match error {
            Failure::Broken(text) if text.contains("kind is unknown") => {
                Failure::CannotHere(CannotHere("the kernel has no tbf queues".into()))
            }
            other => other,
        })
    }

    /// Takes the switch's end of the cable to a host down, or up again: the host sees its carrier go.
    pub fn set_link(&self, plane: usize, host: usize, up: bool) -> Result<(), Failure> {
        self.ip(&["link", "set", &port(plane, host), if up { "up" } else { "down" }])
    }

    fn ip(&self, words: &[&str]) -> Result<(), Failure> {
        run_in(&self.namespace, "ip", words).map(|_| ())
    }
}
