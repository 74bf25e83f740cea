//! `cargo xtask demo`: from a bare checkout to RDMA traffic in one command, on loopback.

use std::process::Command;
use std::time::Duration;

use crate::report::{Trouble, progress};
use crate::stock::pair::{Circumstances, Pair, program};
use crate::stock::perftest::result_rows;
use crate::workspace::{Workspace, cargo};
use crate::{exec, packages};

/// Builds, shows the device, moves data; false when any of it fails.
pub fn run(workspace: &Workspace) -> Result<bool, String> {
    packages::ensure(&[packages::BUILD, packages::DEMO])?;
    progress("building the release (the first time takes some minutes)");
    // Cargo's own progress is the best there is.
    let built = cargo().args(["build", "--release", "--workspace"]).current_dir(&workspace.root).status();
    if !built.is_ok_and(|status| status.success()) {
        return Err("the build failed".to_owned());
    }
    let result = show(workspace);
    if let Err(Trouble::Fail(text) | Trouble::Skip(text)) = &result {
        println!("{text}");
    }
    Ok(result.is_ok())
}

fn show(workspace: &Workspace) -> Result<(), Trouble> {
    headline("The device, as an unmodified program sees it: metaroce run --planes lo -- ibv_devinfo");
    let mut devinfo = workspace.under_metaroce(&program("ibv_devinfo")?, &[], None);
    let done = exec::run("ibv_devinfo", devinfo.args(["-d", "metaroce0"]), Duration::from_secs(30))?;
    if !done.success() {
        return Err(Trouble::Fail(done.to_string()));
    }
    println!("{}", done.output.trim_end());
    let mut rates = Vec::new();
    for loss_per_mille in [0, 10] {
        rates.push(transfer(workspace, Circumstances::lossy(loss_per_mille, 1))?);
    }
    let kept = rates[1] * 100.0 / rates[0];
    println!("\nWith one packet in a hundred lost: {:.0} of {:.0} MiB/s ({kept:.0} %).", rates[1], rates[0]);
    println!("Next: {} --help, and README.md", workspace.metaroce().display());
    Ok(())
}

/// One ib_write_bw between two processes; prints rate and per-path counters, returns MiB/s.
fn transfer(workspace: &Workspace, circumstances: Circumstances) -> Result<f64, Trouble> {
    let loss = circumstances.loss_per_mille / 10;
    headline(&format!("ib_write_bw between two processes over UDP on lo, {loss} % of all packets dropped"));
    let arguments =
        ["-d", "metaroce0", "-x", "0", "-F", "-s", "65536", "-n", "20000"].map(str::to_owned).to_vec();
    let timeout = Duration::from_secs(120);
    let ended = Pair { program: "ib_write_bw", arguments, circumstances, timeout }.run(workspace)?;
    let row =
        result_rows(&ended.client.output).pop().ok_or_else(|| Trouble::Fail(ended.text("no results")))?;
    let rate: f64 = row.get(3).and_then(|word| word.parse().ok()).unwrap_or(0.0);
    println!("{} writes of {} bytes: {rate:.0} MiB/s on average\n", row[1], row[0]);
    stat(workspace, ended.client.pid)?;
    Ok(rate)
}

/// The sender's per-path table.
fn stat(workspace: &Workspace, pid: u32) -> Result<(), Trouble> {
    let mut command: Command = workspace.metaroce_command(&["stat", "--pid", &pid.to_string()]);
    let done = exec::run("metaroce stat", &mut command, Duration::from_secs(20))?;
    println!("{}", done.output.trim_end());
    if done.success() { Ok(()) } else { Err(Trouble::Fail("nothing went through metaroce0".to_owned())) }
}

fn headline(text: &str) {
    println!("\n== {text}");
}
