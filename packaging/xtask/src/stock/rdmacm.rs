//! librdmacm's programs and others that connect by it: every one on loopback and between namespaces, over IPv4 and IPv6,
//! with and without lost packets of the connection manager; and what happens to clients that find nobody.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::namespaces;
use super::pair::{self, Place, ReadyOn, program};
use crate::exec::{self, Running};
use crate::report::{Outcome, Trouble};
use crate::seed::Random;
use crate::workspace::Workspace;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Share of the connection manager's packets that are lost.
const CM_LOSS: &str = "0.05";
/// The port of programs that let nobody choose.
const FIXED_PORT: u16 = 7174;
/// The base port of devices that take part in multicast: nobody else's, so the port of groups below it is neither.
const GROUPS_BASE_PORT: u16 = 20_001;
/// The preloaded library that makes sockets of a program into rsockets.
const RSOCKETS: &str = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so";
const UCX: &str =
    " UCX_TLS=rc_verbs,ud_verbs,self UCX_NET_DEVICES=metaroce0:1 UCX_SOCKADDR_TLS_PRIORITY=rdmacm";
/// A client that is refused knows by then, one that hears nothing a little later.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// With code 0, when its client has.
    Ends,
    /// Not by itself.
    Stays,
}

/// Whether a program takes IPv6 addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ipv6 {
    No,
    Yes,
    /// Its server listens on the first wildcard address that the C library offers, which is IPv6's only on a host
    /// without IPv4.
    Alone,
}

/// A program as server and as client, and what must be in the output.
#[derive(Debug)]
struct Program {
    name: &'static str,
    /// Lines for the shell: `{run}` puts a program under `metaroce run`, `{pre}` with rsockets besides; `{a}` and `{p}`
    /// are the server's address and port, `{b}` is the client's address, `{in}` is a file and `{out}` the one to write.
    /// `{groups}` is `{run}` with a base port of its own, `{m}` a group; `{ucx}` lets UCX connect by rdma_cm alone.
    /// `{6}` is `6` for IPv6 and nothing else, `{[a]}` the address as in a URL, `{name}` one without colons.
    server: &'static str,
    client: &'static str,
    ends: Server,
    proof: &'static str,
    v6: Ipv6,
}

macro_rules! programs {
    ($($name:literal: $server:literal, $client:literal, $ends:ident, $proof:literal, $v6:ident;)*) => {
        const PROGRAMS: &[Program] = &[$(Program {
            name: $name, server: $server, client: $client, ends: Server::$ends, proof: $proof, v6: Ipv6::$v6,
        }),*];
    };
}

// Not over IPv6: perftest 4.5 with `-R` resolves names to IPv4 addresses alone, and io_demo parses no others.
programs! {
    "rping -v -C 10": "{run} rping -s -a {a} -p {p} -C 10 -v", "{run} rping -c -a {a} -p {p} -C 10 -v", Ends,
        "ping data: rdma-ping-9", Yes;
    "rping -q": "{run} rping -s -q -a {a} -p {p} -C 10 -v", "{run} rping -c -q -a {a} -p {p} -C 10 -v", Ends,
        "ping data: rdma-ping-9", Yes;
    "rping -S 23 -V": "{run} rping -s -a {a} -p {p} -S 23 -C 50 -V", "{run} rping -c -a {a} -p {p} -S 23 -C 50 -V",
        Ends, "", Yes;
    "rping -S 65535 -V": "{run} rping -s -a {a} -p {p} -S 65535 -C 50 -V",
        "{run} rping -c -a {a} -p {p} -S 65535 -C 50 -V", Ends, "", Yes;
    "rping -P, three clients": "{run} rping -s -P -a {a} -p {p}",
        "for i in 1 2 3; do {run} rping -c -a {a} -p {p} -C 5 -v || exit 1; done", Stays, "ping data: rdma-ping-4",
        Yes;
    "ucmatose": "{run} ucmatose -b {a} -p {p}", "{run} ucmatose -s {a} -p {p}", Ends, "return status 0", Yes;
    "ucmatose -c 100": "{run} ucmatose -c 100 -b {a} -p {p}", "{run} ucmatose -c 100 -s {a} -p {p}", Ends,
        "return status 0", Yes;
    "ucmatose -m": "{run} ucmatose -m -c 5 -b {a} -p {p}", "{run} ucmatose -m -c 5 -s {a} -p {p}", Ends,
        "return status 0", Yes;
    "udaddy": "{run} udaddy -b {a}", "{run} udaddy -s {a}", Ends, "return status 0", Yes;
    "udaddy -c 20": "{run} udaddy -c 20 -b {a}", "{run} udaddy -c 20 -s {a}", Ends, "return status 0", Yes;
    "mckey": "{groups} mckey -m {m} -b {a} -C 50 -S 1000", "{groups} mckey -s -m {m} -b {b} -C 50 -S 1000", Ends,
        "data transfers complete", Yes;
    "rdma_server": "{run} rdma_server -s {a} -p {p}", "{run} rdma_client -s {a} -p {p}", Ends, "end 0", Yes;
    "rdma_xserver -c r": "{run} rdma_xserver -c r -p {p}", "{run} rdma_xclient -c r -s {a} -p {p}", Ends, "end 0",
        Alone;
    "rdma_xserver -c x": "{run} rdma_xserver -c x -p {p}", "{run} rdma_xclient -c x -s {a} -p {p}", Ends, "end 0",
        Alone;
    "cmtime -c 2000": "{run} cmtime -c 2000 -b {a} -p {p}", "{run} cmtime -c 2000 -s {a} -p {p}", Stays,
        "disconnect", Yes;
    "rstream": "{run} rstream -b {a} -p {p} -S 65536 -C 500 -T v", "{run} rstream -s {a} -p {p} -S 65536 -C 500 -T v",
        Ends, "64k", Yes;
    "riostream": "{run} riostream -b {a} -p {p} -S 65536 -C 500 -T v",
        "{run} riostream -s {a} -p {p} -S 65536 -C 500 -T v", Ends, "64k", Yes;
    "rcopy": "{run} rcopy -p {p}", "{run} rcopy {in} {name}:{out} -p {p} && cmp {in} {out}", Stays, "", Alone;
    "udpong": "{run} udpong -b {a} -p {p}", "{run} udpong -s {a} -p {p} -S 64 -C 1000", Stays, "custom", Yes;
    "iperf3 over rsockets": "{pre} iperf3 -s -1 -p {p}", "{pre} iperf3 -c {a} -p {p} -t 1", Ends, "iperf Done", Yes;
    "socat over rsockets, an echo": "{pre} socat TCP{6}-LISTEN:{p},reuseaddr EXEC:cat",
        "{pre} socat -t 60 - TCP{6}:{[a]}:{p} < {in} > {out} && cmp {in} {out}", Ends, "", Yes;
    "UCX's io_demo": "{ucx} io_demo -p {p}", "{ucx} io_demo -i 2000 -q -p {p} {a}", Stays,
        "Client exit with status 'OK'", No;
    "ib_write_bw -R": "{run} ib_write_bw -R -F -n 1000 -p {p}", "{run} ib_write_bw -R -F -n 1000 -p {p} {a}", Ends,
        "65536", No;
    "ib_write_lat -R": "{run} ib_write_lat -R -F -p {p}", "{run} ib_write_lat -R -F -p {p} {a}", Ends, "2 ", No;
    "ib_read_bw -R": "{run} ib_read_bw -R -F -n 1000 -p {p}", "{run} ib_read_bw -R -F -n 1000 -p {p} {a}", Ends,
        "65536", No;
    "ib_read_lat -R": "{run} ib_read_lat -R -F -p {p}", "{run} ib_read_lat -R -F -p {p} {a}", Ends, "2 ", No;
    "ib_send_bw -R": "{run} ib_send_bw -R -F -n 1000 -p {p}", "{run} ib_send_bw -R -F -n 1000 -p {p} {a}", Ends,
        "65536", No;
    "ib_send_lat -R": "{run} ib_send_lat -R -F -p {p}", "{run} ib_send_lat -R -F -p {p} {a}", Ends, "2 ", No;
    // Nothing holds a sender of datagrams back: no more of them than the receiver has receives and room for.
    "ib_send_bw -R -c UD": "{run} ib_send_bw -R -F -c UD -n 500 -r 500 -s 2048 -p {p}",
        "{run} ib_send_bw -R -F -c UD -n 500 -r 500 -s 2048 -p {p} {a}", Ends, "2048", No;
    "ib_send_lat -R -c UD": "{run} ib_send_lat -R -F -c UD -p {p}", "{run} ib_send_lat -R -F -c UD -p {p} {a}", Ends,
        "2 ", No;
    "ib_send_bw -R -e -r 64": "{run} ib_send_bw -R -e -r 64 -F -n 500 -p {p}",
        "{run} ib_send_bw -R -e -r 64 -F -n 500 -p {p} {a}", Ends, "65536", No;
    "ib_send_bw -R --use-srq": "{run} ib_send_bw -R --use-srq -F -n 500 -p {p}",
        "{run} ib_send_bw -R --use-srq -F -n 500 -p {p} {a}", Ends, "65536", No;
    "ib_write_bw -R -b -q 4 -T 96": "{run} ib_write_bw -R -b -q 4 -T 96 -F -n 500 -p {p}",
        "{run} ib_write_bw -R -b -q 4 -T 96 -F -n 500 -p {p} {a}", Ends, "65536", No;
    "ib_atomic_bw -R": "{run} ib_atomic_bw -R -F -n 1000 -p {p}", "{run} ib_atomic_bw -R -F -n 1000 -p {p} {a}", Ends,
        "8 ", No;
    "ib_atomic_lat -R": "{run} ib_atomic_lat -R -F -p {p}", "{run} ib_atomic_lat -R -F -p {p} {a}", Ends, "8 ", No;
}

/// One program in one of its circumstances.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    program: &'static Program,
    lossy: bool,
    v6: bool,
    place: Place,
}

/// Every program in all of its circumstances.
pub fn matrix() -> Vec<Case> {
    let mut cases = Vec::new();
    for program in PROGRAMS {
        for place in [Place::Loopback, Place::Namespaces] {
            let v6_too = match program.v6 {
                Ipv6::No => false,
                Ipv6::Yes => true,
                Ipv6::Alone => place == Place::Namespaces,
            };
            for v6 in [false, true].into_iter().filter(|v6| v6_too || !v6) {
                cases.extend([false, true].map(|lossy| Case { program, lossy, v6, place }));
            }
        }
    }
    cases
}

/// Every program once, in circumstances that chance chooses.
pub fn sample(random: &mut Random) -> Vec<Case> {
    let mut cases = matrix();
    random.shuffle(&mut cases);
    PROGRAMS
        .iter()
        .filter_map(|program| cases.iter().find(|case| std::ptr::eq(case.program, program)).copied())
        .collect()
}

impl Case {
    /// Name of the check.
    pub fn name(&self) -> String {
        let family = if self.v6 { ", IPv6" } else { "" };
        let loss = if self.lossy { ", 5 % of CM packets lost" } else { "" };
        format!("rdma_cm {}{family}{loss}{}", self.program.name, self.place.suffix())
    }

    /// Runs it: both ends must end well (a server that does not end is ended), and the proof be in the output.
    pub fn run(&self, workspace: &Workspace, seed: u64) -> Outcome {
        for line in [self.program.server, self.program.client] {
            let name = line.split_whitespace().skip_while(|word| !word.starts_with('{')).nth(1);
            program(name.unwrap_or_default())?;
        }
        if self.program.server.starts_with("{pre}") && !Path::new(RSOCKETS).exists() {
            return Err(Trouble::Skip(format!("no {RSOCKETS}")));
        }
        if self.v6 && std::net::UdpSocket::bind("[::1]:0").is_err() {
            return Err(Trouble::Skip("no IPv6 here".to_owned()));
        }
        let files = Files::new()?;
        let output = match self.place {
            Place::Loopback => self.on_loopback(workspace, &files, seed)?,
            Place::Namespaces => self.between_namespaces(workspace, &files, seed)?,
        };
        if output.contains(self.program.proof) {
            Ok(String::new())
        } else {
            Err(Trouble::Fail(format!("no `{}` in the output\n{output}", self.program.proof)))
        }
    }

    /// A template as a line for the shell; `lo` puts the planes there.
    fn line(&self, workspace: &Workspace, files: &Files, seed: u64, template: &str) -> String {
        let mut environment = String::new();
        if self.lossy {
            environment = format!(" METAROCE_CM_LOSS={CM_LOSS} METAROCE_SEED={seed}");
        }
        if self.place == Place::Loopback {
            environment += " METAROCE_PLANES=lo";
        }
        let metaroce = workspace.metaroce();
        let run = |preload: &str| format!("env{preload}{environment} {} run --", metaroce.display());
        template
            .replace("{run}", &run(""))
            .replace("{pre}", &run(&format!(" LD_PRELOAD={RSOCKETS}")))
            .replace("{ucx}", &run(UCX))
            .replace("{groups}", &run(&format!(" METAROCE_BASE_PORT={GROUPS_BASE_PORT}")))
            .replace("{m}", if self.v6 { "ff05::77:2" } else { "239.77.1.2" })
            .replace("{6}", if self.v6 { "6" } else { "" })
            .replace("{[a]}", if self.v6 { "[{a}]" } else { "{a}" })
            .replace("{name}", if self.v6 { SERVER_NAME } else { "{a}" })
            .replace("{in}", &files.input.display().to_string())
            .replace("{out}", &files.output.display().to_string())
    }

    /// The port that shows that the server is ready, if it is not one chosen for it.
    fn own_port(&self) -> Option<u16> {
        match self.program.server {
            line if line.contains("{p}") => None,
            line if line.contains("{groups}") => Some(GROUPS_BASE_PORT - 1),
            _ => Some(FIXED_PORT),
        }
    }

    fn on_loopback(&self, workspace: &Workspace, files: &Files, seed: u64) -> Result<String, Trouble> {
        // Programs on the fixed port have an address of their own.
        let own = format!("127.{}.{}.1", std::process::id() >> 8 & 0xff, std::process::id() & 0xff);
        let address = match (self.v6, self.own_port()) {
            (true, _) => "::1",
            (false, Some(FIXED_PORT)) => &own,
            (false, _) => "127.0.0.1",
        };
        let place = |template: &str, port: u16| {
            let line = self.line(workspace, files, seed, template);
            line.replace("{a}", address).replace("{b}", address).replace("{p}", &port.to_string())
        };
        let ready = self.own_port().map_or(ReadyOn::Udp, ReadyOn::UdpPort);
        let deadline = Instant::now() + TIMEOUT;
        let (server, client) = pair::serve_and_connect_on(
            ready,
            self.program.name,
            |port| shell(workspace, &format!("exec {}", place(self.program.server, port))),
            |port| shell(workspace, &place(self.program.client, port)),
        )?;
        self.judge(server, client, deadline)
    }

    fn judge(&self, server: Running, client: Running, deadline: Instant) -> Result<String, Trouble> {
        let client = client.finish(deadline);
        let patience = match (self.program.ends, client.success()) {
            (Server::Stays, _) => Instant::now(),
            (Server::Ends, true) => deadline,
            (Server::Ends, false) => Instant::now() + Duration::from_secs(2),
        };
        let server = server.finish(patience);
        let server_is_well = match self.program.ends {
            Server::Ends => server.success(),
            Server::Stays => server.status.is_none(),
        };
        let text = format!("{server}\n{client}");
        if client.success() && server_is_well { Ok(text) } else { Err(Trouble::Fail(text)) }
    }

    fn between_namespaces(&self, workspace: &Workspace, files: &Files, seed: u64) -> Result<String, Trouble> {
        // Nobody else is there.
        const PORT: u16 = 7471;
        let port = self.own_port().unwrap_or(PORT);
        let [server, client] = if self.v6 { ["{server6}", "{client6}"] } else { ["{server}", "{client}"] };
        let place = |template: &str| {
            let line = self.line(workspace, files, seed, template);
            line.replace("{a}", server).replace("{b}", client).replace("{p}", &port.to_string())
        };
        let mut client_line = place(self.program.client);
        if self.v6 && self.program.client.contains("{name}") {
            client_line = format!("{} && {client_line}", files.naming(server));
        }
        let mut command = namespaces::netns(workspace)?;
        command.args(["--planes", "2", "--ready-udp", &port.to_string()]);
        if self.v6 {
            command.arg(if self.program.v6 == Ipv6::Alone { "--no-ipv4" } else { "--ipv6" });
        }
        command.args(["--server", &place(self.program.server), "--", "sh", "-c", &client_line]);
        Ok(namespaces::run(&mut command)?.output)
    }
}

fn shell(workspace: &Workspace, line: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", line]).current_dir(&workspace.root);
    workspace.clear_settings(&mut command);
    command
}

/// What the server is called where an address will not do.
const SERVER_NAME: &str = "metaroce-server";

/// A file to send and the name of its copy; removed when dropped.
struct Files {
    dir: PathBuf,
    input: PathBuf,
    output: PathBuf,
}

impl Files {
    fn new() -> std::io::Result<Files> {
        let dir = std::env::temp_dir().join(format!("metaroce-rdmacm-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let (input, output) = (dir.join("in"), dir.join("out"));
        let mut random = Random::new(300_000);
        let bytes: Vec<u8> = (0..300_000).map(|_| random.next() as u8).collect();
        fs::write(&input, bytes)?;
        Ok(Files { dir, input, output })
    }

    /// A line for the shell of a host made of namespaces, whose mounts are its own: the server has a name there.
    fn naming(&self, server: &str) -> String {
        let hosts = self.dir.join("hosts");
        let hosts = hosts.display();
        format!("echo '{server} {SERVER_NAME}' > {hosts} && mount --bind {hosts} /etc/hosts")
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A client that finds nobody, or a port that is not to be had: what it must say, and how soon.
#[derive(Debug, Clone, Copy)]
pub struct Refusal {
    name: &'static str,
    line: &'static str,
    says: &'static str,
    /// On a host of its own, from where `10.255.255.1` and the like lead nowhere.
    alone: bool,
}

/// All of them. Port 9 is nobody's, 24600 is one of the device's own.
pub const REFUSALS: [Refusal; 6] = [
    Refusal {
        name: "rping: client first",
        line: "{run} rping -c -a 127.0.0.1 -p 9 -C 1",
        says: "RDMA_CM_EVENT_REJECTED",
        alone: false,
    },
    Refusal {
        name: "ucmatose: client first",
        line: "{run} ucmatose -s 127.0.0.1 -p 9",
        says: "RDMA_CM_EVENT_REJECTED",
        alone: false,
    },
    Refusal {
        name: "ib_write_bw -R: client first",
        line: "{run} ib_write_bw -R -F -p 9 127.0.0.1",
        says: "CM event bl blka 8",
        alone: false,
    },
    Refusal {
        name: "rping: an address of nobody's",
        line: "{run} rping -c -a 127.9.9.9 -p 9 -C 1",
        says: "RDMA_CM_EVENT_REJECTED",
        alone: false,
    },
    Refusal {
        name: "rping: a host that is not there",
        line: "{run} rping -c -a {neighbour} -p 9 -C 1",
        says: "RDMA_CM_EVENT_UNREACHABLE",
        alone: true,
    },
    Refusal {
        name: "rping: a server on a port of the device",
        line: "{run} rping -s -a 127.0.0.1 -p 24600",
        says: "Address already in use",
        alone: false,
    },
];

impl Refusal {
    /// Name of the check.
    pub fn name(&self) -> String {
        format!("rdma_cm {}: {}", self.name, self.says)
    }

    /// Runs it: it must fail in time, and say why.
    pub fn run(&self, workspace: &Workspace) -> Outcome {
        program(self.line.split_whitespace().nth(1).unwrap_or_default())?;
        let metaroce = workspace.metaroce();
        let started = Instant::now();
        let done = if self.alone {
            // The command of the other end never runs: there is none.
            let run = format!("{} run --", metaroce.display());
            // The third address of the network of the first plane.
            let line = self
                .line
                .replace("{run}", &run)
                .replace("{neighbour}", "$(echo {server} | sed 's/[0-9]*$/77/')");
            let mut command = namespaces::netns(workspace)?;
            command.args(["--planes", "1", "--", "sh", "-c", &format!("{line}; test $? -ne 0")]);
            namespaces::run(&mut command)?
        } else {
            let run = format!("env METAROCE_PLANES=lo {} run --", metaroce.display());
            let done =
                exec::run(self.name, &mut shell(workspace, &self.line.replace("{run}", &run)), TIMEOUT)?;
            if done.status.is_none_or(|status| status.success()) {
                return Err(Trouble::Fail(done.to_string()));
            }
            done
        };
        let took = started.elapsed();
        let limit = if self.alone { 4 * REFUSED_WITHIN } else { REFUSED_WITHIN };
        if took <= limit && done.output.contains(self.says) {
            Ok(String::new())
        } else {
            Err(Trouble::Fail(format!("no `{}` within {limit:?}, after {took:?}\n{done}", self.says)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix__has_no_name_twice_and_every_program_with_and_without_loss() {
        let names: std::collections::BTreeSet<String> = matrix().iter().map(Case::name).collect();
        assert_eq!(names.len(), matrix().len());
        for program in PROGRAMS {
            let of = |lossy| matrix().iter().any(|c| c.lossy == lossy && c.program.name == program.name);
            assert!(of(false) && of(true));
        }
    }

    #[test]
    fn sample__has_every_program_once() {
        for seed in 0..20 {
            let names: Vec<&str> =
                sample(&mut Random::new(seed)).iter().map(|case| case.program.name).collect();
            assert_eq!(names, PROGRAMS.iter().map(|program| program.name).collect::<Vec<_>>());
        }
    }
}
