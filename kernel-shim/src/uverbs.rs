//! The uverbs ioctls that libibverbs issues itself, because no provider can override them.
//!
//! Layouts and numbers are those of rdma/rdma_user_ioctl_cmds.h, ib_user_ioctl_cmds.h, ib_user_ioctl_verbs.h and
//! ib_user_verbs.h. Everything else about the device is answered by the provider and never comes here.

use std::ffi::{c_int, c_ulong, c_void};
use std::fs::{File, OpenOptions};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use crate::device::{self, Device};
use crate::sys;

/// RDMA_VERBS_IOCTL: `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)`.
const RDMA_VERBS_IOCTL: u32 = 0xc018_1b01;

/// Whether a request is one of uverbs; all other ioctls of the process stop at this test.
pub(crate) fn is_verbs_request(request: c_ulong) -> bool {
    // The upper half is sign extension in callers that keep the number in an int.
    request as u32 == RDMA_VERBS_IOCTL
}

/// Answers a verbs ioctl on `fd`; `None` when the descriptor is not our node, so the kernel should answer.
///
/// # Safety
/// `header` is what the caller passed to ioctl: null or a `struct ib_uverbs_ioctl_hdr` with its attributes behind it,
/// whose pointers are valid for their lengths, as the kernel interface demands.
pub(crate) unsafe fn ioctl(fd: c_int, header: *mut c_void) -> Option<Result<(), c_int>> {
    let device = device::current()?;
    // SAFETY: the descriptor is only looked at, and ManuallyDrop leaves it open.
    let node = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let meta = node.metadata().ok()?;
    if !meta.file_type().is_char_device() || meta.rdev() != device.rdev {
        return None;
    }
    if header.is_null() {
        return Some(Err(libc::EFAULT));
    }
    // SAFETY: passed on from our caller.
    let mut request = unsafe { Request::new(header) };
    let device = if request.asks_gids() { device::fresh().unwrap_or(device) } else { device };
    Some(request.answer(device))
}

/// `struct ib_uverbs_ioctl_hdr`.
#[repr(C)]
struct Header {
    length: u16,
    object_id: u16,
    method_id: u16,
    num_attrs: u16,
    reserved1: u64,
    driver_id: u32,
    reserved2: u32,
}

/// `struct ib_uverbs_attr`.
#[repr(C)]
struct Attr {
    attr_id: u16,
    len: u16,
    flags: u16,
    attr_data: u16,
    /// A value of up to eight bytes, the address of a longer one or of an output, or a descriptor.
    data: u64,
}

/// `struct ib_uverbs_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UverbsGidEntry {
    gid: [u8; 16],
    gid_index: u32,
    port_num: u32,
    gid_type: u32,
    netdev_ifindex: u32,
}

const _: () =
    assert!(size_of::<Header>() == 24 && size_of::<Attr>() == 16 && size_of::<UverbsGidEntry>() == 32);

const UVERBS_OBJECT_DEVICE: u16 = 0;
const UVERBS_METHOD_INVOKE_WRITE: u16 = 0;
const UVERBS_METHOD_QUERY_GID_TABLE: u16 = 5;
const UVERBS_METHOD_QUERY_GID_ENTRY: u16 = 6;
const UVERBS_OBJECT_ASYNC_EVENT: u16 = 16;
const UVERBS_METHOD_ASYNC_EVENT_ALLOC: u16 = 0;

const UVERBS_ATTR_CORE_OUT: u16 = 1;
const UVERBS_ATTR_WRITE_CMD: u16 = 2;
const UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE: u16 = 0;
const UVERBS_ATTR_QUERY_GID_ENTRY_PORT: u16 = 0;
const UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX: u16 = 1;
const UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS: u16 = 2;
const UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY: u16 = 3;
const UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE: u16 = 0;
const UVERBS_ATTR_QUERY_GID_TABLE_FLAGS: u16 = 1;
const UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES: u16 = 2;
const UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES: u16 = 3;
const UVERBS_ATTR_F_VALID_OUTPUT: u16 = 2;

const IB_USER_VERBS_CMD_QUERY_DEVICE: u64 = 1;
const IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL: u64 = 17;
const IB_UVERBS_GID_TYPE_ROCE_V2: u32 = 2;

struct Request<'a> {
    object_id: u16,
    method_id: u16,
    attrs: &'a mut [Attr],
}

impl Request<'_> {
    /// # Safety
    /// `header` points to a header that is followed by as many attributes as it says.
    unsafe fn new<'a>(header: *mut c_void) -> Request<'a> {
        let header = header.cast::<Header>();
        // SAFETY: by contract the header is valid and its attributes follow it.
        unsafe {
            let attrs =
                std::slice::from_raw_parts_mut(header.add(1).cast::<Attr>(), (*header).num_attrs.into());
            Request { object_id: (*header).object_id, method_id: (*header).method_id, attrs }
        }
    }

    /// It asks for what changes with addresses.
    fn asks_gids(&self) -> bool {
        let methods = [UVERBS_METHOD_QUERY_GID_ENTRY, UVERBS_METHOD_QUERY_GID_TABLE];
        self.object_id == UVERBS_OBJECT_DEVICE && methods.contains(&self.method_id)
    }

    fn answer(&mut self, device: &Device) -> Result<(), c_int> {
        match (self.object_id, self.method_id) {
            (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE) => self.invoke_write(),
            (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY) => self.query_gid_entry(device),
            (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE) => self.query_gid_table(device),
            (UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC) => {
                let attr = self.attr(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE)?;
                attr.data = event_channel()? as u64;
                attr.flags |= UVERBS_ATTR_F_VALID_OUTPUT;
                Ok(())
            }
            _ => Err(libc::EPROTONOSUPPORT),
        }
    }

    /// The old write commands, wrapped.
    fn invoke_write(&mut self) -> Result<(), c_int> {
        match self.attr(UVERBS_ATTR_WRITE_CMD)?.data {
            // libibverbs asks with too little room, to learn whether commands go by ioctl; ENOSPC is a kernel's yes.
            IB_USER_VERBS_CMD_QUERY_DEVICE => Err(libc::ENOSPC),
            IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL => {
                let response = self.attr(UVERBS_ATTR_CORE_OUT)?;
                if usize::from(response.len) < size_of::<u32>() {
                    return Err(libc::ENOSPC);
                }
                let fd = event_channel()? as u32;
                response.write(0, &fd.to_ne_bytes());
                response.flags |= UVERBS_ATTR_F_VALID_OUTPUT;
                Ok(())
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    }

    fn query_gid_entry(&mut self, device: &Device) -> Result<(), c_int> {
        let port = self.attr(UVERBS_ATTR_QUERY_GID_ENTRY_PORT)?.data as u32;
        let index = self.attr(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX)?.data as u32;
        self.no_flags(UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS)?;
        if port != 1 || index as usize >= device.gid_table_len {
            return Err(libc::EINVAL);
        }
        let entry = gid_entry(device, index as usize).ok_or(libc::ENODATA)?;
        let response = self.attr(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY)?;
        response.write(0, entry.truncated(response.len.into()));
        Ok(())
    }

    fn query_gid_table(&mut self, device: &Device) -> Result<(), c_int> {
        let entry_size = self.attr(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE)?.data as usize;
        self.no_flags(UVERBS_ATTR_QUERY_GID_TABLE_FLAGS)?;
        let response = self.attr(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES)?;
        let populated: Vec<UverbsGidEntry> =
            (0..device.gids.len()).filter_map(|index| gid_entry(device, index)).collect();
        let count = populated.len();
        if entry_size == 0 || usize::from(response.len) / entry_size < count {
            return Err(libc::EINVAL);
        }
        for (index, entry) in populated.iter().enumerate() {
            response.write(index * entry_size, entry.truncated(entry_size));
        }
        let number = self.attr(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES)?;
        let bytes = (count as u64).to_ne_bytes();
        number.write(0, &bytes[..bytes.len().min(number.len.into())]);
        Ok(())
    }

    fn attr(&mut self, id: u16) -> Result<&mut Attr, c_int> {
        self.attrs.iter_mut().find(|attr| attr.attr_id == id).ok_or(libc::EINVAL)
    }

    /// Flags are optional, and none is known.
    fn no_flags(&mut self, id: u16) -> Result<(), c_int> {
        match self.attr(id) {
            Ok(attr) if attr.data as u32 != 0 => Err(libc::EINVAL),
            _ => Ok(()),
        }
    }
}

impl Attr {
    /// Stores an output, which is always behind a pointer.
    fn write(&self, offset: usize, bytes: &[u8]) {
        debug_assert!(offset + bytes.len() <= usize::from(self.len));
        // SAFETY: the caller of ioctl promises `len` writable bytes at `data`, and every use above stays within them.
        unsafe {
            let target = (self.data as usize as *mut u8).add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }
}

impl UverbsGidEntry {
    /// The first bytes of the entry, for callers that were built with a shorter one.
    fn truncated(&self, bytes_max: usize) -> &[u8] {
        // SAFETY: the struct is repr(C), plain data, and has no padding (asserted by its size).
        let all =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<Self>()) };
        &all[..bytes_max.min(all.len())]
    }
}

fn gid_entry(device: &Device, index: usize) -> Option<UverbsGidEntry> {
    device.gids.get(index)?.as_ref().map(|entry| UverbsGidEntry {
        gid: entry.gid,
        gid_index: index as u32,
        port_num: 1,
        gid_type: IB_UVERBS_GID_TYPE_ROCE_V2,
        netdev_ifindex: entry.ifindex,
    })
}

/// A FIFO on one descriptor that is open for both reading and writing: the application reads events from it, the
/// provider writes them into it, and no `read` has to be intercepted.
fn event_channel() -> Result<c_int, c_int> {
    let fifo = || -> io::Result<File> {
        let [reader, _writer] = sys::pipe()?;
        OpenOptions::new().read(true).write(true).open(format!("/proc/thread-self/fd/{}", reader.as_raw_fd()))
    };
    match fifo() {
        Ok(channel) => Ok(channel.into_raw_fd()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RealStack;
    use crate::device::tests::device;

    fn attr(attr_id: u16, len: u16, data: u64) -> Attr {
        Attr { attr_id, len, flags: 1, attr_data: 0, data }
    }

    fn answer(object_id: u16, method_id: u16, attrs: &mut [Attr]) -> Result<(), c_int> {
        Request { object_id, method_id, attrs }.answer(&device(RealStack::default()))
    }

    fn gid(port: u64, index: u64, out: &mut [u8; 32]) -> Result<(), c_int> {
        let mut attrs =
            [attr(0, 4, port), attr(1, 4, index), attr(2, 4, 0), attr(3, 32, out.as_mut_ptr() as u64)];
        answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY, &mut attrs)
    }

    #[test]
    fn query_gid_entry__populated_empty_and_out_of_range() {
        let mut out = [0; 32];
        assert_eq!(gid(1, 0, &mut out), Ok(()));
        assert_eq!(out[10..16], [255, 255, 192, 0, 2, 1]);
        assert_eq!(out[16..], [0u32, 1, 2, 77].map(u32::to_ne_bytes).concat());
        assert_eq!(gid(1, 2, &mut out), Err(libc::ENODATA));
        assert_eq!(gid(1, 15, &mut out), Err(libc::ENODATA));
        assert_eq!(gid(1, 16, &mut out), Err(libc::EINVAL));
        assert_eq!(gid(2, 0, &mut out), Err(libc::EINVAL));
    }

    #[test]
    fn query_gid_table__counts_and_refuses_too_little_room() {
        let mut table = [0u8; 96];
        let mut count = [0u8; 8];
        let mut ask = |len: u16, entry_size: u64| {
            let (table, number) = (table.as_mut_ptr() as u64, count.as_mut_ptr() as u64);
            let mut attrs = [attr(0, 8, entry_size), attr(1, 4, 0), attr(2, len, table), attr(3, 8, number)];
            answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE, &mut attrs)
        };
        assert_eq!(ask(32, 32), Err(libc::EINVAL));
        assert_eq!(ask(96, 0), Err(libc::EINVAL));
        assert_eq!(ask(96, 48), Ok(()));
        assert_eq!(u64::from_ne_bytes(count), 2);
        assert_eq!(table[48], 0x20);
        assert_eq!(table[48 + 16], 1);
    }

    #[test]
    fn channels__carry_what_is_written_into_them() {
        let mut fd = [0u8; 4];
        let mut attrs = [attr(0, 8, 0), attr(1, 4, fd.as_mut_ptr() as u64), attr(2, 8, 17)];
        assert_eq!(answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, &mut attrs), Ok(()));
        let mut event = [attr(0, 0, u64::MAX)];
        assert_eq!(answer(UVERBS_OBJECT_ASYNC_EVENT, UVERBS_METHOD_ASYNC_EVENT_ALLOC, &mut event), Ok(()));
        for fd in [i32::from_ne_bytes(fd), event[0].data as i32] {
            // SAFETY: the descriptor was made above and belongs to this test.
            let mut channel = unsafe { File::from_raw_fd(fd) };
            let mut read = [0; 8];
            io::Write::write_all(&mut channel, &7u64.to_ne_bytes()).unwrap();
            io::Read::read_exact(&mut channel, &mut read).unwrap();
            assert_eq!(u64::from_ne_bytes(read), 7);
        }
    }

    #[test]
    fn other_requests__are_refused_as_a_kernel_does() {
        let probe = &mut [attr(2, 8, IB_USER_VERBS_CMD_QUERY_DEVICE)];
        assert_eq!(answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, probe), Err(libc::ENOSPC));
        let reg_mr = &mut [attr(2, 8, 9)];
        assert_eq!(answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, reg_mr), Err(libc::EOPNOTSUPP));
        assert_eq!(answer(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, &mut []), Err(libc::EINVAL));
        assert_eq!(answer(5, 0, &mut []), Err(libc::EPROTONOSUPPORT));
        assert!(
            is_verbs_request(0xc018_1b01)
                && is_verbs_request(0xffff_ffff_c018_1b01)
                && !is_verbs_request(0x5401)
        );
    }
}
