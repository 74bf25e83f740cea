//! The same programs between two hosts made of network namespaces (`metaroce-netns`), with two planes between them.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::pair::program;
use super::perftest::{self, result_rows};
use crate::exec::{self, Finished};
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

const TIMEOUT: Duration = Duration::from_secs(300);
/// What `metaroce-netns` calls the planes.
const PLANES: [&str; 2] = ["plane0", "plane1"];
/// Its exit code for "not on this machine".
pub const SKIP: i32 = 77;

const PINGPONG_ARGUMENTS: &str = "-d metaroce0 -g 0 -c -s 65536 -n 500";

/// What a check runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    /// `ibv_rc_pingpong` with its data check, one packet in a hundred lost on the wire.
    Pingpong,
    /// `ib_write_bw`; both planes must carry their share.
    Write,
    /// `ib_send_bw` to a multicast group, of IPv4 if the first plane has it.
    Multicast,
    /// A mode of the checker, with packets lost of each 1000.
    Checker(&'static str, u32),
}

/// Which addresses the planes have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// IPv4 on both.
    V4,
    /// IPv4 on the first, IPv6 only on the second.
    Mixed,
    /// IPv6 only on both.
    V6,
}

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    program: Program,
    family: Family,
}

/// All of them.
pub fn checks() -> impl Iterator<Item = Check> {
    const PROGRAMS: [Program; 7] = [
        Program::Pingpong,
        Program::Write,
        Program::Multicast,
        Program::Checker("data", 10),
        Program::Checker("messages", 10),
        Program::Checker("identity", 0),
        Program::Checker("errors", 0),
    ];
    [Family::V4, Family::Mixed, Family::V6]
        .into_iter()
        .flat_map(|family| PROGRAMS.map(|program| Check { program, family }))
}

impl Check {
    /// Its name.
    pub fn name(&self) -> String {
        let what = match self.program {
            Program::Pingpong => "ibv_rc_pingpong -c, 1 % loss on the wire".to_owned(),
            Program::Write => "ib_write_bw uses both planes".to_owned(),
            Program::Multicast => "ib_send_bw -c UD -g".to_owned(),
            Program::Checker(mode, 0) => format!("checker {mode}"),
            Program::Checker(mode, _) => format!("checker {mode}, 1 % loss on the wire"),
        };
        let planes = match self.family {
            Family::V4 => "two planes",
            Family::Mixed => "two planes, one IPv6 only",
            Family::V6 => "two planes, IPv6 only",
        };
        format!("two namespaces, {planes}: {what}")
    }

    /// Whether it is part of the sample: the long ones once only, where the most is different.
    pub fn is_sampled(&self) -> bool {
        let long = matches!(self.program, Program::Checker("identity" | "errors", _));
        !long || self.family == Family::V6
    }

    /// Runs it.
    pub fn run(&self, workspace: &Workspace, seed: u64) -> Outcome {
        match self.program {
            Program::Pingpong => self.pingpong(workspace),
            Program::Write => self.write(workspace),
            Program::Multicast => self.multicast(workspace),
            Program::Checker(mode, loss_per_mille) => self.checker(workspace, mode, loss_per_mille, seed),
        }
    }

    fn pingpong(&self, workspace: &Workspace) -> Outcome {
        program("ibv_rc_pingpong")?;
        let server =
            format!("{} run -- ibv_rc_pingpong {PINGPONG_ARGUMENTS}", workspace.metaroce().display());
        let done = self.between(workspace, 10, &[], &server, &format!("{server} {{server}}"))?;
        if done.output.contains("invalid data") {
            return Err(Trouble::Fail(format!("wrong data arrived\n{done}")));
        }
        Ok(String::new())
    }

    /// Both planes of the sender must carry at least half of an even share.
    fn write(&self, workspace: &Workspace) -> Outcome {
        program("ib_write_bw")?;
        let metaroce = workspace.metaroce();
        let metaroce = metaroce.display();
        let server = format!("{metaroce} run -- ib_write_bw -d metaroce0 -x 0 -F -s 65536 -n 4000");
        // The statistics belong to the process that ran, and only its parent knows its pid.
        let client = format!("{server} {{server}} & pid=$!; wait $pid && {metaroce} stat --json --pid $pid");
        let done = self.between(workspace, 0, &[], &server, &client)?;
        let row = result_rows(&done.output).pop();
        let row = row.ok_or_else(|| Trouble::Fail(format!("no line of results\n{done}")))?;
        let records: Option<Value> =
            done.output.lines().rev().find_map(|line| serde_json::from_str(line).ok());
        let records = records.ok_or_else(|| Trouble::Fail(format!("no statistics\n{done}")))?;
        let paths = records[0]["paths"].as_array().map(Vec::as_slice).unwrap_or_default();
        let bytes = PLANES.map(|plane| -> u64 {
            paths
                .iter()
                .filter(|path| path["plane"] == plane)
                .filter_map(|path| path["tx_bytes"].as_u64())
                .sum()
        });
        let text = format!("{} MiB/s, bytes per plane {bytes:?}", row[3]);
        let total: u64 = bytes.iter().sum();
        if bytes.iter().all(|bytes| *bytes > 0 && bytes * 4 >= total) {
            Ok(text)
        } else {
            Err(Trouble::Fail(format!("{text}\n{records}")))
        }
    }

    /// The receiver waits for every datagram. The hosts have links of their own, so nobody else is in the group.
    fn multicast(&self, workspace: &Workspace) -> Outcome {
        program("ib_send_bw")?;
        let group = match self.family {
            Family::V4 | Family::Mixed => "0:0:0:0:0:0:0:0:0:0:255:255:239:7:8:9",
            // Of scope 1, like the one perftest takes by itself.
            Family::V6 => "255:1:0:0:0:0:0:0:0:0:0:0:0:7:8:9",
        };
        let arguments = format!("-d metaroce0 -x 0 -F -c UD -g -M {group} -s 2048 -n 1600");
        let server = format!("{} run -- ib_send_bw {arguments}", workspace.metaroce().display());
        let done = self.between(workspace, 0, &[], &server, &format!("{server} {{server}}"))?;
        let figure = perftest::figure("ib_send_bw", &done.output);
        figure.ok_or_else(|| Trouble::Fail(format!("no line of results\n{done}")))
    }

    fn checker(&self, workspace: &Workspace, mode: &str, loss_per_mille: u32, seed: u64) -> Outcome {
        let checker = workspace.built("metaroce-checker")?;
        let metaroce = workspace.metaroce();
        let checker = format!("{} run -- {}", metaroce.display(), checker.display());
        let server = format!("{checker} server --bind {{server}}");
        let options = format!("--seed {seed} --metaroce {}", metaroce.display());
        let client = format!("{checker} run {mode} {options} --server {{ready}}");
        let done = self.between(workspace, loss_per_mille, &["--ready", "listening"], &server, &client)?;
        Ok(done.output.lines().last().unwrap_or_default().to_owned())
    }

    /// Runs a server and a client on the two hosts; the client is a line for the shell.
    fn between(
        &self,
        workspace: &Workspace,
        loss_per_mille: u32,
        options: &[&str],
        server: &str,
        client: &str,
    ) -> Result<Finished, Trouble> {
        let mut command = netns(workspace)?;
        command.args(["--planes", "2", "--loss", &loss_per_mille.to_string()]).args(options);
        command.args(match self.family {
            Family::V4 => &[][..],
            Family::Mixed => &["--ipv6-only", "1"],
            Family::V6 => &["--ipv6-only", "0"],
        });
        command.args(["--server", server, "--", "sh", "-c", client]);
        run(&mut command)
    }
}

/// `metaroce-netns` without settings of the caller's.
pub fn netns(workspace: &Workspace) -> Result<Command, Trouble> {
    let mut command = Command::new(workspace.built("metaroce-netns")?);
    command.current_dir(&workspace.root);
    workspace.clear_settings(&mut command);
    Ok(command)
}

/// Runs it; a machine without the right to make namespaces is a skip.
pub fn run(command: &mut Command) -> Result<Finished, Trouble> {
    let done = exec::run("metaroce-netns", command, TIMEOUT)?;
    match done.status.and_then(|status| status.code()) {
        Some(0) => Ok(done),
        Some(SKIP) => Err(Trouble::Skip(done.output.trim().trim_start_matches("SKIP ").to_owned())),
        _ => Err(Trouble::Fail(format!("{command:?}\n{done}"))),
    }
}
