//! `libmetaroce-rdmav34.so`: the libibverbs provider of `metaroce0`, a thin verbs edge over the engine.
//!
//! One file per verbs object; `ffi.rs` (with `chain.rs` for request lists) is the fence between C pointers and safe
//! code, `entry.rs` the table of functions libibverbs calls, `register.rs` how it finds them. The provider never
//! assumes the kernel-shim: it only sees descriptors and structures libibverbs gives it.

// SPDX-License-Identifier: MIT OR Apache-2.0

mod addr;
mod advise;
mod ah;
mod attr;
mod chain;
mod channel;
mod context;
mod control;
mod cq;
mod device;
mod dm;
mod entry;
mod exports;
mod ext;
mod ffi;
mod flow;
mod limits;
mod logger;
#[cfg(test)]
mod loopback;
mod mr;
mod mw;
mod net;
mod netlink;
mod open;
mod pages;
mod pd;
mod poll;
mod post;
mod qp;
mod register;
mod srq;
mod td;
#[cfg(test)]
mod values;
mod wq;
mod wr;
mod xrcd;

/// Runs when libibverbs loads the library.
extern "C" fn constructor() {
    register::register();
}

/// Runs at exit, after the program's own exit handlers: peers get a CLOSE instead of silence.
extern "C" fn destructor() {
    context::exit();
}

#[used]
// SAFETY: the dynamic linker calls the functions in this section once, after the libraries we need are ready.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

#[used]
// SAFETY: as above, at exit.
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;
