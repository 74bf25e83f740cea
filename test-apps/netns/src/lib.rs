//! Two hosts with several network planes between them, made of network namespaces.
//!
//! The namespaces have no names: open file descriptors and the processes inside keep them, and the kernel
//! takes them away with the last of these. So nothing is left behind, not even when the owner is killed, and
//! nothing has to be cleaned up. As root, or as anybody where user namespaces are allowed
//! ([`become_root_of_own_namespace`]).

mod command;
mod ends;
mod fabric;
mod switch;
mod system;

pub use command::{CannotHere, Failure};
pub use ends::{Ended, Listens, READY_LIMIT};
pub use fabric::{Arrived, Fabric, Host, Plan};
pub use switch::{Rate, Switch};
pub use system::become_root_of_own_namespace;
