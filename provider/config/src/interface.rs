//! The host's interfaces and default route as plain data, and the choice of an interface nobody configured.

use std::net::IpAddr;

use crate::{ConfigError, os};

/// One network interface as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Interface {
    /// Name without an alias suffix.
    pub name: String,
    /// Kernel index.
    pub index: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Hardware address, all zero when it has none.
    pub mac: [u8; 6],
    /// Addresses in the order the kernel lists them.
    pub addrs: Vec<IpAddr>,
    /// Administratively up.
    pub up: bool,
    /// Has carrier.
    pub running: bool,
    /// Is a loopback interface.
    pub loopback: bool,
}

/// What the resolution of a configuration needs to know about the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetView {
    /// Interfaces in kernel order.
    pub interfaces: Vec<Interface>,
    /// Interface of the default route, IPv4's before IPv6's.
    pub default_route: Option<String>,
}

impl NetView {
    /// Reads the interfaces and routes of the calling thread's network namespace.
    ///
    /// # Errors
    /// [`ConfigError::Interfaces`] when the kernel does not list them.
    pub fn of_this_host() -> Result<NetView, ConfigError> {
        let interfaces = os::interfaces().map_err(ConfigError::Interfaces)?;
        // thread-self, not self: a thread may have entered a network namespace of its own.
        let read =
            |file: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
        let (routes, routes6) = (read("route"), read("ipv6_route"));
        let default_route = ipv4_default(&routes).or_else(|| ipv6_default(&routes6)).map(str::to_owned);
        Ok(NetView { interfaces, default_route })
    }

    /// The interface to use when none is configured: the default route's, else the first that is up, else loopback.
    pub(crate) fn preferred(&self) -> Option<&Interface> {
        let usable = |i: &&Interface| i.up && !i.addrs.is_empty();
        let routed =
            self.default_route.as_deref().and_then(|name| self.interfaces.iter().find(|i| i.name == name));
        routed
            .filter(usable)
            .or_else(|| self.interfaces.iter().filter(usable).find(|i| !i.loopback && i.running))
            .or_else(|| self.interfaces.iter().filter(usable).find(|i| i.loopback))
    }

    /// The names of all interfaces, for error messages.
    pub(crate) fn names(&self) -> String {
        self.interfaces.iter().map(|i| i.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

const RTF_UP: u32 = 0x1;
const RTF_REJECT: u32 = 0x200;

/// The interface of the best default route in the format of /proc/net/route.
fn ipv4_default(table: &str) -> Option<&str> {
    let routes = table.lines().skip(1).filter_map(|line| {
        let field: Vec<&str> = line.split_whitespace().collect();
        let is_default = field.len() > 7 && field[1] == "00000000" && field[7] == "00000000";
        let flags = u32::from_str_radix(field.get(3)?, 16).ok()?;
        let usable = flags & RTF_UP != 0 && flags & RTF_REJECT == 0;
        (is_default && usable).then(|| (field[6].parse::<u32>().unwrap_or(u32::MAX), field[0]))
    });
    routes.min_by_key(|(metric, _)| *metric).map(|(_, name)| name)
}

/// The interface of the best default route in the format of /proc/net/ipv6_route.
fn ipv6_default(table: &str) -> Option<&str> {
    let routes = table.lines().filter_map(|line| {
        let field: Vec<&str> = line.split_whitespace().collect();
        let is_default = field.len() > 9 && field[0].bytes().all(|b| b == b'0') && field[1] == "00";
        let flags = u32::from_str_radix(field.get(8)?, 16).ok()?;
        let usable = flags & RTF_UP != 0 && flags & RTF_REJECT == 0 && field.get(9) != Some(&"lo");
        (is_default && usable).then(|| (u32::from_str_radix(field[5], 16).unwrap_or(u32::MAX), field[9]))
    });
    routes.min_by_key(|(metric, _)| *metric).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";

    #[test]
    fn ipv4_default__lowest_metric_wins_and_rejects_are_skipped() {
        let table = format!(
            "{HEADER}eth0\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
             eth1\t00000000\t0100A8C0\t0003\t0\t0\t200\t00000000\t0\t0\t0\n\
             bad0\t00000000\t0100A8C0\t0203\t0\t0\t1\t00000000\t0\t0\t0\n\
             eth2\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        );
        assert_eq!(ipv4_default(&table), Some("eth2"));
        assert_eq!(ipv4_default(HEADER), None);
        assert_eq!(ipv4_default("x\nshort line"), None);
    }

    #[test]
    fn ipv6_default__skips_the_null_route_on_lo() {
        let zero = "0".repeat(32);
        let route = |metric: &str, flags: &str, name: &str| {
            format!("{zero} 00 {zero} 00 {zero} {metric} 00000001 00000000 {flags} {name}\n")
        };
        let table = route("ffffffff", "00200200", "lo") + &route("00000400", "00450003", "eth0");
        assert_eq!(ipv6_default(&table), Some("eth0"));
        assert_eq!(ipv6_default(&route("ffffffff", "00200200", "lo")), None);
    }
}
