//! `cargo xtask bench`: the device beside plain UDP, TCP, UCX and libfabric, interleaved in one run, since only ratios
//! carry over from machine to machine.

mod plot;
mod programs;
mod rows;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::report::{Trouble, progress};
use crate::workspace::Workspace;
use crate::{ladder, packages};

use rows::{GOALS, LEFT_OUT, MEASURES};

/// Longest time for one measurement.
const TIMEOUT: Duration = Duration::from_secs(90);
const ROUNDS: usize = 7;
const ROUNDS_QUICK: usize = 3;

/// What to run and where the figures go.
pub struct Options<'a> {
    /// How often everything is measured.
    pub rounds: usize,
    /// Only measures whose name contains this, and what their goals compare them with.
    pub only: Option<&'a str>,
    /// File for all figures.
    pub json: Option<&'a Path>,
    /// File for a picture of the ratios.
    pub plot: Option<&'a Path>,
}

/// What one measurement says.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// The figure, in the measure's unit.
    pub value: f64,
    /// More figures, each a series of its own called `MEASURE: FIELD`.
    pub fields: Vec<(&'static str, f64)>,
    /// Processor seconds of the server and of the client.
    pub cpu: Option<[f64; 2]>,
    /// What was moved in that time, as far as it counts.
    pub bytes: f64,
    pub messages: f64,
}

impl Sample {
    /// Of a figure alone.
    pub fn of(value: f64) -> Sample {
        Sample { value, ..Sample::default() }
    }

    /// With every figure so many times as large.
    pub fn times(mut self, factor: f64) -> Sample {
        self.value *= factor;
        self.fields.iter_mut().for_each(|(_, value)| *value *= factor);
        self
    }
}

/// Something that is measured once per round.
pub struct Measure {
    name: &'static str,
    unit: &'static str,
    run: fn(&Workspace) -> Result<Sample, Trouble>,
}

/// A ratio of two series and where it must lie; with no `to`, a figure itself.
pub struct Goal {
    of: &'static str,
    to: Option<&'static str>,
    bound: Bound,
    /// A figure that is enough whatever the ratio.
    or: Option<f64>,
}

#[derive(Clone, Copy)]
pub enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// Shown only.
    None,
}

/// Every series by name: one place per round, empty where the measurement failed.
#[derive(Default)]
struct Series {
    values: BTreeMap<String, Vec<Option<f64>>>,
    /// Why a measure has no figures.
    skipped: BTreeMap<&'static str, String>,
    failed: bool,
}

/// How a goal was met.
struct Verdict {
    text: String,
    ratio: Option<f64>,
    met: bool,
}

/// How many rounds a run has unless it is said.
pub fn rounds(quick: bool) -> usize {
    if quick { ROUNDS_QUICK } else { ROUNDS }
}

/// Runs all rounds, prints figures and ratios; false when a goal is missed or a measurement failed.
pub fn run(workspace: &Workspace, options: Options<'_>) -> Result<bool, String> {
    packages::ensure(&[packages::BUILD, packages::BENCH])?;
    ladder::release_build(workspace)?;
    let chosen: Vec<&Measure> = MEASURES.iter().filter(|measure| is_wanted(measure, options.only)).collect();
    let rounds = options.rounds;
    let begun = Instant::now();
    let mut series = Series::default();
    for round in 0..rounds {
        progress(&format!("round {} of {rounds}, load {}", round + 1, load()));
        for measure in &chosen {
            series.take(measure, round, workspace);
        }
    }
    print_figures(&chosen, &series);
    let verdicts: Vec<(&Goal, Verdict)> = GOALS
        .iter()
        .filter(|goal| chosen.iter().any(|measure| is_of(goal.of, measure.name)))
        .map(|goal| (goal, judge(goal, &series)))
        .collect();
    println!();
    for (goal, verdict) in &verdicts {
        println!("{}{}", verdict.text, if verdict.met || goal.is_shown() { "" } else { "  MISSED" });
    }
    for (name, why) in LEFT_OUT {
        println!("SKIP  {name}: {why}");
    }
    let met = verdicts.iter().filter(|(goal, _)| !goal.is_shown());
    let (met, all) = (met.clone().filter(|(_, verdict)| verdict.met).count(), met.count());
    println!("\n{met} of {all} goals met, {} s, load {}", begun.elapsed().as_secs(), load());
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
    };
    if let Some(path) = options.json {
        write(path, format!("{}\n", figures_json(&chosen, &series, &verdicts)))?;
    }
    if let Some(path) = options.plot {
        let bars = verdicts.iter().filter_map(|(goal, verdict)| plot::Bar::of(goal, verdict));
        write(path, plot::draw(&bars.collect::<Vec<_>>()))?;
    }
    Ok(met == all && !series.failed)
}

/// Asked for by name, or needed to judge what is.
fn is_wanted(measure: &Measure, only: Option<&str>) -> bool {
    let Some(only) = only else { return true };
    let needed = |goal: &Goal| goal.of.contains(only) && goal.to.is_some_and(|to| is_of(to, measure.name));
    measure.name.contains(only) || GOALS.iter().any(needed)
}

/// Whether a series is that of a measure or of a field of its.
fn is_of(series: &str, measure: &str) -> bool {
    series.strip_prefix(measure).is_some_and(|rest| rest.is_empty() || rest.starts_with(": "))
}

/// The machine's load of the last minute; others who use it blur the figures.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("?").to_owned()
}

impl Goal {
    fn is_shown(&self) -> bool {
        matches!(self.bound, Bound::None)
    }
}

impl Series {
    fn take(&mut self, measure: &Measure, round: usize, workspace: &Workspace) {
        if self.skipped.contains_key(measure.name) {
            return;
        }
        match (measure.run)(workspace) {
            Ok(sample) => self.put(measure.name, round, &sample),
            Err(Trouble::Skip(reason)) => {
                println!("SKIP  {}: {reason}", measure.name);
                self.skipped.insert(measure.name, reason);
            }
            Err(Trouble::Fail(text)) => {
                println!("FAIL  {}\n{text}", measure.name);
                self.failed = true;
            }
        }
    }

    fn put(&mut self, name: &str, round: usize, sample: &Sample) {
        let mut one = |name: String, value: f64| {
            let values = self.values.entry(name).or_default();
            values.resize(round + 1, None);
            values[round] = Some(value);
        };
        one(name.to_owned(), sample.value);
        for (field, value) in &sample.fields {
            one(format!("{name}: {field}"), *value);
        }
        let Some(cpu) = sample.cpu else { return };
        for (end, seconds) in ["server", "client"].into_iter().zip(cpu) {
            if sample.bytes > 0.0 {
                one(format!("{name}: {end} ns/KiB"), seconds * 1e9 * 1024.0 / sample.bytes);
            }
            if sample.messages > 0.0 {
                one(format!("{name}: {end} ns/message"), seconds * 1e9 / sample.messages);
            }
        }
    }

    fn figures(&self, name: &str) -> Option<Figures> {
        Figures::of(self.values.get(name)?.iter().flatten().copied().collect())
    }

    /// Ratio of two series, round by round, as neighbours in time see the same machine.
    fn ratio(&self, of: &str, to: &str) -> Option<f64> {
        let (of, to) = (self.values.get(of)?, self.values.get(to)?);
        let ratios = of.iter().zip(to).filter_map(|(of, to)| Some((*of)? / (*to)?));
        Some(Figures::of(ratios.collect())?.median)
    }
}

/// Median, least and greatest of a series.
struct Figures {
    median: f64,
    min: f64,
    max: f64,
}

impl Figures {
    fn of(mut values: Vec<f64>) -> Option<Figures> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let upper = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[upper] } else { (values[upper - 1] + values[upper]) / 2.0 };
        Some(Figures { median, min, max })
    }
}

fn print_figures(chosen: &[&Measure], series: &Series) {
    println!(
        "\n{:<36} {:>9} {:>9} {:>9} {:<9} {:>17} {:>19}",
        "this run", "median", "min", "max", "", "CPU ns per KiB", "CPU ns per message"
    );
    println!("{:<76} {:>17} {:>19}", "", "server + client", "server + client");
    for measure in chosen {
        let Some(Figures { median, min, max }) = series.figures(measure.name) else { continue };
        let cpu = |unit: &str| {
            let of = |end: &str| Some(series.figures(&format!("{}: {end} {unit}", measure.name))?.median);
            let both = of("server").zip(of("client"));
            both.map_or(String::new(), |(server, client)| format!("{server:.0} + {client:.0}"))
        };
        let line = format!(
            "{:<36} {median:>9.2} {min:>9.2} {max:>9.2} {:<9} {:>17} {:>19}",
            measure.name,
            measure.unit,
            cpu("ns/KiB"),
            cpu("ns/message")
        );
        println!("{}", line.trim_end());
        let prefix = format!("{}: ", measure.name);
        for name in series.values.keys().filter(|name| name.starts_with(&prefix) && !name.contains(" ns/")) {
            let Some(Figures { median, min, max }) = series.figures(name) else { continue };
            println!("{:<36} {median:>9.2} {min:>9.2} {max:>9.2}", format!("    {}", &name[prefix.len()..]));
        }
    }
}

/// A ratio beside its goal.
fn judge(goal: &Goal, series: &Series) -> Verdict {
    let name = goal.to.map_or(goal.of.to_owned(), |to| format!("{} / {to}", goal.of));
    let figure = series.figures(goal.of).map(|figures| figures.median);
    let ratio = match goal.to {
        Some(to) => series.ratio(goal.of, to),
        None => figure,
    };
    let Some(ratio) = ratio else {
        let why = series
            .skipped
            .iter()
            .find(|(skipped, _)| is_of(goal.of, skipped) || goal.to.is_some_and(|to| is_of(to, skipped)));
        let why = why.map_or(String::new(), |(_, why)| format!(": {why}"));
        return Verdict { text: format!("{name:<74} not measured{why}"), ratio: None, met: false };
    };
    let (met, mut want) = match goal.bound {
        Bound::AtLeast(bound) => (ratio >= bound, format!("goal at least {bound}")),
        Bound::AtMost(bound) => (ratio <= bound, format!("goal at most {bound}")),
        Bound::None => (true, String::new()),
    };
    let enough = goal.or.filter(|_| !met).zip(figure);
    if let Some((or, figure)) = goal.or.zip(figure) {
        want += &format!(", or {or} (is {figure:.2})");
    }
    let met = met || enough.is_some_and(|(or, figure)| figure >= or);
    Verdict { text: format!("{name:<74} {ratio:>7.2}  {want}"), ratio: Some(ratio), met }
}

fn figures_json(chosen: &[&Measure], series: &Series, verdicts: &[(&Goal, Verdict)]) -> Value {
    let unit = |name: &str| {
        let own = chosen.iter().find(|measure| measure.name == name);
        own.map(|measure| measure.unit)
    };
    let measures: Vec<Value> = series
        .values
        .iter()
        .map(|(name, values)| {
            json!({ "name": name, "unit": unit(name), "values": values,
            "median": series.figures(name).map(|figures| figures.median) })
        })
        .collect();
    let ratios: Vec<Value> = verdicts
        .iter()
        .map(|(goal, verdict)| {
            let (least, most) = match goal.bound {
                Bound::AtLeast(bound) => (Some(bound), None),
                Bound::AtMost(bound) => (None, Some(bound)),
                Bound::None => (None, None),
            };
            json!({ "of": goal.of, "to": goal.to, "ratio": verdict.ratio, "at_least": least, "at_most": most,
            "or_figure": goal.or, "met": verdict.met })
        })
        .collect();
    let skipped: BTreeMap<&str, &str> = series
        .skipped
        .iter()
        .map(|(name, why)| (*name, why.as_str()))
        .chain(LEFT_OUT.iter().copied())
        .collect();
    json!({ "measures": measures, "ratios": ratios, "skipped": skipped })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals__name_measures() {
        let known = |name: &str| MEASURES.iter().any(|measure| is_of(name, measure.name));
        assert!(GOALS.iter().all(|goal| known(goal.of) && goal.to.is_none_or(known)));
    }

    #[test]
    fn measures__have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = MEASURES.iter().map(|measure| measure.name).collect();
        assert_eq!(names.len(), MEASURES.len());
    }

    #[test]
    fn figures__median_of_even_and_odd_counts() {
        let figures = Figures::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((figures.median, figures.min, figures.max), (2.0, 1.0, 3.0));
        assert_eq!(Figures::of(vec![4.0, 1.0]).unwrap().median, 2.5);
        assert!(Figures::of(Vec::new()).is_none());
    }

    #[test]
    fn judge__compares_round_by_round_and_accepts_a_figure_instead() {
        let mut series = Series::default();
        for (round, (a, b)) in [(1.0, 2.0), (10.0, 20.0), (3.0, 1.0)].into_iter().enumerate() {
            series.put("a", round, &Sample::of(a));
            series.put("b", round, &Sample::of(b));
        }
        let goal = |bound, or| Goal { of: "a", to: Some("b"), bound, or };
        assert_eq!(judge(&goal(Bound::AtLeast(0.5), None), &series).ratio, Some(0.5));
        assert!(judge(&goal(Bound::AtLeast(0.5), None), &series).met);
        assert!(!judge(&goal(Bound::AtLeast(0.6), None), &series).met);
        assert!(judge(&goal(Bound::AtLeast(0.6), Some(3.0)), &series).met);
        assert!(!judge(&goal(Bound::AtLeast(0.6), Some(3.1)), &series).met);
        let absent = Goal { of: "c", to: None, bound: Bound::AtMost(1.0), or: None };
        assert!(!judge(&absent, &series).met);
    }

    #[test]
    fn is_wanted__brings_the_yardsticks_along() {
        let names: Vec<&str> =
            MEASURES.iter().filter(|m| is_wanted(m, Some("ib_send_lat 2 B"))).map(|m| m.name).collect();
        assert!(names.contains(&"UDP ping-pong, one way") && !names.contains(&"UDP blast"));
    }
}
