//! `libmetaroce.so.1` as a C programmer meets it: its symbols have their version, its examples and tests compile without a
//! warning and run, in C99, and its header in C++17.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check.
pub const EXTENSION: &str = "libmetaroce.so.1: symbol versions, examples and tests in C";

/// The library as cargo names it.
const BUILT: &str = "libmetaroce.so";
/// Programs that end with 0, and whose checks are in themselves.
const PROGRAMS: [&str; 3] = ["examples/planes.c", "examples/events.c", "tests/refusals.c"];
/// Two planes on any machine with IPv6.
const PLANES: &str = "a=127.0.0.1,b=::1";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Compiles and runs everything.
pub fn run(workspace: &Workspace) -> Outcome {
    let library = workspace.built(BUILT)?;
    let dir = std::env::temp_dir().join(format!("metaroce-extension-{}", std::process::id()));
    fs::create_dir_all(&dir).map_err(|e| Trouble::Fail(format!("{}: {e}", dir.display())))?;
    let outcome = inside(workspace, &library, &dir);
    let _ = fs::remove_dir_all(&dir);
    outcome
}

fn inside(workspace: &Workspace, library: &Path, dir: &Path) -> Outcome {
    let sources = workspace.root.join("verbs-ext");
    let functions = versioned(library, &sources.join("include/metaroce/metaroce.h"))?;
    for name in [BUILT, "libmetaroce.so.1"] {
        symlink(library, dir.join(name)).map_err(|e| Trouble::Fail(e.to_string()))?;
    }
    for program in PROGRAMS {
        let built = compile(&sources, program, dir)?;
        let mut command = workspace.under_metaroce(&built, &[], None);
        let done =
            exec::run(program, command.env("METAROCE_PLANES", PLANES).env("LD_LIBRARY_PATH", dir), TIMEOUT)?;
        if done.output.contains("no interface or address here") {
            return Err(Trouble::Skip("no IPv6 on lo".into()));
        }
        if !done.success() {
            return Err(Trouble::Fail(done.to_string()));
        }
    }
    Ok(format!("{functions} functions, {} programs", PROGRAMS.len()))
}

fn compile(sources: &Path, program: &str, dir: &Path) -> Result<PathBuf, Trouble> {
    let built = dir.join(Path::new(program).file_stem().unwrap_or_default());
    let mut command = Command::new("gcc");
    command.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-O1"]);
    command.arg("-I").arg(sources.join("include")).arg(sources.join(program));
    command.arg("-L").arg(dir).args(["-lmetaroce", "-libverbs", "-o"]).arg(&built);
    let done = exec::run("gcc", &mut command, TIMEOUT)?;
    if done.success() { Ok(built) } else { Err(Trouble::Fail(done.to_string())) }
}

/// Every function of the header is exported with its version, and nothing else is exported. Gives how many there are.
fn versioned(library: &Path, header: &Path) -> Result<usize, Trouble> {
    let mut command = Command::new("readelf");
    let done = exec::run("readelf", command.args(["-W", "--dyn-syms"]).arg(library), TIMEOUT)?;
    let exported = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let defined = words.len() == 8 && words[4] == "GLOBAL" && words[6] != "UND";
        defined.then(|| words[7].to_owned())
    };
    let mut exported: Vec<String> = done.output.lines().filter_map(exported).collect();
    let header = fs::read_to_string(header).map_err(|e| Trouble::Fail(e.to_string()))?;
    let mut declared: Vec<String> = header.lines().filter_map(declared).collect();
    exported.sort();
    declared.sort();
    if exported == declared && !declared.is_empty() {
        return Ok(declared.len());
    }
    Err(Trouble::Fail(format!("exported: {exported:?}\ndeclared: {declared:?}\n{done}")))
}

/// The symbol of a declaration in the header.
fn declared(line: &str) -> Option<String> {
    let rest = line.strip_prefix("int ").or_else(|| line.strip_prefix("void "))?;
    let (name, _) = rest.split_once('(')?;
    name.starts_with("metaroce_").then(|| format!("{name}@@METAROCE_1.0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared__knows_functions_only() {
        assert_eq!(declared("int metaroce_x(void);").as_deref(), Some("metaroce_x@@METAROCE_1.0"));
        assert_eq!(declared("struct metaroce_x {"), None);
        assert_eq!(declared(" * int metaroce_x(void);"), None);
    }
}
