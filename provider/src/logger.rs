//! What the device writes to standard error: one line per message, chosen by the setting `log` (`METAROCE_LOG`).

use std::io::Write;

/// Installs the logger; the first call counts. `filter` is a level or an env_logger filter.
pub(crate) fn init(filter: &str) {
    let outcome = env_logger::Builder::new()
        .parse_filters(filter)
        .format(|line, record| {
            writeln!(line, "metaroce: {}: {}", record.level().as_str().to_lowercase(), record.args())
        })
        .try_init();
    // A second context in the process: the logger is there already.
    drop(outcome);
}

/// Installs the logger for messages that come before a configuration is known.
pub(crate) fn init_early() {
    init(&std::env::var("METAROCE_LOG").unwrap_or_else(|_| "warn".to_owned()));
}
