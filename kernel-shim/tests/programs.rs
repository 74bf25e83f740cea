//! Unmodified programs under the shim: `ls`, `find`, a shell, Python, libibverbs' tools, and a C program for the rest.

#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A scratch directory with a copy of the shim in it, so that another user can load it; removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("metaroce-shim-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("run")).unwrap();
        fs::set_permissions(path.join("run"), PermissionsExt::from_mode(0o777)).unwrap();
        fs::copy(shim(), path.join("shim.so")).unwrap();
        Scratch(path)
    }

    /// `program` under the shim, on loopback, with files of its own.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("METAROCE_")) {
            command.env_remove(name);
        }
        command
            .env("LD_PRELOAD", self.0.join("shim.so"))
            .env("XDG_RUNTIME_DIR", self.0.join("run"))
            .env("METAROCE_PLANES", "lo")
            .env("LC_ALL", "C")
            .current_dir(self.0.join("run"));
        command
    }

    fn shell(&self, script: &str) -> Output {
        self.command("/bin/sh").args(["-c", script]).output().unwrap()
    }

    /// What a shell script prints; it must succeed and say nothing on stderr.
    fn says(&self, script: &str) -> String {
        let output = self.shell(script);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && err.is_empty(), "{script}: {}\n{out}{err}", output.status);
        out
    }

    fn trees(&self) -> Vec<PathBuf> {
        fs::read_dir(self.0.join("run/metaroce")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The library that cargo built for this test, beside or above the test itself.
fn shim() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let place = |directory: &Path| directory.join("libmetaroce_shim.so");
    let near = [place(test.parent().unwrap()), place(test.parent().unwrap().parent().unwrap())];
    let newest = near
        .into_iter()
        .filter(|path| path.exists())
        .max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
    newest.expect("the shim is not built: run `cargo build -p metaroce-shim` in this profile first")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a machine has what a test needs; what it cannot do is skipped and said.
fn can(what: &str, command: &mut Command) -> bool {
    let works = command.output().is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("skipped: this machine has no {what}");
    }
    works
}

#[test]
fn listing__ls_and_find_see_the_device() {
    let scratch = Scratch::new("ls");
    assert_eq!(
        scratch.says("ls /sys/class/infiniband /dev/infiniband"),
        "/dev/infiniband:\nrdma_cm\nuverbs0\n\n/sys/class/infiniband:\nmetaroce0\n"
    );
    assert!(scratch.says("ls -l /dev/infiniband/uverbs0").starts_with('c'));
    assert!(scratch.says("ls -lR /sys/class/infiniband/metaroce0/").contains("node_guid"));
    let found = scratch.says("find /sys/class/infiniband -name types");
    assert_eq!(found, "/sys/class/infiniband/metaroce0/ports/1/gid_attrs/types\n");
    let types = scratch.says("cat /sys/class/infiniband/*/ports/*/gid_attrs/types/0");
    assert_eq!(types, "RoCE v2\n");
    assert_eq!(scratch.says("cat /sys/class/infiniband/metaroce0/device/net/lo/ifindex"), "1\n");
    // GID 0 is IPv4-mapped, and the entry after the last address is empty.
    assert!(
        scratch.says("cat /sys/class/infiniband/metaroce0/ports/1/gids/0").ends_with(":ffff:7f00:0001\n")
    );
}

#[test]
fn shell__works_in_the_tree_and_cannot_write_to_it() {
    let scratch = Scratch::new("sh");
    let at = "/sys/class/infiniband/metaroce0";
    assert_eq!(
        scratch.says(&format!("cd {at}/ports && /bin/pwd && cd .. && /bin/pwd")),
        format!("{at}/ports\n{at}\n")
    );
    assert_eq!(
        scratch.says("[ -c /dev/infiniband/uverbs0 ] && [ -w /dev/infiniband/uverbs0 ] && echo yes"),
        "yes\n"
    );
    let output = scratch.shell(&format!("echo x > {at}/node_desc"));
    assert!(!output.status.success());
    assert_eq!(scratch.says(&format!("cat {at}/node_desc")), "metaroce\n");
    assert!(!scratch.shell("ls /sys/class/infiniband/other").status.success());
}

#[test]
fn probe__every_hook_as_a_c_program_calls_it() {
    let scratch = Scratch::new("probe");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/probe.c");
    let program = scratch.0.join("probe");
    let built = Command::new("cc")
        .args(["-O2", "-Wall", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .arg("-ldl")
        .output();
    let built = built.expect("a C compiler links Rust programs, so there is one");
    assert!(built.status.success(), "{}", text(&built.stderr));
    let output = scratch.command(program.to_str().unwrap()).arg("lo").output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
}

/// Runs two processes that connect by the device's commands alone.
fn connect(name: &str, address: &str, cm_loss: &str) {
    let scratch = Scratch::new(&format!("cm-{}-{}", name.replace(' ', "-"), address.len()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cm.c");
    let program = scratch.0.join("cm");
    let built = Command::new("cc").args(["-O2", "-Wall", "-o"]).arg(&program).arg(source).output();
    let built = built.expect("a C compiler links Rust programs, so there is one");
    assert!(built.status.success(), "{}", text(&built.stderr));
    let mut command = scratch.command(program.to_str().unwrap());
    let output = command
        .args(name.split(' ').take(1))
        .arg(address)
        .args(name.split(' ').skip(1))
        .env("METAROCE_CM_LOSS", cm_loss)
        .output()
        .unwrap();
    assert!(output.status.success(), "{name} {address}: {}: {}", output.status, text(&output.stderr));
}

#[test]
fn connection__is_made_used_and_ended() {
    connect("talk", "127.0.0.1", "0");
    connect("talk", "127.0.0.2", "0.05");
    connect("reject", "127.0.0.1", "0");
    connect("nobody", "127.0.0.1", "0");
    if std::net::UdpSocket::bind("[::1]:0").is_ok() {
        connect("talk", "::1", "0.05");
        connect("nobody", "::1", "0");
    }
}

#[test]
fn killed_peer__is_noticed() {
    connect("killed", "127.0.0.1", "0");
    connect("ends", "127.0.0.1", "0");
    connect("ends", "127.0.0.2", "0.05");
}

/// `METAROCE_SEED` chooses the moments again.
#[test]
fn peer_killed_at_any_moment__is_noticed() {
    let seed = std::env::var("METAROCE_SEED").unwrap_or_else(|_| std::process::id().to_string());
    eprintln!("METAROCE_SEED={seed}");
    connect(&format!("random {seed}"), "127.0.0.1", "0");
    connect(&format!("random {seed}"), "127.0.0.2", "0.05");
}

#[test]
fn groups__are_joined_and_left_and_their_events_counted() {
    connect("groups", "127.0.0.1", "0");
    if std::net::UdpSocket::bind("[::1]:0").is_ok() {
        connect("groups", "::1", "0");
    }
}

/// `METAROCE_ROUNDS` makes it more.
#[test]
fn cycles__leave_nothing_behind() {
    let rounds = std::env::var("METAROCE_ROUNDS").unwrap_or("1000".to_owned());
    connect(&format!("cycles {rounds}"), "127.0.0.1", "0");
}

/// The kernel's device is a file here, in a mount namespace: what is shown is whose node it is and that all writes reach
/// it, not what a kernel would do with them.
#[test]
fn kernels_rdma_cm__is_left_to_the_kernel() {
    let root = ["--user", "--map-root-user", "--mount"];
    if !can("user and mount namespaces", Command::new("unshare").args(root).arg("true")) {
        return;
    }
    let scratch = Scratch::new("kernel");
    fs::create_dir_all(scratch.0.join("dev/infiniband")).unwrap();
    let script = r"
        set -e
        mount -t tmpfs none /sys/class
        mkdir -p /sys/class/infiniband/mlx5_0 /sys/class/infiniband_verbs
        for node in null zero urandom; do : > ../dev/$node; mount --bind /dev/$node ../dev/$node; done
        : > ../dev/infiniband/rdma_cm
        mount --rbind ../dev /dev
        export LD_PRELOAD=$PWD/../shim.so
        ls -m /dev/infiniband /sys/class/infiniband
        printf '\0\0\0\0\030\0\004\0the body of a first one!' > /dev/infiniband/rdma_cm
        tail -c 24 /dev/infiniband/rdma_cm; wc -c < /dev/infiniband/rdma_cm
        stat -c %F /dev/infiniband/rdma_cm";
    let output = scratch
        .command("unshare")
        .env_remove("LD_PRELOAD")
        .args(root)
        .args(["sh", "-c", script])
        .output()
        .unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && err.is_empty(), "{}\n{out}{err}", output.status);
    assert_eq!(
        out,
        "/dev/infiniband:\nrdma_cm, uverbs0\n\n/sys/class/infiniband:\nmetaroce0, mlx5_0\n\
         the body of a first one!32\nregular file\n"
    );
}

#[test]
fn python__sees_what_programs_in_c_see() {
    if !can("python3", Command::new("python3").arg("--version")) {
        return;
    }
    let scratch = Scratch::new("python");
    let script = "
import glob, os, pathlib, stat
dev = '/sys/class/infiniband/metaroce0'
assert os.listdir('/sys/class/infiniband') == ['metaroce0']
assert os.path.exists(dev + '/device/net/') and os.listdir(dev + '/device/net/') == ['lo']
assert os.path.realpath(dev + '/device') == dev + '/device', os.path.realpath(dev + '/device')
assert glob.glob('/sys/class/infiniband/*/ports/*/state') == [dev + '/ports/1/state']
assert pathlib.Path(dev, 'ports/1/state').read_text() == '4: ACTIVE\\n'
assert stat.S_ISCHR(os.stat('/dev/infiniband/uverbs0').st_mode)
for root, dirs, files in os.walk(dev):
    for name in files:
        if not os.path.islink(os.path.join(root, name)):
            open(os.path.join(root, name)).read()
os.chdir(dev)
assert os.getcwd() == dev
fd = os.open('/sys/class', os.O_RDONLY)
assert stat.S_ISDIR(os.stat('infiniband', dir_fd=fd).st_mode)
";
    let output = scratch.command("python3").args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn ordinary_user__needs_no_privilege() {
    let drop = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--inh-caps=-all"];
    if !can("right to become another user", Command::new("setpriv").args(drop).arg("true")) {
        return;
    }
    let scratch = Scratch::new("user");
    let script =
        "ls /sys/class/infiniband && : < /dev/infiniband/uverbs0 && ls -ld $XDG_RUNTIME_DIR/metaroce";
    let output = scratch.command("setpriv").args(drop).args(["sh", "-c", script]).output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(out.starts_with("metaroce0\ndrwx------"), "{out}");
}

#[test]
fn killed_processes__leave_one_tree_that_the_next_uses_or_reclaims() {
    let scratch = Scratch::new("kill");
    for _ in 0..5 {
        // The shell itself looks, so it holds the tree when it dies.
        let output = scratch.shell("[ -d /sys/class/infiniband/metaroce0 ] && kill -9 $$");
        assert!(!output.status.success());
    }
    let left = scratch.trees();
    assert_eq!(left.len(), 1, "{left:?}");
    scratch.says("ls /sys/class/infiniband");
    assert_eq!(scratch.trees(), left);
    // Another configuration makes another tree and removes the one nobody holds.
    let output = scratch
        .command("ls")
        .env("METAROCE_PLANES", "127.0.0.1")
        .arg("/sys/class/infiniband")
        .output()
        .unwrap();
    assert!(output.status.success());
    let next = scratch.trees();
    assert!(next.len() == 1 && next != left, "{left:?} {next:?}");
}

#[test]
fn broken_configuration__is_said_once_and_only_to_who_asks() {
    let scratch = Scratch::new("broken");
    let run = |script: &str, name: &str, value: &str| {
        scratch.command("/bin/sh").args(["-c", script]).env(name, value).output().unwrap()
    };
    let quiet = run("ls / > /dev/null; cat /proc/self/status > /dev/null", "METAROCE_PLANES", "nowhere9");
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{}", text(&quiet.stderr));
    for (name, value) in
        [("METAROCE_PLANES", "nowhere9"), ("METAROCE_LOSS", "much"), ("METAROCE_CONFIG", "/nowhere9")]
    {
        let looks = "[ -e /sys/class/infiniband ] || [ -e /dev/infiniband ] || [ -e /dev/infiniband/uverbs0 ] || echo none";
        let output = run(looks, name, value);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(out, "none\n");
        assert!(err.starts_with("metaroce: ") && err.lines().count() == 1 && err.contains(value), "{err}");
    }
}

#[test]
fn libibverbs__finds_the_device() {
    if !can("ibv_devices", &mut Command::new("ibv_devices")) {
        return;
    }
    let scratch = Scratch::new("ibv");
    // Without a provider libibverbs says which device it has no driver for, having found it by netlink or sysfs.
    let output = scratch.command("ibv_devices").env("RDMAV_DRIVERS", "none").output().unwrap();
    let err = text(&output.stderr);
    assert!(
        err.contains("no userspace device-specific driver found for") && err.contains("uverbs0"),
        "{err}"
    );
}

#[test]
fn real_stack__stays_and_the_device_is_added() {
    let namespaces = ["-Urm", "--propagation", "private"];
    if !can("right to make user namespaces", Command::new("unshare").args(namespaces).arg("true")) {
        return;
    }
    let scratch = Scratch::new("real");
    // A pretended stack: /sys/class and /dev with what a kernel would have there.
    let script = "
set -e
mount -t tmpfs none /sys/class
mkdir -p /sys/class/infiniband/mlx5_0/ports /sys/class/infiniband_verbs/uverbs0
echo 6 > /sys/class/infiniband_verbs/abi_version
echo real > /sys/class/infiniband/mlx5_0/node_desc
mkdir dev
mount -t tmpfs none dev
mkdir dev/infiniband
touch dev/null dev/infiniband/uverbs0 dev/infiniband/rdma_cm
mount --bind /dev/null dev/null
mount --rbind dev /dev
export LD_PRELOAD=$SHIM
ls -m /sys/class/infiniband
ls -m /sys/class/infiniband_verbs
ls -m /dev/infiniband
cat /sys/class/infiniband/mlx5_0/node_desc /sys/class/infiniband/metaroce0/node_desc
cat /sys/class/infiniband_verbs/abi_version /sys/class/infiniband_verbs/uverbs1/ibdev
sh -c '[ -c /dev/infiniband/uverbs1 ] && [ -f /dev/infiniband/uverbs0 ] && echo nodes
for directory in /sys/class/infiniband/*; do echo $directory; done'
ls /sys/class/infiniband/metaroce0/device/net/lo
";
    let mut command = scratch.command("unshare");
    let shim = scratch.0.join("shim.so");
    let output = command
        .env_remove("LD_PRELOAD")
        .env("SHIM", shim)
        .args(namespaces)
        .args(["sh", "-c", script])
        .output()
        .unwrap();
    let expected = "metaroce0, mlx5_0\nabi_version, uverbs0, uverbs1\nrdma_cm, uverbs0, uverbs1\nreal\nmetaroce\n6\nmetaroce0\n\
                    nodes\n/sys/class/infiniband/metaroce0\n/sys/class/infiniband/mlx5_0\n\
                    address\ndev_id\ndev_port\nifindex\nmtu\noperstate\n";
    assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));
}
