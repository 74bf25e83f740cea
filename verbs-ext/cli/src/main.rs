//! The `metaroce` command: gives unmodified verbs programs the device `metaroce0` and shows what it does.

#![forbid(unsafe_code)]
#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod control;
mod device_config;
mod devices;
mod doctor;
mod elf;
mod environment;
mod libs;
mod link;
mod output;
mod run;
mod settings;
mod show;
mod stat;
mod steer;
mod table;
mod user;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

const ABOUT: &str = "RDMA in software: shows unmodified verbs programs a device, metaroce0, over plain UDP";

const TEACH: &str = "\
Examples:
  metaroce run -- ibv_devinfo                      the device, without hardware, kernel module or root
  metaroce run --planes lo -- ib_write_bw -d metaroce0 -x 0 &
  metaroce run --planes lo -- ib_write_bw -d metaroce0 -x 0 127.0.0.1
  metaroce run --loss 1% -- PROGRAM                the same with one packet in a hundred dropped (seeded)
  metaroce stat                                    bytes per process and path; exit code 1 when nothing moved
  metaroce show paths -w                           every path of running programs, again every second
  metaroce plane drain eth1                        running programs send nothing new on that plane
  metaroce doctor ib_write_bw                      what would keep a program from seeing the device, and the remedy
  eval \"$(metaroce env)\"                           the same environment for a whole shell

Every setting, its default and range: metaroce config";

#[derive(Parser)]
#[command(name = "metaroce", version, about = ABOUT, after_help = TEACH, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program that sees metaroce0 (replaces this process: same pid, signals and exit code)
    Run {
        #[command(flatten)]
        options: environment::DeviceOptions,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
        program: Vec<OsString>,
    },
    /// Print the environment as shell exports: eval "$(metaroce env)"
    Env {
        #[command(flatten)]
        options: environment::DeviceOptions,
    },
    /// Show the device, its planes and its GIDs
    Devices(devices::Args),
    /// List every setting with its variable, default, range and present value
    Config(settings::Args),
    /// Show packets and bytes per process and path; exit code 1 if nothing went through metaroce0
    Stat(stat::Args),
    /// Show what running processes have open: planes, paths, connections, queue pairs, keys
    Show(show::Args),
    /// Take a plane of running programs out of use, or back
    Plane(steer::PlaneArgs),
    /// Move paths of running programs to other source ports
    Path(steer::PathArgs),
    /// Show the port and its planes, as `rdma link` does
    Link(link::LinkArgs),
    /// Show the table of GIDs
    Gids(link::GidArgs),
    /// Check the machine (and a program) and say what is wrong and how to mend it; exit code 1 if something is
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run { options, program } => run::run(&options, &program),
        Command::Env { options } => print_environment(&options),
        Command::Devices(args) => devices::run(&args),
        Command::Config(args) => settings::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Show(args) => show::run(&args),
        Command::Plane(args) => steer::plane(&args),
        Command::Path(args) => steer::path(&args),
        Command::Link(args) => link::show(&args),
        Command::Gids(args) => link::gids(&args),
        Command::Doctor(args) => doctor::run(&args),
    }
}

fn print_environment(options: &environment::DeviceOptions) -> ExitCode {
    let libraries = match libs::Libraries::locate(user::effective_uid()) {
        Ok(libraries) => libraries,
        Err(error) => {
            output::tell(error);
            return ExitCode::FAILURE;
        }
    };
    let mut text = Vec::new();
    for (name, value) in environment::variables(&libraries, options, |name| std::env::var_os(name)) {
        text.extend(environment::export_line(name, &value));
    }
    output::end(text, ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn cli__is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn cli__run_passes_the_programs_own_options_on() {
        let parse = |words: &[&str]| Cli::try_parse_from(words).map(|cli| cli.command);
        let with_dashes =
            parse(&["metaroce", "run", "--planes", "lo", "--", "ib_write_bw", "-d", "metaroce0", "--planes"]);
        let Ok(Command::Run { options, program }) = with_dashes else { panic!("not parsed") };
        assert_eq!(options.planes.as_deref(), Some("lo"));
        assert_eq!(program, ["ib_write_bw", "-d", "metaroce0", "--planes"]);
        let Ok(Command::Run { program, .. }) = parse(&["metaroce", "run", "ibv_devinfo", "-v"]) else {
            panic!("not parsed")
        };
        assert_eq!(program, ["ibv_devinfo", "-v"]);
        assert!(parse(&["metaroce", "run", "--loss", "2", "x"]).is_err());
    }
}
