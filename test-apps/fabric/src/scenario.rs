//! A scenario as data: topology, links, faults, traffic, what to check. TOML; unknown keys are errors.

use crate::port::Port;
use metaroce_proto::Nanos;
use serde::Deserialize;

/// One scenario.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What it is called in reports.
    pub name: String,
    /// Everything random follows from it.
    #[serde(default = "one_u64")]
    pub seed: u64,
    /// Hosts, each with one port per plane.
    pub hosts: usize,
    /// Planes.
    #[serde(default = "one_usize")]
    pub planes: usize,
    /// How the switches of a plane are connected.
    #[serde(default)]
    pub shape: Shape,
    /// Links of hosts.
    #[serde(default)]
    pub link: Link,
    /// Links between switches; as those of hosts if not given.
    pub middle: Option<Link>,
    /// Links of hosts on single planes that differ.
    #[serde(default)]
    pub plane_links: Vec<PlaneLink>,
    /// Switches choose a route per packet instead of per flow.
    #[serde(default)]
    pub spray: bool,
    /// Switches choose by the source port alone, so that consecutive ports take different routes.
    #[serde(default)]
    pub spread: bool,
    /// Hosts keep and compare real bytes.
    #[serde(default)]
    pub real_memory: bool,
    /// Settings of the protocol.
    #[serde(default)]
    pub host: HostSettings,
    /// Random faults on every link into a host.
    #[serde(default)]
    pub damage: DamageSpec,
    /// What hosts do.
    pub traffic: Vec<Traffic>,
    /// Faults at given times.
    #[serde(default)]
    pub faults: Vec<FaultSpec>,
    /// Virtual time at which it ends, unless all finite traffic is complete before.
    #[serde(default = "ten_ms")]
    pub duration_us: f64,
    /// Where measuring begins.
    #[serde(default)]
    pub warmup_us: f64,
    /// Interval of samples of every flow's bytes; 0: none.
    #[serde(default)]
    pub sample_us: f64,
}

/// How the switches of one plane are connected.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Shape {
    /// One switch.
    #[default]
    Star,
    /// Two layers.
    LeafSpine {
        /// Switches with hosts.
        leaves: usize,
        /// Switches between them.
        spines: usize,
    },
    /// Three layers of k-port switches, k * k * k / 4 hosts.
    FatTree {
        /// Ports per switch.
        k: usize,
    },
    /// Sites in a row, hosts spread evenly over them, one link between neighbours.
    Chain {
        /// Number of sites.
        sites: usize,
    },
}

/// A link and the queue before it.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Link {
    /// Rate.
    pub gbps: f64,
    /// Propagation delay, one way.
    pub delay_us: f64,
    /// Bytes the queue holds, KiB.
    pub buffer_kib: u64,
    /// Bytes in the queue from which on packets are marked, KiB; 0: never.
    pub ecn_kib: u64,
    /// MTU in bytes.
    pub mtu: u32,
}

impl Default for Link {
    fn default() -> Self {
        Link { gbps: 100.0, delay_us: 2.5, buffer_kib: 1024, ecn_kib: 100, mtu: 9000 }
    }
}

impl Link {
    /// Bits per second.
    pub fn bps(&self) -> u64 {
        (self.gbps * 1e9) as u64
    }
    /// Propagation delay.
    pub fn delay_ns(&self) -> Nanos {
        (self.delay_us * 1000.0) as Nanos
    }
    /// A switch's port with this link.
    pub fn port(&self) -> Port {
        let ecn = if self.ecn_kib == 0 { u64::MAX } else { self.ecn_kib << 10 };
        Port::new(self.bps(), self.delay_ns(), self.buffer_kib << 10, ecn)
    }
}

/// A plane whose links to hosts differ from the others'.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlaneLink {
    /// Which.
    pub plane: usize,
    /// Its links.
    pub link: Link,
}

/// Settings of the protocol in every host.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostSettings {
    /// Packets per burst; 0: adaptive.
    pub burst: u8,
    /// Paths per plane.
    pub paths: u8,
    /// Largest UDP payload.
    pub segment: u32,
    /// Least probe timeout, us. Hosts here have processors of their own.
    pub pto_min_us: f64,
    /// Silence after which a path is left, us.
    pub leave_after_us: f64,
    /// Delay above twice the least that is no sign of a queue, us.
    pub delay_slack_us: f64,
    /// Share of packets lost from which on tails go twice.
    pub tail_copies_from: f64,
    /// Acknowledgement delay, us.
    pub ack_delay_us: f64,
    /// Bytes one connection may have in flight, KiB.
    pub connection_kib: u32,
    /// Bytes a host's socket holds, KiB.
    pub socket_kib: u32,
    /// The core knows the rate of its links and paces.
    pub rates_known: bool,
    /// Receivers give rate hints (where rates are known).
    pub hints: bool,
}

impl Default for HostSettings {
    fn default() -> Self {
        HostSettings {
            burst: 0,
            paths: 4,
            segment: 4224,
            pto_min_us: 20.0,
            leave_after_us: 1000.0,
            tail_copies_from: 0.0001,
            delay_slack_us: 20.0,
            ack_delay_us: 10.0,
            connection_kib: 512 << 10,
            socket_kib: 1 << 20,
            rates_known: true,
            hints: true,
        }
    }
}

/// Random faults.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DamageSpec {
    /// Probability of loss.
    pub loss: f64,
    /// Probability of damage.
    pub corrupt: f64,
    /// Probability of a second copy.
    pub duplicate: f64,
    /// Probability of being held back.
    pub reorder: f64,
    /// For how long at most.
    pub reorder_us: f64,
}

/// What hosts do.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Traffic {
    /// Who with whom.
    pub pattern: Pattern,
    /// Operation.
    #[serde(default)]
    pub op: Op,
    /// Bytes per message.
    #[serde(default = "size")]
    pub size: u32,
    /// Sizes to choose from instead of one.
    #[serde(default)]
    pub sizes: Vec<u32>,
    /// Messages outstanding per flow.
    #[serde(default = "depth")]
    pub depth: u32,
    /// Messages per flow; 0: until the end.
    #[serde(default)]
    pub count: u64,
    /// When it begins.
    #[serde(default)]
    pub start_us: f64,
    /// When it ends posting; 0: never.
    #[serde(default)]
    pub stop_us: f64,
    /// Queue pairs per pair of hosts.
    #[serde(default = "one_u32")]
    pub qps: u32,
}

/// Who talks with whom.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Pattern {
    /// One initiator, one target.
    Pair {
        /// Initiator.
        from: usize,
        /// Target.
        to: usize,
    },
    /// Hosts `first .. first + count` each with host `to`. With Reads the data comes from `to`.
    ManyToOne {
        /// First initiator.
        first: usize,
        /// How many.
        count: usize,
        /// Target.
        to: usize,
    },
    /// Host `from` with each of hosts `first .. first + count`.
    OneToMany {
        /// Initiator.
        from: usize,
        /// First target.
        first: usize,
        /// How many.
        count: usize,
    },
    /// Each host with the one `shift` further.
    Shift {
        /// Distance.
        shift: usize,
    },
    /// Each host with every other.
    AllPairs,
    /// Ring all-reduce: each host sends `size` bytes to the next once it has the previous step's from the one before.
    AllReduce {
        /// Distance of neighbours of the ring, without a common factor with the number of hosts.
        #[serde(default = "one_usize")]
        stride: usize,
    },
    /// All-to-all in steps: in step s each host sends `size` bytes to the one s further, once both sent and received.
    AllToAll,
}

/// Operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// RDMA Write.
    #[default]
    Write,
    /// RDMA Read.
    Read,
}

/// A fault at a given time.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// When it begins.
    pub at_us: f64,
    /// When it ends; 0: never.
    #[serde(default)]
    pub until_us: f64,
    /// Repeat so many times in all.
    #[serde(default = "one_u32")]
    pub times: u32,
    /// Every so often.
    #[serde(default)]
    pub every_us: f64,
    /// What.
    pub what: FaultKind,
    /// Plane, all if not given.
    pub plane: Option<usize>,
    /// Host, all if not given (then ports between switches too).
    pub host: Option<usize>,
    /// Middle switch (spine) only.
    pub middle: Option<usize>,
    /// Which direction of a host's link, both if not given.
    pub direction: Option<Direction>,
}

/// Direction of a host's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the host.
    Up,
    /// To the host.
    Down,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FaultKind {
    /// Packets vanish and the hosts at the link hear of it.
    LinkDown,
    /// Packets vanish and nobody is told.
    BlackHole,
    /// Some packets vanish.
    Gray {
        /// Probability.
        loss: f64,
    },
    /// The link's rate is divided.
    Slow {
        /// By this.
        factor: f64,
    },
    /// The host does not run (its NIC and socket do).
    Freeze,
}

impl Scenario {
    /// Reads one; an error names the key.
    pub fn parse(text: &str) -> Result<Scenario, String> {
        toml::from_str(text).map_err(|e| e.to_string())
    }
    /// Reads one with some values changed: `path.to.key=value`, the value in TOML syntax; numbers in a path are indexes.
    pub fn parse_with(text: &str, set: &[String]) -> Result<Scenario, String> {
        let mut table: toml::Value = toml::from_str(text).map_err(|e| e.to_string())?;
        for change in set {
            let (path, value) = change.split_once('=').ok_or(format!("{change}: not key=value"))?;
            let value: toml::Table = toml::from_str(&format!("x = {value}")).map_err(|e| e.to_string())?;
            put(&mut table, path, value["x"].clone()).ok_or(format!("{path}: no such place"))?;
        }
        table.try_into().map_err(|e: toml::de::Error| e.to_string())
    }
    /// The link of each plane.
    pub fn links(&self) -> Vec<Link> {
        let one = |p| self.plane_links.iter().find(|l| l.plane == p).map_or(self.link, |l| l.link);
        (0..self.planes).map(one).collect()
    }
    /// One round trip of a small packet between hosts of different leaves, without queues.
    pub fn base_rtt_us(&self) -> f64 {
        let middle = self.middle.unwrap_or(self.link).delay_us;
        let hops = match self.shape {
            Shape::Star => 0.0,
            Shape::LeafSpine { .. } => 2.0,
            Shape::FatTree { .. } => 4.0,
            Shape::Chain { sites } => sites as f64 - 1.0,
        };
        2.0 * (2.0 * self.link.delay_us + hops * middle)
    }
}

/// Puts a value at a dotted path, making tables on the way.
fn put(at: &mut toml::Value, path: &str, value: toml::Value) -> Option<()> {
    let (head, rest) = path.split_once('.').map_or((path, None), |(a, b)| (a, Some(b)));
    let slot = match at {
        toml::Value::Table(t) => t.entry(head).or_insert_with(|| toml::Value::Table(toml::Table::new())),
        toml::Value::Array(a) => a.get_mut(head.parse::<usize>().ok()?)?,
        _ => return None,
    };
    match rest {
        Some(rest) => put(slot, rest, value),
        None => {
            *slot = value;
            Some(())
        }
    }
}

fn one_u64() -> u64 {
    1
}
fn one_usize() -> usize {
    1
}
fn one_u32() -> u32 {
    1
}
fn ten_ms() -> f64 {
    10_000.0
}
fn size() -> u32 {
    65_536
}
fn depth() -> u32 {
    32
}
