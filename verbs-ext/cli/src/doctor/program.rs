//! A given program: can the shim be loaded into it, and whose libibverbs does it use.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::{Finding, verbs};
use crate::elf::{self, Elf};

/// Libraries looked at when following what a program is linked to.
const LIBRARIES_MAX: usize = 256;

/// Looks at a program, found as the shell finds it.
pub fn check(name: &Path) -> Vec<Finding> {
    let Some(path) = elf::find_program(name) else {
        let remedy = "give the path of an executable file, or a name in PATH";
        return vec![Finding::wrong(
            "program",
            format!("{} is not there or not executable", name.display()),
            remedy,
        )];
    };
    let bytes = match elf::read(&path) {
        Ok(bytes) => bytes,
        Err(error) => {
            let found = format!("cannot read {}: {error}", path.display());
            return vec![Finding::advice("program", found, "run doctor as a user who may read it")];
        }
    };
    if let Some(interpreter) = elf::script_interpreter(&bytes) {
        let script =
            Finding::good("program", format!("{} is a script for {}", path.display(), interpreter.display()));
        let target = elf::find_program(&interpreter).unwrap_or(interpreter);
        let bytes = elf::read(&target).unwrap_or_default();
        return std::iter::once(script).chain(binary(&target, &bytes)).collect();
    }
    binary(&path, &bytes)
}

fn binary(path: &Path, bytes: &[u8]) -> Vec<Finding> {
    let shown = path.display();
    let Some(elf) = elf::parse(bytes) else {
        return vec![Finding::wrong(
            "program",
            format!("{shown} is no 64-bit ELF program"),
            "name the real binary",
        )];
    };
    if let Some(obstacle) = elf::preload_obstacle(path) {
        let remedy = if elf.interpreter.is_none() {
            "link it dynamically (libibverbs loads no providers when static)"
        } else {
            "use a build without that"
        };
        return vec![Finding::wrong("program", format!("{shown} {obstacle}"), remedy)];
    }
    let mut findings = vec![Finding::good("program", format!("{shown} is dynamically linked"))];
    findings.push(whose_verbs(path, bytes, &elf));
    findings
}

/// Says where the program's libibverbs comes from.
fn whose_verbs(path: &Path, bytes: &[u8], elf: &Elf) -> Finding {
    if let Some(abi) = elf::embedded_verbs_abi(bytes) {
        let found = format!("{} contains a libibverbs of its own (private ABI {abi})", path.display());
        return bundled(found, abi);
    }
    let system = verbs::find_library("libibverbs.so.1").and_then(|path| path.canonicalize().ok());
    match find_linked(path, elf) {
        Some(library) if Some(&library) == system.as_ref() => {
            Finding::good("its verbs", format!("the system's {}", library.display()))
        }
        Some(library) => {
            let abi = elf::read(&library).ok().and_then(|bytes| elf::embedded_verbs_abi(&bytes)).unwrap_or(0);
            bundled(format!("it brings {} along (private ABI {abi})", library.display()), abi)
        }
        None if contains(bytes, b"libibverbs.so") => {
            Finding::good("its verbs", "loads libibverbs at run time (dlopen)")
        }
        None => Finding::advice(
            "its verbs",
            "is not linked to libibverbs, directly or through its libraries",
            "none if it loads a plug-in that uses verbs; otherwise it will never look for a device",
        ),
    }
}

fn bundled(found: String, abi: u32) -> Finding {
    if abi == 34 {
        Finding::good("its verbs", found)
    } else {
        Finding::wrong(
            "its verbs",
            found,
            "only private ABI 34 is served; let it use the system's libibverbs",
        )
    }
}

/// The libibverbs a program is linked to, directly or through its libraries.
fn find_linked(path: &Path, elf: &Elf) -> Option<PathBuf> {
    let mut seen = HashSet::new();
    let mut pending = vec![(path.to_owned(), elf.clone())];
    while let Some((path, elf)) = pending.pop() {
        for name in &elf.needed {
            let Some(library) = resolve(name, &path, &elf) else { continue };
            if name.starts_with("libibverbs.so") {
                return library.canonicalize().ok();
            }
            if seen.len() < LIBRARIES_MAX && seen.insert(library.clone()) {
                let parsed = elf::read(&library).ok().and_then(|bytes| elf::parse(&bytes));
                pending.extend(parsed.map(|elf| (library, elf)));
            }
        }
    }
    None
}

fn resolve(name: &str, user: &Path, elf: &Elf) -> Option<PathBuf> {
    let origin = user.parent().unwrap_or(Path::new("/")).to_string_lossy().into_owned();
    let own = elf.run_paths.iter().map(|dir| dir.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin));
    own.map(|dir| Path::new(&dir).join(name))
        .find(|path| path.is_file())
        .or_else(|| verbs::find_library(name))
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    #[test]
    fn check__missing_program_is_wrong_and_named() {
        let findings = check(Path::new("/no/such/program"));
        assert_eq!(findings[0].level, Level::Wrong);
        assert!(findings[0].found.contains("/no/such/program"));
    }

    #[test]
    fn check__own_executable_is_dynamic_and_uses_no_verbs() {
        let findings = check(&std::env::current_exe().unwrap());
        assert_eq!(findings[0].level, Level::Good);
        assert_eq!(findings.len(), 2);
    }
}
