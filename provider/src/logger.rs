//! What the device writes to standard error: one line per message, chosen by the setting `log` (`METAROCE_LOG`).

use std::io::Write;

use crate::ffi::Uncancelled;

/// Installs the logger; the first call counts. `filter` is a level or an env_logger filter.
pub(crate) fn init(filter: &str) {
    let logger = env_logger::Builder::new()
        .parse_filters(filter)
        .format(|line, record| {
            writeln!(line, "metaroce: {}: {}", record.level().as_str().to_lowercase(), record.args())
        })
        .build();
    let level = logger.filter();
    // An error means a second context in the process: the logger is there already.
    if log::set_boxed_logger(Box::new(Logger(logger))).is_ok() {
        log::set_max_level(level);
    }
}

/// Installs the logger for messages that come before a configuration is known.
pub(crate) fn init_early() {
    init(&std::env::var("METAROCE_LOG").unwrap_or_else(|_| "warn".to_owned()));
}

/// Writing is a cancellation point, and messages are written with the engine's lock held.
struct Logger(env_logger::Logger);

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }
    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let _uncancelled = Uncancelled::begin();
            self.0.log(record);
        }
    }
    fn flush(&self) {
        self.0.flush();
    }
}
