//! The second process of a bench: started by the first on the same address, or by hand where the ends live in
//! different network namespaces (`--listen` there, `--connect` here).

use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};

use clap::Args;

/// Where the two ends are.
#[derive(Args, Clone)]
pub struct Ends {
    /// Address both processes use when this program starts its own peer.
    #[arg(long, default_value = "127.0.0.1", conflicts_with_all = ["listen", "connect"])]
    pub address: IpAddr,
    /// Be the far end only: listen on this address, print `listening ADDR:PORT`, serve one run, exit.
    #[arg(long, conflicts_with = "connect")]
    pub listen: Option<IpAddr>,
    /// Be the near end of a peer started with --listen.
    #[arg(long)]
    pub connect: Option<SocketAddr>,
}

/// The far end's line that announces its port.
pub const READY: &str = "listening ";

/// The running far end, when this process started it. Killed and reaped when dropped.
pub struct Peer {
    child: Option<Child>,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Peer {
    /// Starts this program again as the far end (`subcommand --listen ADDR args...`), or takes the address of
    /// `--connect`.
    pub fn start(ends: &Ends, subcommand: &str, args: &[String]) -> io::Result<Self> {
        if let Some(address) = ends.connect {
            return Ok(Self { child: None, address });
        }
        let mut child = Command::new(std::env::current_exe()?)
            .arg(subcommand)
            .args(["--listen", &ends.address.to_string()])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("peer has no stdout"))?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.strip_prefix(READY).and_then(|a| a.trim().parse().ok());
        let mut peer = Self { child: Some(child), address: SocketAddr::new(ends.address, 0) };
        peer.address =
            address.ok_or_else(|| io::Error::other("the peer process did not announce its port"))?;
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It has usually exited by itself; both calls only fail when there is nothing left to do.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
