//! `libmetaroce.so.1`: the functions of `metaroce/metaroce.h`. Each finds the provider that made the object it is
//! given, in the same process, and hands over to it; there is no second engine here.
//!
//! The provider is found by where the context's own functions lie: `dladdr` of `poll_cq` names the object, `dlsym` its
//! table. A context of another driver leads to an object without one: ENODEV.

// SPDX-License-Identifier: MIT OR Apache-2.0

mod exports;
mod find;
