//! `metaroce stat`: what went through `metaroce0`, per process and path. Its exit code proves it to scripts.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metaroce_stat::{DeviceCounter as D, PathCounter as P, PathRecord, Record, StatFile};
use serde_json::{Map, Value, json};

use crate::output;
use crate::table::scaled;

mod prometheus;

/// Options of `metaroce stat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON array with every counter
    #[arg(long)]
    json: bool,
    /// Print every counter as Prometheus reads it (text exposition format)
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Every record there is: processes that ended long ago, that sent nothing, and (for root) of all users
    #[arg(long)]
    all: bool,
    /// Only this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Print again every N seconds (1 when not given) until interrupted
    #[arg(short, long, value_name = "N", num_args = 0..=1, default_missing_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    watch: Option<u64>,
}

/// Without --all, processes that ended longer ago than this are not shown.
const ENDED_SHOWN_S: u64 = 3600;

/// Prints the table; 0 when any process shown moved packets, 1 when none did.
pub fn run(args: &Args) -> ExitCode {
    loop {
        let records = match select(args) {
            Ok(records) => records,
            Err(error) => {
                output::tell(format_args!("cannot read the statistics: {error}"));
                return ExitCode::FAILURE;
            }
        };
        let moved = records.iter().any(|(_, record)| moved(record));
        let text = match args {
            Args { json: true, .. } => json_text(&records),
            Args { prometheus: true, .. } => prometheus::text(&records),
            _ => table(&records),
        };
        let usual = if moved { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        let clear =
            if args.watch.is_some() && std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
        if let Err(code) = output::print(format!("{clear}{text}"), usual) {
            return code;
        }
        let Some(seconds) = args.watch else {
            if !moved {
                output::tell("nothing went through metaroce0");
            }
            return usual;
        };
        std::thread::sleep(Duration::from_secs(seconds));
    }
}

/// The records asked for, with the uid of the file they come from.
fn select(args: &Args) -> std::io::Result<Vec<(u32, Record)>> {
    let files = if args.all {
        StatFile::open_all_users()
    } else {
        StatFile::open()?.map(|file| (crate::user::effective_uid(), file)).into_iter().collect()
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let recent = |record: &Record| record.live || now.saturating_sub(record.updated_unix_s) <= ENDED_SHOWN_S;
    Ok(files
        .into_iter()
        .flat_map(|(uid, file)| file.records().into_iter().map(move |record| (uid, record)))
        .filter(|(_, record)| args.pid.is_none_or(|pid| pid == record.pid))
        .filter(|(_, record)| {
            args.all || args.pid.is_some() || (recent(record) && (record.live || moved(record)))
        })
        .collect())
}

fn moved(record: &Record) -> bool {
    record.get(D::TxPackets) + record.get(D::RxPackets) > 0
}

fn table(records: &[(u32, Record)]) -> String {
    let mut text = String::new();
    for (_, record) in records {
        process_text(&mut text, record);
    }
    text
}

fn process_text(text: &mut String, record: &Record) {
    let state = if record.live { "live" } else { "ended" };
    let _ = writeln!(text, "{} pid {} ({state}, slot {})", record.comm, record.pid, record.get(D::Slot));
    let _ = writeln!(
        text,
        "  sent {} in {} packets, received {} in {} packets",
        bytes(record.get(D::TxBytes)),
        record.get(D::TxPackets),
        bytes(record.get(D::RxBytes)),
        record.get(D::RxPackets)
    );
    let _ = write!(text, " ");
    let gauges: &[D] = if record.live { &[D::Qps, D::Connections, D::TransportBytes] } else { &[] };
    let always = [D::Retransmits, D::Lost];
    let rare = [
        D::SpuriousRetransmits,
        D::RnrSent,
        D::ImpairDropped,
        D::ImpairDroppedData,
        D::RxOverflows,
        D::RxMalformed,
        D::RxUnknown,
        D::ResetsSent,
    ];
    let seen = rare.iter().filter(|counter| record.get(**counter) > 0);
    for counter in gauges.iter().chain(&always).chain(seen) {
        let _ = write!(text, " {} {}", counter.name(), record.get(*counter));
    }
    let _ = writeln!(text);
    if !record.paths.is_empty() {
        path_table(text, &record.paths);
    }
}

/// Column title, width and value of the per-path table after plane and path.
type Column = (&'static str, usize, fn(&PathRecord) -> String);

fn path_table(text: &mut String, paths: &[PathRecord]) {
    let sent: u64 = paths.iter().map(|path| path.get(P::TxBytes)).sum();
    let columns: [Column; 11] = [
        ("tx packets", 11, |path| path.get(P::TxPackets).to_string()),
        ("tx bytes", 10, |path| bytes(path.get(P::TxBytes))),
        ("rexmit", 7, |path| path.get(P::Retransmits).to_string()),
        ("lost", 7, |path| path.get(P::Lost).to_string()),
        ("rx packets", 11, |path| path.get(P::RxPackets).to_string()),
        ("rx bytes", 10, |path| bytes(path.get(P::RxBytes))),
        ("CE", 6, |path| path.get(P::RxCe).to_string()),
        ("reord", 6, |path| path.get(P::RxReordered).to_string()),
        ("dup", 6, |path| path.get(P::RxDuplicates).to_string()),
        ("rtt us", 8, |path| match path.get(P::SrttNs) {
            0 => "-".to_owned(),
            ns => format!("{:.1}", ns as f64 / 1000.0),
        }),
        ("cwnd", 6, |path| path.get(P::CwndPackets).to_string()),
    ];
    let _ = write!(text, "  {:<12} {:>4} {:>6}", "plane", "path", "share");
    for (title, width, _) in columns {
        let _ = write!(text, " {title:>width$}");
    }
    let _ = writeln!(text);
    for path in paths {
        let share = if sent == 0 { 0.0 } else { path.get(P::TxBytes) as f64 * 100.0 / sent as f64 };
        let _ = write!(text, "  {:<12} {:>4} {share:>5.1}%", path.plane, path.index);
        for (_, width, value) in columns {
            let _ = write!(text, " {:>width$}", value(path));
        }
        let _ = writeln!(text);
    }
}

fn json_text(records: &[(u32, Record)]) -> String {
    let all: Vec<Value> = records.iter().map(|(uid, record)| process_json(*uid, record)).collect();
    format!("{}\n", Value::Array(all))
}

fn process_json(uid: u32, record: &Record) -> Value {
    let mut object = Map::new();
    object.insert("pid".into(), json!(record.pid));
    object.insert("uid".into(), json!(uid));
    object.insert("comm".into(), json!(record.comm));
    object.insert("state".into(), json!(if record.live { "live" } else { "ended" }));
    object.insert("started_unix_s".into(), json!(record.started_unix_s));
    object.insert("updated_unix_s".into(), json!(record.updated_unix_s));
    for counter in D::ALL {
        object.insert(counter.name().into(), json!(record.get(*counter)));
    }
    let paths = record.paths.iter().map(|path| {
        let mut object = Map::new();
        object.insert("plane".into(), json!(path.plane));
        object.insert("path".into(), json!(path.index));
        for counter in P::ALL {
            object.insert(counter.name().into(), json!(path.get(*counter)));
        }
        Value::Object(object)
    });
    object.insert("paths".into(), paths.collect());
    Value::Object(object)
}

/// Bytes with a decimal unit.
fn bytes(count: u64) -> String {
    scaled(count as f64, "B")
}
