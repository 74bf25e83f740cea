//! What RDMA netlink says about our device, and how that is merged with what the kernel says about its own.

use super::message::{Reply, Request, readdress};
use crate::device::{self, Device};
use crate::rdmacm::{ABI_VERSION, NODE};
use crate::sysfs;

const RDMA_NLDEV_CMD_GET: u16 = 1;
const RDMA_NLDEV_CMD_PORT_GET: u16 = 5;
const RDMA_NLDEV_CMD_SYS_GET: u16 = 6;
const RDMA_NLDEV_CMD_GET_CHARDEV: u16 = 15;

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
const PORT_INDEX: u16 = 3;
const CAP_FLAGS: u16 = 4;
const FW_VERSION: u16 = 5;
const NODE_GUID: u16 = 6;
const SYS_IMAGE_GUID: u16 = 7;
const LID: u16 = 9;
const SM_LID: u16 = 10;
const LMC: u16 = 11;
const PORT_STATE: u16 = 12;
const PORT_PHYS_STATE: u16 = 13;
const DEV_NODE_TYPE: u16 = 14;
const NDEV_INDEX: u16 = 50;
const NDEV_NAME: u16 = 51;
const SYS_NETNS_MODE: u16 = 66;
const DEV_PROTOCOL: u16 = 67;
const CHARDEV_TYPE: u16 = 69;
const CHARDEV_NAME: u16 = 70;
const CHARDEV_ABI: u16 = 71;
const CHARDEV: u16 = 72;
const SYS_COPY_ON_FORK: u16 = 93;

/// RDMA_NODE_IB_CA of rdma/rdma_netlink.h.
const NODE_TYPE_CA: u8 = 1;

/// The datagrams that answer `request` on a socket with netlink port `port`; `ask_kernel` passes it on.
pub(crate) fn replies(
    device: &Device,
    request: &Request,
    port: u32,
    ask_kernel: &dyn Fn(&[u8]) -> Vec<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let index = request.attr_u32(DEV_INDEX);
    let kernel = |keep_end: bool| -> Vec<Vec<u8>> {
        let datagrams = if device.real.netlink { ask_kernel(request.bytes) } else { Vec::new() };
        let datagrams = datagrams.iter().map(|datagram| readdress(datagram, port, keep_end));
        datagrams.filter(|datagram| !datagram.is_empty()).collect()
    };
    if index.is_none_or(|index| index == device.index)
        && let Some(own) = own(device, request, port, index.is_some())
    {
        // A dump of all devices is the kernel's, without its end, then ours, then the end.
        let mut all = if request.is_dump() && index.is_none() { kernel(false) } else { Vec::new() };
        all.push(own.finish());
        return all;
    }
    let mut all = kernel(true);
    if all.is_empty() {
        let errno =
            if index.is_some_and(|index| index != device.index) { libc::ENODEV } else { libc::EOPNOTSUPP };
        all.push(Reply::new(request.seq, port).error(errno, request).finish());
    }
    all
}

/// Our part of the answer; `None` when the request is not about our device or not understood.
fn own(device: &Device, request: &Request, port: u32, by_index: bool) -> Option<Reply> {
    let dump = request.is_dump();
    let flags = if dump { libc::NLM_F_MULTI as u16 } else { 0 };
    let reply = Reply::new(request.seq, port).message(request.kind, flags);
    let reply = match request.operation() {
        RDMA_NLDEV_CMD_GET if dump || by_index => describe_device(reply, device),
        RDMA_NLDEV_CMD_PORT_GET if by_index && (dump || request.attr_u32(PORT_INDEX) == Some(1)) => {
            describe_port(reply, device)
        }
        RDMA_NLDEV_CMD_GET_CHARDEV if by_index && request.attr(CHARDEV_TYPE)?.starts_with(b"uverbs") => reply
            .attr(CHARDEV_ABI, &u64::from(sysfs::UVERBS_ABI).to_ne_bytes())
            .attr(CHARDEV, &device.chardev().to_ne_bytes())
            .attr_str(CHARDEV_NAME, &device.uverbs),
        RDMA_NLDEV_CMD_GET_CHARDEV
            if !by_index
                && device.has_rdma_cm()
                && request.attr(CHARDEV_TYPE)?.starts_with(NODE.as_bytes()) =>
        {
            reply
                .attr(CHARDEV_ABI, &ABI_VERSION.to_ne_bytes())
                .attr(CHARDEV, &device.chardev().to_ne_bytes())
                .attr_str(CHARDEV_NAME, NODE)
        }
        // Our memory needs no protection over fork, but a real device beside it may: then the kernel answers.
        RDMA_NLDEV_CMD_SYS_GET if !device.real.netlink => {
            reply.attr(SYS_NETNS_MODE, &[1]).attr(SYS_COPY_ON_FORK, &[1])
        }
        _ => return None,
    };
    Some(if dump {
        reply.done()
    } else if request.wants_ack() {
        reply.error(0, request)
    } else {
        reply
    })
}

fn describe_device(reply: Reply, device: &Device) -> Reply {
    let guid = device.node_guid.to_ne_bytes();
    reply
        .attr(DEV_INDEX, &device.index.to_ne_bytes())
        .attr_str(DEV_NAME, device::NAME)
        .attr(PORT_INDEX, &1u32.to_ne_bytes())
        .attr_str(FW_VERSION, sysfs::FW_VER)
        .attr(NODE_GUID, &guid)
        .attr(SYS_IMAGE_GUID, &guid)
        .attr(DEV_NODE_TYPE, &[NODE_TYPE_CA])
        .attr_str(DEV_PROTOCOL, "roce")
}

fn describe_port(reply: Reply, device: &Device) -> Reply {
    let plane = device.plane0();
    // IB_PORT_ACTIVE and LINK_UP, or IB_PORT_DOWN and DISABLED.
    let (state, phys_state) = if device.is_up() { (4, 5) } else { (1, 3) };
    reply
        .attr(DEV_INDEX, &device.index.to_ne_bytes())
        .attr_str(DEV_NAME, device::NAME)
        .attr(PORT_INDEX, &1u32.to_ne_bytes())
        .attr(CAP_FLAGS, &u64::from(sysfs::PORT_CAP_FLAGS).to_ne_bytes())
        .attr(LID, &0u32.to_ne_bytes())
        .attr(SM_LID, &0u32.to_ne_bytes())
        .attr(LMC, &[0])
        .attr(PORT_STATE, &[state])
        .attr(PORT_PHYS_STATE, &[phys_state])
        .attr(NDEV_INDEX, &plane.ifindex.to_ne_bytes())
        .attr_str(NDEV_NAME, &plane.ifname)
}

#[cfg(test)]
mod tests {
    use super::super::message::parse;
    use super::*;
    use crate::device::RealStack;
    use crate::device::tests::{device, real_stack};

    const DUMP: u16 = libc::NLM_F_DUMP as u16;
    const NLDEV: u16 = 5 << 10;

    /// A request for `operation` with attributes.
    fn request(operation: u16, flags: u16, attrs: &[(u16, &[u8])]) -> Vec<u8> {
        let start = Reply::new(3, 0).message(NLDEV | operation, flags);
        attrs.iter().fold(start, |reply, (id, payload)| reply.attr(*id, payload)).finish()
    }

    /// The messages of the answer: type, errno if it is an error, device index, all as seen by the program.
    fn ask(device: &Device, bytes: &[u8], kernel: &[Vec<u8>]) -> Vec<(u16, Option<i32>, Option<u32>)> {
        let datagrams = replies(device, &parse(bytes).unwrap()[0], 44, &|_| kernel.to_vec());
        let mut seen = Vec::new();
        for datagram in &datagrams {
            for message in parse(datagram).unwrap() {
                assert_eq!((message.seq, &message.bytes[12..16]), (3, &44u32.to_ne_bytes()[..]));
                let error = i32::from(message.kind) == libc::NLMSG_ERROR;
                let errno = error.then(|| i32::from_ne_bytes(message.bytes[16..20].try_into().unwrap()));
                seen.push((
                    message.kind,
                    errno,
                    if message.is_nldev() { message.attr_u32(DEV_INDEX) } else { None },
                ));
            }
        }
        seen
    }

    #[test]
    fn get__dump_lists_the_device_then_ends() {
        let seen = ask(&device(RealStack::default()), &request(1, DUMP, &[]), &[]);
        assert_eq!(seen, [(NLDEV | 1, None, Some(0)), (3, None, None)]);
    }

    #[test]
    fn get__dump_beside_a_real_stack_lists_both_and_ends_once() {
        let mut device = device(real_stack());
        device.index = 1000;
        let kernel = [
            Reply::new(3, 9).message(NLDEV | 1, 2).attr(DEV_INDEX, &5u32.to_ne_bytes()).finish(),
            Reply::new(3, 9).done().finish(),
        ];
        let seen = ask(&device, &request(1, DUMP, &[]), &kernel);
        assert_eq!(seen, [(NLDEV | 1, None, Some(5)), (NLDEV | 1, None, Some(1000)), (3, None, None)]);
        let index = 5u32.to_ne_bytes();
        let seen = ask(&device, &request(1, 1, &[(DEV_INDEX, &index)]), &kernel[..1]);
        assert_eq!(seen, [(NLDEV | 1, None, Some(5))]);
    }

    #[test]
    fn chardev__is_the_node_and_rdma_cm_has_one() {
        let device = device(RealStack::default());
        let index = 0u32.to_ne_bytes();
        let bytes = request(15, 1, &[(DEV_INDEX, &index), (CHARDEV_TYPE, b"uverbs\0")]);
        let datagrams = replies(&device, &parse(&bytes).unwrap()[0], 44, &|_| Vec::new());
        let messages = parse(&datagrams[0]).unwrap();
        assert_eq!((datagrams.len(), messages.len()), (1, 1));
        assert_eq!(messages[0].attr(CHARDEV), Some(&0x103u64.to_ne_bytes()[..]));
        assert_eq!(messages[0].attr(CHARDEV_NAME), Some(&b"uverbs0\0"[..]));
        let bytes = request(15, 1, &[(CHARDEV_TYPE, b"rdma_cm\0")]);
        assert_eq!(ask(&device, &bytes, &[]), [(NLDEV | 15, None, None)]);
        let datagrams = replies(&device, &parse(&bytes).unwrap()[0], 44, &|_| Vec::new());
        let messages = parse(&datagrams[0]).unwrap();
        assert_eq!(messages[0].attr(CHARDEV_ABI), Some(&4u64.to_ne_bytes()[..]));
        assert_eq!(messages[0].attr(CHARDEV_NAME), Some(&b"rdma_cm\0"[..]));
        // Beside real devices the connection manager is the kernel's.
        let beside = super::super::super::device::tests::device(real_stack());
        assert_eq!(ask(&beside, &bytes, &[]), [(2, Some(-libc::EOPNOTSUPP), None)]);
    }

    #[test]
    fn other_requests__fail_with_an_errno() {
        let device = device(RealStack::default());
        let seven = 7u32.to_ne_bytes();
        assert_eq!(
            ask(&device, &request(1, 1, &[(DEV_INDEX, &seven)]), &[]),
            [(2, Some(-libc::ENODEV), None)]
        );
        assert_eq!(ask(&device, &request(9, DUMP, &[]), &[]), [(2, Some(-libc::EOPNOTSUPP), None)]);
        let index = 0u32.to_ne_bytes();
        let port = request(5, 1, &[(DEV_INDEX, &index), (PORT_INDEX, &seven)]);
        assert_eq!(ask(&device, &port, &[]), [(2, Some(-libc::EOPNOTSUPP), None)]);
    }

    #[test]
    fn get__acknowledges_when_asked_to() {
        let index = 0u32.to_ne_bytes();
        let bytes = request(1, libc::NLM_F_ACK as u16 | 1, &[(DEV_INDEX, &index)]);
        let seen = ask(&device(RealStack::default()), &bytes, &[]);
        assert_eq!(seen, [(NLDEV | 1, None, Some(0)), (2, Some(0), None)]);
    }
}
