//! What the device promises at most; `query_device` reports these and the create verbs check against them.

/// Depth of a send or receive queue.
pub(crate) const MAX_QP_WR: u32 = 1 << 20;
/// SGEs of a send or receive request.
pub(crate) const MAX_SGE: u32 = 32;
/// Inline bytes of a send request; more than any application asks for, small enough to copy.
pub(crate) const MAX_INLINE: u32 = 1024;
/// QPs of a process: the index part of a QPN, without the reserved numbers.
pub(crate) const MAX_QP: u32 = metaroce_proto::config::limits::QPS_MAX;
/// CQs.
pub(crate) const MAX_CQ: u32 = 1 << 20;
/// Depth of a CQ.
pub(crate) const MAX_CQE: u32 = 1 << 20;
/// MRs.
pub(crate) const MAX_MR: u32 = 1 << 20;
/// Memory windows share the table of keys with MRs.
pub(crate) const MAX_MW: u32 = 1 << 20;
/// Bytes of device memory in a process: enough for any test of it, little to lose.
pub(crate) const MAX_DM_SIZE: u64 = 16 << 20;
/// Raw packet QPs share the numbers of all QPs; their tables of work queues have so many entries.
pub(crate) const MAX_RWQ_TABLE: u32 = 256;
/// Expected messages of a tag matching SRQ, and changes of them under way.
pub(crate) const MAX_TAGS: u32 = 1 << 12;
pub(crate) const MAX_TAG_OPS: u32 = 1 << 12;
/// Bytes of a rendezvous request that are looked at: the header and where the data is.
pub(crate) const MAX_RENDEZVOUS_HEADER: u32 = 32;
/// PDs.
pub(crate) const MAX_PD: u32 = 1 << 20;
/// Reads and atomics outstanding per QP, in either direction.
pub(crate) const MAX_RD_ATOMIC: u32 = 128;
/// Address handles.
pub(crate) const MAX_AH: u32 = 1 << 20;
/// Multicast groups a process takes part in, and QPs of it in each.
pub(crate) const MAX_GROUPS: u32 = metaroce_proto::config::limits::GROUPS_MAX as u32;
pub(crate) const MAX_GROUP_QPS: u32 = MAX_QP;
/// SRQs of a process, the size of the engine's table.
pub(crate) const MAX_SRQ: u32 = 1 << 14;
/// Depth of an SRQ.
pub(crate) const MAX_SRQ_WR: u32 = 1 << 20;
/// SGEs of an SRQ request.
pub(crate) const MAX_SRQ_SGE: u32 = 32;
/// Bytes of a message, as the InfiniBand specification says.
pub(crate) const MAX_MSG_SZ: u32 = 1 << 31;
/// The only port.
pub(crate) const PORT: u8 = 1;
/// Locally administered identifier ("MR"), so that no other vendor's special cases apply.
pub(crate) const VENDOR_ID: u32 = 0x02_4d52;
/// First model.
pub(crate) const VENDOR_PART_ID: u32 = 1;
/// First revision.
pub(crate) const HW_VER: u32 = 1;
