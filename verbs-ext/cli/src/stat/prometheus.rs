//! `metaroce stat --prometheus`: the same counters in the text format that Prometheus scrapes, for a textfile collector.

use std::fmt::Write as _;

use metaroce_stat::{DeviceCounter, PathCounter, Record};

/// All counters of all records: per process `metaroce_NAME`, per plane and path `metaroce_path_NAME`. What only grows
/// ends in `_total`.
pub(super) fn text(records: &[(u32, Record)]) -> String {
    let mut text = String::new();
    for counter in DeviceCounter::ALL {
        let name = family(&mut text, "metaroce", counter.name(), counter.is_gauge());
        for (uid, record) in records {
            let _ = writeln!(text, "{name}{{{}}} {}", process(*uid, record), record.get(*counter));
        }
    }
    for counter in PathCounter::ALL {
        let name = family(&mut text, "metaroce_path", counter.name(), counter.is_gauge());
        for (uid, record) in records {
            for path in &record.paths {
                let (process, plane) = (process(*uid, record), label(&path.plane));
                let _ = writeln!(
                    text,
                    "{name}{{{process},plane=\"{plane}\",path=\"{}\"}} {}",
                    path.index,
                    path.get(*counter)
                );
            }
        }
    }
    text
}

/// Begins a family of values; gives its name.
fn family(text: &mut String, prefix: &str, name: &str, gauge: bool) -> String {
    let name = format!("{prefix}_{name}{}", if gauge { "" } else { "_total" });
    let _ = writeln!(text, "# TYPE {name} {}", if gauge { "gauge" } else { "counter" });
    name
}

/// The labels of a process. Its start tells processes apart that had one number after the other.
fn process(uid: u32, record: &Record) -> String {
    format!(
        "uid=\"{uid}\",pid=\"{}\",started=\"{}\",comm=\"{}\"",
        record.pid,
        record.started_unix_s,
        label(&record.comm)
    )
}

/// The value of a label, which may be anything a user calls a program or a plane.
fn label(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_cannot_end_their_quotes() {
        assert_eq!(label("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }

    #[test]
    fn families_say_their_type() {
        let mut text = String::new();
        assert_eq!(family(&mut text, "metaroce", "tx_bytes", false), "metaroce_tx_bytes_total");
        assert_eq!(family(&mut text, "metaroce_path", "srtt_ns", true), "metaroce_path_srtt_ns");
        assert_eq!(text, "# TYPE metaroce_tx_bytes_total counter\n# TYPE metaroce_path_srtt_ns gauge\n");
    }
}
