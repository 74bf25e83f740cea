//! `metaroce doctor`: everything that must be right before a program sees `metaroce0`, and the remedy where it is not.

mod machine;
mod program;
mod verbs;

use std::process::ExitCode;

use serde_json::{Value, json};

use crate::output;

/// Options of `metaroce doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A program to look at as well: linked statically? its own libibverbs?
    program: Option<std::path::PathBuf>,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Good,
    /// Works, but not as well as it could.
    Advice,
    /// Keeps the device from working.
    Wrong,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, one or two words.
    pub subject: &'static str,
    /// How it is.
    pub level: Level,
    /// What was found, one sentence without a full stop.
    pub found: String,
    /// What to do about it; empty when nothing is to be done.
    pub remedy: String,
}

impl Finding {
    /// A finding that asks for nothing.
    pub fn good(subject: &'static str, found: impl Into<String>) -> Finding {
        Finding { subject, level: Level::Good, found: found.into(), remedy: String::new() }
    }

    /// Something that could be better.
    pub fn advice(subject: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { subject, level: Level::Advice, found: found.into(), remedy: remedy.into() }
    }

    /// Something that must be mended.
    pub fn wrong(subject: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { subject, level: Level::Wrong, found: found.into(), remedy: remedy.into() }
    }
}

/// Prints all findings; 1 when something is wrong.
pub fn run(args: &Args) -> ExitCode {
    let mut findings = vec![verbs::library(), verbs::own_libraries()];
    findings.extend(machine::device());
    findings.push(machine::kernel());
    findings.push(machine::statistics());
    findings.extend(machine::environment());
    if let Some(name) = &args.program {
        findings.extend(program::check(name));
    }
    findings.push(verbs::end_to_end());
    let text = if args.json {
        format!("{}\n", Value::Array(findings.iter().map(finding_json).collect()))
    } else {
        findings.iter().map(finding_text).collect()
    };
    let wrong = findings.iter().any(|finding| finding.level == Level::Wrong);
    output::end(text, if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn finding_text(finding: &Finding) -> String {
    let mark = match finding.level {
        Level::Good => "ok   ",
        Level::Advice => "hint ",
        Level::Wrong => "WRONG",
    };
    let mut text = format!("{mark}  {:<12} {}\n", finding.subject, finding.found);
    if !finding.remedy.is_empty() {
        text += &format!("{:21}remedy: {}\n", "", finding.remedy);
    }
    text
}

fn finding_json(finding: &Finding) -> Value {
    let level = match finding.level {
        Level::Good => "ok",
        Level::Advice => "hint",
        Level::Wrong => "wrong",
    };
    json!({ "subject": finding.subject, "level": level, "found": finding.found, "remedy": finding.remedy })
}
