//! Runs a stock program as server and client: own port per run, readiness seen and not slept for, hard timeout.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::namespaces;
use crate::exec::{Finished, Running};
use crate::packages::find_in_path;
use crate::report::Trouble;
use crate::workspace::Workspace;

/// How often the server's port is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A server must listen within this time.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(20);
/// Attempts when somebody else takes the port between our choice and the server's bind.
const PORT_ATTEMPTS: usize = 5;
/// What servers print when their port is taken.
const PORT_TAKEN: [&str; 4] =
    ["Address already in use", "Couldn't listen to port", "bind() failed", "unable to start listener"];

/// What surrounds both ends of a run.
#[derive(Debug, Clone, Default)]
pub struct Circumstances {
    /// Share of packets dropped, per mille.
    pub loss_per_mille: u32,
    /// Seed of the pattern of drops.
    pub seed: u64,
    /// More variables to set.
    pub environment: Vec<(&'static str, String)>,
    /// Command in front of `metaroce run` that confines it; empty for none.
    pub confinement: Vec<OsString>,
    /// Another place of `metaroce` and its libraries.
    pub metaroce: Option<PathBuf>,
    /// Where the two ends are.
    pub place: Place,
}

/// Where the two ends of a run are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Place {
    /// Both on this host's loopback.
    #[default]
    Loopback,
    /// Two hosts made of network namespaces, with two planes between them.
    Namespaces,
}

impl Place {
    /// What follows the name of a check.
    pub fn suffix(self) -> &'static str {
        match self {
            Place::Loopback => "",
            Place::Namespaces => ", between namespaces",
        }
    }
}

impl Circumstances {
    /// Seeded loss and nothing else.
    pub fn lossy(loss_per_mille: u32, seed: u64) -> Circumstances {
        Circumstances { loss_per_mille, seed, ..Circumstances::default() }
    }

    /// `PROGRAM` under `metaroce run` in these circumstances.
    pub fn command(&self, workspace: &Workspace, program: &Path) -> Command {
        let mut command = workspace.under_metaroce(program, &self.confinement, self.metaroce.as_deref());
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if self.loss_per_mille > 0 {
            command.env("METAROCE_LOSS", self.loss().to_string()).env("METAROCE_SEED", self.seed.to_string());
        }
        command
    }

    /// The share as a fraction.
    fn loss(&self) -> f64 {
        f64::from(self.loss_per_mille) / 1000.0
    }

    /// The options of `metaroce run` that ask for the same.
    fn options(&self) -> String {
        if self.loss_per_mille == 0 {
            return String::new();
        }
        format!(" --loss {} --seed {}", self.loss(), self.seed)
    }
}

/// One server-and-client run.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Program both ends run.
    pub program: &'static str,
    /// Arguments of both ends, without port and address.
    pub arguments: Vec<String>,
    /// What surrounds both ends.
    pub circumstances: Circumstances,
    /// Both ends together must end within this time.
    pub timeout: Duration,
}

/// Both ends after their end.
#[derive(Debug, Clone)]
pub struct Ended {
    /// The end that was started first.
    pub server: Finished,
    /// The end that connected.
    pub client: Finished,
}

impl Ended {
    /// Both outputs, for a failure.
    pub fn text(&self, headline: &str) -> String {
        format!("{headline}\n{}\n{}", self.server, self.client)
    }
}

/// Path of a stock program; a skip when the machine does not have it.
pub fn program(name: &str) -> Result<PathBuf, Trouble> {
    find_in_path(name).ok_or_else(|| Trouble::Skip(format!("{name} is not installed")))
}

impl Pair {
    /// Runs both ends; fails unless both end with code 0 in time.
    pub fn run(&self, workspace: &Workspace) -> Result<Ended, Trouble> {
        let program = program(self.program)?;
        if self.circumstances.place == Place::Namespaces {
            return self.run_between_namespaces(workspace);
        }
        let deadline = Instant::now() + self.timeout;
        let (server, client) = serve_and_connect(
            self.program,
            |port| self.command(workspace, &program, port, None),
            |port| self.command(workspace, &program, port, Some("127.0.0.1")),
        )
        .map_err(|trouble| match trouble {
            Trouble::Fail(text) => Trouble::Fail(format!("{}\n{text}", self.line())),
            skip => skip,
        })?;
        self.judge(server, client, deadline)
    }

    /// The faults are injected as on loopback. The output of both ends comes as one.
    fn run_between_namespaces(&self, workspace: &Workspace) -> Result<Ended, Trouble> {
        let (metaroce, options) = (workspace.metaroce(), self.circumstances.options());
        let end =
            format!("{} run{options} -- {} {}", metaroce.display(), self.program, self.arguments.join(" "));
        let mut command = namespaces::netns(workspace)?;
        command.args(["--planes", "2", "--server", &end, "--"]);
        command.args(end.split_whitespace()).arg("{server}");
        let done = namespaces::run(&mut command)?;
        Ok(Ended { server: done.clone(), client: done })
    }

    fn judge(&self, server: Running, client: Running, deadline: Instant) -> Result<Ended, Trouble> {
        let client = client.finish(deadline);
        // A client that failed leaves its server waiting: no need to wait for the whole timeout then.
        let patience = if client.success() { deadline } else { Instant::now() + Duration::from_secs(2) };
        let ended = Ended { server: server.finish(patience), client };
        if ended.client.success() && ended.server.success() {
            return Ok(ended);
        }
        let headline = match (ended.client.status, ended.server.status) {
            (None, _) => format!("client did not end within {} s", self.timeout.as_secs()),
            (Some(status), _) if !status.success() => format!("client failed ({status})"),
            (_, None) => format!("server did not end within {} s", self.timeout.as_secs()),
            (_, Some(status)) => format!("server failed ({status})"),
        };
        Err(Trouble::fail(ended.text(&format!("{headline}: {}", self.line()))))
    }

    fn command(&self, workspace: &Workspace, program: &Path, port: u16, peer: Option<&str>) -> Command {
        let mut command = self.circumstances.command(workspace, program);
        command.args(&self.arguments).arg("-p").arg(port.to_string()).args(peer);
        command
    }

    /// The command line a person would type to see it again.
    fn line(&self) -> String {
        let (options, arguments) = (self.circumstances.options(), self.arguments.join(" "));
        format!("metaroce run --planes lo{options} -- {} {arguments} [127.0.0.1]", self.program)
    }
}

/// How a server shows that it is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadyOn {
    /// It listens on its port by TCP.
    Tcp,
    /// It has its UDP port, as listeners of rdma_cm have.
    Udp,
    /// It has this UDP port, whatever port was chosen for it.
    UdpPort(u16),
}

/// [`serve_and_connect_on`] for servers that listen by TCP.
pub fn serve_and_connect(
    name: &str,
    server: impl Fn(u16) -> Command,
    client: impl Fn(u16) -> Command,
) -> Result<(Running, Running), Trouble> {
    serve_and_connect_on(ReadyOn::Tcp, name, server, client)
}

/// Starts a server on a port of its own, waits until it listens, starts its client. When somebody else takes the port
/// between our choice and the server's bind, another port is tried.
pub fn serve_and_connect_on(
    ready: ReadyOn,
    name: &str,
    server: impl Fn(u16) -> Command,
    client: impl Fn(u16) -> Command,
) -> Result<(Running, Running), Trouble> {
    let mut taken = String::new();
    for _ in 0..PORT_ATTEMPTS {
        let port = free_port()?;
        let running = Running::start(format!("{name} server"), &mut server(port))?;
        match wait_for_listener(running, ready, port) {
            Ok(running) => {
                return Ok((running, Running::start(format!("{name} client"), &mut client(port))?));
            }
            Err(text) if PORT_TAKEN.iter().any(|mark| text.contains(mark)) => taken = text,
            Err(text) => return Err(Trouble::Fail(text)),
        }
    }
    Err(Trouble::fail(format!("no free port in {PORT_ATTEMPTS} attempts\n{taken}")))
}

/// A port the kernel says is free now.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Waits until something listens on `port`; the server's output when it ends or stays silent instead. Connecting
/// would be simpler, but these servers take the first connection for their peer.
fn wait_for_listener(mut server: Running, ready: ReadyOn, port: u16) -> Result<Running, String> {
    let deadline = Instant::now() + LISTEN_TIMEOUT;
    while !is_listening(server.pid(), ready, port) {
        if server.has_ended() || Instant::now() > deadline {
            return Err(format!("the server does not listen\n{}", server.finish(Instant::now())));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(server)
}

/// Whether something listens on `port` in the network namespace of process `pid`.
fn is_listening(pid: u32, ready: ReadyOn, port: u16) -> bool {
    let (tables, state, port) = match ready {
        ReadyOn::Tcp => (["tcp", "tcp6"], TCP_LISTEN, port),
        ReadyOn::Udp => (["udp", "udp6"], UDP_BOUND, port),
        ReadyOn::UdpPort(port) => (["udp", "udp6"], UDP_BOUND, port),
    };
    tables
        .iter()
        .filter_map(|table| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).ok())
        .any(|table| table_lists(&table, state, port))
}

/// States in `/proc/net/tcp` and `/proc/net/udp`.
const TCP_LISTEN: &str = "0A";
const UDP_BOUND: &str = "07";

/// Whether a `/proc/net/tcp` table has a socket in this state on `port`.
fn table_lists(table: &str, state: &str, port: u16) -> bool {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        fields.next().is_some_and(|local| local.ends_with(&suffix)) && fields.nth(1) == Some(state)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists__listen_sockets_only() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n   \
            1: 0100007F:1F91 0100007F:0050 01 00000000:00000000\n";
        assert!(table_lists(table, TCP_LISTEN, 0x1f90));
        assert!(!table_lists(table, TCP_LISTEN, 0x1f91));
        assert!(!table_lists(table, TCP_LISTEN, 0x1f92));
    }

    #[test]
    fn is_listening__sees_a_real_listener() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(std::process::id(), ReadyOn::Tcp, port));
    }
}
