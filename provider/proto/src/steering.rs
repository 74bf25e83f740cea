//! What an operator, the application and the host's links say about planes and source ports, and what becomes of the
//! paths that use them.

use crate::config::limits;
use crate::connection::{Conn, completer};
use crate::endpoint::{Endpoint, parts};
use crate::journal::Happened;
use crate::parts::Parts;
use crate::path::{Health, PathTx};
use crate::plane_status;
use crate::stats::Cause;
use crate::types::*;

/// What an operator wants of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Admin {
    /// To be used.
    #[default]
    Up,
    /// Nothing new; what is on its way there may arrive.
    Drain,
    /// Nothing at all: what is on its way there goes again elsewhere.
    Down,
}

/// One plane of ours as it is to be used.
#[derive(Debug, Clone, Copy)]
pub struct PlaneState {
    /// What the operator wants.
    pub admin: Admin,
    /// Its link is up, as far as the driver has told.
    pub link_up: bool,
    /// Source ports (entropy values) not to be used, a bit each.
    pub denied: u64,
}

impl Default for PlaneState {
    fn default() -> Self {
        PlaneState { admin: Admin::Up, link_up: true, denied: 0 }
    }
}

impl Endpoint {
    /// Our planes as they are to be used.
    pub fn plane_states(&self) -> &[PlaneState] {
        &self.planes
    }
    /// A plane of ours went up or down (link event): its paths are left at once, or probed at once. Connections made
    /// later begin without a plane that is down.
    pub fn set_plane_state(&mut self, now: Nanos, plane: u8, up: bool, sink: &mut impl Sink) {
        let Some(state) = self.planes.get_mut(usize::from(plane)) else { return };
        if std::mem::replace(&mut state.link_up, up) != up {
            self.journal.add(now, plane, Happened::Link(up));
        }
        self.tell_status();
        self.each_usable(now, sink, |p, conn| {
            if up {
                probe_plane(p, conn, plane);
            } else {
                completer::leave_plane(p, conn, plane, Cause::Link);
            }
        });
    }
    /// An operator wants a plane used, drained or left. Gives the number of connections that go on using it because they
    /// have no other path that answers; they leave it as soon as one does. Busy: it is the last plane in use.
    pub fn set_plane_admin(
        &mut self,
        now: Nanos,
        plane: u8,
        admin: Admin,
        sink: &mut impl Sink,
    ) -> Result<usize, Refused> {
        let index = usize::from(plane);
        let others = self.planes.iter().enumerate().any(|(at, x)| at != index && x.admin == Admin::Up);
        let state = self.planes.get_mut(index).ok_or(Refused::NotFound)?;
        if admin != Admin::Up && !others {
            return Err(Refused::Busy);
        }
        state.admin = admin;
        self.tell_status();
        self.journal.add(now, plane, Happened::Admin(admin));
        let mut kept = 0;
        self.each_usable(now, sink, |p, conn| kept += usize::from(obey(p, conn)));
        Ok(kept)
    }
    /// A source port of a plane is not to be used, or may be again. Paths that use it change to another at once. Busy:
    /// fewer than a connection has paths on the plane would be left.
    pub fn deny_entropy(
        &mut self,
        now: Nanos,
        plane: u8,
        entropy: u8,
        deny: bool,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let offered = u32::from(self.config.entropies_per_plane).min(64);
        let least = u32::from(self.config.paths_per_plane).min(offered);
        let state = self.planes.get_mut(usize::from(plane)).ok_or(Refused::NotFound)?;
        if u32::from(entropy) >= offered {
            return Err(Refused::NotFound);
        }
        let bit = 1u64 << entropy;
        let denied = if deny { state.denied | bit } else { state.denied & !bit };
        if offered - denied.count_ones() < least {
            return Err(Refused::Busy);
        }
        state.denied = denied;
        self.each_usable(now, sink, |p, conn| {
            obey(p, conn);
        });
        Ok(())
    }
    /// Changes the source port of a path of a connection: what is on its way on it goes again.
    pub fn rehash(
        &mut self,
        now: Nanos,
        connection: u32,
        path: u8,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let mut found = false;
        self.each_usable(now, sink, |p, conn| {
            if conn.index == connection && usize::from(path) < conn.paths.len() {
                completer::rehash(p, conn, usize::from(path));
                found = true;
            }
        });
        if found { Ok(()) } else { Err(Refused::NotFound) }
    }
    /// A connection has got its paths: it begins as everything above wants.
    pub(crate) fn steer_new(&mut self, now: Nanos, index: u32, sink: &mut impl Sink) {
        let plain = |x: &PlaneState| x.admin == Admin::Up && x.link_up && x.denied == 0;
        if self.planes.iter().all(plain) {
            return;
        }
        let Some(mut conn) = self.conns.get_mut(index as usize).and_then(Option::take) else { return };
        let mut p = parts!(self, now, sink);
        for plane in 0..p.planes.len() {
            if !p.planes[plane].link_up {
                completer::leave_plane(&mut p, &mut conn, plane as u8, Cause::Link);
            }
        }
        obey(&mut p, &mut conn);
        self.put(conn);
    }
    /// Peers hear of planes that went down or up with the next acknowledgement, which goes at once (MR-PATH-4).
    fn tell_status(&mut self) {
        if self.plane_status.follow(&self.planes) {
            let told = self.conns.iter_mut().flatten().filter(|conn| conn.takes_status && conn.usable());
            told.for_each(|conn| conn.ack.now = true);
        }
    }
    fn each_usable<S: Sink>(
        &mut self,
        now: Nanos,
        sink: &mut S,
        mut each: impl FnMut(&mut Parts<'_, S>, &mut Conn),
    ) {
        for index in 0..self.conns.len() {
            let Some(mut conn) = self.conns[index].take() else { continue };
            if !conn.paths.is_empty() {
                let mut p = parts!(self, now, sink);
                each(&mut p, &mut conn);
                p.activate(&mut conn);
            }
            self.put(conn);
        }
    }
}

/// Paths of a plane that were left are probed at once.
fn probe_plane<S: Sink>(p: &Parts<'_, S>, conn: &mut Conn, plane: u8) {
    let left = conn.paths.iter_mut().filter(|x| x.plane == plane && !x.barred && !x.health.is_active());
    left.for_each(|x| x.health = Health::Suspect { probe_at: p.now, pause: limits::PROBE_FIRST_NS });
}

/// Makes a connection's paths what is wanted of their planes and ports. Gives whether it goes on using what it should not.
fn obey<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> bool {
    for index in 0..conn.paths.len() {
        let path = &mut conn.paths[index];
        let state = p.planes.get(usize::from(path.plane)).copied().unwrap_or_default();
        let was = std::mem::replace(&mut path.barred, state.admin != Admin::Up);
        if state.admin != Admin::Drain && std::mem::take(&mut path.draining) {
            path.changed = (p.now, Cause::Operator);
            p.note_path(conn, index);
        }
        let path = &conn.paths[index];
        let plane = path.plane;
        if was && !path.barred {
            probe_plane(p, conn, plane);
        }
        if state.denied >> conn.paths[index].entropy.min(63) & 1 == 1 {
            completer::rehash(p, conn, index);
        }
    }
    enforce(p, conn)
}

/// Leaves, or drains, the paths in use that should not be, if another one can carry their load. Gives whether none can.
pub(crate) fn enforce<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> bool {
    let planes = p.planes;
    // A path that has answered since its link was said to be down is believed.
    let unlinked = |x: &PathTx| {
        planes.get(usize::from(x.plane)).is_some_and(|plane| !plane.link_up) && x.changed.1 != Cause::Answered
    };
    let others_serve = plane_status::others_serve(conn);
    let unwanted = |x: &PathTx| x.barred || x.peer_down && others_serve || unlinked(x);
    if !conn.paths.iter().any(|x| x.in_use() && unwanted(x)) {
        return false;
    }
    if !conn.paths.iter().any(|x| x.in_use() && !unwanted(x)) {
        return true;
    }
    for index in 0..conn.paths.len() {
        let path = &mut conn.paths[index];
        if !path.in_use() || !unwanted(path) {
            continue;
        }
        let state = planes.get(usize::from(path.plane)).copied().unwrap_or_default();
        let drains = state.admin == Admin::Drain && state.link_up && !path.peer_down;
        if drains {
            path.draining = true;
            path.changed = (p.now, Cause::Operator);
            p.note_path(conn, index);
        } else {
            let cause = match path {
                PathTx { barred: true, .. } => Cause::Operator,
                PathTx { peer_down: true, .. } => Cause::Peer,
                _ => Cause::Link,
            };
            completer::leave_path(p, conn, index, cause);
        }
    }
    false
}
