//! `metaroce run`: becomes the given program, with the environment that shows it `metaroce0`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use crate::device_config;
use crate::elf;
use crate::environment::{self, DeviceOptions};
use crate::libs::Libraries;
use crate::output;
use crate::user;

/// Exit codes of shells and `env` for a program that cannot be run.
const CANNOT_EXECUTE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Replaces this process (same pid) by `program`; returns only when that fails.
pub fn run(options: &DeviceOptions, program: &[OsString]) -> ExitCode {
    let Some((name, arguments)) = program.split_first() else {
        output::tell("no program given");
        return ExitCode::from(NOT_FOUND);
    };
    let libraries = match Libraries::locate(user::effective_uid()) {
        Ok(libraries) => libraries,
        Err(error) => {
            output::tell(error);
            return ExitCode::from(CANNOT_EXECUTE);
        }
    };
    let variables = environment::variables(&libraries, options, |name| std::env::var_os(name));
    if let Err(error) = device_config::with_variables(&variables) {
        output::tell(error);
        return ExitCode::from(CANNOT_EXECUTE);
    }
    if let Some(obstacle) = elf::find_program(Path::new(name)).and_then(|path| elf::preload_obstacle(&path)) {
        output::tell(format_args!("warning: {} {obstacle}; it will not see metaroce0", name.display()));
    }
    let error = Command::new(name).args(arguments).envs(variables).exec();
    output::tell(format_args!("cannot run {}: {error}", name.display()));
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_EXECUTE })
}
