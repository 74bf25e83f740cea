//! LD_PRELOAD shim that answers for the RDMA kernel interfaces, so that unmodified programs find `metaroce0`.
//!
//! `hooks` holds the libc symbols and nothing else; `ops` decides where a path leads; `sysfs`, `netlink`, `uverbs`
//! and `rdmacm` are the four kernel interfaces; `device` is what they all describe and `store` keeps the tree of
//! files they show. The shim knows neither libibverbs nor the provider: it meets them at the kernel ABI alone.
//!
//! It keeps no table of descriptors. What a call means is read from the call itself (a request number, a path) or from
//! the kernel's own view of the descriptor (device number, socket protocol), so dup, fork, exec, threads and a `close`
//! the shim never sees cannot leave it with a stale belief.
//!
//! Out of its reach are programs that do not call libc through its symbols: static ones, those that make system calls
//! themselves, and libraries loaded with RTLD_DEEPBIND.

#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod device;
mod guard;
mod hooks;
mod netlink;
mod ops;
mod rdmacm;
mod store;
mod sys;
mod sysfs;
mod uverbs;
