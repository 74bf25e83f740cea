//! FIFO event channels towards the application: completion channels (8-byte records) and the asynchronous event
//! channel (16-byte records). Sending never blocks and never loses a record.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::ffi;

/// A FIFO whose other end the application reads.
///
/// Our descriptor is a description of its own (the application changes O_NONBLOCK on its one), and it is open for
/// reading too: writing can then never raise SIGPIPE, and destroying an object can take its unread records back.
#[derive(Debug)]
pub(crate) struct Channel<const N: usize> {
    fifo: File,
    /// Records that did not fit; the application's next read makes room for them.
    waiting: Mutex<VecDeque<[u8; N]>>,
    /// Length of `waiting`, to keep the usual case free of the lock.
    waiting_len: AtomicUsize,
}

/// Channel of `ibv_get_cq_event`.
pub(crate) type CompChannel = Channel<8>;
/// Channel of `ibv_get_async_event`.
pub(crate) type AsyncChannel = Channel<16>;

impl<const N: usize> Channel<N> {
    /// Opens the FIFO behind `fd` once more.
    pub(crate) fn open(fd: RawFd) -> io::Result<Self> {
        let fifo = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{fd}"))?;
        Ok(Self { fifo, waiting: Mutex::default(), waiting_len: AtomicUsize::new(0) })
    }

    /// Goes on in the FIFO behind `fd`; what was sent before is gone.
    pub(crate) fn adopt(&self, fd: RawFd) -> io::Result<()> {
        let other = Self::open(fd)?;
        ffi::replace_descriptor(other.fifo.as_fd(), self.fifo.as_fd())
    }

    /// Sends a record, or keeps it until there is room.
    pub(crate) fn send(&self, record: [u8; N]) {
        if self.waiting_len.load(Ordering::Acquire) == 0 && self.write(&record) {
            return;
        }
        let mut waiting = self.waiting.lock();
        waiting.push_back(record);
        self.waiting_len.store(waiting.len(), Ordering::SeqCst);
        // The application may have emptied the FIFO before it could see that something waits.
        self.drain_into_fifo(&mut waiting);
    }

    /// Called when the application has read a record: moves waiting ones into the FIFO.
    pub(crate) fn after_read(&self) {
        if self.waiting_len.load(Ordering::SeqCst) != 0 {
            self.drain_into_fifo(&mut self.waiting.lock());
        }
    }

    /// Takes every unread record of `element` back; gives their number.
    pub(crate) fn purge(&self, element: u64) -> u32 {
        let mut waiting = self.waiting.lock();
        let mut others = VecDeque::with_capacity(waiting.len());
        let mut purged = 0;
        let mut sort = |record: [u8; N]| {
            if element_of(&record) == element { purged += 1 } else { others.push_back(record) }
        };
        let mut buffer = [0u8; 4096];
        // Writes are whole records and 4096 is a multiple of them, so reads are whole records too.
        while let Ok(n @ 1..) = ffi::read_uncancelled(self.fifo.as_fd(), &mut buffer) {
            buffer[..n].chunks_exact(N).for_each(|r| sort(r.try_into().expect("chunk of N")));
            if n < buffer.len() {
                break;
            }
        }
        waiting.drain(..).for_each(sort);
        *waiting = others;
        self.waiting_len.store(waiting.len(), Ordering::SeqCst);
        self.drain_into_fifo(&mut waiting);
        purged
    }

    fn drain_into_fifo(&self, waiting: &mut VecDeque<[u8; N]>) {
        while let Some(record) = waiting.front() {
            if !self.write(record) {
                break;
            }
            waiting.pop_front();
        }
        self.waiting_len.store(waiting.len(), Ordering::SeqCst);
    }

    /// `false` when the FIFO is full. Up to PIPE_BUF bytes go whole or not at all.
    fn write(&self, record: &[u8; N]) -> bool {
        loop {
            match ffi::write_uncancelled(self.fifo.as_fd(), record) {
                Ok(_) => return true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

/// Both kinds of record begin with the object's address.
fn element_of(record: &[u8]) -> u64 {
    u64::from_ne_bytes(record[..8].try_into().expect("records have at least 8 bytes"))
}

impl AsyncChannel {
    /// A new FIFO; gives our side and the application's descriptor, which libibverbs closes with the context.
    pub(crate) fn pipe() -> io::Result<(Self, std::io::PipeReader)> {
        let (reader, _writer) = io::pipe()?;
        Ok((Self::open(reader.as_raw_fd())?, reader))
    }
}

/// One verbs object as a source of events of one kind; destruction waits for what it has sent.
#[derive(Debug)]
pub(crate) struct Source<const N: usize> {
    channel: Arc<Channel<N>>,
    /// Address of the object as C knows it; set before the object can produce events.
    element: AtomicU64,
    sent: AtomicU32,
}

impl<const N: usize> Source<N> {
    pub(crate) fn new(channel: Arc<Channel<N>>) -> Arc<Self> {
        Arc::new(Self { channel, element: AtomicU64::new(0), sent: AtomicU32::new(0) })
    }

    /// Names the object.
    pub(crate) fn set_element<T>(&self, object: *mut T) {
        self.element.store(object as u64, Ordering::Release);
    }

    /// Called when the application has read a record from the channel.
    pub(crate) fn after_read(&self) {
        self.channel.after_read();
    }

    /// Takes the unread events back; gives how many the application has got and must acknowledge. The object must
    /// not produce events any more.
    pub(crate) fn close(&self) -> u32 {
        let sent = self.sent.load(Ordering::Acquire);
        if sent == 0 {
            return 0;
        }
        sent.wrapping_sub(self.channel.purge(self.element.load(Ordering::Acquire)))
    }
}

impl Source<8> {
    /// Announces a completion event.
    pub(crate) fn completion(&self) {
        self.sent.fetch_add(1, Ordering::AcqRel);
        self.channel.send(self.element.load(Ordering::Acquire).to_ne_bytes());
    }
}

impl Source<16> {
    /// Announces an asynchronous event (`struct ib_uverbs_async_event_desc`).
    pub(crate) fn event(&self, event_type: u32) {
        self.sent.fetch_add(1, Ordering::AcqRel);
        let mut record = [0; 16];
        record[..8].copy_from_slice(&self.element.load(Ordering::Acquire).to_ne_bytes());
        record[8..12].copy_from_slice(&event_type.to_ne_bytes());
        self.channel.send(record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn channel() -> (Arc<AsyncChannel>, std::io::PipeReader) {
        let (channel, reader) = AsyncChannel::pipe().expect("pipe");
        (Arc::new(channel), reader)
    }

    fn read_one(reader: &mut std::io::PipeReader) -> (u64, u32) {
        let mut record = [0; 16];
        reader.read_exact(&mut record).expect("record");
        (element_of(&record), u32::from_ne_bytes(record[8..12].try_into().expect("4 bytes")))
    }

    #[test]
    fn send_keeps_what_does_not_fit_and_loses_nothing() {
        // A FIFO of 64 KiB holds 4096 records of 16 bytes; the rest must arrive as the reader makes room.
        let (channel, mut reader) = channel();
        let source = Source::new(Arc::clone(&channel));
        source.element.store(7, Ordering::Release);
        for i in 0..5000 {
            source.event(i);
        }
        assert!(channel.waiting_len.load(Ordering::SeqCst) > 0);
        for i in 0..5000 {
            assert_eq!(read_one(&mut reader), (7, i));
            source.after_read();
        }
        assert_eq!(source.close(), 5000);
    }

    #[test]
    fn close_takes_unread_events_of_its_object_only() {
        let (channel, mut reader) = channel();
        let (a, b) = (Source::new(Arc::clone(&channel)), Source::new(Arc::clone(&channel)));
        a.element.store(0xa, Ordering::Release);
        b.element.store(0xb, Ordering::Release);
        for i in 0..3000 {
            a.event(i);
            b.event(i);
        }
        assert_eq!(read_one(&mut reader), (0xa, 0));
        assert_eq!(a.close(), 1);
        for i in 0..3000 {
            assert_eq!(read_one(&mut reader), (0xb, i));
            b.after_read();
        }
        assert_eq!(b.close(), 3000);
    }
}
