//! What is built on verbs: UCX, Open MPI over it, libfabric. Each run must show in the device's own counters.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::namespaces;
use super::pair::{Circumstances, Pair, program};
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

const TIMEOUT: Duration = Duration::from_secs(90);
/// What UCX may use: nothing but the device (and itself, for a process's messages to itself).
const UCX: [(&str, &str); 2] = [("UCX_TLS", "rc_verbs,ud_verbs,self"), ("UCX_NET_DEVICES", "metaroce0:1")];

/// Tests of UCX's lower layer: transport and arguments, as far as the transport offers them.
const UCT: [(&str, &str); 10] = [
    ("rc_verbs", "-t am_lat"),
    ("rc_verbs", "-t am_bw -s 4096 -D bcopy"),
    ("rc_verbs", "-t put_lat"),
    ("rc_verbs", "-t put_bw -s 65536 -D zcopy"),
    ("rc_verbs", "-t get -s 65536 -D zcopy"),
    ("rc_verbs", "-t fadd"),
    ("rc_verbs", "-t cswap"),
    ("rc_verbs", "-t am_bw -s 8192 -D zcopy"),
    ("ud_verbs", "-t am_lat"),
    ("ud_verbs", "-t am_bw -s 1024 -D bcopy"),
];

/// Tests of its upper layer.
const UCP: [&str; 8] = [
    "-t tag_lat",
    "-t tag_bw -s 65536",
    "-t stream_bw -s 4096",
    "-t ucp_put_bw -s 65536",
    "-t ucp_get -s 65536",
    "-t ucp_fadd -s 8",
    "-t ucp_swap -s 8",
    "-t ucp_cswap -s 8",
];

/// libfabric's providers over verbs, and the endpoint type of each.
const LIBFABRIC: [(&str, &str); 4] =
    [("verbs", "msg"), ("verbs", "dgram"), ("verbs;ofi_rxm", "rdm"), ("verbs;ofi_rxd", "rdm")];

/// One run.
#[derive(Debug, Clone, Copy)]
pub enum Check {
    /// `ucx_perftest` of one transport.
    Uct(&'static str, &'static str),
    /// `ucx_perftest` over whatever UCX makes of the transports.
    Ucp(&'static str),
    /// `exchange` under `mpirun` with this many ranks.
    Mpi(u32),
    /// `fi_pingpong`.
    Libfabric(&'static str, &'static str),
}

/// All of them.
pub fn checks() -> impl Iterator<Item = Check> {
    let uct = UCT.into_iter().map(|(transport, test)| Check::Uct(transport, test));
    let fabric = LIBFABRIC.into_iter().map(|(provider, endpoint)| Check::Libfabric(provider, endpoint));
    uct.chain(UCP.into_iter().map(Check::Ucp)).chain([2, 4].map(Check::Mpi)).chain(fabric)
}

impl Check {
    /// Its name.
    pub fn name(&self) -> String {
        match self {
            Check::Uct(transport, test) => format!("UCX {transport}: {test}"),
            Check::Ucp(test) => format!("UCX, upper layer: {test}"),
            Check::Mpi(ranks) => format!("Open MPI over UCX, {ranks} ranks: ring, allreduce, alltoall"),
            Check::Libfabric(provider, endpoint) => format!("fi_pingpong -p {provider} -e {endpoint}"),
        }
    }

    /// Runs it.
    pub fn run(&self, workspace: &Workspace) -> Outcome {
        match self {
            Check::Uct(transport, test) => ucx(workspace, &format!("-d metaroce0:1 -x {transport} {test}")),
            Check::Ucp(test) => ucx(workspace, test),
            Check::Mpi(ranks) => mpi(workspace, *ranks),
            Check::Libfabric(provider, endpoint) => libfabric(workspace, provider, endpoint),
        }
    }
}

fn ucx(workspace: &Workspace, test: &str) -> Outcome {
    let fixed = test.split_whitespace().chain(["-n", "2000", "-w", "100"]);
    let circumstances = Circumstances {
        environment: UCX.map(|(name, value)| (name, value.to_owned())).to_vec(),
        ..Circumstances::default()
    };
    let arguments = fixed.map(str::to_owned).collect();
    let ended =
        Pair { program: "ucx_perftest", arguments, circumstances, timeout: TIMEOUT }.run(workspace)?;
    let last = ended.client.output.lines().rev().find(|line| line.starts_with("Final:"));
    let last = last.ok_or_else(|| Trouble::Fail(ended.text("no line of results")))?;
    let sent = sent_bytes(workspace, ended.client.pid)?;
    let rate = last.split_whitespace().last().unwrap_or("?");
    Ok(format!("{rate} messages/s, {sent} bytes through the device"))
}

/// Bytes that a process has sent through the device; none is a failure.
fn sent_bytes(workspace: &Workspace, pid: u32) -> Result<u64, Trouble> {
    let arguments = ["stat", "--json", "--pid", &pid.to_string()];
    let done = exec::run("metaroce stat", &mut workspace.metaroce_command(&arguments), TIMEOUT)?;
    let records: Value = serde_json::from_str(&done.output).unwrap_or_default();
    let all = records.as_array().map(Vec::as_slice).unwrap_or_default();
    match all.iter().filter_map(|record| record["tx_bytes"].as_u64()).sum() {
        0 => Err(Trouble::Fail(format!("nothing went through the device\n{done}"))),
        bytes => Ok(bytes),
    }
}

fn mpi(workspace: &Workspace, ranks: u32) -> Outcome {
    let mpirun = program("mpirun")?;
    let exchange = compile(workspace)?;
    let mut command = Command::new(mpirun);
    workspace.clear_settings(&mut command);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string(), "--mca", "pml", "ucx"]);
    for (name, value) in UCX {
        command.args(["-x", &format!("{name}={value}")]);
    }
    // Only the parent of a rank knows its pid. `stat` fails if nothing of it went through the device.
    let rank = "\"$0\" run --planes lo -- \"$1\" & pid=$!; wait $pid && \"$0\" stat --pid $pid";
    command.args(["sh", "-c", rank]).arg(workspace.metaroce()).arg(exchange);
    let done = exec::run("mpirun", &mut command, TIMEOUT)?;
    let right = done.success() && done.output.contains(&format!("{ranks} ranks, 0 wrong"));
    if right { Ok(String::new()) } else { Err(Trouble::Fail(done.to_string())) }
}

/// Compiles our MPI program beside the other programs.
fn compile(workspace: &Workspace) -> Result<PathBuf, Trouble> {
    let mpicc = program("mpicc")?;
    let source = workspace.root.join("test-apps/mpi/exchange.c");
    let exchange = workspace.release.join("metaroce-mpi-exchange");
    let mut command = Command::new(mpicc);
    command.args(["-O1", "-Wall", "-Werror", "-std=c99"]).arg(source).arg("-o").arg(&exchange);
    let done = exec::run("mpicc", &mut command, TIMEOUT)?;
    if done.success() { Ok(exchange) } else { Err(Trouble::Fail(done.to_string())) }
}

/// Both ends on one host with a network interface of its own: libfabric does not look at loopback, and the server
/// of `fi_pingpong` tells its client a loopback address.
fn libfabric(workspace: &Workspace, provider: &str, endpoint: &str) -> Outcome {
    program("fi_pingpong")?;
    let metaroce = workspace.metaroce();
    let end = format!("{} run -- fi_pingpong -p '{provider}' -e {endpoint} -I 200", metaroce.display());
    // The server is ready when it listens on its TCP port.
    let client = format!(
        "{end} & server=$!; until grep -q ':B9E8 .* 0A ' /proc/net/tcp /proc/net/tcp6; do kill -0 $server || exit 1; sleep 0.02; done; \
         {end} {{client}} & client=$!; wait $client && wait $server && {} stat --pid $client",
        metaroce.display()
    );
    let mut command = namespaces::netns(workspace)?;
    command.args(["--planes", "1", "--", "sh", "-c", &client]);
    let done = namespaces::run(&mut command)?;
    if done.output.contains("Mxfers/sec") { Ok(String::new()) } else { Err(Trouble::Fail(done.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__are_unique() {
        let names: std::collections::BTreeSet<String> = checks().map(|check| check.name()).collect();
        assert_eq!(names.len(), checks().count());
    }
}
