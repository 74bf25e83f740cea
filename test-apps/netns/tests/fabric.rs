//! The fabric does what it says: planes carry, lose, go down; nothing is left behind.
#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::Duration;

use metaroce_netns::{Fabric, Failure, Plan};

/// The fabric, or None (and a SKIP line) where it cannot be.
fn fabric(plan: Plan) -> Option<Fabric> {
    match Fabric::new(plan) {
        Ok(fabric) => Some(fabric),
        Err(Failure::CannotHere(why)) => {
            println!("SKIP {}", why.0);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Sends `count` datagrams from host 0 to host 1 over a plane; how many arrive.
fn deliver(fabric: &Fabric, plane: usize, count: u32) -> u32 {
    let [from, to] = fabric.hosts();
    let receiver = to.run(|| UdpSocket::bind((to.ipv4(plane), 0))).unwrap().unwrap();
    let sender = from.run(|| UdpSocket::bind((from.ipv4(plane), 0))).unwrap().unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    let mut buffer = [0; 64];
    let mut got = 0;
    for number in 0..count {
        // A host whose own end is down refuses to send.
        let _ = sender.send(&number.to_le_bytes());
        receiver.set_nonblocking(number + 1 < count).unwrap();
        got += u32::from(receiver.recv(&mut buffer).is_ok());
    }
    while receiver.recv(&mut buffer).is_ok() {
        got += 1;
    }
    got
}

#[test]
fn fabric__carries_on_every_plane() {
    let Some(fabric) = fabric(Plan { planes: 3, ..Plan::default() }) else { return };
    for plane in 0..3 {
        assert_eq!(deliver(&fabric, plane, 50), 50, "plane {plane}");
    }
}

#[test]
fn loss__strikes_the_planes_it_is_set_on() {
    let Some(fabric) = fabric(Plan { super_packets: false, ..Plan::default() }) else { return };
    match fabric.set_loss(&[(1, 500)]) {
        Err(Failure::CannotHere(why)) => return println!("SKIP {}", why.0),
        other => other.unwrap(),
    }
    assert_eq!(deliver(&fabric, 0, 400), 400);
    let got = deliver(&fabric, 1, 400);
    assert!((100..300).contains(&got), "{got} of 400 at 50 % loss");
    fabric.set_loss(&[(1, 1000)]).unwrap();
    assert_eq!(deliver(&fabric, 1, 20), 0);
    fabric.set_loss(&[]).unwrap();
    assert_eq!(deliver(&fabric, 1, 50), 50);
}

#[test]
fn link__goes_down_and_up() {
    let Some(fabric) = fabric(Plan::default()) else { return };
    fabric.set_link(1, 0, false).unwrap();
    assert_eq!(deliver(&fabric, 1, 20), 20);
    fabric.set_link(1, 0, true).unwrap();
    let arrived = (0..50).any(|_| deliver(&fabric, 0, 1) == 1);
    assert!(arrived, "plane 0 carries again");
}

#[test]
fn command__runs_both_ends_and_leaves_nothing() {
    let before = namespaces();
    let done = Command::new(env!("CARGO_BIN_EXE_metaroce-netns"))
        .args(["--ready", "ok", "--server", "echo ok 42", "--"])
        .args([
            "sh",
            "-c",
            "test {ready} = 42 && ip -o addr | grep -q {client}/24 && test -d /sys/class/net/plane1",
        ])
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    if done.status.code() == Some(77) {
        return println!("SKIP {}", String::from_utf8_lossy(&done.stderr));
    }
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(namespaces(), before);
}

/// Named namespaces of the machine: none of ours may be among them.
fn namespaces() -> usize {
    std::fs::read_dir("/run/netns").map_or(0, |entries| entries.count())
}
