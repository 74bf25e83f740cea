//! The fabric: two hosts, a cable per plane, or a switch where links have a rate. Loss strikes at the receiving host,
//! where the sender cannot notice it.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::command::{CannotHere, Failure, run_in};
use crate::switch::{Rate, Switch};
use crate::system;

/// Planes at most: one second octet each.
const PLANES_MAX: usize = 64;
/// The number of the cable beside the planes, and its name.
const CONTROL: usize = 99;
const CONTROL_NAME: &str = "control";
/// A veth's carrier is there by then, or something is wrong.
const CARRIER_LIMIT: Duration = Duration::from_secs(10);

/// What to build.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Cables between the hosts; interfaces are called `plane0`, `plane1`, ...
    pub planes: usize,
    /// MTU of every interface, in bytes.
    pub mtu: u32,
    /// IPv6 addresses beside the IPv4 ones.
    pub ipv6: bool,
    /// Planes from this one on have IPv6 addresses and no others.
    pub ipv6_only: Option<usize>,
    /// No IPv4 addresses beside the planes either, not even the loopback interface's. [`Host::control`] is no address
    /// of the host then.
    pub no_ipv4: bool,
    /// Segmentation-offload super-packets cross a cable whole, as on a real NIC; with loss they must be cut
    /// first, or one drop takes all of them.
    pub super_packets: bool,
    /// Rate of every link, through a switch per plane; super-packets are cut then. `None`: as fast as the machine.
    pub rate: Option<Rate>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            planes: 2,
            mtu: 9000,
            ipv6: false,
            ipv6_only: None,
            no_ipv4: false,
            super_packets: true,
            rate: None,
        }
    }
}

impl Plan {
    fn has_ipv4(&self, plane: usize) -> bool {
        self.ipv6_only.is_none_or(|first| plane < first)
    }
}

/// One host: a network namespace.
#[derive(Debug)]
pub struct Host {
    namespace: File,
    index: u8,
}

/// What an interface has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Bytes of frames.
    pub bytes: u64,
    /// Frames, super-packets as one.
    pub packets: u64,
}

/// Two connected hosts. They vanish with it.
#[derive(Debug)]
pub struct Fabric {
    hosts: [Host; 2],
    switch: Option<Switch>,
    plan: Plan,
}

impl Host {
    /// Its IPv4 address on a plane: 10.(100 + plane).0.(1 or 2).
    pub fn ipv4(&self, plane: usize) -> IpAddr {
        Ipv4Addr::new(10, 100 + plane as u8, 0, self.index + 1).into()
    }

    /// Its IPv6 address on a plane, if the plan has any: fd00:0:0:(plane)::(1 or 2).
    pub fn ipv6(&self, plane: usize) -> IpAddr {
        Ipv6Addr::new(0xfd00, 0, 0, plane as u16, 0, 0, 0, u16::from(self.index) + 1).into()
    }

    /// An IPv4 address that always works: on plane 0, or, where that has none, on a cable beside the planes. Many
    /// programs exchange their addresses over TCP and IPv4, whatever their data takes.
    pub fn control(&self, plan: &Plan) -> IpAddr {
        self.ipv4(if plan.has_ipv4(0) { 0 } else { CONTROL })
    }

    /// Lets a command run on this host.
    pub fn inside<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        system::inside(command, &self.namespace)
    }

    /// Runs `work` in a thread on this host: sockets it makes belong to the host, wherever they go.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Failure> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| system::enter(&self.namespace).map(|()| work()));
            thread
                .join()
                .map_err(|_| Failure::Broken("the work on a host panicked".into()))?
                .map_err(Failure::from)
        })
    }

    /// Runs a tool on this host; its output.
    pub fn tool(&self, program: &str, arguments: &[&str]) -> Result<String, Failure> {
        run_in(&self.namespace, program, arguments)
    }

    /// How `ip` names the namespace.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }

    fn make(index: u8) -> Result<Self, Failure> {
        let namespace = system::new_network().map_err(|e| Failure::CannotHere(CannotHere(e.to_string())))?;
        let host = Self { namespace, index };
        host.tool("ip", &["link", "set", "lo", "up"])?;
        // Link-local addresses would be unusable for a second or two after the link comes up, while the
        // kernel looks for duplicates. Without IPv6 there is nothing to switch off.
        let _ = host.run(|| fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0"))?;
        Ok(host)
    }

    fn configure(&self, plan: &Plan) -> Result<(), Failure> {
        for plane in 0..plan.planes {
            let name = interface(plane);
            if plan.has_ipv4(plane) {
                self.tool("ip", &["addr", "add", &format!("{}/24", self.ipv4(plane)), "dev", &name])?;
            }
            if plan.ipv6 || !plan.has_ipv4(plane) {
                self.tool(
                    "ip",
                    &["addr", "add", &format!("{}/64", self.ipv6(plane)), "dev", &name, "nodad"],
                )?;
            }
            if !plan.super_packets || plan.rate.is_some() {
                self.tool("ethtool", &["-K", &name, "tx-udp-segmentation", "off"])?;
            }
            self.tool("ip", &["link", "set", &name, "mtu", &plan.mtu.to_string(), "up"])?;
        }
        if plan.no_ipv4 {
            self.tool("ip", &["-4", "addr", "flush", "dev", "lo"])?;
        } else if !plan.has_ipv4(0) {
            let address = format!("{}/24", self.ipv4(CONTROL));
            self.tool("ip", &["addr", "add", &address, "dev", CONTROL_NAME])?;
            self.tool("ip", &["link", "set", CONTROL_NAME, "up"])?;
        }
        Ok(())
    }
}

/// Name of a plane's interface, the same on both hosts.
pub fn interface(plane: usize) -> String {
    format!("plane{plane}")
}

impl Fabric {
    /// Builds it; the links are up when it returns.
    pub fn new(plan: Plan) -> Result<Self, Failure> {
        if plan.planes == 0 || plan.planes > PLANES_MAX {
            return Err(Failure::Broken(format!("1 to {PLANES_MAX} planes, not {}", plan.planes)));
        }
        let hosts = [Host::make(0)?, Host::make(1)?];
        let control = (!plan.has_ipv4(0) && !plan.no_ipv4).then(|| CONTROL_NAME.to_owned());
        let switch = plan.rate.map(|_| Switch::new()).transpose()?;
        let cabled = if switch.is_some() { 0 } else { plan.planes };
        for (plane, switch) in switch.iter().flat_map(|switch| (0..plan.planes).map(move |p| (p, switch))) {
            switch.connect(plane, plan.mtu, hosts.each_ref().map(Host::path))?;
        }
        for name in (0..cabled).map(interface).chain(control) {
            let far = hosts[1].path();
            let cable = ["link", "add", &name, "type", "veth", "peer", "name", &name, "netns", &far]
                .map(str::to_owned);
            hosts[0].tool("ip", &cable.each_ref().map(String::as_str))?;
        }
        for host in &hosts {
            host.configure(&plan)?;
        }
        for plane in 0..plan.planes {
            if let (Some(switch), Some(rate)) = (&switch, plan.rate) {
                switch.set_rate(plane, rate)?;
            }
        }
        let fabric = Self { hosts, switch, plan };
        fabric.wait_for_carrier()?;
        Ok(fabric)
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host; 2] {
        &self.hosts
    }

    /// What is between them, if links have a rate.
    pub fn switch(&self) -> Option<&Switch> {
        self.switch.as_ref()
    }

    /// What it was built to.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Names of the planes' interfaces, as METAROCE_PLANES takes them.
    pub fn planes(&self) -> String {
        (0..self.plan.planes).map(interface).collect::<Vec<_>>().join(",")
    }

    /// From now on each plane of both hosts drops this many of 1000 UDP packets that arrive (0 ends it, 1000 is a
    /// black hole). Planes not listed lose nothing.
    pub fn set_loss(&self, per_mille: &[(usize, u32)]) -> Result<(), Failure> {
        (0..self.hosts.len()).try_for_each(|host| self.set_loss_at(host, per_mille))
    }

    /// The same at one host only: what it sends arrives.
    pub fn set_loss_at(&self, host: usize, per_mille: &[(usize, u32)]) -> Result<(), Failure> {
        let mut rules = String::from(
            "add table inet loss\ndelete table inet loss\nadd table inet loss\n\
             add chain inet loss input { type filter hook input priority 0; }\n",
        );
        for (plane, loss) in per_mille.iter().filter(|(_, loss)| *loss > 0) {
            let chance =
                if *loss >= 1000 { String::new() } else { format!("numgen random mod 1000 < {loss} ") };
            rules += &format!(
                "add rule inet loss input iifname \"{}\" meta l4proto udp {chance}counter drop\n",
                interface(*plane)
            );
        }
        self.hosts[host].tool("nft", &[&rules]).map(|_| ())
    }

    /// What has arrived on each plane of a host.
    pub fn arrived(&self, host: usize) -> Result<Vec<Arrived>, Failure> {
        let table = self.hosts[host].run(|| fs::read_to_string("/proc/thread-self/net/dev"))??;
        let of = |name: String| {
            let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}:")));
            let mut numbers =
                line.into_iter().flat_map(str::split_whitespace).map(|n| n.parse().unwrap_or(0));
            Arrived { bytes: numbers.next().unwrap_or(0), packets: numbers.next().unwrap_or(0) }
        };
        Ok((0..self.plan.planes).map(interface).map(of).collect())
    }

    /// Takes a host's end of a plane down, or up again.
    pub fn set_link(&self, host: usize, plane: usize, up: bool) -> Result<(), Failure> {
        let word = if up { "up" } else { "down" };
        self.hosts[host].tool("ip", &["link", "set", &interface(plane), word]).map(|_| ())
    }

    /// The kernel reports a cable's carrier a moment after both its ends are up.
    fn wait_for_carrier(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + CARRIER_LIMIT;
        for host in &self.hosts {
            for plane in 0..self.plan.planes {
                let name = interface(plane);
                while !host.tool("ip", &["-o", "link", "show", &name])?.contains("state UP") {
                    if Instant::now() > deadline {
                        return Err(Failure::Broken(format!("{name} does not come up")));
                    }
                    std::thread::yield_now();
                }
            }
        }
        Ok(())
    }
}
