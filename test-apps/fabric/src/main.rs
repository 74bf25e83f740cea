//! `metaroce-fabric`: runs scenarios from files.

use clap::{Parser, Subcommand};
use metaroce_fabric::claims::{self, Extent};
use metaroce_fabric::{report, run, scenario::Scenario};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "metaroce-fabric", about = "Deterministic simulator of hosts and fabrics")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the table of claims
    Results {
        /// A subset that takes a few minutes
        #[arg(long)]
        quick: bool,
        /// Only claims whose name contains this
        #[arg(long)]
        only: Option<String>,
        /// One JSON object per line instead of text
        #[arg(long)]
        json: bool,
    },
    /// Run scenarios (TOML files)
    Run {
        /// Files
        files: Vec<PathBuf>,
        /// Change a value: path.to.key=value in TOML syntax
        #[arg(long = "set")]
        set: Vec<String>,
        /// JSON instead of text
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Task::Results { quick, only, json } => {
            let extent = if quick { Extent::Quick } else { Extent::Full };
            let rows = claims::run_all(extent, only.as_deref(), |row| {
                if json {
                    println!("{}", serde_json::to_string(row).unwrap_or_default());
                } else {
                    let mark = if row.good { "ok  " } else { "FALL" };
                    println!(
                        "{mark} {}: {}\n       goal {}; measured {}",
                        row.claim, row.what, row.goal, row.measured
                    );
                }
            });
            if rows.iter().all(|r| r.good) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Task::Run { files, set, json } => {
            let mut good = true;
            for file in files {
                let text = match std::fs::read_to_string(&file) {
                    Ok(text) => text,
                    Err(error) => {
                        eprintln!("{}: {error}", file.display());
                        return ExitCode::FAILURE;
                    }
                };
                match Scenario::parse_with(&text, &set) {
                    Ok(scenario) => {
                        let outcome = run::run(&scenario);
                        good &= outcome.breaches.is_empty();
                        if json {
                            println!("{}", report::json(&outcome));
                        } else {
                            print!("{}", report::text(&outcome));
                        }
                    }
                    Err(error) => {
                        eprintln!("{}: {error}", file.display());
                        return ExitCode::FAILURE;
                    }
                }
            }
            if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
    }
}
