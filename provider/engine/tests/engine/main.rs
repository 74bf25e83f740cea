//! Integration tests of the engine through its public API: two devices in one process over loopback sockets.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod common;
mod gone;
mod groups;
mod pair;
mod wake;
