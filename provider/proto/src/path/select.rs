//! Which path the next burst takes: the next one in turn that has room for a whole burst, so that every path carries
//! its share; else the one with most room (design D12).

use super::PathTx;

/// Picks a path slot, or none when no window is open. `turn` is the connection's cursor; `burst` the packets wanted.
/// A path with a small window (one on trial) gets small bursts, so that it can grow; a remnant of a large window is not
/// worth a packet of its own while ACKs are on their way that open it further.
pub fn select(paths: &mut [PathTx], turn: &mut usize, burst: u32) -> Option<(usize, u32)> {
    let count = paths.len();
    for step in 0..count {
        let i = (*turn + step) % count;
        let room = paths[i].room();
        paths[i].limited |= room < burst;
        let worthwhile = burst.min(paths[i].congestion.window().div_ceil(2));
        if room > 0 && (room >= worthwhile || paths[i].in_flight() == 0) {
            *turn = (i + 1) % count;
            return Some((i, room));
        }
    }
    None
}
