//! Developer commands: `cargo xtask demo`, `test`, `soak`, `bench`, `results`, `requirements`.

#![forbid(unsafe_code)]
#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod bench;
mod demo;
mod exec;
mod ladder;
mod man;
mod packages;
mod pyverbs;
mod report;
mod requirements;
mod results;
mod seed;
mod stock;
mod tidy;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use report::Report;
use workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of metaroce", subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build, show the device, move data between two processes with and without loss (loopback only)
    Demo,
    /// All tests, cheapest first; the last line counts them
    Test {
        /// Fewer stock-program combinations
        #[arg(long)]
        quick: bool,
        /// Seed of the sample of stock-program combinations (printed; random when not given)
        #[arg(long)]
        seed: Option<u64>,
        /// Only checks whose name contains this
        filter: Option<String>,
    },
    /// Whole matrices of stock programs instead of a sample, over and over
    Soak {
        /// Seed of the order and of the injected faults (printed; random when not given)
        #[arg(long)]
        seed: Option<u64>,
        /// Stop after this many minutes; without it, after one whole matrix
        #[arg(long)]
        minutes: Option<u64>,
        /// Only checks whose name contains this; `long: ` are the long tests
        filter: Option<String>,
    },
    /// The table of claims, measured in the simulator and on real sockets; exit code 1 when one falls short; writes docs/results.md
    Results {
        /// A subset that takes a few minutes
        #[arg(long)]
        quick: bool,
        /// The simulator alone: its rows repeat bit by bit, whatever else the machine does
        #[arg(long)]
        simulator: bool,
        /// Only claims whose name contains this (then the page is not written)
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// Write all rows to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// The requirements of docs/protocol.md that no test cites; exit code 1 when a number is unknown or no code cites it
    Requirements,
    /// Write a manual page for every function of libmetaroce.so.1
    Man {
        /// Where to
        dir: PathBuf,
    },
    /// Bandwidth, message rate, latency and processor time beside plain UDP, TCP, UCX and libfabric in one run; exit code 1 below the goals
    Bench {
        /// Fewer rounds, 5 minutes
        #[arg(long)]
        quick: bool,
        /// This many rounds
        #[arg(long, value_parser = clap::value_parser!(u8).range(1..), conflicts_with = "quick")]
        rounds: Option<u8>,
        /// Only measures whose name contains this, and what they are judged by
        #[arg(long, value_name = "NAME")]
        only: Option<String>,
        /// Draw the ratios into this file (SVG)
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
        /// Write all figures to this file
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let workspace = match Workspace::find() {
        Ok(workspace) => workspace,
        Err(error) => {
            eprintln!("xtask: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = match Cli::parse().command {
        Task::Demo => demo::run(&workspace),
        Task::Test { quick, seed, filter } => {
            let options = ladder::Options { quick, seed: seed.unwrap_or_else(seed::fresh) };
            ladder::run(&workspace, options, Report::new(filter))
        }
        Task::Soak { seed, minutes, filter } => {
            stock::soak(&workspace, seed.unwrap_or_else(seed::fresh), minutes, Report::new(filter))
        }
        Task::Results { quick, simulator, only, json } => {
            let (only, json) = (only.as_deref(), json.as_deref());
            results::run(&workspace, results::Options { quick, simulator, only, json })
        }
        Task::Requirements => requirements::list(&workspace),
        Task::Man { dir } => man::write(&workspace, &dir).map(|pages| {
            println!("{pages} pages in {}: man -l {}/metaroce_query_device.3", dir.display(), dir.display());
            true
        }),
        Task::Bench { quick, rounds, only, plot, json } => bench::run(
            &workspace,
            bench::Options {
                rounds: rounds.map(usize::from).unwrap_or_else(|| bench::rounds(quick)),
                only: only.as_deref(),
                json: json.as_deref(),
                plot: plot.as_deref(),
            },
        ),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
