//! Which path the next burst takes: the next one in turn that has room for a whole burst, so that every path carries
//! its share; else the one with most room (design D12).

use super::PathTx;

/// Picks a path slot, or none when no window is open. `turn` is the connection's cursor; `burst` the packets wanted.
pub fn select(paths: &mut [PathTx], turn: &mut usize, burst: u32) -> Option<(usize, u32)> {
    let count = paths.len();
    let mut best: Option<(usize, u32)> = None;
    for step in 0..count {
        let i = (*turn + step) % count;
        let room = paths[i].room();
        if room >= burst {
            *turn = (i + 1) % count;
            return Some((i, room));
        }
        paths[i].limited = true;
        if room > best.map_or(0, |b| b.1) {
            best = Some((i, room));
        }
    }
    let (i, room) = best?;
    // A remnant of a window is not worth a packet of its own while ACKs are on their way that open it further.
    if room < burst.min(paths[i].congestion.window().div_ceil(2)) && paths[i].in_flight() > 0 {
        return None;
    }
    *turn = (i + 1) % count;
    Some((i, room))
}
