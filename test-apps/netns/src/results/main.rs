//! `metaroce-netns-results`: the real-socket column of the table of claims: unmodified perftest between two hosts made of
//! network namespaces, over planes with a rate. A JSON object per row, as `cargo xtask results` reads them.

mod claims;
mod traffic;

use std::process::ExitCode;

use clap::Parser;
use metaroce_netns::{Failure, become_root_of_own_namespace};
use serde_json::json;

/// Measures the claims on real sockets.
#[derive(Parser)]
#[command(name = "metaroce-netns-results", version)]
struct Cli {
    /// A subset that takes a minute.
    #[arg(long)]
    quick: bool,
    /// Only claims whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

/// What a run showed.
#[derive(Debug)]
pub struct Shown {
    /// In words.
    pub measured: String,
    /// The goal is reached.
    pub good: bool,
}

/// One run of a claim.
pub struct Run {
    /// The claim's name.
    pub claim: &'static str,
    /// What it says.
    pub says: &'static str,
    /// What distinguishes this run.
    pub what: String,
    /// The goal in words.
    pub goal: String,
    /// Part of the quick subset.
    pub quick: bool,
    /// Does it.
    pub show: Box<dyn Fn() -> Result<Shown, Failure>>,
}

fn main() -> ExitCode {
    // Before anything makes a thread.
    let rights = become_root_of_own_namespace();
    let cli = Cli::parse();
    for run in claims::all() {
        let wanted = cli.only.as_deref().is_none_or(|only| run.claim.contains(only));
        if !wanted || cli.quick && !run.quick {
            continue;
        }
        let shown = match &rights {
            Err(error) => {
                Shown { measured: format!("skipped: no right to make namespaces ({error})"), good: true }
            }
            Ok(()) => match (run.show)() {
                Ok(shown) => shown,
                Err(Failure::CannotHere(why)) => {
                    Shown { measured: format!("skipped: {}", Failure::CannotHere(why)), good: true }
                }
                Err(error) => Shown { measured: format!("failed: {error}"), good: false },
            },
        };
        let row = json!({
            "claim": run.claim, "says": run.says, "what": run.what, "goal": run.goal, "measured": shown.measured,
            "good": shown.good, "command": format!("cargo xtask results --only {}", run.claim),
        });
        println!("{row}");
    }
    ExitCode::SUCCESS
}
