//! Unmodified perftest as traffic: pairs of a server and a client on the two hosts, and what arrives meanwhile.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use metaroce_netns::{CannotHere, Ended, Fabric, Failure, Listens};

/// First TCP port of the servers.
const PORT: u16 = 18_600;
/// Whatever a run lasts, its ends are done so much later, or hang.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Servers on host 0 and their clients on host 1.
pub struct Pairs {
    servers: Vec<Ended>,
    clients: Vec<Ended>,
}

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// The program.
    pub name: &'a str,
    /// Its arguments, without device, port and address.
    pub arguments: &'a str,
    /// Mb/s of each plane that both ends are told; 0: not told.
    pub told_mbit: u32,
}

/// `metaroce`, which lies beside this program.
pub fn metaroce() -> Result<PathBuf, Failure> {
    let here = std::env::current_exe()?;
    let path = here.with_file_name("metaroce");
    if path.exists() { Ok(path) } else { Err(Failure::Broken(format!("{} is not built", path.display()))) }
}

fn command(fabric: &Fabric, program: Program<'_>, port: u16) -> Result<Command, Failure> {
    let mut command = Command::new(metaroce()?);
    command.args(["run", "--", program.name, "-d", "metaroce0", "-p", &port.to_string()]);
    command.args(program.arguments.split_whitespace()).env("METAROCE_PLANES", fabric.planes());
    if program.told_mbit > 0 {
        command.env("METAROCE_PLANE_RATE", program.told_mbit.to_string());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

impl Pairs {
    /// Starts so many pairs; all servers listen before the first client starts.
    pub fn start(fabric: &Fabric, program: Program<'_>, count: u16) -> Result<Self, Failure> {
        let found = std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program.name).exists()));
        if !found {
            return Err(Failure::CannotHere(CannotHere(format!("{} is not installed", program.name))));
        }
        let [server_host, client_host] = fabric.hosts();
        let mut pairs = Pairs { servers: Vec::new(), clients: Vec::new() };
        for pair in 0..count {
            let mut server = command(fabric, program, PORT + pair)?;
            pairs.servers.push(Ended(server_host.inside(&mut server).spawn()?));
        }
        for (pair, server) in (0..count).zip(&mut pairs.servers) {
            Listens::TcpPort(PORT + pair).wait(&mut server.0)?;
        }
        for pair in 0..count {
            let mut client = command(fabric, program, PORT + pair)?;
            client.arg(server_host.control(fabric.plan()).to_string());
            pairs.clients.push(Ended(client_host.inside(&mut client).spawn()?));
        }
        Ok(pairs)
    }

    /// Process ids of the servers.
    pub fn server_pids(&self) -> Vec<u32> {
        self.servers.iter().map(|server| server.0.id()).collect()
    }

    /// Waits for all ends; what each client printed. An end that failed, or hangs, is an error.
    pub fn finish(mut self) -> Result<Vec<String>, Failure> {
        let deadline = Instant::now() + END_LIMIT;
        let clients = self.clients.iter_mut();
        let printed = clients.map(|client| ended(&mut client.0, deadline)).collect::<Result<Vec<_>, _>>()?;
        self.servers.iter_mut().try_for_each(|server| ended(&mut server.0, deadline).map(|_| ()))?;
        Ok(printed)
    }
}

fn ended(child: &mut Child, deadline: Instant) -> Result<String, Failure> {
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut out)).transpose()?;
    child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut err)).transpose()?;
    let last =
        err.lines().chain(out.lines()).find(|line| !line.trim().is_empty()).unwrap_or_default().to_owned();
    match status {
        None => Err(Failure::Broken(format!("an end hangs: {last}"))),
        Some(status) if !status.success() => {
            Err(Failure::Broken(format!("an end failed ({status}): {last}")))
        }
        Some(_) => Ok(out),
    }
}

/// Gigabits per second that a bandwidth test printed last, from its column of MiB/s, which has more digits than the one
/// of Gb/s.
pub fn gbits(printed: &str) -> Result<f64, Failure> {
    let row = printed.lines().rev().find_map(|line| {
        let fields: Vec<f64> =
            line.split_whitespace().map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
        fields.get(3).filter(|_| fields.len() >= 4).copied()
    });
    let mib = row.ok_or_else(|| Failure::Broken("a client printed no result".into()))?;
    Ok(mib * f64::from(1 << 20) * 8.0 / 1e9)
}

/// What arrives at host 0, looked at every few milliseconds.
pub struct Meter<'a> {
    fabric: &'a Fabric,
    started: Instant,
    /// When, and bytes on all planes so far.
    seen: Vec<(Duration, u64)>,
}

impl<'a> Meter<'a> {
    /// Begins now.
    pub fn new(fabric: &'a Fabric) -> Self {
        Meter { fabric, started: Instant::now(), seen: Vec::new() }
    }
    /// Looks on until so long after the beginning.
    pub fn until(&mut self, end: Duration) -> Result<(), Failure> {
        while self.started.elapsed() < end {
            let bytes = self.fabric.arrived(0)?.iter().map(|plane| plane.bytes).sum();
            self.seen.push((self.started.elapsed(), bytes));
            std::thread::sleep(Duration::from_millis(4));
        }
        Ok(())
    }
    /// Time since the beginning.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }
    /// Mb/s between two times.
    pub fn mbit(&self, from: Duration, to: Duration) -> f64 {
        let at =
            |time: Duration| self.seen.iter().find(|(when, _)| *when >= time).or(self.seen.last()).copied();
        let (Some((a, first)), Some((b, last))) = (at(from), at(to)) else { return 0.0 };
        (last - first) as f64 * 8.0 / 1e6 / (b - a).as_secs_f64().max(1e-3)
    }
    /// How long after `from` the rate over 20 ms first reached `goal` Mb/s.
    pub fn reached(&self, from: Duration, goal: f64) -> Option<Duration> {
        let span = Duration::from_millis(20);
        let ends = self.seen.iter().map(|(when, _)| *when).filter(|when| *when >= from + span);
        ends.into_iter().find(|end| self.mbit(*end - span, *end) >= goal).map(|end| end - from)
    }
}
