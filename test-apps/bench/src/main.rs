//! `metaroce-bench`: the yardsticks MetaRoCE is measured against. No verbs here: plain UDP sockets, used as
//! well as the kernel lets them, between two processes. `blast` bounds bandwidth from above, `udp-pingpong`
//! latency from below.

mod blast;
mod pair;
mod pingpong;
mod socket;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Yardsticks of this host for a UDP transport.
#[derive(Parser)]
#[command(name = "metaroce-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Credit-controlled GSO/GRO UDP blast, one copy into the destination buffer: the upper bound of a Write
    /// stream.
    Blast(blast::Args),
    /// UDP ping-pong, spinning or blocking: the lower bound of a small message's latency.
    UdpPingpong(pingpong::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Blast(args) => blast::run(&args),
        Command::UdpPingpong(args) => pingpong::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("metaroce-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
