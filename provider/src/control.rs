//! The control socket: where an operator looks at a process and steers it. One per device, served by the threads that
//! follow links (`net.rs`), so it costs nothing while nobody asks.
//!
//! It has a name in the abstract name space, which ends with the process whatever happens to it, and answers to the
//! process's own user and to root, as the kernel tells who is at the other end. A line of JSON asks, a line answers
//! (`answer.rs`). Everything is bounded: clients, length of a question, and an answer is a page.

use std::io::{self, ErrorKind, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::Duration;

use metaroce_config::Followed;
use metaroce_engine::Device;
use parking_lot::{Mutex, RwLock};

use crate::netlink::{own_uid, peer_uid};

mod answer;

/// Clients at a time; a further one replaces the one that came first, so that nobody is locked out for good.
const CLIENTS_MAX: usize = 8;
/// Bytes of a question.
const QUESTION_MAX: usize = 4096;
/// Devices of one process, or of processes with one number in several pid namespaces, that can have sockets at once.
const NAMES: u32 = 16;
/// Longest wait for another thread that opens the device.
const OPENING: Duration = Duration::from_millis(100);

/// The listening socket of a device, shared by the threads of its contexts.
pub(crate) struct ControlSocket {
    listener: ManuallyDrop<UnixListener>,
    device: Weak<Device>,
    process: u32,
}

/// Sockets there are.
static SOCKETS: Mutex<Vec<Weak<ControlSocket>>> = Mutex::new(Vec::new());

impl ControlSocket {
    /// The device's socket, made if need be. Without one the device works all the same.
    pub(crate) fn of(device: &Arc<Device>) -> Option<Arc<Self>> {
        // Not for ever: in the child of a fork a thread that held the lock does not exist.
        let mut sockets = SOCKETS.try_lock_for(OPENING)?;
        sockets.retain(|socket| socket.strong_count() > 0);
        let ours = sockets.iter().filter_map(Weak::upgrade);
        if let Some(socket) = ours.into_iter().find(|s| s.device.as_ptr() == Arc::as_ptr(device)) {
            return Some(socket);
        }
        let listener = bind().inspect_err(|e| log::info!("no control socket: {e}")).ok()?;
        device.keep_from_children(listener.as_raw_fd());
        let process = std::process::id();
        let listener = ManuallyDrop::new(listener);
        let socket = Arc::new(Self { listener, device: Arc::downgrade(device), process });
        sockets.push(Arc::downgrade(&socket));
        Some(socket)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // In the child of a fork it is closed already, and the number may be another's.
        if self.process != std::process::id() {
            return;
        }
        if let Some(device) = self.device.upgrade() {
            device.release_descriptor(self.listener.as_raw_fd());
        }
        // SAFETY: dropped here only, and not used any more.
        unsafe { ManuallyDrop::drop(&mut self.listener) };
    }
}

/// Binds the first free name of this process: `metaroce-ctl-UID-PID`, then with `-1` and so on.
fn bind() -> io::Result<UnixListener> {
    let base = format!("metaroce-ctl-{}-{}", own_uid(), std::process::id());
    for number in 0..NAMES {
        let name = if number == 0 { base.clone() } else { format!("{base}-{number}") };
        match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    Err(ErrorKind::AddrInUse.into())
}

/// One thread's side of the socket.
pub(crate) struct Server {
    socket: Option<Arc<ControlSocket>>,
    clients: Vec<Client>,
}

struct Client {
    stream: UnixStream,
    question: Vec<u8>,
    answer: Vec<u8>,
    /// Bytes of the answer that have left.
    sent: usize,
}

impl Server {
    pub(crate) fn new(socket: Option<Arc<ControlSocket>>) -> Self {
        Self { socket, clients: Vec::new() }
    }

    /// What to wait for, in the order that [`Server::serve`] expects.
    pub(crate) fn list(&self, fds: &mut Vec<libc::pollfd>) {
        let Some(socket) = &self.socket else { return };
        let entry = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        fds.push(entry(socket.listener.as_raw_fd(), libc::POLLIN));
        fds.extend(self.clients.iter().map(|client| {
            entry(client.stream.as_raw_fd(), if client.answering() { libc::POLLOUT } else { libc::POLLIN })
        }));
    }

    /// Serves those of the list that are ready.
    pub(crate) fn serve(&mut self, fds: &[libc::pollfd], state: &RwLock<Followed>) {
        let Self { socket: Some(socket), clients } = self else { return };
        let Some((listener, others)) = fds.split_first() else { return };
        let mut ready = others.iter().map(|entry| entry.revents != 0);
        clients.retain_mut(|client| !ready.next().unwrap_or(false) || client.go_on(&socket.device, state));
        if listener.revents != 0 {
            // One at a time: the thread comes here again at once.
            if let Some(client) = accept(&socket.listener) {
                if clients.len() >= CLIENTS_MAX {
                    clients.remove(0);
                }
                clients.push(client);
            }
        }
    }
}

/// Takes a client that may ask: one of this user's, or root.
fn accept(listener: &UnixListener) -> Option<Client> {
    let (stream, _) = listener.accept().ok()?;
    let uid = peer_uid(&stream).ok()?;
    if uid != 0 && uid != own_uid() {
        log::info!("user {uid} is not let into the control socket");
        return None;
    }
    stream.set_nonblocking(true).ok()?;
    Some(Client { stream, question: Vec::new(), answer: Vec::new(), sent: 0 })
}

impl Client {
    fn answering(&self) -> bool {
        self.sent < self.answer.len()
    }

    /// Reads, answers and writes as far as that goes without waiting; `false`: this client is done with.
    fn go_on(&mut self, device: &Weak<Device>, state: &RwLock<Followed>) -> bool {
        if !self.answering() && self.read().is_err() {
            return false;
        }
        loop {
            if self.write().is_err() {
                return false;
            }
            if self.answering() {
                return true;
            }
            let Some(end) = self.question.iter().position(|byte| *byte == b'\n') else {
                return self.question.len() < QUESTION_MAX;
            };
            let Some(device) = device.upgrade() else { return false };
            self.answer = answer::to(&self.question[..end], &device, state).to_string().into_bytes();
            self.answer.push(b'\n');
            self.sent = 0;
            self.question.drain(..=end);
        }
    }

    /// Takes what has come, a buffer at a time. The end of the stream is an error.
    fn read(&mut self) -> io::Result<()> {
        let mut buffer = [0u8; 512];
        match self.stream.read(&mut buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.question.extend_from_slice(&buffer[..count]);
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while self.answering() {
            match self.stream.write(&self.answer[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
