//! Expectations all modes share: completions in time and in order, statuses, events, states.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::IBV_WC_SUCCESS;
use metaroce_test_verbs::{
    AsyncEvent, Context, Cq, Element, Qp, Wc, event_name, opcode_name, state_name, status_name,
};

use crate::Outcome;
use crate::session::Session;

/// How long a thing that must not happen is waited for.
pub const QUIET: Duration = Duration::from_millis(100);
/// How long an event that must come may take.
pub const EVENT_LIMIT: Duration = Duration::from_secs(5);

/// Polls until exactly `count` completions are taken; an error that shows what came when `limit` passes
/// first.
pub fn collect(cq: &Cq, count: usize, limit: Duration) -> Outcome<Vec<Wc>> {
    let mut wcs = Vec::with_capacity(count);
    let begin = Instant::now();
    while wcs.len() < count {
        if cq.poll_at_most(count - wcs.len(), &mut wcs)? == 0 {
            if begin.elapsed() > limit {
                let got = describe(&wcs);
                return Err(format!("{} of {count} completions after {limit:?}: {got}", wcs.len()).into());
            }
            std::thread::yield_now();
        }
    }
    Ok(wcs)
}

/// Like [`collect`], and every one must be a success.
pub fn collect_good(cq: &Cq, count: usize, limit: Duration) -> Outcome<Vec<Wc>> {
    let wcs = collect(cq, count, limit)?;
    match wcs.iter().find(|wc| wc.status != IBV_WC_SUCCESS) {
        Some(bad) => Err(format!("unexpected completion {}", describe(&[*bad])).into()),
        None => Ok(wcs),
    }
}

/// Polls for [`QUIET`]: what came although nothing should.
pub fn surplus(cq: &Cq) -> Outcome<Vec<Wc>> {
    let mut wcs = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < QUIET && wcs.is_empty() {
        cq.poll(&mut wcs)?;
        std::thread::yield_now();
    }
    Ok(wcs)
}

/// Completions in short: `wr_id:status(opcode)`, the first few.
pub fn describe(wcs: &[Wc]) -> String {
    let one = |wc: &Wc| match wc.status {
        IBV_WC_SUCCESS => format!("{:#x}:ok({})", wc.wr_id, opcode_name(wc.opcode)),
        status => format!("{:#x}:{}", wc.wr_id, status_name(status)),
    };
    let mut text = wcs.iter().take(8).map(one).collect::<Vec<_>>().join(" ");
    if wcs.len() > 8 {
        text += " ...";
    }
    if text.is_empty() { "none".into() } else { text }
}

/// Statuses in short, for a table of what was wanted.
fn describe_wanted(wanted: &[(u64, u32)]) -> String {
    wanted
        .iter()
        .map(|(id, status)| format!("{id:#x}:{}", status_name(*status)))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Collects as many completions as are wanted and checks `(wr_id, status)` one by one, then that no more
/// come.
pub fn check_statuses(
    session: &mut Session,
    name: &str,
    cq: &Cq,
    wanted: &[(u64, u32)],
    limit: Duration,
) -> Outcome {
    let wcs = match collect(cq, wanted.len(), limit) {
        Ok(wcs) => wcs,
        Err(error) => {
            session.check(name, false, format!("want {}; {error}", describe_wanted(wanted)));
            return Ok(());
        }
    };
    let more = surplus(cq)?;
    let right = wcs.iter().zip(wanted).all(|(wc, (id, status))| (wc.wr_id, wc.status) == (*id, *status));
    let detail = match (right, more.is_empty()) {
        (true, true) => describe(&wcs),
        (false, _) => format!("got {} want {}", describe(&wcs), describe_wanted(wanted)),
        (_, false) => format!("surplus {}", describe(&more)),
    };
    session.check(name, right && more.is_empty(), detail);
    Ok(())
}

/// Checks that this event, and only this, is raised.
pub fn check_event(session: &mut Session, context: &Context, kind: u32, element: Element) -> Outcome {
    let wanted = AsyncEvent { kind, element };
    let name = format!("event {}", event_name(kind));
    match context.async_event(EVENT_LIMIT)? {
        Some(event) if event == wanted => session.check(name, true, "raised"),
        Some(event) => session.check(name, false, format!("got {event:?} want {wanted:?}")),
        None => session.check(name, false, format!("not raised in {EVENT_LIMIT:?}")),
    };
    check_no_event(session, context, "no further event")
}

/// Checks that no asynchronous event is there or comes soon.
pub fn check_no_event(session: &mut Session, context: &Context, name: &str) -> Outcome {
    match context.async_event(QUIET)? {
        None => session.check(name, true, format!("none in {QUIET:?}")),
        Some(event) => session.check(name, false, format!("got {}", event_name(event.kind))),
    };
    Ok(())
}

/// Checks a QP's state as `ibv_query_qp` tells it; a state that is still on its way gets [`QUIET`].
pub fn check_state(session: &mut Session, name: &str, qp: &Qp, wanted: u32) -> Outcome {
    let begin = Instant::now();
    let mut got = qp.query()?.state;
    while got != wanted && begin.elapsed() < QUIET {
        std::thread::yield_now();
        got = qp.query()?.state;
    }
    session.check(name, got == wanted, format!("{} (want {})", state_name(got), state_name(wanted)));
    Ok(())
}

/// Checks that `spent` lies between `least` and `most`.
pub fn check_time(session: &mut Session, name: &str, spent: Duration, least: Duration, most: Duration) {
    let detail = format!("{spent:.1?} (allowed {least:.1?} to {most:.1?})");
    session.check(name, spent >= least && spent <= most, detail);
}

/// Checks that a call failed with `errno`.
pub fn check_errno<T>(session: &mut Session, name: &str, result: &std::io::Result<T>, errno: i32) {
    let wanted = std::io::Error::from_raw_os_error(errno);
    match result {
        Ok(_) => session.check(name, false, format!("succeeded; want {wanted}")),
        Err(error) => {
            let got = metaroce_test_verbs::Errno::of(error);
            session.check(name, got == Some(errno), format!("{error} (want {wanted})"))
        }
    };
}
