//! Running the tools that set networks up, and telling "this machine cannot" from "this went wrong".

use std::fmt;
use std::fs::File;
use std::io;
use std::process::{Command, Stdio};

use crate::system;

/// The machine lacks something: a test skips.
#[derive(Debug)]
pub struct CannotHere(pub String);

/// Why there is no fabric.
#[derive(Debug)]
pub enum Failure {
    /// Not on this machine.
    CannotHere(CannotHere),
    /// Something went wrong.
    Broken(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::CannotHere(CannotHere(why)) => write!(f, "cannot make network namespaces here: {why}"),
            Failure::Broken(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Failure {}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Broken(error.to_string())
    }
}

/// Where system tools live that an ordinary user's PATH may lack.
const PATH: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";

/// Runs a tool inside a namespace; its output.
pub fn run_in(namespace: &File, program: &str, arguments: &[&str]) -> Result<String, Failure> {
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", PATH).stdin(Stdio::null());
    let done = match system::inside(&mut command, namespace).output() {
        Ok(done) => done,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Failure::CannotHere(CannotHere(format!("{program} is not installed"))));
        }
        // A host gets its own /sys, for which the mounts are cut from everybody else's: not possible below a chroot.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let why = "the root directory is not a mount point (a chroot)";
            return Err(Failure::CannotHere(CannotHere(why.into())));
        }
        Err(error) => return Err(Failure::Broken(format!("{program}: {error}"))),
    };
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let words = arguments.join(" ");
    Err(Failure::Broken(format!("{program} {words}: {}", String::from_utf8_lossy(&done.stderr).trim())))
}
