//! Plane status told to peers: a plane that one end knows down need not be found silent by the other (MR-PATH-4).

use crate::config::limits;
use crate::connection::Conn;
use crate::parts::Parts;
use crate::path::Health;
use crate::steering::{Admin, PlaneState, enforce};
use crate::types::Sink;

/// Which planes of an endpoint are not to be used, and which version of that it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlaneStatus {
    /// Counts the changes; 0: all planes are up and always were.
    pub epoch: u8,
    /// A bit per plane, in the order of the HELLO: its link is down, or an operator does not want it used.
    pub down: u16,
}

impl PlaneStatus {
    /// Takes over how our planes are now; true if that is news for peers.
    pub fn follow(&mut self, planes: &[PlaneState]) -> bool {
        let is_down = |x: &PlaneState| !x.link_up || x.admin != Admin::Up;
        let bits = planes.iter().take(16).enumerate().filter(|(_, x)| is_down(x));
        let down = bits.fold(0, |bits, (plane, _)| bits | 1 << plane);
        if down == self.down {
            return false;
        }
        // After 255 changes comes 1: 0 would say that nothing ever was.
        *self = PlaneStatus { epoch: self.epoch.checked_add(1).unwrap_or(1), down };
        true
    }
    /// The plane, by its place in the HELLO, is not to be used.
    fn is_down(self, plane: u8) -> bool {
        self.down.checked_shr(plane.into()).unwrap_or(0) & 1 == 1
    }
    /// It was said later than the other.
    fn is_newer(self, than: PlaneStatus) -> bool {
        than.epoch == 0 || (self.epoch.wrapping_sub(than.epoch) as i8) > 0
    }
}

/// The peer told the status of its planes: paths to those that are down are left at once, paths to those that are up again
/// are probed (MR-PATH-5).
pub fn on_status<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, status: PlaneStatus) {
    if !status.is_newer(conn.peer_status) {
        return;
    }
    conn.peer_status = status;
    for index in 0..conn.paths.len() {
        let path = &mut conn.paths[index];
        let was = std::mem::replace(&mut path.peer_down, status.is_down(path.peer_plane));
        if was && !path.peer_down && !path.barred && !path.health.is_active() {
            path.health = Health::Suspect { probe_at: p.now, pause: limits::PROBE_FIRST_NS };
        }
    }
    enforce(p, conn);
    p.activate(conn);
}

/// A path has answered whose plane the peer does not want used: while others serve it stays left.
pub fn stays_left(conn: &Conn, index: usize) -> bool {
    let path = &conn.paths[index];
    path.peer_down && !path.health.is_active() && others_serve(conn)
}

/// There are paths in use on planes that both ends want used, and unless nothing is on its way one of them answers.
pub fn others_serve(conn: &Conn) -> bool {
    let mut others = conn.paths.iter().filter(|x| x.in_use() && !x.peer_down && !x.barred).peekable();
    let there = others.peek().is_some();
    let (mut answers, mut silent) = (false, false);
    others.for_each(|x| {
        silent |= x.pto_count > 0;
        answers |= x.pto_count == 0 && x.in_flight() > 0;
    });
    there && (answers || !silent)
}
