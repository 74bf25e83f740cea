//! The same programs between two hosts made of network namespaces (`metaroce-netns`), with two planes between them.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::pair::program;
use super::perftest::result_rows;
use crate::exec::{self, Finished};
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check of the ping-pong.
pub const PINGPONG: &str = "two namespaces, two planes: ibv_rc_pingpong -c, 1 % loss on the wire";
/// Name of the check of bandwidth.
pub const WRITE: &str = "two namespaces, two planes: ib_write_bw uses both planes";
/// Name of the check of the data.
pub const DATA: &str = "two namespaces, two planes: checker data, 1 % loss on the wire";

const TIMEOUT: Duration = Duration::from_secs(300);
/// What `metaroce-netns` calls the planes.
const PLANES: [&str; 2] = ["plane0", "plane1"];
/// Its exit code for "not on this machine".
const SKIP: i32 = 77;

/// The ping-pong with its data check, one packet in a hundred lost on the wire.
pub fn pingpong(workspace: &Workspace) -> Outcome {
    program("ibv_rc_pingpong")?;
    let server = format!("{} run -- ibv_rc_pingpong {PINGPONG_ARGUMENTS}", workspace.metaroce().display());
    let done = between(workspace, 10, &[], &server, &format!("{server} {{server}}"))?;
    if done.output.contains("invalid data") {
        return Err(Trouble::Fail(format!("wrong data arrived\n{done}")));
    }
    Ok(String::new())
}

const PINGPONG_ARGUMENTS: &str = "-d metaroce0 -g 0 -c -s 65536 -n 500";

/// A bandwidth run; both planes of the sender must carry at least half of an even share.
pub fn write(workspace: &Workspace) -> Outcome {
    program("ib_write_bw")?;
    let metaroce = workspace.metaroce();
    let metaroce = metaroce.display();
    let server = format!("{metaroce} run -- ib_write_bw -d metaroce0 -x 0 -F -s 65536 -n 4000");
    // The statistics belong to the process that ran, and only its parent knows its pid.
    let client = format!("{server} {{server}} & pid=$!; wait $pid && {metaroce} stat --json --pid $pid");
    let done = between(workspace, 0, &[], &server, &client)?;
    let row = result_rows(&done.output).pop();
    let row = row.ok_or_else(|| Trouble::Fail(format!("no line of results\n{done}")))?;
    let records: Option<Value> = done.output.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    let records = records.ok_or_else(|| Trouble::Fail(format!("no statistics\n{done}")))?;
    let paths = records[0]["paths"].as_array().map(Vec::as_slice).unwrap_or_default();
    let bytes = PLANES.map(|plane| -> u64 {
        paths.iter().filter(|path| path["plane"] == plane).filter_map(|path| path["tx_bytes"].as_u64()).sum()
    });
    let text = format!("{} MiB/s, bytes per plane {bytes:?}", row[3]);
    let total: u64 = bytes.iter().sum();
    if bytes.iter().all(|bytes| *bytes > 0 && bytes * 4 >= total) {
        Ok(text)
    } else {
        Err(Trouble::Fail(format!("{text}\n{records}")))
    }
}

/// Every opcode, every byte, over two lossy planes.
pub fn data(workspace: &Workspace, seed: u64) -> Outcome {
    let checker =
        workspace.program("metaroce-checker").ok_or_else(|| Trouble::fail("no metaroce-checker"))?;
    let checker = format!("{} run -- {}", workspace.metaroce().display(), checker.display());
    let server = format!("{checker} server --bind {{server}}");
    let client = format!("{checker} run data --seed {seed} --server {{ready}}");
    let done = between(workspace, 10, &["--ready", "listening"], &server, &client)?;
    Ok(done.output.lines().last().unwrap_or_default().to_owned())
}

/// Runs a server and a client on the two hosts; the client is a line for the shell.
fn between(
    workspace: &Workspace,
    loss_per_mille: u32,
    options: &[&str],
    server: &str,
    client: &str,
) -> Result<Finished, Trouble> {
    let netns =
        workspace.program("metaroce-netns").ok_or_else(|| Trouble::fail("metaroce-netns is not built"))?;
    let mut command = Command::new(netns);
    command.args(["--planes", "2", "--loss", &loss_per_mille.to_string()]).args(options);
    command.args(["--server", server, "--", "sh", "-c", client]).current_dir(&workspace.root);
    workspace.clear_settings(&mut command);
    let done = exec::run("metaroce-netns", &mut command, TIMEOUT)?;
    match done.status.and_then(|status| status.code()) {
        Some(0) => Ok(done),
        Some(SKIP) => Err(Trouble::Skip(done.output.trim().trim_start_matches("SKIP ").to_owned())),
        _ => Err(Trouble::Fail(format!("server: {server}\nclient: {client}\n{done}"))),
    }
}
