//! The claims and how each is shown.

use std::thread::sleep;
use std::time::Duration;

use metaroce_netns::{Fabric, Failure, Plan, Rate};

use crate::traffic::{Meter, Pairs, Program, gbits};
use crate::{Run, Shown};

/// Mb/s of a plane where four carry traffic.
const MBIT: u32 = 200;
const STREAM: &str = "-s 65536";

fn fabric(planes: usize, mbit: u32) -> Result<Fabric, Failure> {
    Fabric::new(Plan { planes, rate: Some(Rate::mbit(mbit)), ..Plan::default() })
}

fn write(arguments: &str, told_mbit: u32) -> Program<'_> {
    Program { name: "ib_write_bw", arguments, told_mbit }
}

/// A pair that streams Writes: for some seconds (`-D 8 -f 1`) or so many of them (`-n 1500`).
fn start(fabric: &Fabric, how_long: &str) -> Result<Pairs, Failure> {
    Pairs::start(fabric, write(&format!("{STREAM} {how_long}"), 0), 1)
}

/// Gb/s of pairs that stream Writes for some seconds.
fn stream(fabric: &Fabric, seconds: u32, pairs: u16, more: &str, told: u32) -> Result<Vec<f64>, Failure> {
    let arguments = format!("{STREAM} -D {} -f 1 {more}", seconds + 2);
    Pairs::start(fabric, write(&arguments, told), pairs)?.finish()?.iter().map(|text| gbits(text)).collect()
}

/// All runs, in the order of the table.
pub fn all() -> Vec<Run> {
    let mut runs = Vec::new();
    runs.extend([(1, 99.0), (10, 97.0), (100, 85.0)].map(|(per_mille, goal)| loss(per_mille, goal)));
    runs.extend([(4, 3.9), (8, 7.7)].map(|(planes, goal)| planes_scale(planes, goal)));
    runs.extend([4, 8].map(many_qps));
    runs.extend([Death::Link, Death::BlackHole, Death::OneWay, Death::FarEnd].map(plane_death));
    runs.push(last_plane());
    runs.extend([Trouble::Slow, Trouble::Gray].map(slow_plane));
    runs.push(share("netns-incast", 16, "16 senders to 16 receivers behind one port", 0.95));
    runs.push(share("netns-share", 8, "8 receiver processes", 0.0));
    runs.push(freeze());
    runs.push(jumbo());
    runs.push(exchange());
    runs
}

fn loss(per_mille: u32, goal: f64) -> Run {
    let show = move || {
        let fabric = fabric(4, MBIT)?;
        let whole = stream(&fabric, 3, 1, "", 0)?[0];
        fabric.set_loss(&[0, 1, 2, 3].map(|plane| (plane, per_mille)))?;
        let lossy = stream(&fabric, 3, 1, "", 0)?[0];
        let part = lossy / whole * 100.0;
        Ok(Shown { measured: format!("{part:.2} % ({lossy:.3} of {whole:.3} Gb/s)"), good: part >= goal })
    };
    Run {
        claim: "netns-loss",
        says: "Random loss on 4 planes, streaming Write (ib_write_bw), of its own loss-free goodput.",
        what: format!("{:.1} % loss", f64::from(per_mille) / 10.0),
        goal: format!(">= {goal} %"),
        quick: per_mille == 10,
        show: Box::new(show),
    }
}

fn planes_scale(planes: usize, goal: f64) -> Run {
    let show = move || {
        let one = stream(&fabric(1, 150)?, 3, 1, "", 0)?[0];
        let all = stream(&fabric(planes, 150)?, 3, 1, "", 0)?[0];
        let times = all / one;
        Ok(Shown { measured: format!("{times:.2}x ({one:.3} to {all:.3} Gb/s)"), good: times >= goal })
    };
    Run {
        claim: "netns-planes",
        says: "Goodput grows with the number of planes.",
        what: format!("1 to {planes} planes of 150 Mb/s"),
        goal: format!(">= {goal}x"),
        quick: planes == 4,
        show: Box::new(show),
    }
}

fn many_qps(planes: usize) -> Run {
    let show = move || {
        let seconds = 4;
        let one = stream(&fabric(1, 150)?, seconds, 8, "-q 500 -t 4 -s 4096", 0)?.iter().sum::<f64>();
        let all = stream(&fabric(planes, 150)?, seconds, 8, "-q 500 -t 4 -s 4096", 0)?.iter().sum::<f64>();
        let times = all / one / planes as f64;
        Ok(Shown {
            measured: format!("{times:.3} of linear ({one:.3} to {all:.3} Gb/s)"),
            good: times >= 0.95,
        })
    };
    Run {
        claim: "netns-qps",
        says: "4,000 QPs from 8 processes on shared connections: all complete.",
        what: format!("1 to {planes} planes"),
        goal: "linear within 5 %".into(),
        quick: false,
        show: Box::new(show),
    }
}

/// How a plane dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// The sender's own interface goes down.
    Link,
    /// Everything vanishes, no event tells.
    BlackHole,
    /// Data arrives, what the receiver sends does not.
    OneWay,
    /// The receiver's cable is cut: the sender's link stays up.
    FarEnd,
}

impl Death {
    fn set(self, fabric: &Fabric, plane: usize, dead: bool) -> Result<(), Failure> {
        let lost = [(plane, if dead { 1000 } else { 0 })];
        match self {
            Death::Link => fabric.set_link(1, plane, !dead),
            Death::BlackHole => fabric.set_loss(&lost),
            Death::OneWay => fabric.set_loss_at(1, &lost),
            Death::FarEnd => match fabric.switch() {
                Some(switch) => switch.set_link(plane, 0, !dead),
                None => Err(Failure::Broken("no switch".into())),
            },
        }
    }
    fn name(self) -> &'static str {
        match self {
            Death::Link => "link down",
            Death::BlackHole => "silent black hole",
            Death::OneWay => "one way: acknowledgements vanish",
            Death::FarEnd => "far end down",
        }
    }
}

fn plane_death(death: Death) -> Run {
    let show = move || {
        let fabric = fabric(4, MBIT)?;
        let pairs = start(&fabric, "-D 9 -f 1")?;
        let (s, ms) = (Duration::from_secs, Duration::from_millis);
        let mut meter = Meter::new(&fabric);
        meter.until(s(3))?;
        death.set(&fabric, 2, true)?;
        let died = meter.now();
        meter.until(died + s(2))?;
        death.set(&fabric, 2, false)?;
        let healed = meter.now();
        meter.until(healed + ms(2500))?;
        pairs.finish()?;
        let whole = meter.mbit(died - s(1), died);
        // At 4/4 until then, a one-way plane still brings data: what counts is that the rate is kept.
        let goal = whole * 0.75 * 0.95;
        let (at_first, later) =
            (meter.mbit(died + ms(100), died + ms(300)), meter.mbit(died + ms(100), died + s(2)));
        let reached =
            meter.reached(died, goal).map_or_else(|| "never".into(), |t| format!("{} ms", t.as_millis()));
        let back = meter.mbit(healed + s(1), healed + s(2));
        let measured = format!(
            "{:.1} % of 4/4 from 100 to 300 ms, {:.1} % to 2 s (there after {reached}), {:.1} % from 1 s after repair on; no error",
            at_first / whole * 100.0,
            later / whole * 100.0,
            back / whole * 100.0
        );
        Ok(Shown { measured, good: at_first >= goal && later >= goal && back >= whole * 0.97 })
    };
    Run {
        claim: "netns-plane-death",
        says: "One of 4 planes dies while ib_write_bw streams, which sees no error.",
        what: death.name().into(),
        goal: ">= 95 % of 3/4 from 100 ms on; 4/4 (to 3 %) within 1 s of repair".into(),
        quick: death == Death::BlackHole,
        show: Box::new(show),
    }
}

fn last_plane() -> Run {
    let show = || {
        let fabric = fabric(1, MBIT)?;
        let pairs = start(&fabric, "-n 1500")?;
        let mut meter = Meter::new(&fabric);
        meter.until(Duration::from_secs(2))?;
        fabric.set_loss(&[(0, 1000)])?;
        meter.until(meter.now() + Duration::from_millis(300))?;
        fabric.set_loss(&[(0, 0)])?;
        let rate = gbits(&pairs.finish()?[0])?;
        Ok(Shown { measured: format!("complete, {rate:.3} Gb/s with the outage"), good: true })
    };
    Run {
        claim: "netns-last-plane",
        says: "The last plane dies and returns before the QP's own retry time.",
        what: "300 ms without a plane".into(),
        goal: "the transfer completes".into(),
        quick: false,
        show: Box::new(show),
    }
}

/// What is wrong with a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Slow,
    Gray,
}

fn slow_plane(trouble: Trouble) -> Run {
    let show = move || {
        let fabric = fabric(4, MBIT)?;
        let whole = stream(&fabric, 3, 1, "", 0)?[0];
        match (trouble, fabric.switch()) {
            (Trouble::Slow, Some(switch)) => switch.set_port_rate(2, 0, Rate::mbit(MBIT / 10))?,
            _ => fabric.set_loss(&[(2, 50)])?,
        }
        let left = stream(&fabric, 4, 1, "", 0)?[0] / whole * 100.0;
        Ok(Shown { measured: format!("{left:.1} %"), good: left >= 70.0 })
    };
    Run {
        claim: "netns-slow-plane",
        says: "One plane of 4 in trouble costs at most its share and 5 %.",
        what: if trouble == Trouble::Slow { "ten times slower" } else { "5 % gray loss" }.into(),
        goal: ">= 70 % of the whole".into(),
        quick: false,
        show: Box::new(show),
    }
}

fn share(claim: &'static str, pairs: u16, what: &'static str, jain_goal: f64) -> Run {
    let show = move || {
        let fabric = fabric(1, MBIT * 2)?;
        let rates = stream(&fabric, 6, pairs, "", MBIT * 2)?;
        let (sum, squares) = (rates.iter().sum::<f64>(), rates.iter().map(|r| r * r).sum::<f64>());
        let (count, fair) = (f64::from(pairs), sum / f64::from(pairs));
        let jain = sum * sum / (count * squares);
        let off = rates.iter().map(|r| (r / fair - 1.0).abs()).fold(0.0, f64::max) * 100.0;
        let good = if jain_goal > 0.0 { jain >= jain_goal } else { off <= 5.0 };
        Ok(Shown { measured: format!("Jain {jain:.4}, at most {off:.1} % off fair, {sum:.3} Gb/s"), good })
    };
    Run {
        claim,
        says: "Processes that receive on one host share what its port brings in.",
        what: what.into(),
        goal: if jain_goal > 0.0 { format!("Jain >= {jain_goal}") } else { "within 5 % of fair".into() },
        quick: false,
        show: Box::new(show),
    }
}

fn freeze() -> Run {
    let show = || {
        let fabric = fabric(4, MBIT)?;
        let pairs = start(&fabric, "-D 8 -f 1")?;
        let ms = Duration::from_millis;
        let mut meter = Meter::new(&fabric);
        meter.until(ms(3000))?;
        let from = meter.now();
        let pids = pairs.server_pids();
        let signal = |name: &str| {
            pids.iter()
                .try_for_each(|pid| fabric.hosts()[0].tool("kill", &[name, &pid.to_string()]).map(|_| ()))
        };
        for _ in 0..50 {
            signal("-STOP")?;
            sleep(ms(5));
            signal("-CONT")?;
            meter.until(meter.now() + ms(35))?;
        }
        let to = meter.now();
        pairs.finish()?;
        let kept = meter.mbit(from, to) / meter.mbit(from - ms(1000), from) * 100.0;
        Ok(Shown { measured: format!("{kept:.1} % of the rate kept, no error"), good: kept >= 80.0 })
    };
    Run {
        claim: "netns-freeze",
        says: "The receiver is stopped for 5 ms, 50 times, an eighth of the time and more.",
        what: "SIGSTOP, SIGCONT".into(),
        goal: ">= 80 % of the rate".into(),
        quick: false,
        show: Box::new(show),
    }
}

fn jumbo() -> Run {
    let show = || {
        let fabric = fabric(2, MBIT)?;
        for host in fabric.hosts() {
            host.tool("ip", &["link", "set", "plane0", "mtu", "1500"])?;
        }
        let pairs = start(&fabric, "-D 8 -f 1")?;
        let (s, ms) = (Duration::from_secs, Duration::from_millis);
        let mut meter = Meter::new(&fabric);
        meter.until(s(3))?;
        Death::BlackHole.set(&fabric, 1, true)?;
        let died = meter.now();
        meter.until(died + s(2))?;
        pairs.finish()?;
        let kept = meter.mbit(died + ms(100), died + s(2)) / meter.mbit(died - s(1), died) * 100.0;
        Ok(Shown { measured: format!("{kept:.1} % with one plane of two, no error"), good: kept >= 47.5 })
    };
    Run {
        claim: "netns-jumbo",
        says: "The plane with jumbo frames dies, the one with an MTU of 1500 takes over.",
        what: "black hole".into(),
        goal: ">= 95 % of the remaining plane".into(),
        quick: false,
        show: Box::new(show),
    }
}

fn exchange() -> Run {
    let show = || {
        let fabric = Fabric::new(Plan { planes: 1, ..Plan::default() })?;
        let count =
            || -> Result<u64, Failure> { Ok(fabric.arrived(0)?[0].packets + fabric.arrived(1)?[0].packets) };
        let exchanges = |n: u32| -> Result<u64, Failure> {
            let before = count()?;
            let arguments = format!("-s 64 -n {n}");
            let program = Program { name: "ib_send_lat", arguments: &arguments, told_mbit: 0 };
            Pairs::start(&fabric, program, 1)?.finish()?;
            Ok(count()? - before)
        };
        // Set-up and end cost the same in both.
        let (few, many) = (exchanges(1000)?, exchanges(21_000)?);
        let each = many.saturating_sub(few) as f64 / 20_000.0;
        Ok(Shown { measured: format!("{each:.3} packets"), good: each <= 2.05 })
    };
    Run {
        claim: "netns-exchange",
        says: "A pong carries the ping's acknowledgement: packets per ping-pong exchange (ib_send_lat).",
        what: "64 B".into(),
        goal: "2 (to 0.05)".into(),
        quick: true,
        show: Box::new(show),
    }
}
