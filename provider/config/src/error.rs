//! What can be wrong with a configuration; every message is one sentence that names the cause and the remedy.

use std::io;
use std::path::PathBuf;

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file cannot be read.
    #[error("cannot read {} ({source}); correct the path in METAROCE_CONFIG or the file's permissions", path.display())]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What is named as the configuration file cannot be one.
    #[error("{} is no regular file of at most 1 MiB; correct the path in METAROCE_CONFIG", path.display())]
    NoConfigFile {
        /// What was named.
        path: PathBuf,
    },
    /// The configuration file is not TOML.
    #[error("{} is not valid TOML ({message}); correct that line", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column, on one line.
        message: String,
    },
    /// The configuration file has a key that means nothing.
    #[error("unknown key `{key}` in {}; remove it or use one of: {known}", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key as written.
        key: String,
        /// The keys that exist, comma separated.
        known: String,
    },
    /// A value that does not parse or is out of range.
    #[error("{place} is `{value}`; set it to {range}, or remove it")]
    BadValue {
        /// Variable name, or key and file.
        place: String,
        /// The value as written.
        value: String,
        /// What is accepted.
        range: &'static str,
    },
    /// A plane that is neither an interface nor an address of this host.
    #[error("{place} names `{name}`, which is no interface or address here; use one of: {known}")]
    UnknownInterface {
        /// Variable name, or key and file.
        place: String,
        /// The name as written.
        name: String,
        /// The interfaces that exist, comma separated.
        known: String,
    },
    /// A plane's interface without any IP address.
    #[error("{place} names `{name}`, which has no IP address; give it one or choose another interface")]
    NoAddress {
        /// Variable name, or key and file.
        place: String,
        /// The interface.
        name: String,
    },
    /// The same interface, address or label twice.
    #[error("{place} has `{name}` twice; name each plane once, with a label of its own (label=interface)")]
    RepeatedPlane {
        /// Variable name, or key and file.
        place: String,
        /// What is repeated.
        name: String,
    },
    /// Nothing is configured and nothing suitable exists.
    #[error(
        "no network interface is up and has an address; bring one up, for example with `ip link set lo up`"
    )]
    NoInterface,
    /// The kernel does not list its interfaces.
    #[error("cannot list the network interfaces ({0}); allow netlink and getifaddrs in this sandbox")]
    Interfaces(#[source] io::Error),
}
