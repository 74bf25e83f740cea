//! One network path of a connection: what was sent on it and is unresolved, what was received on it, its round trip
//! time, congestion window and health.

pub mod congestion;
pub mod health;
pub mod rtt;
pub mod rx_window;
pub mod select;
pub mod tx_window;

pub use congestion::{AckNews, Congestion};
pub use health::Health;
pub use rtt::Rtt;
pub use rx_window::PathRx;
pub use tx_window::{FrameKind, PathTx, PktState, TxFrame};
