//! Where things are: the workspace, its target directory, and the programs built there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::report::Trouble;

/// Paths of this checkout.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// Top directory.
    pub root: PathBuf,
    /// `target/release`.
    pub release: PathBuf,
    /// What `cargo metadata --no-deps` says.
    pub metadata: Value,
}

impl Workspace {
    /// Asks cargo.
    pub fn find() -> Result<Workspace, String> {
        let out = cargo()
            .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .map_err(|error| format!("cargo does not start: {error}"))?;
        if !out.status.success() {
            return Err(String::from_utf8_lossy(&out.stderr).into_owned());
        }
        let metadata: Value = serde_json::from_slice(&out.stdout).map_err(|error| error.to_string())?;
        let path = |key: &str| {
            metadata[key].as_str().map(PathBuf::from).ok_or(format!("no {key} in cargo metadata"))
        };
        Ok(Workspace {
            root: path("workspace_root")?,
            release: path("target_directory")?.join("release"),
            metadata,
        })
    }

    /// The `metaroce` command of the release build.
    pub fn metaroce(&self) -> PathBuf {
        self.release.join("metaroce")
    }

    /// A program of the release build, when the workspace has it.
    pub fn program(&self, name: &str) -> Option<PathBuf> {
        let path = self.release.join(name);
        path.is_file().then_some(path)
    }

    /// The same for a check, which fails without it.
    pub fn built(&self, name: &str) -> Result<PathBuf, Trouble> {
        self.program(name).ok_or_else(|| Trouble::Fail(format!("{name} is not built")))
    }

    /// `metaroce run -- PROGRAM` on loopback, with no METAROCE_* setting of the caller's left; behind a confining
    /// command and with another copy of `metaroce` when given.
    pub fn under_metaroce(
        &self,
        program: &Path,
        confinement: &[OsString],
        metaroce: Option<&Path>,
    ) -> Command {
        let metaroce = metaroce.map_or_else(|| self.metaroce(), Path::to_owned);
        let mut words = confinement.iter().cloned().chain([metaroce.into_os_string()]);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg("run").arg("--").arg(program).current_dir(&self.root);
        self.clear_settings(&mut command);
        command.env("METAROCE_PLANES", "lo");
        command
    }

    /// Takes the caller's METAROCE_* settings away.
    pub fn clear_settings(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("METAROCE_")) {
                command.env_remove(name);
            }
        }
    }

    /// `metaroce` itself on loopback.
    pub fn metaroce_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.metaroce());
        command.args(arguments).env("METAROCE_PLANES", "lo");
        command
    }
}

/// The cargo that runs this task.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}
