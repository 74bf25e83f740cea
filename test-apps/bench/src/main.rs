//! `metaroce-bench`: the yardsticks MetaRoCE is measured against, and what its core costs. No verbs here: plain UDP
//! sockets, used as well as the kernel lets them, between two processes. `blast` bounds bandwidth from above, `udp-pingpong`
//! latency from below.

mod blast;
mod copy;
mod core;
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
    /// A copy in memory, for scale.
    Copy(copy::Args),
    /// The protocol core alone: cost per packet, allocations, and memory per connection.
    Core(core::Args),
}

#[global_allocator]
static ALLOCATOR: core::Counting = core::Counting;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Blast(args) => blast::run(&args),
        Command::UdpPingpong(args) => pingpong::run(&args),
        Command::Copy(args) => copy::run(&args),
        Command::Core(args) => core::run(&args).map_err(std::io::Error::other),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("metaroce-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
