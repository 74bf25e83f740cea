//! Requirements of docs/protocol.md: each number is defined once, and cited by the code that implements it; which of
//! them a test cites.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::report::{Outcome, Trouble};
use crate::tidy;
use crate::workspace::Workspace;

/// Where numbers are defined: each at the beginning of an item, in bold.
const SPECIFICATION: &str = "docs/protocol.md";
/// Words of a requirement that are shown beside its number.
const WORDS_SHOWN: usize = 12;

/// A requirement and where its number stands.
#[derive(Debug, Default)]
struct Requirement {
    /// Its first words.
    words: String,
    /// Comments of code name it.
    in_code: bool,
    /// Comments of tests name it.
    in_tests: bool,
}

/// All requirements by number, and what is wrong with the numbers.
#[derive(Debug, Default)]
struct Survey {
    requirements: BTreeMap<String, Requirement>,
    breaches: Vec<String>,
}

impl Survey {
    fn of(workspace: &Workspace) -> Result<Survey, String> {
        let specification = fs::read_to_string(workspace.root.join(SPECIFICATION))
            .map_err(|error| format!("{SPECIFICATION}: {error}"))?;
        let mut survey = Survey::default();
        survey.define(&specification);
        for path in tidy::sources(&workspace.root) {
            let shown = path.strip_prefix(&workspace.root).unwrap_or(&path);
            // These tools are about numbers, not about the protocol.
            if !shown.starts_with("packaging")
                && let Ok(text) = fs::read_to_string(&path)
            {
                survey.cite(shown, &text);
            }
        }
        survey.judge();
        Ok(survey)
    }

    /// Takes the definitions in.
    fn define(&mut self, text: &str) {
        for (index, line) in text.lines().enumerate() {
            let Some((number, rest)) = definition(line) else { continue };
            let words: Vec<&str> = rest.split_whitespace().take(WORDS_SHOWN).collect();
            let requirement = Requirement { words: words.join(" "), ..Requirement::default() };
            if self.requirements.insert(number.to_owned(), requirement).is_some() {
                self.breaches.push(format!("{SPECIFICATION}:{}: {number} is defined twice", index + 1));
            }
        }
    }

    /// Takes the citations of a file in. Only comments of Rust code count as saying who implements or proves a rule.
    fn cite(&mut self, path: &Path, text: &str) {
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        let all_tests = is_test_file(path);
        let first_test = if all_tests { 0 } else { unit_tests_at(text) };
        for (index, line) in text.lines().enumerate() {
            for number in numbers(line) {
                let Some(requirement) = self.requirements.get_mut(number) else {
                    let at = format!("{}:{}", path.display(), index + 1);
                    self.breaches.push(format!("{at}: {number} is not in {SPECIFICATION}"));
                    continue;
                };
                let counts = is_rust && line.contains("//");
                requirement.in_tests |= counts && index >= first_test;
                requirement.in_code |= counts && index < first_test;
            }
        }
    }

    /// Finds what no code implements, or does not say so.
    fn judge(&mut self) {
        let silent = self.requirements.iter().filter(|(_, r)| !r.in_code);
        self.breaches.extend(silent.map(|(number, r)| format!("{number} is cited by no code: {}", r.words)));
    }

    /// Those without a test, by number.
    fn untested(&self) -> impl Iterator<Item = (&String, &Requirement)> {
        self.requirements.iter().filter(|(_, requirement)| !requirement.in_tests)
    }
}

/// The step of the ladder: fails on a number that is defined twice, unknown, or cited by no code.
pub fn check(workspace: &Workspace) -> Outcome {
    let survey = Survey::of(workspace)?;
    if !survey.breaches.is_empty() {
        return Err(Trouble::fail(survey.breaches.join("\n")));
    }
    let (all, without) = (survey.requirements.len(), survey.untested().count());
    Ok(format!("{all} in {SPECIFICATION}, {} cited by a test, {without} not", all - without))
}

/// Lists the requirements no test cites; false when a number is wrong.
pub fn list(workspace: &Workspace) -> Result<bool, String> {
    let survey = Survey::of(workspace)?;
    for (number, requirement) in survey.untested() {
        println!("{number:<14} {} ...", requirement.words);
    }
    let areas: BTreeSet<&str> =
        survey.untested().filter_map(|(number, _)| number.split('-').nth(1)).collect();
    let (all, without) = (survey.requirements.len(), survey.untested().count());
    println!("{without} of {all} requirements are cited by no test, in {} areas", areas.len());
    survey.breaches.iter().for_each(|breach| eprintln!("{breach}"));
    Ok(survey.breaches.is_empty())
}

/// The number a line of the specification defines, and the text behind it.
fn definition(line: &str) -> Option<(&str, &str)> {
    let (number, rest) = line.strip_prefix("* **")?.split_once("**")?;
    (numbers(number).next() == Some(number)).then_some((number, rest))
}

/// The requirement numbers in a line; a part of one (`MR-REQ-4.6`) names the whole.
fn numbers(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("MR-").filter_map(|(at, prefix)| {
        let rest = &line[at + prefix.len()..];
        let area = rest.bytes().take_while(u8::is_ascii_uppercase).count();
        let digits = rest.get(area + 1..)?.bytes().take_while(u8::is_ascii_digit).count();
        let whole = area > 0 && digits > 0 && rest.as_bytes()[area] == b'-';
        whole.then(|| &line[at..at + prefix.len() + area + 1 + digits])
    })
}

/// A file that holds tests, and the programs they consist of, and nothing else.
fn is_test_file(path: &Path) -> bool {
    let names = || path.iter().filter_map(|name| name.to_str());
    names().any(|name| matches!(name, "tests" | "tests.rs" | "test-apps" | "loopback" | "loopback.rs"))
}

/// The line a file's unit tests begin at: they are the last thing in it.
fn unit_tests_at(text: &str) -> usize {
    let mut lines = text.lines().enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        let module = lines.peek().is_some_and(|(_, next)| next.starts_with("mod ") && next.ends_with('{'));
        if line == "#[cfg(test)]" && module {
            return index;
        }
    }
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Rules\n\n* **MR-A-1** One MUST count (see MR-A-2).\n\
        * **MR-A-2** Two\n  1. first\n* **MR-LONG-10** Ten ten ten ten ten ten ten ten ten ten ten ten ten.\n\
        * **bold** is no number, nor is MR-A-9 here.\n";

    fn survey(files: &[(&str, &str)]) -> Survey {
        let mut survey = Survey::default();
        survey.define(TEXT);
        files.iter().for_each(|(path, text)| survey.cite(Path::new(path), text));
        survey
    }

    #[test]
    fn numbers__are_found_whole() {
        let found = |line: &'static str| numbers(line).collect::<Vec<_>>();
        assert_eq!(found("(MR-A-1, MR-LONG-10) and MR-A-2.6 to 8"), ["MR-A-1", "MR-LONG-10", "MR-A-2"]);
        assert_eq!(found("MR- MR-A MR-A- MR-a-1 MR-1 MR-Ä-1 MR-A_1 `MR-<area>-<n>`"), [""; 0]);
    }

    #[test]
    fn define__takes_items_only_and_finds_doubles() {
        let mut survey = survey(&[]);
        let all: Vec<&String> = survey.requirements.keys().collect();
        assert_eq!(all, ["MR-A-1", "MR-A-2", "MR-LONG-10"]);
        assert_eq!(survey.requirements["MR-A-1"].words, "One MUST count (see MR-A-2).");
        assert_eq!(survey.requirements["MR-LONG-10"].words.split(' ').count(), WORDS_SHOWN);
        assert!(survey.breaches.is_empty());
        survey.define("* **MR-A-2** Again");
        assert_eq!(survey.breaches, ["docs/protocol.md:1: MR-A-2 is defined twice"]);
    }

    #[test]
    fn cite__tells_code_tests_and_text_apart() {
        let code =
            "// Because (MR-A-1).\nlet a = 1;\n#[cfg(test)]\nmod tests {\n    /// Proves MR-LONG-10.\n}\n";
        let text = "MR-A-2 is explained here.\n";
        let survey = survey(&[
            ("provider/proto/src/a.rs", code),
            ("docs/using.md", text),
            ("provider/proto/src/b.rs", "let text = \"MR-A-2\";\n"),
            ("provider/proto/tests/c.rs", "/// MR-A-1\n"),
        ]);
        let cited = |number: &str| {
            let requirement = &survey.requirements[number];
            (requirement.in_code, requirement.in_tests)
        };
        assert_eq!(cited("MR-A-1"), (true, true));
        assert_eq!(cited("MR-A-2"), (false, false));
        assert_eq!(cited("MR-LONG-10"), (false, true));
        let untested: Vec<&String> = survey.untested().map(|(number, _)| number).collect();
        assert_eq!(untested, ["MR-A-2"]);
    }

    #[test]
    fn judge__finds_unknown_and_silent_ones() {
        let code = "// MR-A-1, MR-A-2 and MR-A-3.\n";
        let mut survey = survey(&[("a.rs", code), ("test-apps/b.rs", "// MR-LONG-10\n")]);
        survey.judge();
        assert_eq!(survey.breaches.len(), 2, "{:?}", survey.breaches);
        assert_eq!(survey.breaches[0], "a.rs:1: MR-A-3 is not in docs/protocol.md");
        assert!(survey.breaches[1].starts_with("MR-LONG-10 is cited by no code: Ten ten"));
    }

    #[test]
    fn unit_tests_at__only_where_the_module_follows() {
        assert_eq!(unit_tests_at("#[cfg(test)]\nmod tests;\nfn a() {}\n"), usize::MAX);
        assert_eq!(unit_tests_at("fn a() {}\n#[cfg(test)]\nmod tests {\n"), 1);
    }
}
