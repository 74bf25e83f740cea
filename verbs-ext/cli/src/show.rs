//! `metaroce show`: planes, paths, connections, queue pairs and keys of running processes, asked at their control
//! sockets.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

use crate::control::{self, Process};
use crate::output;

mod text;

/// Options of `metaroce show`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to show
    #[arg(value_enum, default_value = "planes")]
    what: What,
    /// Print one JSON array: an object per process, with everything that is known of each item
    #[arg(long)]
    json: bool,
    /// Only this process
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
    /// Print again every N seconds (1 when not given) until interrupted
    #[arg(short, long, value_name = "N", num_args = 0..=1, default_missing_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
}

/// What there is to be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// Planes: link, addresses, packets, rates
    Planes,
    /// Paths of every connection: state and cause, round trip time, window, marks, rate, repairs
    Paths,
    /// Connections: peer, windows, rate hints
    Connections,
    /// Queue pairs: state, peer, what is posted
    Qps,
    /// Memory regions and windows
    Mrs,
}

/// Between the two looks that a rate is taken from.
const RATE_SPAN: Duration = Duration::from_millis(100);

/// Bytes counted at a time, by process and item.
type Counted = HashMap<(String, String), (u64, [u64; 2])>;

/// Prints what there is; 1 when no process has the device open, or one does not answer.
pub fn run(args: &Args) -> ExitCode {
    let mut before = Counted::new();
    loop {
        let mut processes = match control::processes(args.pid) {
            Ok(processes) => processes,
            Err(error) => {
                output::tell(format_args!("cannot look for processes: {error}"));
                return ExitCode::FAILURE;
            }
        };
        if before.is_empty() && args.what.has_rates() {
            let _ = look(args.what, &mut processes, &mut before);
            std::thread::sleep(RATE_SPAN);
        }
        let (shown, errors) = look(args.what, &mut processes, &mut before);
        let text =
            if args.json { format!("{}\n", Value::Array(shown)) } else { text::all(args.what, &shown) };
        let good = errors.is_empty() && !processes.is_empty();
        let usual = if good { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        let clear =
            if args.watch.is_some() && std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        if let Err(code) = output::print(format!("{clear}{text}"), usual) {
            return code;
        }
        errors.iter().for_each(output::tell);
        if processes.is_empty() {
            output::tell("no process of yours in this network namespace has metaroce0 open");
        }
        let Some(seconds) = args.watch else {
            return usual;
        };
        std::thread::sleep(Duration::from_secs(seconds));
    }
}

impl What {
    fn has_rates(self) -> bool {
        matches!(self, What::Planes | What::Paths)
    }
    /// As the process is asked for it.
    fn question(self) -> &'static str {
        match self {
            What::Planes => "planes",
            What::Paths | What::Connections => "connections",
            What::Qps => "qps",
            What::Mrs => "mrs",
        }
    }
}

/// Asks every process; rates are taken against the look before.
fn look(what: What, processes: &mut [Process], before: &mut Counted) -> (Vec<Value>, Vec<String>) {
    let (mut shown, mut errors) = (Vec::new(), Vec::new());
    let mut counted = Counted::new();
    for process in processes {
        match process.show(what.question()) {
            Ok(mut answer) => {
                arrange(what, &mut answer);
                rate(what, &process.name, &mut answer, before, &mut counted);
                shown.push(answer);
            }
            Err(error) => errors.push(error),
        }
    }
    *before = counted;
    (shown, errors)
}

/// Paths come with their connections: makes them the items, or takes them off.
fn arrange(what: What, answer: &mut Value) {
    let Some(items) = answer["items"].as_array_mut() else { return };
    if what == What::Connections {
        for connection in items {
            connection["paths"] = connection["paths"].as_array().map_or(0, Vec::len).into();
        }
    } else if what == What::Paths {
        let paths_of = |mut connection: Value| {
            let mut paths = connection["paths"].take().as_array().cloned().unwrap_or_default();
            for (number, path) in paths.iter_mut().enumerate() {
                path["path"] = number.into();
                for key in ["connection", "peer", "peer_slot"] {
                    path[key] = connection[key].clone();
                }
            }
            paths
        };
        *items = std::mem::take(items).into_iter().flat_map(paths_of).collect();
    }
}

/// Puts rates in: bits per second since the look before.
fn rate(what: What, process: &str, answer: &mut Value, before: &Counted, counted: &mut Counted) {
    let names: &[(&str, &str)] = match what {
        What::Planes => &[("tx_bytes", "tx_bps"), ("rx_bytes", "rx_bps")],
        What::Paths => &[("delivered_bytes", "delivery_bps")],
        _ => return,
    };
    let now = answer["now_ns"].as_u64().unwrap_or(0);
    for item in answer["items"].as_array_mut().into_iter().flatten() {
        let key = (process.to_owned(), format!("{} {} {}", item["connection"], item["path"], item["plane"]));
        let mut bytes = [0; 2];
        for (count, (name, _)) in bytes.iter_mut().zip(names) {
            *count = item[*name].as_u64().unwrap_or(0);
        }
        if let Some((then, were)) = before.get(&key) {
            let span = now.saturating_sub(*then).max(1) as f64 / 1e9;
            for (at, (_, rate)) in names.iter().enumerate() {
                item[*rate] = json!((bytes[at].saturating_sub(were[at]) as f64 * 8.0 / span).round());
            }
        }
        counted.insert(key, (now, bytes));
    }
}
