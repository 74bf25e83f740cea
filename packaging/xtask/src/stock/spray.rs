//! Spraying and repair as the device's own counters show them.

use std::time::Duration;

use serde_json::Value;

use super::pair::{Circumstances, Ended, Pair};
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check of even shares.
pub const EVEN: &str = "spraying: every path carries at least half its share";
/// Name of the check of repair.
pub const LOSS: &str = "repair: one retransmission per dropped data packet";

const TIMEOUT: Duration = Duration::from_secs(90);
/// Paths a plane has by default, at least.
const PATHS_MIN: usize = 4;
/// Retransmitted data packets per dropped one.
const RATIO: std::ops::RangeInclusive<f64> = 1.0..=1.2;

/// A plain bandwidth run: 512 MiB in 64 KiB Writes.
fn transfer(workspace: &Workspace, circumstances: Circumstances) -> Result<Ended, Trouble> {
    let arguments =
        ["-d", "metaroce0", "-x", "0", "-F", "-s", "65536", "-n", "8192"].map(str::to_owned).to_vec();
    Pair { program: "ib_write_bw", arguments, circumstances, timeout: TIMEOUT }.run(workspace)
}

/// Every path of the sender carries at least half of an even share of its bytes.
pub fn even(workspace: &Workspace) -> Outcome {
    let ended = transfer(workspace, Circumstances::default())?;
    let record = record_of(workspace, ended.client.pid)?;
    let empty = Vec::new();
    let bytes: Vec<u64> =
        record["paths"].as_array().unwrap_or(&empty).iter().map(|path| number(path, "tx_bytes")).collect();
    let total: u64 = bytes.iter().sum();
    let shares: Vec<String> =
        bytes.iter().map(|b| format!("{:.1}", *b as f64 * 100.0 / total.max(1) as f64)).collect();
    let fair = bytes.len() >= PATHS_MIN && bytes.iter().all(|b| b * 2 * bytes.len() as u64 >= total);
    let text = format!("{} paths, shares in %: {}", bytes.len(), shares.join(" "));
    if fair && total > 0 { Ok(text) } else { Err(Trouble::Fail(format!("{text}\n{record}"))) }
}

/// At 1 % injected loss, what was dropped was sent again once, and hardly anything else.
pub fn loss(workspace: &Workspace, seed: u64) -> Outcome {
    let ended = transfer(workspace, Circumstances::lossy(10, seed))?;
    let records = [record_of(workspace, ended.client.pid)?, record_of(workspace, ended.server.pid)?];
    let sum = |name: &str| records.iter().map(|record| number(record, name)).sum::<u64>();
    let (dropped, again) = (sum("impair_dropped_data"), sum("retransmits"));
    let ratio = again as f64 / dropped.max(1) as f64;
    let text =
        format!("{again} retransmissions for {dropped} dropped data packets, ratio {ratio:.3}, seed {seed}");
    if dropped > 0 && RATIO.contains(&ratio) {
        Ok(text)
    } else {
        Err(Trouble::Fail(format!("{text}\n{}\n{}", records[0], records[1])))
    }
}

/// What `metaroce stat` says of a process, ended or not.
pub fn record_of(workspace: &Workspace, pid: u32) -> Result<Value, Trouble> {
    let pid_text = pid.to_string();
    let mut command = workspace.metaroce_command(&["stat", "--json", "--pid", &pid_text]);
    let done = exec::run("metaroce stat", &mut command, Duration::from_secs(20))?;
    let line = done.output.lines().next().unwrap_or_default();
    let all: Value = serde_json::from_str(line).map_err(|_| Trouble::Fail(done.to_string()))?;
    let newest = all.as_array().and_then(|records| records.last().cloned());
    newest.ok_or_else(|| Trouble::fail(format!("metaroce stat knows no process {pid}")))
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}
