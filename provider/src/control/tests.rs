//! The control socket as an operator's program meets it: questions and answers, bounds, and who may ask.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Instant;

use metaroce_config::NetView;
use serde_json::Value;

use super::*;
use crate::context::Context;

const PATIENCE: Duration = Duration::from_secs(20);

fn context(base_port: u16) -> Arc<Context> {
    let env = |name: &str| match name {
        "METAROCE_PLANES" => Some("lo".to_owned()),
        "METAROCE_BASE_PORT" => Some(base_port.to_string()),
        _ => None,
    };
    let config = metaroce_config::resolve(&env, None, &NetView::of_this_host().expect("interfaces"));
    Context::over(Device::with_config(config.expect("loopback")), 1).expect("context").0
}

/// The name of a device's socket, without the leading zero byte.
fn name(context: &Context) -> Vec<u8> {
    let socket = ControlSocket::of(&context.device).expect("a control socket");
    let address = socket.listener.local_addr().expect("its address");
    address.as_abstract_name().expect("abstract").to_vec()
}

fn connect(context: &Context) -> UnixStream {
    let address = SocketAddr::from_abstract_name(name(context)).expect("address");
    let stream = UnixStream::connect_addr(&address).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    stream
}

fn ask(stream: &UnixStream, question: &str) -> Value {
    (&mut &*stream).write_all(format!("{question}\n").as_bytes()).expect("asked");
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("answered");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

#[test]
fn answers_what_is_there_and_names_what_is_not() {
    let context = context(26000);
    let stream = connect(&context);
    let planes = ask(&stream, r#"{"show":"planes"}"#);
    assert_eq!((&planes["pid"], &planes["items"][0]["label"]), (&std::process::id().into(), &"lo".into()));
    assert_eq!(planes["items"][0]["link"], "up");
    // Nothing is open: looking at it opens nothing.
    let qps = ask(&stream, r#"{"show":"qps"}"#);
    assert_eq!((&qps["items"], &qps["slot"]), (&Value::Array(Vec::new()), &Value::Null));
    for wrong in ["{", r#"{"show":"everything"}"#, "7", r#"{"show":"qps","from":-1}"#] {
        assert!(ask(&stream, wrong)["error"].is_string(), "{wrong}");
    }
    let key = context.device.register_mr(1, 4096, 4096, 64, 1).expect("MR");
    let mrs = ask(&stream, r#"{"show":"mrs"}"#);
    assert_eq!((&mrs["items"][0]["key"], &mrs["items"][0]["bytes"]), (&key.into(), &64.into()));
}

#[test]
fn pages_cover_all_keys_once() {
    let context = context(26010);
    let count = metaroce_proto::snapshot::OBJECTS_PER_PAGE + 3;
    let register = |n: usize| context.device.register_mr(1, 4096 * (n as u64 + 1), 0, 64, 1).expect("MR");
    let mut keys: Vec<u64> = (0..count).map(|n| register(n).into()).collect();
    let stream = connect(&context);
    let (mut seen, mut from) = (Vec::new(), Value::from(0));
    while !from.is_null() {
        let page = ask(&stream, &format!(r#"{{"show":"mrs","from":{from}}}"#));
        seen.extend(page["items"].as_array().expect("items").iter().filter_map(|mr| mr["key"].as_u64()));
        from = page["next"].clone();
    }
    keys.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, keys);
}

#[test]
fn one_client_too_many_replaces_the_first() {
    let context = context(26020);
    let first = connect(&context);
    assert!(ask(&first, r#"{"show":"planes"}"#)["items"].is_array());
    let others: Vec<UnixStream> = (0..CLIENTS_MAX).map(|_| connect(&context)).collect();
    for stream in &others {
        assert!(ask(stream, r#"{"show":"planes"}"#)["items"].is_array());
    }
    assert_eq!((&first).read(&mut [0; 1]).expect("the end"), 0);
    // A question without an end is not collected for ever.
    let last = others.last().expect("one");
    let _ = (&mut &*last).write_all(&[b'x'; 4 * QUESTION_MAX]);
    let gone = (&*last).read(&mut [0; 1]);
    assert!(matches!(&gone, Ok(0)) || gone.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
}

#[test]
fn contexts_of_a_device_share_a_socket_that_outlives_the_first() {
    let first = context(26030);
    let second = Context::over(Arc::clone(&first.device), 1).expect("context").0;
    let name = name(&first);
    first.close();
    let address = SocketAddr::from_abstract_name(&name).expect("address");
    let stream = UnixStream::connect_addr(&address).expect("still there");
    assert!(ask(&stream, r#"{"show":"planes"}"#)["items"].is_array());
    drop(stream);
    second.close();
    assert!(UnixStream::connect_addr(&address).is_err(), "closed with the last context");
}

/// Another user gets no answer, a child of a fork keeps no copy.
#[test]
fn others_are_not_let_in() {
    let context = context(26040);
    let name = String::from_utf8(name(&context)).expect("text");
    let script = format!(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(20)\ns.connect('\\0{name}')\n\
         try:\n  s.sendall(b'{{\"show\":\"planes\"}}\\n')\n  print(len(s.recv(65536)))\nexcept OSError: print(0)"
    );
    if own_uid() != 0 || !std::path::Path::new("/usr/bin/python3").exists() {
        println!("SKIP to become another user takes root and python3");
        return;
    }
    let answered = |uid: u32| {
        let output =
            Command::new("/usr/bin/python3").args(["-c", &script]).uid(uid).output().expect("python3");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().parse::<usize>().expect("a number")
    };
    assert_eq!(answered(65534), 0);
    assert!(answered(0) > 100);
}

#[test]
fn a_forked_child_keeps_no_copy() {
    let context = context(26050);
    let fd = ControlSocket::of(&context.device).expect("socket").listener.as_raw_fd();
    // SAFETY: the child only makes calls that are safe after a fork, and ends by _exit.
    let child = unsafe {
        match libc::fork() {
            0 => libc::_exit(i32::from(libc::fcntl(fd, libc::F_GETFD) >= 0)),
            child => child,
        }
    };
    let begun = Instant::now();
    let mut status = 0;
    // SAFETY: waits for the child just made; the status lives through the call.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        assert!(begun.elapsed() < PATIENCE, "the child hangs");
        std::thread::yield_now();
    }
    assert_eq!(status, 0, "the child still has the descriptor");
    assert!(ask(&connect(&context), r#"{"show":"planes"}"#)["items"].is_array());
}
