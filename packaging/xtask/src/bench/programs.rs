//! Runs one measurement: a program and its peer on loopback or between two hosts, their figures and their processor time.

use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Sample, TIMEOUT};
use crate::exec::{Finished, Running};
use crate::report::Trouble;
use crate::stock::namespaces;
use crate::stock::pair::{program, serve_and_connect};
use crate::stock::perftest::result_rows;
use crate::workspace::Workspace;

/// How often a far end is looked at until it has said where it listens.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// What the far end of `metaroce-bench` says before the address.
const READY: &str = "listening ";

/// Where the two ends are.
#[derive(Clone, Copy, Default)]
pub enum Place {
    /// Both on loopback.
    #[default]
    Loopback,
    /// Two namespaces with this many cables of this MTU between them.
    Veth { planes: u32, mtu: u32 },
}

/// A run of perftest.
#[derive(Clone, Copy, Default)]
pub struct Perftest {
    /// Program and arguments beside the device's.
    pub line: &'static str,
    /// Processor of the server and of the client; anywhere if none.
    pub cores: Option<[u32; 2]>,
    /// Settings of the device, `NAME=value`.
    pub settings: &'static [&'static str],
    pub place: Place,
}

impl Perftest {
    pub const fn on(self, place: Place) -> Perftest {
        Perftest { place, ..self }
    }

    pub const fn pinned(self, server: u32, client: u32) -> Perftest {
        Perftest { cores: Some([server, client]), ..self }
    }

    pub const fn with(self, settings: &'static [&'static str]) -> Perftest {
        Perftest { settings, ..self }
    }
}

/// A run of perftest as its arguments.
pub const fn perftest(line: &'static str) -> Perftest {
    Perftest { line, cores: None, settings: &[], place: Place::Loopback }
}

/// Average bandwidth in Gb/s, and the message rate in millions per second as field `rate`.
pub fn bandwidth(workspace: &Workspace, run: Perftest) -> Result<Sample, Trouble> {
    let mut run = run_perftest(workspace, run, &["--report_gbits"])?;
    let (value, rate) = (run.column(3)?, run.column(4)?);
    let (bytes, messages) = (run.column(0)? * run.column(1)?, run.column(1)?);
    Ok(Sample { value, fields: vec![("rate", rate)], cpu: run.cpu.take(), bytes, messages })
}

/// Message rate in millions per second.
pub fn rate(workspace: &Workspace, run: Perftest) -> Result<Sample, Trouble> {
    let sample = bandwidth(workspace, run)?;
    Ok(Sample { value: sample.fields[0].1, fields: Vec::new(), ..sample })
}

/// Typical latency as perftest reports it, in microseconds; its p99 as field `p99`.
pub fn latency(workspace: &Workspace, run: Perftest) -> Result<Sample, Trouble> {
    let mut run = run_perftest(workspace, run, &[])?;
    let (value, p99) = (run.column(4)?, run.column(7)?);
    let messages = run.column(1)?;
    Ok(Sample { value, fields: vec![("p99", p99)], cpu: run.cpu.take(), bytes: 0.0, messages })
}

/// The last line of results, and the processor seconds of server and client where they can be told apart.
struct Ran {
    row: Vec<String>,
    cpu: Option<[f64; 2]>,
    output: String,
}

impl Ran {
    fn column(&self, index: usize) -> Result<f64, Trouble> {
        let word = self.row.get(index).and_then(|word| word.parse().ok());
        word.ok_or_else(|| Trouble::Fail(format!("no such column of results\n{}", self.output)))
    }
}

fn run_perftest(workspace: &Workspace, run: Perftest, more: &[&str]) -> Result<Ran, Trouble> {
    let mut words = run.line.split_whitespace();
    let name = words.next().unwrap_or_default();
    let path = program(name)?;
    let fixed = ["-d", "metaroce0", "-x", "0", "-F"];
    let arguments: Vec<&str> = fixed.into_iter().chain(words).chain(more.iter().copied()).collect();
    let (output, cpu) = match run.place {
        Place::Loopback => {
            let end = |side: usize| {
                let confinement = run.cores.map_or(Vec::new(), |cores| pin(cores[side]));
                let mut command = workspace.under_metaroce(&path, &confinement, None);
                command.envs(run.settings.iter().filter_map(|setting| setting.split_once('=')));
                command.args(&arguments);
                command
            };
            if let Some(cores) = run.cores {
                have_cores(cores)?;
            }
            let (server, client) = serve_and_connect(
                name,
                |port| with_port(end(0), port),
                |port| {
                    let mut command = with_port(end(1), port);
                    command.arg("127.0.0.1");
                    command
                },
            )?;
            let (server, client) = both(server, client)?;
            (client.output.clone(), Some([&server, &client].map(seconds)))
        }
        Place::Veth { .. } => {
            let metaroce = workspace.metaroce();
            let settings = run.settings.join(" ");
            let end = format!("env {settings} {} run -- {name} {}", metaroce.display(), arguments.join(" "));
            (between(workspace, run.place, &[], &end, &format!("{end} {{server}}"))?, None)
        }
    };
    let row = result_rows(&output).pop();
    row.map(|row| Ran { row, cpu, output: output.clone() })
        .ok_or_else(|| Trouble::Fail(format!("no results\n{output}")))
}

/// Processor seconds of a process and the children it has waited for.
fn seconds(done: &Finished) -> f64 {
    (done.cpu.own + done.cpu.children).as_secs_f64()
}

fn with_port(mut command: Command, port: u16) -> Command {
    command.arg("-p").arg(port.to_string());
    command
}

/// What keeps a command on one processor.
fn pin(core: u32) -> Vec<OsString> {
    ["taskset", "-c", &core.to_string()].map(OsString::from).to_vec()
}

fn have_cores(cores: [u32; 2]) -> Result<(), Trouble> {
    program("taskset")?;
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = cores.into_iter().max().unwrap_or(0) as usize + 1;
    let text =
        || Trouble::Skip(format!("{wanted} processors are needed to pin the ends, {there} is what there is"));
    if wanted <= there { Ok(()) } else { Err(text()) }
}

/// Waits for both; either one's failure is one of the measurement.
fn both(server: Running, client: Running) -> Result<(Finished, Finished), Trouble> {
    let client = client.finish(Instant::now() + TIMEOUT);
    let patience = if client.success() { TIMEOUT } else { Duration::from_secs(1) };
    let server = server.finish(Instant::now() + patience);
    if client.success() && server.success() {
        return Ok((server, client));
    }
    Err(Trouble::Fail(format!("{server}\n{client}")))
}

/// Server and client on two hosts; the output of both.
fn between(
    workspace: &Workspace,
    place: Place,
    options: &[&str],
    server: &str,
    client: &str,
) -> Result<String, Trouble> {
    let Place::Veth { planes, mtu } = place else {
        return Err(Trouble::fail("not a place with two hosts"));
    };
    let mut command = namespaces::netns(workspace)?;
    command.args(["--planes", &planes.to_string(), "--mtu", &mtu.to_string()]).args(options);
    command.args(["--server", server, "--"]).args(client.split_whitespace());
    Ok(namespaces::run(&mut command)?.output)
}

/// A yardstick of `metaroce-bench` with two ends: what its line of JSON says.
pub fn yardstick(
    workspace: &Workspace,
    line: &str,
    place: Place,
    cores: Option<[u32; 2]>,
) -> Result<(Value, Option<[f64; 2]>), Trouble> {
    let path = workspace.built("metaroce-bench")?;
    let (output, cpu) = match place {
        Place::Loopback => {
            if let Some(cores) = cores {
                have_cores(cores)?;
            }
            let command = |side: usize| {
                let mut words = cores.map_or(Vec::new(), |cores| pin(cores[side]));
                words.push(path.clone().into_os_string());
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]).args(line.split_whitespace());
                command
            };
            let mut far = Running::start("far end", command(0).args(["--listen", "127.0.0.1"]))?;
            let address = listening(&mut far)?;
            let near = Running::start("near end", command(1).args(["--json", "--connect", &address]))?;
            let (far, near) = both(far, near)?;
            (near.output.clone(), Some([&far, &near].map(seconds)))
        }
        Place::Veth { .. } => {
            let program = format!("{} {line}", path.display());
            let server = format!("{program} --listen {{server}}");
            let client = format!("{program} --json --connect {{ready}}");
            (between(workspace, place, &["--ready", READY.trim_end()], &server, &client)?, None)
        }
    };
    Ok((json_line(&output)?, cpu))
}

/// Where the far end of a yardstick listens.
fn listening(far: &mut Running) -> Result<String, Trouble> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let text = far.output_so_far();
        let line = text.split_inclusive('\n').find_map(|line| line.strip_suffix('\n')?.strip_prefix(READY));
        if let Some(address) = line {
            return Ok(address.to_owned());
        }
        if far.has_ended() || Instant::now() > deadline {
            return Err(Trouble::Fail(format!("the far end does not listen\n{text}")));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A benchmark of `metaroce-bench` that needs one process: its lines of JSON.
pub fn alone(workspace: &Workspace, line: &str) -> Result<Vec<Value>, Trouble> {
    let path = workspace.built("metaroce-bench")?;
    let done = crate::exec::run("metaroce-bench", Command::new(path).args(line.split_whitespace()), TIMEOUT)?;
    if !done.success() {
        return Err(Trouble::Fail(done.to_string()));
    }
    Ok(done.output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

fn json_line(output: &str) -> Result<Value, Trouble> {
    let value = output.lines().find_map(|line| serde_json::from_str::<Value>(line).ok());
    value.ok_or_else(|| Trouble::Fail(format!("no line of JSON\n{output}")))
}

/// A number of a JSON answer.
pub fn number(value: &Value, field: &str) -> Result<f64, Trouble> {
    value[field].as_f64().ok_or_else(|| Trouble::Fail(format!("no {field} in {value}")))
}

/// Stream of TCP by iperf3, Gb/s.
pub fn iperf3(workspace: &Workspace, place: Place) -> Result<Sample, Trouble> {
    let path = program("iperf3")?;
    let (output, cpu) = match place {
        Place::Loopback => {
            let command = |port: u16, words: &[&str]| {
                let mut command = Command::new(&path);
                command.args(["-p", &port.to_string()]).args(words);
                command
            };
            let (server, client) = serve_and_connect(
                "iperf3",
                |port| command(port, &["-s", "-1", "-B", "127.0.0.1"]),
                |port| command(port, &["-c", "127.0.0.1", "-t", "1", "-J"]),
            )?;
            let client = client.finish(Instant::now() + TIMEOUT);
            // It has served its one client, but goes on for a moment.
            let server = server.finish(Instant::now() + Duration::from_secs(3));
            (client.output.clone(), Some([&server, &client].map(seconds)))
        }
        Place::Veth { .. } => {
            let client = format!("{} -c {{server}} -t 1 -J", path.display());
            (between(workspace, place, &["--end-server"], "iperf3 -s -1 -B {server}", &client)?, None)
        }
    };
    // The server's report may stand before the JSON, which takes many lines.
    let json = output.find("\n{").map_or(0, |at| at + 1);
    let mut values = serde_json::Deserializer::from_str(output.get(json..).unwrap_or_default()).into_iter();
    let value: Value = values.next().and_then(Result::ok).ok_or_else(|| Trouble::Fail(output.clone()))?;
    let received = &value["end"]["sum_received"];
    let bits = number(received, "bits_per_second")?;
    Ok(Sample { cpu, bytes: number(received, "bytes")?, ..Sample::of(bits / 1e9) })
}

/// `ucx_perftest` of the upper layer over TCP: columns of its last line.
pub fn ucx_tcp(workspace: &Workspace, test: &str, place: Place) -> Result<Vec<f64>, Trouble> {
    let path = program("ucx_perftest")?;
    let output = match place {
        Place::Loopback => {
            let command = |port: u16| {
                let mut command = Command::new(&path);
                command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "lo");
                command.args(test.split_whitespace()).arg("-f");
                with_port(command, port)
            };
            let client = |port| {
                let mut command = command(port);
                command.arg("127.0.0.1");
                command
            };
            let (server, client) = serve_and_connect("ucx_perftest", command, client)?;
            both(server, client)?.1.output
        }
        Place::Veth { .. } => {
            let end = format!("env UCX_TLS=tcp UCX_NET_DEVICES=plane0 {} -f {test}", path.display());
            between(workspace, place, &[], &end, &format!("{end} {{server}}"))?
        }
    };
    let line = output.lines().rev().find_map(|line| {
        let words = line.strip_prefix("Final:").unwrap_or(line).split_whitespace();
        words.map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>().filter(|row| row.len() >= 8)
    });
    line.ok_or_else(|| Trouble::Fail(format!("no line of results\n{output}")))
}

/// `fi_pingpong` over libfabric's TCP: microseconds one way.
pub fn libfabric_tcp() -> Result<Sample, Trouble> {
    let path = program("fi_pingpong")?;
    let command = |port: u16, option: &str, peer: Option<&str>| {
        let mut command = Command::new(&path);
        command.args("-p tcp -e msg -I 2000 -S 64".split_whitespace());
        command.args([option, &port.to_string()]).args(peer);
        command
    };
    let (server, client) = serve_and_connect(
        "fi_pingpong",
        |port| command(port, "-B", None),
        |port| command(port, "-P", Some("127.0.0.1")),
    )?;
    let (_, client) = both(server, client)?;
    // bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec
    let words: Vec<&str> = client.output.lines().last().unwrap_or_default().split_whitespace().collect();
    let value = words.get(6).and_then(|word| word.parse().ok());
    value.map(Sample::of).ok_or_else(|| Trouble::Fail(client.to_string()))
}

/// What some pairs of processes reach together that write the same amount at the same time, Gb/s: all of it by the time
/// of the slowest.
pub fn pairs_together(workspace: &Workspace, pairs: usize, line: &'static str) -> Result<Sample, Trouble> {
    let samples: Vec<Result<Sample, Trouble>> = std::thread::scope(|scope| {
        let one = || scope.spawn(|| bandwidth(workspace, perftest(line)));
        let running: Vec<_> = (0..pairs).map(|_| one()).collect();
        let broken = || Err(Trouble::fail("a measuring thread panicked"));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| broken())).collect()
    });
    let samples = samples.into_iter().collect::<Result<Vec<_>, _>>()?;
    let slowest = samples.iter().map(|sample| sample.value).fold(f64::MAX, f64::min);
    Ok(Sample::of(slowest * pairs as f64))
}
