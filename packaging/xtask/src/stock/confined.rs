//! The device for those who may do nothing: no capability, hardly any lockable memory, small socket buffers.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::pair::{Circumstances, Pair, program};
use super::perftest;
use crate::exec;
use crate::packages::is_root;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check as an ordinary user.
pub const ORDINARY_USER: &str = "ordinary user, no_new_privs, ulimit -l 64: 1 GiB of registered memory";
/// Name of the check with small buffers.
pub const SMALL_BUFFERS: &str = "receive buffer of 212,992 bytes, 1 % loss";

/// What the kernels of Debian 12 and Ubuntu grant at most.
const SMALL_RCVBUF: u32 = 212_992;
const TIMEOUT: Duration = Duration::from_secs(120);
/// nobody.
const UID: &str = "65534";

/// A bandwidth run over 1 GiB of registered memory as nobody (root drops to it), or as whoever runs the tests.
pub fn ordinary_user(workspace: &Workspace) -> Outcome {
    let copy = PublicCopy::make(workspace)?;
    let mut confinement = vec![program("prlimit")?.into_os_string(), "--memlock=65536:65536".into()];
    confinement.push(program("setpriv")?.into_os_string());
    confinement.push("--no-new-privs".into());
    if is_root() {
        let drop_all =
            ["--reuid", UID, "--regid", UID, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"];
        confinement.extend(drop_all.map(OsString::from));
    }
    let circumstances = Circumstances {
        confinement,
        metaroce: Some(copy.dir.join("metaroce")),
        environment: vec![("XDG_RUNTIME_DIR", String::new())],
        ..Circumstances::default()
    };
    register(workspace, &circumstances)?;
    write_bandwidth(workspace, &["-s", "65536", "-n", "4000"], circumstances)
}

/// Registers 1 GiB. (perftest could, too, but fills its buffers byte by byte.)
fn register(workspace: &Workspace, circumstances: &Circumstances) -> Result<(), Trouble> {
    const SCRIPT: &str = "\
import pyverbs.enums as e
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
MR(PD(Context(name='metaroce0')), 1 << 30, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
print('registered')";
    let mut command = circumstances.command(workspace, Path::new("/usr/bin/python3"));
    let done = exec::run("python3", command.args(["-c", SCRIPT]), TIMEOUT)?;
    if done.output.contains("registered") { Ok(()) } else { Err(Trouble::Fail(done.to_string())) }
}

/// A bandwidth run with the socket buffer of older kernels, where losses hurt more.
pub fn small_buffers(workspace: &Workspace, seed: u64) -> Outcome {
    let environment = vec![("METAROCE_RCVBUF", SMALL_RCVBUF.to_string())];
    let circumstances = Circumstances { environment, ..Circumstances::lossy(10, seed) };
    write_bandwidth(workspace, &["-s", "65536", "-n", "4000", "-q", "4"], circumstances)
}

fn write_bandwidth(workspace: &Workspace, sizes: &[&str], circumstances: Circumstances) -> Outcome {
    let fixed = ["-d", "metaroce0", "-x", "0", "-F"];
    let arguments = fixed.iter().chain(sizes).map(|word| word.to_string()).collect();
    let ended = Pair { program: "ib_write_bw", arguments, circumstances, timeout: TIMEOUT }.run(workspace)?;
    let figure = perftest::figure("ib_write_bw", &ended.client.output);
    figure.ok_or_else(|| Trouble::Fail(ended.text("no line of results")))
}

/// The command and its libraries where every user may read them; removed when dropped.
struct PublicCopy {
    dir: PathBuf,
}

impl PublicCopy {
    fn make(workspace: &Workspace) -> Result<PublicCopy, Trouble> {
        let dir = std::env::temp_dir().join(format!("metaroce-public-{}", std::process::id()));
        fs::create_dir(&dir)?;
        let copy = PublicCopy { dir };
        fs::set_permissions(&copy.dir, fs::Permissions::from_mode(0o755))?;
        for name in ["metaroce", "libmetaroce_shim.so", "libmetaroce_provider.so"] {
            fs::copy(workspace.release.join(name), copy.dir.join(name))?;
            fs::set_permissions(copy.dir.join(name), fs::Permissions::from_mode(0o755))?;
        }
        Ok(copy)
    }
}

impl Drop for PublicCopy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
