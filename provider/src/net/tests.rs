//! The table of GIDs under changes, and real changes in a network namespace of its own.

use std::io::Read;
use std::process::Command;

use metaroce_config::{GID_TABLE_LEN, Interface};

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

fn net(up: bool, addrs: &[&str]) -> NetView {
    let interface = Interface {
        name: "eth0".into(),
        index: 2,
        mtu: 1500,
        addrs: addrs.iter().map(|a| ip(a)).collect(),
        up,
        running: up,
        ..Interface::default()
    };
    NetView { interfaces: vec![interface], default_route: None }
}

fn state(planes: &str, here: &NetView) -> Followed {
    let env = |name: &str| (name == "METAROCE_PLANES").then(|| planes.to_owned());
    Followed::new(&metaroce_config::resolve(&env, None, here).expect("configuration"), Some(here))
}

#[test]
fn follow_keeps_indexes_and_fills_the_first_gap() {
    let mut state = state("eth0", &net(true, &["192.0.2.1", "192.0.2.2", "2001:db8::1"]));
    let table = |state: &Followed| state.gids.clone();
    state.follow(&net(true, &["192.0.2.1", "2001:db8::1"]));
    assert_eq!(table(&state), [Some(ip("192.0.2.1")), None, Some(ip("2001:db8::1"))]);
    state.follow(&net(true, &["192.0.2.1", "2001:db8::1", "2001:db8::7", "192.0.2.9"]));
    let all = ["192.0.2.1", "192.0.2.9", "2001:db8::1", "2001:db8::7"].map(|a| Some(ip(a)));
    assert_eq!(table(&state), all);
    assert_eq!(port(&state).gid_table_len, GID_TABLE_LEN);
}

#[test]
fn follow_survives_an_interface_that_goes_and_comes() {
    let here = net(true, &["192.0.2.1"]);
    let mut state = state("eth0", &here);
    state.follow(&NetView::default());
    assert!(!port(&state).up && state.gids == [None]);
    state.follow(&here);
    assert!(port(&state).up && state.gids == [Some(ip("192.0.2.1"))]);
    state.follow(&net(false, &["192.0.2.1"]));
    assert!(!port(&state).up && state.gids == [Some(ip("192.0.2.1"))], "down, with its address");
}

#[test]
fn follow_gives_a_plane_named_by_address_no_other() {
    let here = net(true, &["192.0.2.1", "192.0.2.2"]);
    let mut state = state("192.0.2.2", &here);
    state.follow(&net(true, &["192.0.2.1", "192.0.2.3"]));
    assert_eq!(state.gids, [None]);
    state.follow(&here);
    assert_eq!(state.gids, [Some(ip("192.0.2.2"))]);
}

/// Runs a command of iproute2 in the thread's namespace.
fn run_ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("iproute2 is installed");
    assert!(status.success(), "ip {arguments}");
}

fn next_event(reader: &mut std::io::PipeReader) -> (u64, u32) {
    let mut record = [0; 16];
    reader.read_exact(&mut record).expect("record");
    let element = u64::from_ne_bytes(record[..8].try_into().expect("8 bytes"));
    (element, u32::from_ne_bytes(record[8..12].try_into().expect("4 bytes")))
}

#[test]
fn changes_in_a_namespace_raise_events() {
    // A thread of its own: it enters a namespace, and its children and its watcher with it.
    let test = || {
        // SAFETY: a plain system call that concerns this thread only.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            // Not root: `cargo xtask test` runs the same in a user namespace.
            return;
        }
        run_ip("link add plane0 type veth peer name other0");
        run_ip("link set other0 up");
        run_ip("addr add 192.0.2.1/24 dev plane0");
        run_ip("link set plane0 up");
        let here = NetView::of_this_host().expect("interfaces");
        let env = |name: &str| (name == "METAROCE_PLANES").then(|| "plane0".to_owned());
        let config = metaroce_config::resolve(&env, None, &here).expect("configuration");
        let (events, mut reader) = AsyncChannel::pipe().expect("pipe");
        let device = Device::with_config(config);
        let watched = Watched::begin(&device, &Arc::new(events));
        let port = u64::from(PORT);
        if !watched.port().up {
            // The kernel says "running" a moment after "up".
            while next_event(&mut reader) != (port, IBV_EVENT_PORT_ACTIVE) {}
        }

        run_ip("addr add 192.0.2.2/24 dev plane0");
        loop {
            assert_eq!(next_event(&mut reader), (port, IBV_EVENT_GID_CHANGE));
            // A link-local IPv6 address may get its event before.
            if (0..4).any(|i| watched.gid_address(i) == Some(ip("192.0.2.2"))) {
                break;
            }
        }
        run_ip("addr del 192.0.2.2/24 dev plane0");
        while (0..4).any(|i| watched.gid_address(i) == Some(ip("192.0.2.2"))) {
            assert_eq!(next_event(&mut reader), (port, IBV_EVENT_GID_CHANGE));
        }
        run_ip("link set plane0 down");
        while next_event(&mut reader) != (port, IBV_EVENT_PORT_ERR) {}
        assert!(!watched.port().up);
        run_ip("link set plane0 up");
        while next_event(&mut reader) != (port, IBV_EVENT_PORT_ACTIVE) {}
        assert!(watched.port().up);
        run_ip("link del plane0");
        while next_event(&mut reader) != (port, IBV_EVENT_PORT_ERR) {}
        watched.end();
    };
    std::thread::spawn(test).join().expect("test thread");
}
