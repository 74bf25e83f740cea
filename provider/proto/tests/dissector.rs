//! The Wireshark dissector (`packaging/wireshark/metaroce.lua`) reads every kind of packet that the core writes, field by
//! field, and calls broken what is.
#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::fs;
use std::path::Path;
use std::process::Command;

use metaroce_proto::wire::hello::HelloPlane;
use metaroce_proto::wire::*;
use metaroce_proto::*;

/// A packet, and what the dissector has to say of it: fields, and words of the column.
struct Case {
    packet: Vec<u8>,
    fields: &'static [(&'static str, &'static str)],
    info: &'static str,
}

fn packet(kind: PacketType, body: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let header = Header {
        kind,
        flags: FLAG_ACK_REQUEST,
        path: 3,
        generation: 9,
        dcid: 0xabcdef,
        psn: if kind == PacketType::Data { 77 } else { 0 },
        src_slot: 5,
        backlog: HUNGRY,
    };
    let mut bytes = Vec::new();
    header.write(&mut bytes);
    body(&mut bytes);
    bytes
}

fn frame(frame: Frame<'_>, fields: &'static [(&'static str, &'static str)], info: &'static str) -> Case {
    let kind = if frame.wants_ack() { PacketType::Data } else { PacketType::Control };
    // A second frame behind it: its end was found.
    let packet = packet(kind, |out| {
        frame.write(out);
        Frame::Hint { epoch: 1, rate: 2, budget: 3 }.write(out);
    });
    Case { packet, fields, info }
}

fn request(opcode: Opcode, srq: Option<u32>) -> Request<'static> {
    let atomic = matches!(opcode, Opcode::CompareSwap | Opcode::FetchAdd | Opcode::AtomicWrite);
    Request {
        opcode,
        solicited: true,
        dst_qpn: Qpn(0x123456),
        src_qpn: Qpn(0x654321),
        life: 11,
        cpn: 12,
        units: 13,
        attempt: 14,
        msn: 15,
        total: if atomic { 8 } else { 1000 },
        offset: 0,
        recv_index: 16,
        srq,
        raddr: 0x1122334455667788,
        rkey: 0xaabbccdd,
        imm: 0x01020304,
        compare_add: 0x11,
        swap: 0x22,
        payload: if opcode.has_response() { &[] } else { &[0x5a; 8] },
    }
}

fn cases() -> Vec<Case> {
    let ack = Ack { path: 1, generation: 2, highest: 300, ce: 4, delay_us: 5, sack: [1, 0, 0, 1 << 63] };
    let refuse =
        Refuse { code: RefuseCode::NotReady, attempt: 6, qpn: Qpn(7), life: 8, number: 9, timer: 12 };
    let void =
        Void { response: true, cpn: 21, units: 22, src_qpn: Qpn(23), life: 24, attempt: 25, confirms: 2 };
    let response = Response {
        kind: RespKind::Read,
        qpn: Qpn(31),
        life: 32,
        cpn: 33,
        units: 34,
        attempt: 35,
        msn: 36,
        offset: 100,
        total: 108,
        payload: &[7; 8],
    };
    let mut all = vec![
        frame(
            Frame::Ack(ack),
            &[
                ("ack.path", "1"),
                ("ack.generation", "2"),
                ("ack.highest", "300"),
                ("ack.ce", "4"),
                ("ack.delay", "5"),
            ],
            "Control path 3.9, ACK path 1 to 300, HINT",
        ),
        frame(
            Frame::Refuse(refuse),
            &[
                ("refuse.code", "2"),
                ("attempt", "6"),
                ("stream", "8"),
                ("refuse.number", "9"),
                ("refuse.timer", "12"),
            ],
            "Control path 3.9, REFUSE NOT_READY, HINT",
        ),
        frame(
            Frame::Credit { qpn: Qpn(1), life: 2, limit: 3 },
            &[("stream", "2"), ("credit.limit", "3")],
            "Control path 3.9, CREDIT, HINT",
        ),
        frame(
            Frame::Planes { epoch: 4, down: 5 },
            &[("planes.epoch", "4"), ("planes.down", "0x0005")],
            "Control path 3.9, PLANES, HINT",
        ),
        frame(Frame::Close, &[("hint.budget", "3")], "Control path 3.9, CLOSE, HINT"),
        frame(Frame::CloseAck, &[("hint.epoch", "1")], "Control path 3.9, CLOSE_ACK, HINT"),
        frame(Frame::Ping, &[("psn", "77")], "Data path 3.9 psn 77, PING, HINT"),
        frame(
            Frame::Void(void),
            &[
                ("void.space", "1"),
                ("cpn", "21"),
                ("units", "22"),
                ("attempt", "25"),
                ("void.confirms", "0x0002"),
            ],
            "Data path 3.9 psn 77, VOID cpn 21, HINT",
        ),
        frame(
            Frame::Response(response),
            &[
                ("response", "0"),
                ("cpn", "33"),
                ("attempt", "35"),
                ("offset", "100"),
                ("payload", "0707070707070707"),
            ],
            "Data path 3.9 psn 77, Response cpn 33 msn 36 108/108, HINT",
        ),
        Case {
            packet: packet(PacketType::Reset, |_| {}),
            fields: &[("dcid", "0x0000000000abcdef"), ("slot", "5"), ("generation", "9")],
            info: "RESET path 3.9",
        },
    ];
    let remote: &[_] = &[("raddr", "0x1122334455667788"), ("rkey", "0xaabbccdd"), ("solicited", "1")];
    let imm: &[_] = &[("imm", "0x01020304"), ("dst_qpn", "0x00123456"), ("recv_index", "16")];
    let atomic: &[_] = &[("compare_add", "0x0000000000000011"), ("swap", "0x0000000000000022")];
    let requests = [
        (Opcode::Write, None, remote, "Write cpn 12 msn 15 8/1000"),
        (Opcode::WriteImm, None, imm, "WriteImm cpn 12 msn 15 8/1000"),
        (Opcode::Send, Some(99), &[("srq", "99"), ("for_srq", "1")], "Send cpn 12 msn 15 8/1000"),
        (Opcode::SendImm, None, imm, "SendImm cpn 12 msn 15 8/1000"),
        (Opcode::SendInv, Some(98), &[("srq", "98"), ("imm", "0x01020304")], "SendInv cpn 12 msn 15 8/1000"),
        (Opcode::Read, None, remote, "Read cpn 12 msn 15 0/1000"),
        (Opcode::CompareSwap, None, atomic, "CompareSwap cpn 12 msn 15 0/8"),
        (Opcode::FetchAdd, Some(97), atomic, "FetchAdd cpn 12 msn 15 0/8"),
        (Opcode::AtomicWrite, None, remote, "AtomicWrite cpn 12 msn 15 8/8"),
    ];
    for (opcode, srq, fields, info) in requests {
        all.push(frame(Frame::Request(request(opcode, srq)), fields, info));
    }
    let hello = Hello {
        wants_answer: true,
        incarnation: 1,
        scid: 2,
        bound: 3,
        ordinal: 4,
        segment: 1500,
        unit: 64,
        budget: 5,
        message_window: 6,
        paths: 7,
        first_cpn: [8, 9],
        features: FEATURE_HINTS | FEATURE_PLANES,
        planes: vec![HelloPlane { label: "rail0".into(), addrs: vec!["10.0.0.1".parse().unwrap()] }],
    };
    all.push(Case {
        packet: packet(PacketType::Hello, |out| hello.write(0, out)),
        fields: &[
            ("hello.ordinal", "4"),
            ("hello.segment", "1500"),
            ("hello.paths", "7"),
            ("hello.first_response", "9"),
            ("hello.features", "0x00000003"),
            ("hello.label", "rail0"),
            ("hello.address", "::ffff:10.0.0.1"),
        ],
        info: "HELLO path 3.9",
    });
    let datagram = datagram::Datagram {
        dst_qpn: Qpn(1),
        src_qpn: Qpn(2),
        qkey: 0x11111111,
        imm: Some(7),
        solicited: false,
        group: Some("ff0e::1".parse().unwrap()),
        payload: &[],
    };
    all.push(Case {
        packet: packet(PacketType::Datagram, |out| {
            datagram.write_header(2, out);
            out.extend([1, 2]);
        }),
        fields: &[("qkey", "0x11111111"), ("imm", "0x00000007"), ("group", "ff0e::1"), ("payload", "0102")],
        info: "Datagram path 3.9",
    });
    // A frame that is cut, and one that nobody knows.
    let mut cut = frame(Frame::Ack(ack), &[], "[malformed]");
    cut.packet.truncate(40);
    all.push(cut);
    all.push(Case {
        packet: packet(PacketType::Control, |out| out.extend([0x77; 8])),
        fields: &[],
        info: "[malformed]",
    });
    all
}

/// A capture file of raw IPv4 packets.
fn capture(cases: &[Case]) -> Vec<u8> {
    const LINKTYPE_RAW: u32 = 101;
    let mut file = Vec::new();
    for word in [0xa1b2c3d4, 2 | 4 << 16, 0, 0, 65535, LINKTYPE_RAW] {
        file.extend(u32::to_le_bytes(word));
    }
    for case in cases {
        let length = case.packet.len() as u16 + 28;
        for word in [0, 0, u32::from(length), u32::from(length)] {
            file.extend(word.to_le_bytes());
        }
        file.extend([0x45, 0]);
        file.extend(length.to_be_bytes());
        file.extend([0, 0, 0, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1]);
        for word in [0xc000, 24576 + 5, length - 20, 0] {
            file.extend(word.to_be_bytes());
        }
        file.extend(&case.packet);
    }
    file
}

#[test]
fn dissector__reads_every_kind_of_packet() {
    let cases = cases();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/wireshark/metaroce.lua");
    let file = std::env::temp_dir().join(format!("metaroce-dissector-{}.pcap", std::process::id()));
    fs::write(&file, capture(&cases)).unwrap();
    let mut names: Vec<&str> = cases.iter().flat_map(|case| case.fields).map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.dedup();
    let mut command = Command::new("tshark");
    command.arg("-X").arg(format!("lua_script:{}", script.display())).arg("-r").arg(&file);
    command.args(["-T", "fields", "-E", "occurrence=f", "-E", "separator=|", "-e", "_ws.col.Info"]);
    for name in &names {
        command.arg("-e").arg(format!("metaroce.{name}"));
    }
    match command.output() {
        Err(_) => println!("SKIP tshark is not installed"),
        Ok(done) => {
            let text = String::from_utf8_lossy(&done.stdout);
            assert_eq!(text.lines().count(), cases.len(), "{}", String::from_utf8_lossy(&done.stderr));
            cases.iter().zip(text.lines()).for_each(|(case, line)| compare(case, line, &names));
        }
    }
    fs::remove_file(&file).unwrap();
}

/// What the dissector has said of a packet: the column, then the fields of these names.
fn compare(case: &Case, line: &str, names: &[&str]) {
    let words: Vec<&str> = line.split('|').collect();
    assert!(words[0].contains(case.info), "no `{}`: {line}", case.info);
    assert_eq!(words[0].contains("[malformed]"), case.info == "[malformed]", "{line}");
    for (name, value) in case.fields {
        let at = names.binary_search(name).expect("all names are there");
        assert_eq!(words.get(at + 1), Some(value), "metaroce.{name}: {line}");
    }
}
