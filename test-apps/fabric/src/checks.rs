//! What must be true after a run, whatever its speed. Each check is an object of its own and says what it found.

use crate::world::World;

/// Something that must hold after a run.
pub trait Check {
    /// What it is called.
    fn name(&self) -> &'static str;
    /// Empty, or what is wrong.
    fn breaches(&self, world: &World) -> Vec<String>;
}

/// With real memory: the bytes of every message equalled their source's when it completed.
struct MemoryEquality;
/// No byte was placed twice or without having been asked for.
struct ExactlyOnce;
/// Completions came in posting order and without error.
struct InOrder;
/// Every packet is accounted for.
struct Conservation;
/// What was posted completes: nothing is left hanging when traffic is finite.
struct Liveness;

/// All checks that apply to every run.
pub fn all() -> Vec<Box<dyn Check>> {
    vec![
        Box::new(MemoryEquality),
        Box::new(ExactlyOnce),
        Box::new(InOrder),
        Box::new(Conservation),
        Box::new(Liveness),
    ]
}

/// Every breach of every check.
pub fn breaches(world: &World) -> Vec<String> {
    let found = |c: Box<dyn Check>| -> Vec<String> {
        c.breaches(world).into_iter().map(|b| format!("{}: {b}", c.name())).collect()
    };
    all().into_iter().flat_map(found).collect()
}

impl Check for MemoryEquality {
    fn name(&self) -> &'static str {
        "memory equality"
    }
    fn breaches(&self, world: &World) -> Vec<String> {
        let mut found = Vec::new();
        for (i, f) in world.flows.iter().enumerate().filter(|(_, f)| f.different > 0) {
            found.push(format!("flow {i}: {} messages differed", f.different));
        }
        for (h, host) in world.hosts.iter().enumerate().filter(|(_, h)| h.memory.stray > 0) {
            found.push(format!("host {h}: {} bytes outside every region", host.memory.stray));
        }
        found
    }
}

impl Check for ExactlyOnce {
    fn name(&self) -> &'static str {
        "exactly once"
    }
    fn breaches(&self, world: &World) -> Vec<String> {
        let mut found = Vec::new();
        for (i, (f, placed)) in world.flows.iter().zip(world.placed()).enumerate() {
            let posted: u64 = if f.sizes.len() == 1 {
                f.posted * u64::from(f.sizes[0])
            } else {
                (0..f.posted).map(|n| u64::from(f.size_of(n))).sum()
            };
            if placed < f.bytes || placed > posted {
                found
                    .push(format!("flow {i}: {placed} bytes placed, {} completed, {posted} posted", f.bytes));
            }
        }
        found
    }
}

impl Check for InOrder {
    fn name(&self) -> &'static str {
        "in order"
    }
    fn breaches(&self, world: &World) -> Vec<String> {
        let bad = world.flows.iter().enumerate().filter(|(_, f)| f.disorder + f.errors > 0);
        bad.map(|(i, f)| format!("flow {i}: {} out of order, {} in error", f.disorder, f.errors)).collect()
    }
}

impl Check for Conservation {
    fn name(&self) -> &'static str {
        "conservation"
    }
    fn breaches(&self, world: &World) -> Vec<String> {
        let f = &world.fate;
        let waiting: u64 = 0;
        let ends = f.delivered + f.full + f.lost + f.corrupt + f.overflow + waiting + world.on_the_way();
        if f.sent + f.copied == ends {
            Vec::new()
        } else {
            vec![format!("{f:?}, {} on the way", world.on_the_way())]
        }
    }
}

impl Check for Liveness {
    fn name(&self) -> &'static str {
        "liveness"
    }
    fn breaches(&self, world: &World) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        let placed = world.placed();
        for (i, f) in world.flows.iter().enumerate() {
            if f.count != u64::MAX && f.done < f.count {
                found.push(format!("flow {i}: {} of {} messages complete", f.done, f.count));
            } else if f.collective.is_none() && f.posted > 0 && placed[i] == 0 {
                found.push(format!("flow {i}: nothing arrived of {} messages", f.posted));
            }
        }
        for c in &world.collectives {
            let left = c.finished_at.iter().filter(|t| **t == 0).count();
            if left > 0 {
                found.push(format!("{left} hosts did not finish their collective"));
            }
        }
        found
    }
}
