//! One line per message on standard error, filtered by `METAROCE_LOG` (off, error, warn, info, debug, trace).

use std::io::Write;

use log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }
    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // One write, so that lines of processes sharing a terminal do not mix; nothing can be done on failure.
            let line = format!("metaroce: {}: {}\n", record.level().as_str().to_lowercase(), record.args());
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
    fn flush(&self) {}
}

/// Installs the logger; called once by the library's constructor.
pub(crate) fn init() {
    let level = std::env::var("METAROCE_LOG").ok().and_then(|text| text.parse().ok());
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(level.unwrap_or(LevelFilter::Warn));
    }
}
