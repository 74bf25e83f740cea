//! Starts the two ends of every case, collects their checks, prints the verdict. Uses no verbs itself.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::json;

use crate::control::Check;
use crate::modes::{Case, Mode};
use crate::options::Options;
use crate::process::Spec;
use crate::{Outcome, pattern};

/// The server's line that announces its port.
const READY: &str = "listening ";

/// Arguments of `run`.
#[derive(Args)]
pub struct RunArgs {
    /// What to check.
    mode: Mode,
    /// Only cases whose name contains this.
    #[arg(long)]
    case: Option<String>,
    /// Far end's server; one is started here by default.
    #[arg(long)]
    server: Option<SocketAddr>,
    /// One JSON object per check and a closing one instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: Options,
}

/// Runs the mode; true when nothing failed.
pub fn run(args: &RunArgs) -> Outcome<bool> {
    let seed = args.options.seed.unwrap_or_else(random_seed);
    let own = if args.server.is_none() { Some(Server::start()?) } else { None };
    let server = args.server.or(own.as_ref().map(|s| s.address)).ok_or("no server")?;
    if !args.json {
        println!("metaroce-checker {} seed {seed}", args.mode);
    }
    let mut tally = Tally { json: args.json, ..Tally::default() };
    for (mode, case) in args.mode.each(&args.options) {
        if args.case.as_ref().is_none_or(|part| case.name.contains(part.as_str())) {
            let spec = Spec { mode, case: case.name.clone(), seed, options: args.options.clone() };
            run_pair(&spec, &case, server, &mut tally)?;
        }
    }
    if args.json {
        println!("{}", json!({"passed": tally.passed, "failed": tally.failed, "seed": seed}));
    } else {
        println!("{} passed, {} failed", tally.passed, tally.failed);
    }
    Ok(tally.failed == 0 && tally.passed > 0)
}

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: usize,
    json: bool,
}

impl Tally {
    fn add(&mut self, spec: &Spec, check: &Check) {
        let Check { name, ok, detail } = check;
        *(if *ok { &mut self.passed } else { &mut self.failed }) += 1;
        let case = format!("{}/{}", spec.mode, spec.case);
        if self.json {
            println!("{}", json!({"case": case, "check": name, "ok": ok, "detail": detail}));
        } else {
            println!("{} {case}: {name}: {detail}", if *ok { "PASS" } else { "FAIL" });
        }
    }
}

fn run_pair(spec: &Spec, case: &Case, server: SocketAddr, tally: &mut Tally) -> Outcome {
    let begin = Instant::now();
    let mut child = Command::new(std::env::current_exe()?)
        .args(["case", "--spec", &serde_json::to_string(spec)?, "--server", &server.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().ok_or("child without stdout")?;
    let (mut checks, mut failed) = (0, 0);
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        match serde_json::from_str::<Check>(&line) {
            Ok(check) => {
                checks += 1;
                failed += usize::from(!check.ok);
                tally.add(spec, &check);
            }
            Err(_) => eprintln!("{line}"),
        }
    }
    let status = child.wait()?;
    let spent = begin.elapsed().as_secs_f64();
    let problem = match (status.signal(), status.success()) {
        (Some(libc::SIGALRM), _) => Some(format!("hung: killed after {spent:.1} s (limit {:?})", case.limit)),
        (Some(signal), _) => Some(format!("died of signal {signal} after {spent:.1} s")),
        (None, false) if failed == 0 => Some(describe_exit(status)),
        (None, true) if checks == 0 => Some("checked nothing".into()),
        _ => None,
    };
    if let Some(detail) = problem {
        tally.add(spec, &Check { name: "process".into(), ok: false, detail });
    }
    Ok(())
}

fn describe_exit(status: ExitStatus) -> String {
    format!("ended with {status} before it could say why")
}

/// A server of our own, killed with its cases when dropped.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start() -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["server", "--bind", "127.0.0.1", "--port", "0", "--with-parent"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or("server without stdout")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.strip_prefix(READY).and_then(|a| a.trim().parse().ok());
        match address {
            Some(address) => Ok(Self { child, address }),
            None => {
                // Best effort: it has most likely exited already.
                let _ = child.kill();
                Err(format!("the server process did not start: {:?}", child.wait()?).into())
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its case processes die with it (PR_SET_PDEATHSIG).
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The far end: each connection becomes a process that has it as stdin.
pub fn serve(bind: IpAddr, port: u16) -> Outcome {
    let listener = TcpListener::bind(SocketAddr::new(bind, port))?;
    println!("{READY}{}", listener.local_addr()?);
    let mut children: Vec<Child> = Vec::new();
    for stream in listener.incoming() {
        let child = Command::new(std::env::current_exe()?)
            .arg("case")
            .stdin(Stdio::from(OwnedFd::from(stream?)))
            .stdout(Stdio::null())
            .spawn()?;
        children.push(child);
        children.retain_mut(still_there);
    }
    Ok(())
}

/// Reaps a far end that has ended, and says so if it did not end by itself (some cases kill it on purpose).
fn still_there(child: &mut Child) -> bool {
    match child.try_wait() {
        Ok(Some(status)) => {
            if let Some(signal) = status.signal().filter(|signal| *signal != libc::SIGKILL) {
                eprintln!("metaroce-checker: a far end died of signal {signal}");
            }
            false
        }
        Ok(None) => true,
        Err(_) => false,
    }
}

fn random_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    // Short enough to be typed again.
    pattern::derive(now, &[u64::from(std::process::id())]) % 1_000_000_000
}
