//! Unmodified Debian programs under the shim: the device must look and work right to them.

mod addresses;
mod checker;
mod children;
mod confined;
mod extension;
mod interop;
pub mod namespaces;
mod operator;
pub mod pair;
pub mod perftest;
mod pingpong;
mod rdmacm;
mod services;
mod spray;

use std::time::{Duration, Instant};

use crate::bench;
use crate::exec;
use crate::ladder::{self, Options};
use crate::packages;
use crate::report::{Outcome, Report, Trouble, progress};
use crate::seed::Random;
use crate::workspace::Workspace;
use pair::Place;

/// Longest time for a program that only looks at the device.
const LOOK_TIMEOUT: Duration = Duration::from_secs(20);
/// Runs in a row of the repeated ping-pong.
const REPEATS: usize = 100;
const REPEATS_QUICK: usize = 10;

/// Names of all checks of this module, for filters.
pub fn names() -> impl Iterator<Item = String> {
    let fixed = [
        "ibv_devices",
        "ibv_devinfo",
        "metaroce devices",
        "metaroce doctor",
        REPEATED,
        spray::EVEN,
        spray::LOSS,
        children::CHILDREN,
        children::NEWEST,
        extension::EXTENSION,
        operator::OPERATOR,
        confined::ORDINARY_USER,
        confined::SMALL_BUFFERS,
    ];
    fixed
        .map(str::to_owned)
        .into_iter()
        .chain(addresses::CHECKS.iter().map(|check| check.name.to_owned()))
        .chain(checker::names())
        .chain(services::CASES.iter().map(services::Case::name))
        .chain(namespaces::checks().map(|check| check.name()))
        .chain(interop::checks().map(|check| check.name()))
        .chain(rdmacm::matrix().into_iter().map(|case| case.name()))
        .chain(rdmacm::REFUSALS.iter().map(rdmacm::Refusal::name))
        .chain(pingpong::matrix().into_iter().map(|case| case.name()))
        .chain(perftest::matrix().into_iter().map(|case| case.name()))
}

const REPEATED: &str = "ibv_rc_pingpong: many runs in a row, 1 % loss";

/// The sample CI runs, chosen by the seed.
pub fn sample(workspace: &Workspace, options: Options, report: &mut Report) {
    let mut random = Random::new(options.seed);
    if !device_checks(workspace, report) {
        progress("the device does not come up: the programs that move data are left out");
        return;
    }
    // A filter asks for certain cases: then the whole matrix is there to be asked for.
    let (pingpongs, perftests) = match (report.is_filtered(), options.quick) {
        (true, _) => (usize::MAX, usize::MAX),
        (false, true) => (8, 1),
        (false, false) => (20, 40),
    };
    let mut cases = pingpong::matrix();
    random.shuffle(&mut cases);
    for case in cases.iter().take(pingpongs) {
        let seed = random.next();
        report.check(&case.name(), || case.run(workspace, Place::Loopback, seed));
    }
    for case in perftest::sample(&mut random, perftests) {
        let seed = random.next();
        report.check(&case.name(), || case.run(workspace, Place::Loopback, seed));
    }
    for case in services::CASES {
        let seed = random.next();
        report.check(&case.name(), || case.run(workspace, seed));
    }
    let repeats = if options.quick { REPEATS_QUICK } else { REPEATS };
    report.check(REPEATED, || repeated(workspace, repeats, &mut random));
    report.check(spray::EVEN, || spray::even(workspace));
    report.check(spray::LOSS, || spray::loss(workspace, options.seed));
    report.check(children::CHILDREN, || children::run(workspace, options.seed));
    report.check(children::NEWEST, || children::newest(workspace, options.seed));
    for check in addresses::CHECKS {
        report.check(check.name, || addresses::run(workspace, check));
    }
    report.check(extension::EXTENSION, || extension::run(workspace));
    report.check(operator::OPERATOR, || operator::run(workspace));
    report.check(confined::ORDINARY_USER, || confined::ordinary_user(workspace));
    report.check(confined::SMALL_BUFFERS, || confined::small_buffers(workspace, options.seed));
    let all = report.is_filtered();
    for check in namespaces::checks().filter(|check| all || check.is_sampled()) {
        report.check(&check.name(), || check.run(workspace, options.seed));
    }
    for check in interop::checks() {
        report.check(&check.name(), || check.run(workspace));
    }
    let cases = if all { rdmacm::matrix() } else { rdmacm::sample(&mut random) };
    let few = if options.quick { 6 } else { usize::MAX };
    for case in cases.iter().take(if all { usize::MAX } else { few }) {
        let seed = random.next() % 1_000_000_000;
        report.check(&case.name(), || case.run(workspace, seed));
    }
    for refusal in rdmacm::REFUSALS {
        report.check(&refusal.name(), || refusal.run(workspace));
    }
    checker::run(workspace, options.seed, report);
}

/// `cargo xtask soak`: the whole matrices in random order, again and again until the time is up.
pub fn soak(
    workspace: &Workspace,
    seed: u64,
    minutes: Option<u64>,
    mut report: Report,
) -> Result<bool, String> {
    packages::ensure(&[packages::BUILD, packages::TEST])?;
    println!("seed {seed} (repeat with: cargo xtask soak --seed {seed})");
    ladder::release_build(workspace)?;
    let mut random = Random::new(seed);
    let deadline = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    let over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    if !device_checks(workspace, &mut report) {
        return Ok(report.finish());
    }
    loop {
        for case in shuffled(&mut random) {
            if over() {
                return Ok(report.finish());
            }
            for place in [Place::Loopback, Place::Namespaces] {
                let seed = random.next() % 1_000_000_000;
                let name = format!("{}{}", case.name(), place.suffix());
                report.check(&name, || case.run(workspace, place, seed));
            }
        }
        report.check(REPEATED, || repeated(workspace, REPEATS, &mut random));
        report.check(spray::EVEN, || spray::even(workspace));
        report.check(spray::LOSS, || spray::loss(workspace, random.next()));
        let seed = random.next() % 1_000_000_000;
        for check in namespaces::checks() {
            report.check(&check.name(), || check.run(workspace, seed));
        }
        checker::run(workspace, seed, &mut report);
        for case in rdmacm::matrix() {
            report.check(&case.name(), || case.run(workspace, seed));
        }
        for refusal in rdmacm::REFUSALS {
            report.check(&refusal.name(), || refusal.run(workspace));
        }
        report.check(children::CHILDREN, || children::run(workspace, seed));
        ladder::long_tests(workspace, seed, &mut report);
        report.check(FOUR, || four_processes(workspace));
        if minutes.is_none() {
            return Ok(report.finish());
        }
    }
}

const FOUR: &str = "long: 4 processes reach 0.7 of what 2 do";

/// More processes than processors share what there is, and lose little of it.
fn four_processes(workspace: &Workspace) -> Outcome {
    let only = Some("4 processes, long run");
    match bench::run(workspace, bench::Options { rounds: 3, only, json: None, plot: None }) {
        Ok(true) => Ok(String::new()),
        Ok(false) => Err(Trouble::fail("less: see the figures above")),
        Err(error) => Err(Trouble::Fail(error)),
    }
}

enum Case {
    Pingpong(pingpong::Case),
    Perftest(perftest::Case),
}

impl Case {
    fn name(&self) -> String {
        match self {
            Case::Pingpong(case) => case.name(),
            Case::Perftest(case) => case.name(),
        }
    }

    fn run(&self, workspace: &Workspace, place: Place, seed: u64) -> Outcome {
        match self {
            Case::Pingpong(case) => case.run(workspace, place, seed),
            Case::Perftest(case) => case.run(workspace, place, seed),
        }
    }
}

fn shuffled(random: &mut Random) -> Vec<Case> {
    let pingpongs = pingpong::matrix().into_iter().map(Case::Pingpong);
    let mut cases: Vec<Case> = pingpongs.chain(perftest::matrix().into_iter().map(Case::Perftest)).collect();
    random.shuffle(&mut cases);
    cases
}

/// What needs no data path; false when the device cannot even be opened.
fn device_checks(workspace: &Workspace, report: &mut Report) -> bool {
    let listed = report.check("ibv_devices", || {
        look(workspace, "ibv_devices", &[], |text| {
            let count = text.lines().filter(|line| line.trim_start().starts_with("metaroce0")).count();
            (count == 1)
                .then(String::new)
                .ok_or_else(|| format!("metaroce0 is listed {count} times, not once"))
        })
    });
    let opened =
        report.check("ibv_devinfo", || look(workspace, "ibv_devinfo", &["-v", "-d", "metaroce0"], devinfo));
    report.check("metaroce devices", || own(workspace, &["devices"]));
    report.check("metaroce doctor", || own(workspace, &["doctor", "ibv_devinfo"]));
    listed && opened
}

/// What `ibv_devinfo -v` must say: one active Ethernet port, RoCE v2 GIDs, the first an IPv4-mapped one.
fn devinfo(text: &str) -> Result<String, String> {
    let has = |what: &str| text.contains(what).then_some(()).ok_or(format!("no `{what}`"));
    has("PORT_ACTIVE")?;
    has("link_layer:\t\tEthernet")?;
    let gids: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("GID[")).collect();
    let first = gids.first().ok_or("no GID")?;
    if !first.contains("::ffff:127.0.0.1") {
        return Err(format!("GID 0 is not the IPv4-mapped address of lo: {first}"));
    }
    match gids.iter().find(|line| !line.contains("RoCE v2")) {
        Some(line) => Err(format!("not RoCE v2: {line}")),
        None => Ok(format!("{} GIDs", gids.len())),
    }
}

/// Runs a program that only looks at the device and judges its output.
fn look(
    workspace: &Workspace,
    name: &str,
    arguments: &[&str],
    judge: impl FnOnce(&str) -> Result<String, String>,
) -> Outcome {
    let mut command = workspace.under_metaroce(&pair::program(name)?, &[], None);
    let done = exec::run(name, command.args(arguments), LOOK_TIMEOUT)?;
    if !done.success() {
        return Err(Trouble::Fail(done.to_string()));
    }
    judge(&done.output).map_err(|wrong| Trouble::Fail(format!("{wrong}\n{done}")))
}

/// Runs the `metaroce` command; it must exit with 0.
fn own(workspace: &Workspace, arguments: &[&str]) -> Outcome {
    let done = exec::run("metaroce", &mut workspace.metaroce_command(arguments), LOOK_TIMEOUT)?;
    if done.success() { Ok(String::new()) } else { Err(Trouble::Fail(done.to_string())) }
}

/// The same ping-pong again and again under loss: the last acknowledgement of an exiting process gets lost too.
fn repeated(workspace: &Workspace, count: usize, random: &mut Random) -> Outcome {
    let case = pingpong::repeated();
    for round in 1..=count {
        let seed = random.next();
        case.run(workspace, Place::Loopback, seed).map_err(|trouble| match trouble {
            Trouble::Fail(text) => Trouble::Fail(format!("run {round} of {count}, seed {seed}: {text}")),
            skip => skip,
        })?;
    }
    Ok(format!("{count} runs"))
}
