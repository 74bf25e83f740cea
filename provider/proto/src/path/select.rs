//! Which path the next burst takes: the next one in turn that has room for a whole burst, so that every path carries
//! its share; else the one with most room (design D12).

use super::PathTx;
use crate::pace::Pace;
use crate::types::Nanos;

/// Why no path can be had now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shut {
    /// No window is open.
    Windows,
    /// A window is open on this plane, but its link is busy.
    Link(u8),
}

/// What is wanted of a path.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Packets.
    pub burst: u32,
    /// Packets that may be in flight on it, whatever its window.
    pub per_path: u32,
}

/// Picks a path slot and its room. `turn` is the connection's cursor.
/// A path with a small window (one on trial) gets small bursts, so that it can grow; a remnant of a large window is not
/// worth a packet of its own while ACKs are on their way that open it further.
pub fn select(
    paths: &mut [PathTx],
    turn: &mut usize,
    wanted: Wanted,
    pace: &Pace,
    now: Nanos,
) -> Result<(usize, u32), Shut> {
    let Wanted { burst, per_path } = wanted;
    let count = paths.len();
    let mut shut = Shut::Windows;
    let mut soonest = Nanos::MAX;
    for step in 0..count {
        let i = (*turn + step) % count;
        let room = paths[i].room().min(per_path.saturating_sub(paths[i].in_flight()));
        let worthwhile = burst.min(paths[i].congestion.window().div_ceil(2)).min(per_path.div_ceil(2));
        let open = room > 0 && (room >= worthwhile || paths[i].in_flight() == 0);
        let free_at = pace.open_at(paths[i].plane);
        if open && free_at > now {
            // Its window is not what holds this path back.
            if free_at < soonest {
                (soonest, shut) = (free_at, Shut::Link(paths[i].plane));
            }
            continue;
        }
        if open {
            *turn = (i + 1) % count;
            return Ok((i, room));
        }
    }
    Err(shut)
}
