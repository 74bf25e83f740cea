//! `metaroce-netns`: runs a server on one and a client on the other of two hosts made of network namespaces.
//!
//! ```text
//! metaroce-netns --planes 2 --server 'metaroce run -- ib_write_bw' -- metaroce run -- ib_write_bw {server}
//! metaroce-netns --ready listening --server 'metaroce-bench blast --listen {server}' -- metaroce-bench blast --connect {ready}
//! ```

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use metaroce_netns::{
    Ended, Fabric, Failure, Listens, Plan, READY_LIMIT, Rate, become_root_of_own_namespace,
};

/// The exit code that means "not on this machine", as test harnesses know it.
const SKIP: u8 = 77;
/// A server that has nothing more to do ends by then, or is ended.
const SERVER_LIMIT: Duration = Duration::from_secs(3);

/// Runs a server and a client on two hosts with several planes between them.
#[derive(Parser)]
#[command(name = "metaroce-netns", version)]
struct Cli {
    /// Planes: cables between the hosts, called plane0, plane1, ... (METAROCE_PLANES lists them all).
    #[arg(long, default_value_t = 2)]
    planes: usize,
    /// MTU of every interface.
    #[arg(long, default_value_t = 9000)]
    mtu: u32,
    /// IPv6 addresses too.
    #[arg(long)]
    ipv6: bool,
    /// Planes from this one on have IPv6 addresses and no others (0: all of them).
    #[arg(long, value_name = "PLANE")]
    ipv6_only: Option<usize>,
    /// No IPv4 at all, not even on the loopback interface.
    #[arg(long, conflicts_with = "ipv6_only")]
    no_ipv4: bool,
    /// Packets lost of each 1000, on every plane and in both directions.
    #[arg(long, default_value_t = 0)]
    loss: u32,
    /// Cut segmentation-offload packets at the sender, as without this kind of NIC (always so with --loss).
    #[arg(long)]
    cut: bool,
    /// Rate of every link in Mb/s, with switches between the hosts.
    #[arg(long, value_name = "MBIT")]
    rate: Option<u32>,
    /// Command of the server, words separated by blanks; without it only the client runs.
    #[arg(long)]
    server: Option<String>,
    /// The server is one that runs until it is ended: it is as soon as the client has ended, and what it exits
    /// with does not count.
    #[arg(long)]
    end_server: bool,
    /// The server is ready when it prints a line that begins with this word (by default: when it listens on
    /// TCP).
    #[arg(long)]
    ready: Option<String>,
    /// The server is ready when something has this UDP port.
    #[arg(long, value_name = "PORT", conflicts_with = "ready")]
    ready_udp: Option<u16>,
    /// The client's command. In both commands {server} and {client} are IPv4 addresses of the hosts,
    /// {server6} and {client6} the IPv6 addresses of plane 0, in
    /// the client's {ready} is what follows the ready word.
    #[arg(trailing_var_arg = true, required = true)]
    client: Vec<String>,
}

fn main() -> ExitCode {
    // Before anything makes a thread.
    let rights = become_root_of_own_namespace();
    let cli = Cli::parse();
    if let Err(error) = rights {
        eprintln!("SKIP no right to make network namespaces (root, or user namespaces): {error}");
        return ExitCode::from(SKIP);
    }
    match run(&cli) {
        Ok(code) => ExitCode::from(code),
        Err(Failure::CannotHere(why)) => {
            eprintln!("SKIP {}", Failure::CannotHere(why));
            ExitCode::from(SKIP)
        }
        Err(error) => {
            eprintln!("metaroce-netns: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<u8, Failure> {
    let super_packets = !cli.cut && cli.loss == 0;
    let plan = Plan {
        planes: cli.planes,
        mtu: cli.mtu,
        ipv6: cli.ipv6,
        ipv6_only: if cli.no_ipv4 { Some(0) } else { cli.ipv6_only },
        no_ipv4: cli.no_ipv4,
        super_packets,
        rate: cli.rate.map(Rate::mbit),
    };
    let fabric = Fabric::new(plan)?;
    if cli.loss > 0 {
        let all: Vec<(usize, u32)> = (0..cli.planes).map(|plane| (plane, cli.loss)).collect();
        fabric.set_loss(&all)?;
    }
    let [server_host, client_host] = fabric.hosts();
    let place = |word: &str| {
        word.replace("{server}", &server_host.control(fabric.plan()).to_string())
            .replace("{client}", &client_host.control(fabric.plan()).to_string())
            .replace("{server6}", &server_host.ipv6(0).to_string())
            .replace("{client6}", &client_host.ipv6(0).to_string())
    };
    let (server, ready) = match &cli.server {
        None => (None, String::new()),
        Some(line) => {
            let words: Vec<String> = line.split_whitespace().map(place).collect();
            let mut command = command_of(&words, &fabric)?;
            let (server, ready) = start(server_host.inside(&mut command), cli)?;
            (Some(server), ready)
        }
    };
    let words: Vec<String> = cli.client.iter().map(|word| place(word).replace("{ready}", &ready)).collect();
    let mut command = command_of(&words, &fabric)?;
    let status = client_host.inside(&mut command).status()?;
    // The client's failure says more; a server that failed by itself is one, too.
    let served = server.filter(|_| !cli.end_server).and_then(|mut server| wait_a_little(&mut server.0));
    let status = served.filter(|_| status.success()).unwrap_or(status);
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(u8::try_from(code).unwrap_or(1))
}

/// Starts the server and waits until it is ready; gives what follows the ready word.
fn start(command: &mut Command, cli: &Cli) -> Result<(Ended, String), Failure> {
    command.stdin(Stdio::null());
    if cli.ready.is_some() {
        command.stdout(Stdio::piped());
    }
    let mut server = Ended(command.spawn()?);
    let ready = match &cli.ready {
        Some(word) => wait_for_line(&mut server.0, word)?,
        None => {
            cli.ready_udp.map_or(Listens::Tcp, Listens::UdpPort).wait(&mut server.0)?;
            String::new()
        }
    };
    Ok((server, ready))
}

fn command_of(words: &[String], fabric: &Fabric) -> Result<Command, Failure> {
    let (program, arguments) = words.split_first().ok_or(Failure::Broken("a command has no words".into()))?;
    let mut command = Command::new(program);
    command.args(arguments).env("METAROCE_PLANES", fabric.planes());
    Ok(command)
}

/// Waits for the line that begins with `word`; what follows it. Later lines go to our own output.
fn wait_for_line(server: &mut Child, word: &str) -> Result<String, Failure> {
    let stdout = server.stdout.take().ok_or(Failure::Broken("the server has no output".into()))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    let word = word.to_owned();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            match line.strip_prefix(&word) {
                // Nobody listens any more once the first one has come.
                Some(rest) => drop(sender.send(rest.trim().to_owned())),
                None => println!("{line}"),
            }
        }
    });
    receiver.recv_timeout(READY_LIMIT).map_err(|_| Failure::Broken("the server did not become ready".into()))
}

/// Gives a server time to end by itself; its status if it did.
fn wait_a_little(server: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + SERVER_LIMIT;
    loop {
        match server.try_wait() {
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}
