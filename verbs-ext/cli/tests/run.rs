//! The `metaroce` command as a user starts it, with stand-ins for its two libraries.

#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory with both libraries in it (any loadable ones will do), and a runtime directory.
struct Install {
    root: PathBuf,
    libraries: PathBuf,
}

impl Install {
    fn new(test: &str, libraries: &str) -> Install {
        let root = std::env::temp_dir().join(format!("metaroce-cli-run-{}-{test}", std::process::id()));
        let libraries = root.join(libraries);
        fs::create_dir_all(&libraries).unwrap();
        fs::create_dir(root.join("runtime")).unwrap();
        let any = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"]
            .into_iter()
            .find(|path| Path::new(path).exists())
            .expect("a libm to stand in");
        symlink(any, libraries.join("libmetaroce_shim.so")).unwrap();
        symlink(any, libraries.join("libmetaroce_provider.so")).unwrap();
        Install { root, libraries }
    }

    fn metaroce(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_metaroce"));
        self.apply(command.args(arguments));
        command
    }

    /// Sets the environment of this installation.
    fn apply<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env_remove("LD_PRELOAD")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("IBV_DRIVERS")
            .env("METAROCE_PLANES", "lo")
            .env("METAROCE_LIBDIR", &self.libraries)
            .env("XDG_RUNTIME_DIR", self.root.join("runtime"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
    }
}

impl Drop for Install {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

const SHOW: &str = "echo $$; echo \"$LD_PRELOAD\"; echo \"$RDMAV_DRIVERS\"; exit 7";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks the output of [`SHOW`]; returns the driver named.
fn check(pid: u32, out: &Output, shim: &str) -> String {
    let stdout = text(&out.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(out.status.code(), Some(7), "{}", text(&out.stderr));
    assert_eq!(text(&out.stderr), "");
    assert_eq!(lines[0], pid.to_string(), "the program has another pid than metaroce had");
    assert!(lines[1].ends_with(shim), "{stdout}");
    assert!(Path::new(&format!("{}-rdmav34.so", lines[2])).exists(), "{stdout}");
    lines[2].to_owned()
}

#[test]
fn run__execs_with_both_variables_set() {
    let install = Install::new("plain", "lib");
    let child = install.metaroce(&["run", "--", "/bin/sh", "-c", SHOW]).spawn().unwrap();
    let pid = child.id();
    let driver = check(pid, &child.wait_with_output().unwrap(), "lib/libmetaroce_shim.so");
    assert!(driver.starts_with(install.root.to_str().unwrap()));
}

#[test]
fn run__from_an_unclean_path_by_many_at_once() {
    // Spaces and colons would split LD_PRELOAD, semicolons RDMAV_DRIVERS.
    let install = Install::new("unclean", "my libs: a;b");
    let start = || install.metaroce(&["run", "/bin/sh", "-c", SHOW]).spawn().unwrap();
    let children: Vec<_> = (0..24).map(|_| start()).collect();
    let mut drivers: Vec<String> = children
        .into_iter()
        .map(|child| {
            let pid = child.id();
            check(pid, &child.wait_with_output().unwrap(), "/libmetaroce_shim.so")
        })
        .collect();
    drivers.dedup();
    assert_eq!(drivers.len(), 1, "{drivers:?}");
}

#[test]
fn run__installed_below_a_prefix_finds_its_libraries() {
    let install = Install::new("prefix", "lib/metaroce");
    fs::create_dir(install.root.join("bin")).unwrap();
    // Another process copies: a file open for writing here would be inherited by what other tests fork meanwhile, and
    // a file somebody writes cannot be executed (ETXTBSY).
    let copied =
        Command::new("cp").arg(env!("CARGO_BIN_EXE_metaroce")).arg(install.root.join("bin")).status();
    assert!(copied.unwrap().success());
    let mut command = Command::new(install.root.join("bin/metaroce"));
    install.apply(command.args(["run", "/bin/sh", "-c", SHOW])).env_remove("METAROCE_LIBDIR");
    let child = command.spawn().unwrap();
    let pid = child.id();
    check(pid, &child.wait_with_output().unwrap(), "lib/metaroce/libmetaroce_shim.so");
}

#[test]
fn run__names_what_is_wrong() {
    let install = Install::new("wrong", "lib");
    let fails = |command: &mut Command, code: i32, words: &[&str]| {
        let out = command.output().unwrap();
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    };
    fails(&mut install.metaroce(&["run", "no-such-program-here"]), 127, &["no-such-program-here"]);
    fails(&mut install.metaroce(&["run", "--planes", "nosuch9", "true"]), 126, &["nosuch9"]);
    fails(
        install.metaroce(&["run", "true"]).env("METAROCE_LIBDIR", "/nowhere"),
        126,
        &["/nowhere", "METAROCE_LIBDIR"],
    );
}

#[test]
fn env__can_be_evaluated_by_a_shell() {
    let install = Install::new("env", "it's here");
    let script = format!(
        "eval \"$({} env --loss 1%)\" && echo \"$METAROCE_LOSS\" && {SHOW}",
        env!("CARGO_BIN_EXE_metaroce")
    );
    let mut shell = Command::new("/bin/sh");
    install.apply(&mut shell);
    let out = shell.args(["-c", &script]).output().unwrap();
    let stdout = text(&out.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!((out.status.code(), lines[0]), (Some(7), "0.01"), "{stdout}{}", text(&out.stderr));
    assert!(lines[2].ends_with("/libmetaroce_shim.so") && lines[3].ends_with("/libmetaroce"), "{stdout}");
}

#[test]
fn stat__of_a_process_that_never_was_is_a_failure() {
    let install = Install::new("stat", "lib");
    let out = install.metaroce(&["stat", "--pid", "4194304", "--json"]).output().unwrap();
    assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(1), "[]\n"));
    assert!(text(&out.stderr).contains("nothing went through metaroce0"));
}

#[test]
fn output__that_cannot_be_written_is_no_panic() {
    let install = Install::new("output", "lib");
    for subcommand in [
        ["config", "--json"],
        ["devices", "--json"],
        ["link", "--json"],
        ["gids", "--json"],
        ["env", "--planes=lo"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = install.metaroce(&subcommand).stdout(full).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{subcommand:?}");
        let said = text(&out.stderr);
        assert!(said.starts_with("metaroce: cannot write to standard output"), "{subcommand:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        // The reader is gone before the first byte.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = install.metaroce(&subcommand).stdout(writer).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{subcommand:?}: {}", text(&out.stderr));
        assert_eq!(text(&out.stderr), "", "{subcommand:?}");
    }
}
