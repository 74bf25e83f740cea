//! `metaroce-checker`: two ordinary verbs programs that move data between each other and compare what they
//! see with what the verbs promise. It links the stock libibverbs and knows nothing of the device that serves
//! it.
//!
//! `run MODE` starts both ends of every case as fresh processes; with `--server` the far end is a
//! `metaroce-checker server` elsewhere. Each case has a hard time limit, so a hang is a failure, never a
//! wait.

mod control;
mod expect;
mod link;
mod modes;
mod options;
mod pattern;
mod process;
mod runner;
mod session;

use std::net::IpAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use modes::Mode;
use options::Options;

/// Anything that ends a case early; its text is the reason shown.
pub type Fault = Box<dyn std::error::Error>;
/// Result of whatever a case does.
pub type Outcome<T = ()> = Result<T, Fault>;

/// Checks a verbs device between two processes.
#[derive(Parser)]
#[command(name = "metaroce-checker", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a mode's cases and print PASS or FAIL for every check.
    Run(runner::RunArgs),
    /// Be the far end: accept cases over TCP until killed. Prints `listening ADDR:PORT`.
    Server {
        /// Address to listen on.
        #[arg(long, default_value = "127.0.0.1")]
        bind: IpAddr,
        /// Port; 0 takes a free one.
        #[arg(long, default_value_t = 0)]
        port: u16,
        /// Die with the process that started it.
        #[arg(long, hide = true)]
        with_parent: bool,
    },
    /// List the cases of a mode.
    List {
        /// Which mode.
        mode: Mode,
        #[command(flatten)]
        options: Options,
    },
    /// One end of one case (started by `run` and by `server`).
    #[command(hide = true)]
    Case {
        /// The near end's assignment; without it this is the far end, and its control connection is stdin.
        #[arg(long)]
        spec: Option<String>,
        /// Far end's server.
        #[arg(long)]
        server: Option<String>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => runner::run(&args),
        Command::Server { bind, port, with_parent } => {
            if with_parent {
                process::die_with_parent();
            }
            runner::serve(bind, port).map(|()| true)
        }
        Command::List { mode, options } => {
            for case in mode.cases(&options) {
                println!("{mode}/{}", case.name);
            }
            Ok(true)
        }
        Command::Case { spec, server } => process::run_case(spec.as_deref(), server.as_deref()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("metaroce-checker: {error}");
            ExitCode::FAILURE
        }
    }
}
