//! Two devices in one process, connected over loopback: what the engine's integration tests stand on.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metaroce_config::{DeviceConfig, Impairment, Plane};
use metaroce_engine::{Cq, Device, Qp, QpCreate, Srq};
use metaroce_proto::{Completion, Opcode, QpModify, QpState, QpType, SendWqe, Sge, access, send_flags};

/// Longest time a test waits for anything: a hang is a failure, not a stuck build.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything remote may do, and writing locally.
pub const ALL_ACCESS: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// Settings for loopback with these faults. Each test has its own range of ports.
pub fn config(base_port: u16, impairment: Impairment) -> DeviceConfig {
    DeviceConfig {
        planes: vec![Plane {
            label: "lo".into(),
            ifname: "lo".into(),
            ifindex: 1,
            mtu: 65536,
            mac: [0; 6],
            addrs: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            up: true,
            rate_bps: None,
        }],
        base_port,
        paths_per_plane: 4,
        segment_bytes_max: 4180,
        burst_packets_max: 0,
        rcvbuf_bytes: 4 << 20,
        gso: true,
        impairment,
        cm_loss: 0.0,
        log: "warn".into(),
    }
}

/// One end: a device, a CQ, a QP and registered memory.
pub struct End {
    pub device: Arc<Device>,
    pub pd: u32,
    pub cq: Arc<Cq>,
    pub qp: Arc<Qp>,
    pub memory: Box<[u64]>,
    pub key: u32,
}

impl End {
    /// A fresh end with `bytes` of registered memory.
    pub fn new(config: DeviceConfig, bytes: usize) -> End {
        End::with_srq(config, bytes, |_, _| None)
    }

    /// The same with an SRQ that `make` gives.
    pub fn with_srq(
        config: DeviceConfig,
        bytes: usize,
        make: impl FnOnce(&Arc<Device>, u32) -> Option<Arc<Srq>>,
    ) -> End {
        let device = Device::with_config(config);
        let pd = device.alloc_pd();
        let cq = device.create_cq(256, None).unwrap();
        let srq = make(&device, pd);
        let qp = device.create_qp(&qp_of(pd, &cq, srq), None).unwrap();
        let memory = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
        let va = memory.as_ptr() as u64;
        let key = device.register_mr(pd, va, va, memory.len() as u64 * 8, ALL_ACCESS).unwrap();
        End { device, pd, cq, qp, memory, key }
    }

    /// Address of the memory.
    pub fn va(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// A part of the memory.
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.va() + offset as u64, len: len as u32, lkey: self.key }
    }

    /// The memory's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.memory.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Fills the memory with a pattern of `seed`.
    pub fn fill(&mut self, seed: u64) {
        for (i, word) in self.memory.iter_mut().enumerate() {
            *word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
        }
    }

    /// Posts one signaled request.
    pub fn post(&self, opcode: Opcode, sge: Sge, remote: (u64, u32)) {
        let mut post = self.qp.send();
        post.push(wqe(opcode, sge.len, remote), [sge].into_iter()).unwrap();
        post.commit();
    }

    /// Polls until `count` completions have come.
    pub fn completions(&self, count: usize) -> Vec<Completion> {
        let since = Instant::now();
        let mut got = Vec::new();
        while got.len() < count {
            self.cq.poll(count - got.len(), |completion| got.push(*completion));
            assert!(since.elapsed() < PATIENCE, "only {} of {count} completions came", got.len());
        }
        got
    }
}

/// A QP on one CQ.
pub fn qp_of(pd: u32, cq: &Arc<Cq>, srq: Option<Arc<Srq>>) -> QpCreate {
    QpCreate {
        qp_type: QpType::Rc,
        pd,
        send_cq: Some(cq.clone()),
        recv_cq: Some(cq.clone()),
        xrcd: None,
        srq,
        max_send_wr: 64,
        max_recv_wr: 64,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 256,
    }
}

/// A signaled request.
pub fn wqe(opcode: Opcode, length: u32, remote: (u64, u32)) -> SendWqe {
    SendWqe {
        num_sge: 1,
        length,
        imm: 0x1234_5678,
        remote_addr: remote.0,
        rkey: remote.1,
        ..SendWqe::new(u64::from(length), opcode, send_flags::SIGNALED)
    }
}

/// Takes both QPs to RTS.
pub fn connect(a: &Qp, b: &Qp) {
    for (me, peer) in [(a, b), (b, a)] {
        let init = QpModify { state: Some(QpState::Init), access: Some(ALL_ACCESS), ..QpModify::default() };
        me.modify(&init).unwrap();
        let loopback = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let rtr = QpModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer.qpn()),
            remote: loopback,
            local: loopback,
            path_mtu: Some(1024),
            max_dest_rd_atomic: Some(16),
            min_rnr_timer: Some(1),
            ..QpModify::default()
        };
        me.modify(&rtr).unwrap();
        let rts = QpModify {
            state: Some(QpState::Rts),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(16),
            ..QpModify::default()
        };
        me.modify(&rts).unwrap();
    }
}

/// Two connected ends.
pub fn pair(base_port: u16, impairment: Impairment, bytes: usize) -> (End, End) {
    let a = End::new(config(base_port, impairment), bytes);
    let b = End::new(config(base_port, impairment), bytes);
    connect(&a.qp, &b.qp);
    (a, b)
}
