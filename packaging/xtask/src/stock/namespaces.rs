//! Two hosts made of network namespaces with two planes between them, for the programs that also run on loopback.

use std::process::Command;
use std::time::{Duration, Instant};

use super::pair::{Circumstances, Pair, program};
use super::perftest::result_rows;
use super::spray;
use crate::exec;
use crate::packages::is_root;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check of the ping-pong.
pub const PINGPONG: &str = "two namespaces, two planes: ibv_rc_pingpong -c, 1 % loss";
/// Name of the check of bandwidth.
pub const WRITE: &str = "two namespaces, two planes: ib_write_bw uses both planes";

const TIMEOUT: Duration = Duration::from_secs(60);
/// Interfaces of each host, their MTU as of a jumbo-frame fabric.
const PLANES: [&str; 2] = ["plane0", "plane1"];
const MTU: &str = "9000";
/// Addresses for documentation (RFC 5737), inside the namespaces only.
const SERVER: [&str; 2] = ["192.0.2.1", "198.51.100.1"];
const CLIENT: [&str; 2] = ["192.0.2.2", "198.51.100.2"];

/// The ping-pong with its data check.
pub fn pingpong(workspace: &Workspace, seed: u64) -> Outcome {
    let hosts = Hosts::make()?;
    let arguments = ["-d", "metaroce0", "-g", "0", "-c", "-s", "65536", "-n", "500"];
    let ended = hosts.pair("ibv_rc_pingpong", &arguments, 10, seed).run(workspace)?;
    if ended.client.output.contains("invalid data") || ended.server.output.contains("invalid data") {
        return Err(Trouble::Fail(ended.text("wrong data arrived")));
    }
    Ok(String::new())
}

/// A bandwidth run; both planes of the sender must carry at least half of an even share.
pub fn write(workspace: &Workspace) -> Outcome {
    let hosts = Hosts::make()?;
    let arguments = ["-d", "metaroce0", "-x", "0", "-F", "-s", "65536", "-n", "4000"];
    let ended = hosts.pair("ib_write_bw", &arguments, 0, 0).run(workspace)?;
    let row =
        result_rows(&ended.client.output).pop().ok_or_else(|| Trouble::Fail(ended.text("no results")))?;
    let record = spray::record_of(workspace, ended.client.pid)?;
    let paths = record["paths"].as_array().map(Vec::as_slice).unwrap_or_default();
    let bytes = PLANES.map(|plane| -> u64 {
        paths.iter().filter(|path| path["plane"] == plane).filter_map(|path| path["tx_bytes"].as_u64()).sum()
    });
    let text = format!("{} MiB/s, bytes per plane {bytes:?}", row[3]);
    let total: u64 = bytes.iter().sum();
    if bytes.iter().all(|bytes| *bytes > 0 && bytes * 4 >= total) {
        Ok(text)
    } else {
        Err(Trouble::Fail(format!("{text}\n{record}")))
    }
}

/// Two network namespaces of this run, gone when dropped.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    fn make() -> Result<Hosts, Trouble> {
        program("ip")?;
        if !is_root() {
            return Err(Trouble::Skip("network namespaces need root".to_owned()));
        }
        let names = ["server", "client"].map(|end| format!("metaroce-{}-{end}", std::process::id()));
        let hosts = Hosts { names };
        let [server, client] = &hosts.names;
        for name in &hosts.names {
            ip(&["netns", "add", name])
                .map_err(|text| Trouble::Skip(format!("no network namespaces here: {text}")))?;
            ip(&["-n", name, "link", "set", "lo", "up"]).map_err(Trouble::Fail)?;
        }
        for (index, plane) in PLANES.iter().enumerate() {
            let veth = [
                "-n", server, "link", "add", plane, "mtu", MTU, "type", "veth", "peer", "name", plane,
                "netns", client,
            ];
            ip(&veth).map_err(Trouble::Fail)?;
            ip(&["-n", client, "link", "set", plane, "mtu", MTU]).map_err(Trouble::Fail)?;
            for (name, addresses) in [(server, SERVER), (client, CLIENT)] {
                let address = format!("{}/24", addresses[index]);
                ip(&["-n", name, "addr", "add", &address, "dev", plane]).map_err(Trouble::Fail)?;
                ip(&["-n", name, "link", "set", plane, "up"]).map_err(Trouble::Fail)?;
            }
        }
        hosts.wait_for_carrier()?;
        Ok(hosts)
    }

    /// The kernel reports a veth's carrier a moment after both ends are up.
    fn wait_for_carrier(&self) -> Result<(), Trouble> {
        let deadline = Instant::now() + Duration::from_secs(10);
        for (name, plane) in self.names.iter().flat_map(|name| PLANES.map(|plane| (name, plane))) {
            while !ip(&["-n", name, "-o", "link", "show", plane]).map_err(Trouble::Fail)?.contains("state UP")
            {
                if Instant::now() > deadline {
                    return Err(Trouble::fail(format!("{plane} in {name} does not come up")));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// A run with its server on the first host and its client on the second.
    fn pair(&self, program: &'static str, arguments: &[&str], loss_per_mille: u32, seed: u64) -> Pair {
        let on = |name: &str| Circumstances {
            confinement: ["ip", "netns", "exec", name].map(Into::into).to_vec(),
            environment: vec![("METAROCE_PLANES", PLANES.join(","))],
            ..Circumstances::lossy(loss_per_mille, seed)
        };
        Pair {
            program,
            arguments: arguments.iter().map(|word| word.to_string()).collect(),
            circumstances: on(&self.names[1]),
            server: Some(on(&self.names[0])),
            address: SERVER[0],
            timeout: TIMEOUT,
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

/// Runs `ip`; its output, or its complaint when it fails.
fn ip(arguments: &[&str]) -> Result<String, String> {
    let path = program("ip").map_err(|_| "ip is not installed".to_owned())?;
    let done = exec::run("ip", Command::new(path).args(arguments), Duration::from_secs(20));
    match done {
        Ok(done) if done.success() => Ok(done.output),
        Ok(done) => Err(format!("ip {}: {}", arguments.join(" "), done.output.trim())),
        Err(error) => Err(error.to_string()),
    }
}
