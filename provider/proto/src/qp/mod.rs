//! A queue pair: its send queue and transmit stream, its receive queue and receive stream.

pub mod recv_queue;
pub mod rx_stream;
pub mod send_queue;
pub mod tags;

pub use recv_queue::{RecvQueue, Srq};
pub use rx_stream::{Fatal, RespJob, RespWork, RxMsg, RxStream};
pub use send_queue::{TxStream, Wqe};

use crate::steer::Rss;
use crate::types::*;
use std::net::IpAddr;

/// Attributes that `modify_qp` sets.
#[derive(Debug, Clone, Copy, Default)]
pub struct Attrs {
    /// `IBV_ACCESS_REMOTE_*` bits.
    pub access: u32,
    /// Peer QP.
    pub dest_qpn: Qpn,
    /// Peer address.
    pub remote: Option<IpAddr>,
    /// Q_Key (UD).
    pub qkey: u32,
    /// Local ACK timeout code (4.096 us * 2^code; 0: never).
    pub timeout: u8,
    /// Retries before RETRY_EXC_ERR.
    pub retry_cnt: u8,
    /// RNR retries; 7: for ever.
    pub rnr_retry: u8,
    /// RNR timer code told to the peer.
    pub min_rnr_timer: u8,
    /// Reads and atomics we may have outstanding.
    pub max_rd_atomic: u8,
    /// Reads and atomics we serve.
    pub max_dest_rd_atomic: u8,
}

/// One queue pair.
#[derive(Debug)]
pub struct Qp {
    /// Number.
    pub qpn: Qpn,
    /// What it was made of.
    pub init: QpInit,
    /// State.
    pub state: QpState,
    /// Attributes.
    pub attrs: Attrs,
    /// Requester side.
    pub tx: TxStream,
    /// Responder side.
    pub rx: RxStream,
    /// Posted (or bound) receives.
    pub rq: RecvQueue,
    /// Frames are spread over work queues (raw packets).
    pub rss: Option<Box<Rss>>,
}

impl Qp {
    /// A QP in RESET.
    pub fn new(qpn: Qpn, init: QpInit) -> Self {
        Qp {
            qpn,
            init,
            state: QpState::Reset,
            attrs: Attrs::default(),
            tx: TxStream::default(),
            rx: RxStream::default(),
            rq: RecvQueue::default(),
            rss: None,
        }
    }
    /// Packets of the peer's stream are taken in this state.
    pub fn receives(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }
    /// Its messages name the SRQ they are for.
    pub fn is_xrc(&self) -> bool {
        matches!(self.init.qp_type, QpType::XrcSend | QpType::XrcRecv)
    }
    /// First receive index that is not there. On an SRQ that is a guess: others may be faster.
    pub fn recv_limit(&self, srqs: &crate::tables::SrqTable) -> u32 {
        // Of an XRC stream the last SRQ it was short of.
        let srq = self.init.srq.or(self.rx.short_of);
        let shared = srq.and_then(|s| srqs.get(s)).map_or(0, |srq| srq.queue.len());
        self.rq.limit().wrapping_add(shared as u32)
    }
    /// How long the peer may be silent before the QP gives up; `None`: for ever.
    pub fn patience_ns(&self) -> Option<Nanos> {
        if !self.init.qp_type.is_reliable() {
            return Some(crate::config::limits::UNRELIABLE_PATIENCE_NS);
        }
        // Codes below 10 (4 ms) are shorter than a scheduling hiccup of a software device.
        let code = u32::from(self.attrs.timeout & 31);
        (code != 0).then(|| (4096 << code.max(10)) * (u64::from(self.attrs.retry_cnt) + 1))
    }
}

/// Milliseconds-and-below table of the 5-bit RNR timer codes (InfiniBand), in nanoseconds.
pub fn rnr_timer_ns(code: u8) -> Nanos {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    HUNDREDTHS_OF_MS[usize::from(code & 31)] * 10_000
}
