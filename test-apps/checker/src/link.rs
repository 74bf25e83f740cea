//! The verbs objects of one end and how two ends become connected, as every program with an out-of-band
//! channel does.

use std::sync::Arc;
use std::time::Duration;

use metaroce_test_verbs::{
    Attr, Channel, Context, Cq, Pd, PortInfo, Qp, QpCaps, QpOptions, Remote, Srq, Transport,
};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::session::{Role, Session};

/// What an end is made of.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Service of the QPs.
    pub transport: Transport,
    /// QPs.
    pub qps: usize,
    /// Sizes of each.
    pub caps: QpCaps,
    /// Entries of each of the two CQs.
    pub cqe: usize,
    /// Attributes, but for the peer's; `path_mtu` comes from the options.
    pub attr: Attr,
    /// Every odd QP posts by `ibv_wr_*`.
    pub extended: bool,
    /// The receive CQ reports to a completion channel.
    pub channel: bool,
    /// Every send is signaled.
    pub signal_all: bool,
    /// Receives come from an SRQ of this many WRs.
    pub srq: Option<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        let caps = QpCaps { send_wr: 64, recv_wr: 64, send_sge: 4, recv_sge: 4, inline: 0 };
        let attr = Attr::default();
        Self {
            transport: Transport::Rc,
            qps: 1,
            caps,
            cqe: 1024,
            attr,
            extended: false,
            channel: false,
            signal_all: false,
            srq: None,
        }
    }
}

/// One end's objects. Fields drop in this order: QPs before what they use.
#[derive(Debug)]
pub struct End {
    /// In the order their numbers were exchanged.
    pub qps: Vec<Qp>,
    /// Numbers of the peer's QPs, after [`End::exchange`].
    pub remotes: Vec<Remote>,
    /// SRQ, if asked for.
    pub srq: Option<Arc<Srq>>,
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Channel of the receive CQ, if asked for.
    pub channel: Option<Arc<Channel>>,
    /// The protection domain of everything.
    pub pd: Arc<Pd>,
    /// The device.
    pub context: Arc<Context>,
    /// Its limits.
    pub info: PortInfo,
    /// Attributes used by [`End::connect`]; change before it.
    pub attr: Attr,
    gid: [u8; 16],
}

/// What the ends tell each other.
#[derive(Serialize, Deserialize)]
struct Address {
    gid: [u8; 16],
    qpns: Vec<u32>,
}

impl End {
    /// Opens the device and makes everything, QPs in RESET.
    pub fn new(session: &Session, setup: &Setup) -> Outcome<Self> {
        let options = &session.options;
        let context = Context::open(options.device.as_deref())?;
        let pd = Pd::new(&context)?;
        let channel = if setup.channel { Some(Channel::new(&context)?) } else { None };
        let send_cq = Cq::new(&context, i32::try_from(setup.cqe)?, None)?;
        let recv_cq = Cq::new(&context, i32::try_from(setup.cqe)?, channel.as_ref())?;
        let srq = setup.srq.map(|wrs| Srq::new(&pd, wrs, setup.caps.recv_sge)).transpose()?;
        let qps = (0..setup.qps)
            .map(|i| {
                let extended = setup.extended && i % 2 == 1;
                let (caps, signal_all) = (setup.caps, setup.signal_all);
                let how = QpOptions {
                    transport: setup.transport,
                    send_cq: &send_cq,
                    recv_cq: &recv_cq,
                    srq: srq.as_ref(),
                    caps,
                    signal_all,
                    extended,
                };
                Qp::new(&pd, &how)
            })
            .collect::<Result<_, _>>()?;
        let path_mtu = if session.role == Role::A { options.mtu_a } else { options.mtu_b };
        let attr = Attr { gid_index: options.gid_index, path_mtu, ..setup.attr };
        let (info, gid) = (context.info()?, context.gid(i32::from(options.gid_index))?);
        Ok(Self { qps, remotes: Vec::new(), srq, send_cq, recv_cq, channel, pd, context, info, attr, gid })
    }

    /// Learns the peer's GID and QP numbers.
    pub fn exchange(&mut self, session: &mut Session) -> Outcome {
        let mine = Address { gid: self.gid, qpns: self.qps.iter().map(Qp::qpn).collect() };
        let theirs: Address = session.swap(&mine)?;
        self.remotes = theirs.qpns.iter().map(|qpn| Remote { gid: theirs.gid, qpn: *qpn }).collect();
        Ok(())
    }

    /// Our own QP `index` as a peer (loopback inside the process).
    pub fn myself(&self, index: usize) -> Remote {
        Remote { gid: self.gid, qpn: self.qps[index].qpn() }
    }

    /// The attributes QP `index` connects with.
    pub fn attr_for(&self, index: usize) -> Attr {
        Attr { remote: self.remotes[index], ..self.attr }
    }

    /// Brings every QP to RTS, each to the peer's of the same index.
    pub fn to_rts(&self) -> Outcome {
        for (i, qp) in self.qps.iter().enumerate() {
            let attr = self.attr_for(i);
            qp.to_init(&attr)?;
            qp.to_rtr(&attr)?;
            qp.to_rts(&attr)?;
        }
        Ok(())
    }

    /// Exchange, RTS, and a barrier: afterwards both ends may post.
    pub fn connect(&mut self, session: &mut Session) -> Outcome {
        self.exchange(session)?;
        self.to_rts()?;
        session.barrier()
    }
}

/// `(retry_cnt + 1) * 4.096 us * 2^timeout`: when a silent peer is given up at the earliest.
pub fn retry_time(attr: &Attr) -> Duration {
    Duration::from_nanos(4096 * (1 << attr.timeout)) * (u32::from(attr.retry_cnt) + 1)
}
